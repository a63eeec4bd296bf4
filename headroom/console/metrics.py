"""Metrics of the fleet and of pending pods.

Each scrape computes them from one snapshot. ``pending_counter`` counts the pending pods.

The number of series is limited. Devices have their own series up to a maximum number, in the order
of node names. Pods and nodes have their own series only while they have a problem.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from headroom.console.facts.pod_limits import pods_by_class
from headroom.console.history.holdings import Held
from headroom.contract.timestamps import age
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.crowded_pods import crashed_pods
from headroom.core.cluster.idle_pods import idle_pods
from headroom.core.cluster.memory_totals import (
    Totals,
    cordoned,
    nodes_by_state,
    report_ages_s,
    some_devices,
    totals,
    unhealthy,
)
from headroom.core.cluster.unmanaged_gpus import unmanaged_gpus
from headroom.core.groups.partial import partly_bound
from headroom.core.placement.device_accounting import DeviceTerms
from headroom.core.placement.snapshot import Snapshot
from headroom.core.whatif.pending_pods import Pending

#: Maximum number of series for each problem of pods or nodes. The worst are exported.
MOST_OFFENDERS = 100

#: Seconds for which the metrics show that a container crashed on an overcommitted device.
CRASHED_FOR_S = 900.0

#: Label value for a pod whose namespace and name are unknown. If the label were empty, Prometheus
#: would write the console's own pod into it.
_UNKNOWN = "(unknown)"

#: Maps each attribute of ``Totals``, which is also a part of the metric's name, to the help text.
_FLEET = {
    "capacity": "Physical memory of all devices, including the driver's reserve.",
    "allocatable": "Part of the capacity that can be reserved.",
    "reserved": "Memory charged to pods whose device is known: the larger of request and use.",
    "unconfirmed": "Worst-case charge of unconfirmed pods. It exceeds their requests, because "
    "a pod is charged on each device that it may get.",
    "committed": "Allocatable memory that is taken in the worst case.",
    "used": "Measured use of all processes.",
    "unattributed": "Memory in use that belongs to no known pod, beyond the tolerance.",
    "headroom": "Memory that can still be reserved; an overcommitted device counts as 0.",
    "overcommitted": "Memory committed beyond the devices' memory in the worst case; must be 0.",
}
#: Attributes of ``Totals``, which are also values of the label.
_DRIFT = ("overuse", "underuse", "unreserved")
#: Part of the metric's name, its help text, and a function that returns the bytes.
_OF_DEVICE: tuple[tuple[str, str, Callable[[DeviceTerms], int]], ...] = (
    (
        "capacity",
        "Physical memory of the device, including the driver's reserve.",
        lambda d: d.device.memory_bytes,
    ),
    (
        "reserved",
        "Memory charged to pods that are known to use the device.",
        lambda d: d.reservation_bytes,
    ),
    ("used", "Measured use of the device by all processes.", lambda d: d.device.used_bytes),
    (
        "headroom",
        "Memory of the device that can still be reserved; negative if it is overcommitted.",
        lambda d: d.headroom_bytes,
    ),
)


class Scrapes:
    """Holds the snapshot of the scrape in progress. At most one scrape is in progress.

    The reference is dropped at the end of the scrape, because a snapshot that is still referenced
    must be copied when the next snapshot is made.
    """

    def __init__(self) -> None:
        #: The snapshot of the current scrape, or None between scrapes.
        self.snapshot: Snapshot | None = None
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def of(self, snap: Snapshot) -> Iterator[None]:
        with self._lock:
            self.snapshot = snap
            try:
                yield
            finally:
                self.snapshot = None


class FleetCollector(Collector):
    """Collects the metrics of the fleet and of pending pods.

    ``snapshot`` returns the newest snapshot, and may be called on any thread. ``pending`` returns
    the latest counts of pending pods, and ``held`` the holdings of the namespaces.
    """

    def __init__(
        self,
        cluster: Cluster,
        snapshot: Callable[[], Snapshot | None],
        pending: Callable[[], Pending],
        most_devices: int,
        stale_after_s: float,
        held: Callable[[], Held] = dict,
    ) -> None:
        self._cluster = cluster
        self._snapshot = snapshot
        self._pending = pending
        self._most_devices = most_devices
        self._stale_after_s = stale_after_s
        self._held = held

    def describe(self) -> Iterable[Metric]:
        """Return no metrics, because registering must not read the fleet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._overcommitted()
        yield from self._crashed()
        yield from self._overusing()
        yield from self._pending_pods()
        yield GaugeMetricFamily(
            "headroom_groups_partly_bound",
            "Groups of pods that are bound in part: the bound pods keep memory while others wait.",
            len(partly_bound(self._cluster)),
        )
        snap = self._snapshot()
        if snap is None:
            return
        fleet = totals(snap)
        yield from _fleet(fleet)
        yield from self._idle(snap)
        yield from self._holdings()
        classes = GaugeMetricFamily(
            "headroom_reserved_pods",
            "Pods that have a reservation, by class: guaranteed (limit equals request), burstable "
            "(limit above request) or unlimited.",
            labels=["class"],
        )
        for each, count in pods_by_class(self._cluster, snap).items():
            classes.add_metric([each.value], count)
        yield classes
        yield from self._nodes(snap)
        yield from self._devices(snap, fleet.devices)

    def _overcommitted(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "headroom_overcommitted_bytes",
            "Bytes committed beyond the device's memory in the worst case; absent if there are "
            "none. At most 100 devices, the worst.",
            labels=["node", "device"],
        )
        worst = sorted(self._cluster.overcommits.now(), key=lambda over: -over.excess_bytes)
        for over in worst[:MOST_OFFENDERS]:
            family.add_metric([over.node, over.device], over.excess_bytes)
        yield family

    def _crashed(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "headroom_crashed_on_overcommitted_bytes",
            "Largest excess of an overcommitted device on which a container of the pod ended with "
            "an error in the last 15 minutes; absent otherwise. At most 100 pods, the worst.",
            labels=["namespace", "pod", "node", "device"],
        )
        since_s = time.time() - CRASHED_FOR_S
        found = [
            (pod, crash.crowding.over)
            for pod, crash in crashed_pods(self._cluster)
            if crash.end.at_s is None or crash.end.at_s >= since_s
        ]
        for pod, over in sorted(found, key=lambda each: -each[1].excess_bytes)[:MOST_OFFENDERS]:
            labels = [pod.metadata.namespace, pod.metadata.name, over.node, over.device]
            family.add_metric(labels, over.excess_bytes)
        yield family

    def _overusing(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "headroom_pod_overuse_bytes",
            "Bytes that a pod uses on a device above its request, if this has lasted longer than "
            "overuse_after_s; absent otherwise. At most 100, the worst.",
            labels=["namespace", "pod", "node", "device"],
        )
        worst = sorted(self._cluster.overuses.lasting, key=lambda each: -each.excess_bytes)
        for each in worst[:MOST_OFFENDERS]:
            labels = [each.namespace or _UNKNOWN, each.name or _UNKNOWN, each.node, each.device]
            family.add_metric(labels, each.excess_bytes)
        yield family

    def _idle(self, snap: Snapshot) -> Iterator[Metric]:
        gpus = GaugeMetricFamily(
            "headroom_idle_gpus",
            "GPUs that pods of the namespace hold without using an SM for an hour. A pod with half "
            "of a GPU's memory counts as 0.5. Only pods that hold at least 1 GiB, in at most 100 "
            "namespaces.",
            labels=["namespace"],
        )
        held = GaugeMetricFamily(
            "headroom_idle_held_bytes",
            "Memory held by the pods that headroom_idle_gpus counts.",
            labels=["namespace"],
        )
        sums: dict[str, tuple[float, int]] = {}
        for each in idle_pods(self._cluster, snap, time.monotonic(), time.time()):
            gpu_ratio, held_bytes = sums.get(each.namespace, (0.0, 0))
            sums[each.namespace] = gpu_ratio + each.gpu_ratio, held_bytes + each.held_bytes
        worst = sorted(sums.items(), key=lambda each: -each[1][0])[:MOST_OFFENDERS]
        for namespace, (gpu_ratio, held_bytes) in worst:
            gpus.add_metric([namespace or _UNKNOWN], gpu_ratio)
            held.add_metric([namespace or _UNKNOWN], held_bytes)
        yield gpus
        yield held

    def _holdings(self) -> Iterator[Metric]:
        gpus = GaugeMetricFamily(
            "headroom_held_gpus",
            "GPUs that the pods of the namespace hold, by whether they use an SM: active, idle or "
            "unmeasured. Namespaces beyond 200 are summed as (others).",
            labels=["namespace", "state"],
        )
        memory = GaugeMetricFamily(
            "headroom_held_bytes",
            "Memory that the pods of the namespace hold: used, unused, or unmeasured.",
            labels=["namespace", "state"],
        )
        for namespace, held in self._held().items():
            for state in ("active", "idle", "unmeasured"):
                gpus.add_metric([namespace or _UNKNOWN, state], getattr(held, f"{state}_gpus"))
            for state in ("used", "unused", "unmeasured"):
                memory.add_metric([namespace or _UNKNOWN, state], getattr(held, f"{state}_bytes"))
        yield gpus
        yield memory

    def _pending_pods(self) -> Iterator[Metric]:
        pending, now_s = self._pending(), time.time()
        pods = GaugeMetricFamily(
            "headroom_pending_pods",
            "Unbound pods that request GPUs, by the reason that rejected most nodes. not_asked: "
            "kube-scheduler has not called filter for them.",
            labels=["reason"],
        )
        oldest = GaugeMetricFamily(
            "headroom_pending_oldest_seconds",
            "Age of the oldest unbound pod that requests GPUs, by the same reasons.",
            labels=["reason"],
        )
        for code, count in sorted(pending.pods.items()):
            pods.add_metric([code], count)
            age_s = age(pending.oldest.get(code, ""), now_s)
            if age_s is not None:
                oldest.add_metric([code], max(0.0, age_s))
        yield pods
        yield oldest

    def _nodes(self, snap: Snapshot) -> Iterator[Metric]:
        now_s = time.monotonic()
        nodes = GaugeMetricFamily(
            "headroom_nodes",
            "Nodes by state: open to pods, or the reason why they take no pods.",
            labels=["state"],
        )
        for state, count in nodes_by_state(snap, now_s).items():
            nodes.add_metric([state], count)
        yield nodes
        unmanaged = GaugeMetricFamily(
            "headroom_unmanaged_gpu_nodes",
            "Nodes that offer GPUs under a resource name that the settings do not manage; absent "
            "if there are none. Pods that request this resource are bound without a reservation.",
            labels=["resource"],
        )
        for resource, offering in unmanaged_gpus(self._cluster).items():
            unmanaged.add_metric([resource], len(offering))
        yield unmanaged
        devices = GaugeMetricFamily(
            "headroom_unhealthy_devices",
            "Unhealthy devices, which take no pods, by reason; absent if there are none.",
            labels=["reason"],
        )
        for code, count in unhealthy(snap).items():
            devices.add_metric([code], count)
        yield devices
        yield GaugeMetricFamily(
            "headroom_cordoned_devices",
            "Devices that take no new pods only because they are cordoned.",
            value=cordoned(snap),
        )
        ages_s = report_ages_s(snap, self._stale_after_s, now_s)
        yield GaugeMetricFamily(
            "headroom_report_oldest_age_seconds",
            "Age of the oldest report of all nodes that ever reported.",
            value=max(0.0, *ages_s.values(), 0.0),
        )
        stale = GaugeMetricFamily(
            "headroom_report_age_seconds",
            "Seconds since the last heartbeat of a node's agent if its report is stale; absent "
            "otherwise. At most the 100 nodes with the oldest reports.",
            labels=["node"],
        )
        late = {name: age_s for name, age_s in ages_s.items() if age_s > self._stale_after_s}
        for name in sorted(late, key=lambda name: -late[name])[:MOST_OFFENDERS]:
            stale.add_metric([name], late[name])
        yield stale

    def _devices(self, snap: Snapshot, devices: int) -> Iterator[Metric]:
        listed = list(some_devices(snap, self._most_devices))
        for name, text, figure in _OF_DEVICE:
            family = GaugeMetricFamily(
                f"headroom_ledger_device_{name}_bytes", text, labels=["node", "device"]
            )
            for node, terms in listed:
                if terms.believed:
                    family.add_metric([node, terms.device.uuid], figure(terms))
            yield family
        yield GaugeMetricFamily(
            "headroom_ledger_devices_left_out",
            "Devices that are in the sums but have no series of their own (setting device_series).",
            value=devices - len(listed),
        )


def _fleet(fleet: Totals) -> Iterator[Metric]:
    for name, text in _FLEET.items():
        yield GaugeMetricFamily(f"headroom_fleet_{name}_bytes", text, value=getattr(fleet, name))
    yield GaugeMetricFamily(
        "headroom_fleet_devices",
        "Number of devices; devices that share one memory count once.",
        value=fleet.devices,
    )
    drift = GaugeMetricFamily(
        "headroom_ledger_drift_bytes",
        "Difference between ledger and measurement, over all devices: used above the request "
        "(overuse), requested but unused (underuse), used without a reservation there "
        "(unreserved).",
        labels=["kind"],
    )
    for kind in _DRIFT:
        drift.add_metric([kind], getattr(fleet, kind))
    yield drift
