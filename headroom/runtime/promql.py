"""Contains all PromQL queries of Headroom. They work with these differences between Prometheus
setups:

* One Prometheus, Thanos or Mimir can store several clusters. So each selector contains the matchers
  of setting ``prometheus_matchers``.
* If a target has a label with the same name as a label of its metrics, such as ``namespace``,
  Prometheus renames the metric's label to ``exported_namespace``, unless the scrape configuration
  honors labels. Queries keep both labels, and ``own_label`` returns the metric's label.
* Replicas, Prometheus servers or scrape configurations can repeat a series with additional labels.
  A query that adds up series first takes the maximum of such duplicates.
* Exporters send impossible values. ``Measured`` finds and omits them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from headroom.contract.dcgm import (
    FREE_BYTES,
    FREE_MIB,
    INSTANCES,
    SM_ACTIVITY,
    USED_BYTES,
    USED_MIB,
    UTILIZATION_PERCENT,
    UUIDS,
)
from headroom.contract.quantity import MAX_DEVICE_BYTES

MIB = 1 << 20
#: Ratios measured at one moment may add up to slightly more than 1. A larger value is not a ratio.
MOST_RATIO = 1.01
#: Labels with the node of a device, preferred label first. dcgm-exporter's label is lower-case
#: since 4.6.0.
HOSTS = ("Hostname", "hostname", "node")
#: Labels with the model of a device: the agent's label, and dcgm-exporter's.
MODELS = ("model_name", "modelName")
#: The queries for the memory of devices, with the number of bytes in the unit of their result.
TOTALS = {"device total": 1, "fb_total": MIB, "fb_total_bytes": 1}

#: Labels that dcgm-exporter uses with ``--use-old-namespace``.
_OLD_NAMES = {"pod": "pod_name", "namespace": "pod_namespace", "container": "container_name"}
_MATCHER = r'\s*(?!__name__)[a-zA-Z_][a-zA-Z0-9_]*\s*(?:=~|!~|!=|=)\s*"(?:[^"\\\n]|\\[^\n])*"\s*'
_MATCHERS = re.compile(f"{_MATCHER}(?:,{_MATCHER})*")
#: Matchers that divide the fleet into parts by the index of a device on its node. Every release of
#: dcgm-exporter calls this label ``gpu``. The last part contains the devices without the label or
#: with a larger index.
_PARTS = (*(f'gpu="{index}"' for index in range(8)), 'gpu!~"[0-7]"')
#: Step of the queries for the first and last samples of past lives, and therefore the maximum error
#: of these times.
_LIFE_STEP = "5m"


def own_label(labels: Mapping[str, str], name: str) -> str:
    """Return a label of the metric, even if Prometheus has renamed it because the target has a
    label of the same name."""
    old = labels.get(_OLD_NAMES.get(name, ""))
    return labels.get(f"exported_{name}") or old or labels.get(name, "")


def own_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return all labels with the names that they have in the metric."""
    names = dict.fromkeys(name.removeprefix("exported_") for name in labels)
    return {name: own_label(labels, name) for name in names}


def check_matchers(text: str) -> str:
    """Return the matchers of a selector. Raises ``ValueError`` if the text is something else."""
    if text and not _MATCHERS.fullmatch(text):
        raise ValueError(
            f"{text!r} is not a list of label matchers as between the braces of a PromQL selector. "
            'Example: cluster="eu-1",env=~"prod|stage"'
        )
    return text.strip()


def quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


class RangeQuery(NamedTuple):
    """A query whose results become series of the history."""

    kind: str
    unit: str
    promql: str


@dataclass(frozen=True, slots=True)
class Measured:
    """A query over a day, whose series can contain impossible values."""

    #: ``max`` or ``avg``.
    figure: str
    selector: str
    metric: str
    #: The largest possible value, in the metric's unit. For memory, the device's memory if known.
    most: float
    #: Number of bytes in the metric's unit, or None if the metric does not measure memory.
    unit_bytes: int | None = None

    @property
    def promql(self) -> str:
        return f"{self.figure}_over_time({self.selector}[1d])"

    @property
    def suspects(self) -> str | None:
        """The query for series that have an impossible value, or None if the result of ``promql``
        already shows it."""
        if self.figure == "max":
            return None
        of = f"_over_time({self.selector}[1d])"
        return f"(max{of} > {self.most:.12g}) or (min{of} < 0)"

    def possible(self, labels: Mapping[str, str], most: float) -> str:
        """Return the query for one series that counts only values between 0 and ``most``."""
        of = ",".join(
            f"{name}={quoted(text)}"
            for name, text in sorted(labels.items())
            # Prometheus 3 may return other names. Older servers cannot parse these in a query.
            if name.isascii() and name.isidentifier() and name != "__name__"
        )
        return f"{self.figure}_over_time((({self.metric}{{{of}}} >= 0) <= {most:.12g})[1d:15s])"


def _by(*names: str) -> str:
    """Return labels for ``by`` or ``on``. Each label is also listed with the name that Prometheus
    renames it to."""
    return f"({', '.join(start + name for name in names for start in ('', 'exported_'))})"


#: Labels of a device, without the labels of the pods that use it.
_OF_DEVICE = f"({', '.join((*UUIDS, *INSTANCES))}, {_by(*HOSTS, *MODELS)[1:]}"


@dataclass(frozen=True, slots=True)
class Queries:
    """Creates the queries for one cluster.

    ``matchers`` select that cluster's series, such as ``cluster="eu-1"``. The matchers are empty if
    Prometheus has no other cluster. ``resources`` are extended resources of GPUs; a trailing *
    marks a prefix.
    """

    matchers: str = ""
    resources: Sequence[str] = ("nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-*")

    def of(self, metric: str, *matchers: str) -> str:
        """Return the selector of a metric."""
        every = ",".join(filter(None, (*matchers, self.matchers)))
        return f"{metric}{{{every}}}" if every else metric

    # SM activity of each device.

    def sm_activity(self, quantile: float, window_s: float) -> list[str]:
        """Return queries whose series have the label ``figure="ratio"`` or ``figure="at"``."""
        return [text for part in _PARTS for text in self._sm_part(quantile, window_s, part)]

    def _sm_part(self, quantile: float, window_s: float, part: str) -> tuple[str, str]:
        by = f"max by ({', '.join((*UUIDS, *INSTANCES))})"
        ratios, times = [], []
        # A single selector with both names would fail: without their names, the old and new series
        # of an upgraded exporter can have equal labels.
        for selector in (self.of(metric, part) for metric in SM_ACTIVITY):
            now = f"(({selector} >= 0) <= {MOST_RATIO})"
            past = f"quantile_over_time({quantile:g}, {selector}[{window_s:.0f}s])"
            ratios.append(f"(((({past}) >= 0) <= {MOST_RATIO}) and {now})")
            times.append(f"(timestamp({selector}) and {now})")
        ratio, at = (f"{by} ({' or '.join(each)})" for each in (ratios, times))
        return (
            f'label_replace({ratio}, "figure", "ratio", "", "")',
            f'label_replace({at}, "figure", "at", "", "")',
        )

    # The console's history of more than an hour.

    def fleet(self) -> list[RangeQuery]:
        """Return the queries for the fleet. Every console exports the same sums, so the queries
        take the highest."""

        def of(name: str) -> str:
            return self.of(f"headroom_fleet_{name}_bytes")

        overcommitted = self.of("headroom_overcommitted_bytes")
        pending = f"max by (instance, reason) ({self.of('headroom_pending_pods')})"
        figures = {
            "allocatable": ("bytes", of("allocatable")),
            "reserved": ("bytes", f"{of('reserved')} + {of('unconfirmed')}"),
            "used": ("bytes", of("used")),
            "unattributed": ("bytes", of("unattributed")),
            "headroom": ("bytes", of("headroom")),
            "overcommitted_devices": (
                "count",
                f"count by (instance) (max by (instance, device) ({overcommitted}) > 0)",
            ),
            "pending_pods": ("count", f"sum by (instance) ({pending})"),
        }
        return [RangeQuery(kind, unit, f"max({text})") for kind, (unit, text) in figures.items()]

    def device(self, node: str, uuid: str) -> list[RangeQuery]:
        """Return the queries for a device. They ignore targets whose label ``node`` names another
        node."""
        of = f"UUID={quoted(uuid)},node=~{quoted(re.escape(node) + '|')}"
        reserved = self.of("headroom_ledger_device_reserved_bytes", f"device={quoted(uuid)}")
        return [
            RangeQuery("reserved", "bytes", f"max({reserved})"),
            RangeQuery("used", "bytes", f"max({self.of('headroom_device_used_bytes', of)})"),
            RangeQuery("sm", "ratio", f"max({self.of('headroom_device_sm_activity_ratio', of)})"),
            self._pods(self.of("headroom_pod_used_bytes", of), "namespace", "pod", "pod_uid"),
        ]

    def pod(self, namespace: str, name: str) -> RangeQuery:
        """Return the query for a pod. It returns a series for each device of the pod."""
        forms = [
            [f'{label}={quoted(text)},exported_{label}=""', f"exported_{label}={quoted(text)}"]
            for label, text in (("namespace", namespace), ("pod", name))
        ]
        selectors = [self.of("headroom_pod_used_bytes", *each) for each in product(*forms)]
        return self._pods(" or ".join(selectors), "namespace", "pod", "pod_uid", "UUID")

    @staticmethod
    def _pods(series: str, *labels: str) -> RangeQuery:
        each = _by("namespace", "pod", "container", "pod_uid", "UUID", "GPU_I_ID")
        return RangeQuery("pod", "bytes", f"sum by {_by(*labels)} (max by {each} ({series}))")

    def held(self, step_s: float, every_s: int) -> list[RangeQuery]:
        """Return the queries for GPU seconds and byte seconds of each namespace and state.

        Each value is a sum over the step before it. The added values are ``every_s`` seconds apart.
        """
        by = f"max by {_by('namespace', 'state')}"
        return [
            _seconds(of, f"{by} ({self.of(f'headroom_held_{of}')})", step_s, every_s)
            for of in ("gpus", "bytes")
        ]

    def covered(self, step_s: float, every_s: int) -> RangeQuery:
        """Return the query for the seconds in which ``held`` has values."""
        devices = self.of("headroom_fleet_devices")
        return _seconds("covered", f"max({devices}) * 0 + 1", step_s, every_s)

    # Past days, for plans and for the recorder.

    @property
    def _requests(self) -> str:
        return self.of("kube_pod_container_resource_requests", f'resource=~"{self.gpu_resources}"')

    @property
    def gpu_resources(self) -> str:
        """A pattern for ``resources`` as kube-state-metrics writes them, such as nvidia_com_gpu."""
        names = (re.sub(r"[^a-zA-Z0-9_*]", "_", name) for name in self.resources)
        return "|".join(name.replace("*", ".*") for name in names)

    def _of_gpu_pods(self, metric: str, *matchers: str) -> str:
        """Return the query for pods that requested a GPU on that day."""
        requests = f"max_over_time({self._requests}[1d])"
        on = _by("namespace", "pod")
        return f"max_over_time({self.of(metric, *matchers)}[1d]) and on {on} {requests}"

    def _measured(
        self, figure: str, metric: str, most: float, unit_bytes: int | None = None
    ) -> Measured:
        return Measured(figure, self.of(metric), metric, most, unit_bytes)

    def _memory(self, metric: str, unit_bytes: int = 1) -> Measured:
        return self._measured("max", metric, MAX_DEVICE_BYTES / unit_bytes, unit_bytes)

    def totals(self, days: int) -> dict[str, str]:
        """Return the queries for the memory of devices in the days before the time of evaluation.
        The queries return the median, so that impossible values have no effect."""
        own = self.of("headroom_device_memory_bytes")
        sums = {
            "device total": (own, 1),
            "fb_total": (f"{self.of(USED_MIB)} + {self.of(FREE_MIB)}", MIB),
            "fb_total_bytes": (f"{self.of(USED_BYTES)} + {self.of(FREE_BYTES)}", 1),
        }
        found = {}
        for name, (total, unit_bytes) in sums.items():
            now = f"(max by {_OF_DEVICE} ({total}) <= {MAX_DEVICE_BYTES // unit_bytes})"
            found[name] = f"quantile_over_time(0.5, {now}[{days}d:{10 * days}m]) or {now}"
        return found

    @property
    def lives(self) -> dict[str, str]:
        """Return the queries that a plan makes for each day."""
        requests = self._requests
        return {
            "gpus": f"max_over_time({requests}[1d])",
            "first": f"min_over_time(timestamp({requests})[1d:1m])",
            "last": f"max_over_time(timestamp({requests})[1d:1m])",
            "created": self._of_gpu_pods("kube_pod_created"),
            "started": self._of_gpu_pods("kube_pod_start_time"),
            "completed": self._of_gpu_pods("kube_pod_completion_time"),
            "owner": self._of_gpu_pods("kube_pod_owner"),
            **{
                name: self._of_gpu_pods(
                    "kube_pod_container_resource_requests", f'resource="{name}"'
                )
                for name in ("cpu", "memory")
            },
        }

    @property
    def use(self) -> dict[str, Measured]:
        """Return the queries that a plan makes for the use of pods on each day."""
        return {
            "fb_used": self._memory(USED_MIB, MIB),
            "fb_used_bytes": self._memory(USED_BYTES),
            **{f"sm {each}": self._measured("avg", each, MOST_RATIO) for each in SM_ACTIVITY},
            "utilization": self._measured("avg", UTILIZATION_PERCENT, 100 * MOST_RATIO),
            "pod_used": self._memory("headroom_pod_used_bytes"),
            "pod_sm": self._measured("avg", "headroom_pod_sm_activity_ratio", MOST_RATIO),
        }

    @property
    def nodes(self) -> dict[str, str]:
        """Return the queries that a plan makes for the nodes at the end of its window."""
        resources = f'resource=~"{self.gpu_resources}|cpu|memory"'
        return {
            "node": self.of("kube_node_status_allocatable", resources),
            "node_labels": self.of("kube_node_labels"),
            "devices": " or ".join(
                f"group by {_OF_DEVICE} ({self.of(used)})" for used in (USED_MIB, USED_BYTES)
            ),
        }

    @property
    def ended_lives(self) -> dict[str, str]:
        """Return the queries that the recorder makes for each day."""
        memory = {name: measured.selector for name, measured in self.peaks.items()}
        reasons = "Evicted|NodeLost|NodeAffinity|Shutdown"
        killed = 'reason="OOMKilled"'
        terminated = "kube_pod_container_status{}_terminated_reason"
        return {
            **{
                name.replace("most", figure): f"{each}_over_time(timestamp({of})[1d:{_LIFE_STEP}])"
                for name, of in memory.items()
                for figure, each in (("first", "min"), ("last", "max"))
            },
            "node": f"max_over_time({self._requests}[1d])",
            "owner": self._of_gpu_pods("kube_pod_owner"),
            "image": self._of_gpu_pods("kube_pod_container_info"),
            "failed": self._of_gpu_pods("kube_pod_status_phase", 'phase="Failed"'),
            "evicted": self._of_gpu_pods("kube_pod_status_reason", f'reason=~"{reasons}"'),
            "oom-killed 0": self._of_gpu_pods(terminated.format("_last"), killed),
            "oom-killed 1": self._of_gpu_pods(terminated.format(""), killed),
        }

    @property
    def peaks(self) -> dict[str, Measured]:
        """Return the queries that the recorder makes for the memory use on each day."""
        return {
            "peak most": self._memory("headroom_pod_peak_bytes"),
            "used most": self._memory(USED_MIB, MIB),
            "used-bytes most": self._memory(USED_BYTES),
        }


#: The queries for a Prometheus that has no other cluster.
EVERY_CLUSTER = Queries()


def _seconds(kind: str, promql: str, step_s: float, every_s: int) -> RangeQuery:
    # The range is a millisecond shorter than the step. With both of its ends, it would contain one
    # value too many in each step that begins with a value.
    step_ms = round(1000 * step_s) - 1
    summed = f"sum_over_time(({promql})[{step_ms}ms:{every_s}s])"
    return RangeQuery(kind, "s", f"{summed} * {every_s}")
