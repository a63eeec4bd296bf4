"""The page of all metrics: reads the registries of the processes, and the rules of the alerts."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from agent.metrics import DEVICE_LABELS, POD_LABELS, AgentCollector, Sample, SampleCollector
from extender.metrics import Telemetry
from headroom.console.metrics import FleetCollector
from headroom.contract.gpunode import GPUNodeStatus
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.placement.policy import Rules
from headroom.core.whatif.pending_pods import Pending
from headroom.dra_taints.metrics import TaintTelemetry
from headroom.recorder.metrics import RecorderTelemetry
from headroom.runtime.telemetry import CertificateCollector, ProcessTelemetry, ViewTelemetry
from headroom.webhook.metrics import WebhookTelemetry
from reference.markdown import ROOT, code, head, sentence, table

_INTRO = """\
Each process serves `/metrics` in Prometheus' text format: agents on port 9412, all others on 8889.
Values that are not known are absent, not zero. To add up a counter of one component over its
replicas, use `sum`. All consoles report the same values of the fleet, so use `max` for these.

To scrape them, see [monitoring.md](../get-started/monitoring.md). In a cluster, all processes
answer only clients that may `get` the path /metrics ([why](../design/security.md#metrics)).
[alerts.md](../operate/alerts.md) describes the alerts.

"""
#: Section -> the text below its heading.
_SECTIONS = {
    "All components except agents": "The last column has the alerts that use a metric.",
    "The extender": "Series of single devices, pods and nodes exist only at the console.",
    "The console": "The number of series is bounded. At most `device_series` devices (2,000; 0: "
    "none) have series of their own. Pods and nodes have series only if something is wrong with "
    "them, at most 100 for each problem.",
    "Extender and console": "",
    "The webhook": "Its port requires no token, because its metrics name no pod.",
    "The recorder": "Its port requires no token, because its metrics name no pod. Replicas that do "
    "not lead write nothing.",
    "The controller of device taints": "Only with component `device-taints` "
    "([dra.md](../how-to/dra.md)).",
    "The agent": "Labels have the same names as in dcgm-exporter, except `model_name`: "
    "*device* stands for "
    + ", ".join(map(code, DEVICE_LABELS))
    + "; *pod* stands for these and "
    + ", ".join(map(code, POD_LABELS))
    + ". A name that the agent does not know is `(unknown)`. Metrics of pods have other names than "
    "metrics of devices, so no sum counts memory twice. [agent.md](../operate/agent.md) describes "
    "the measurements.",
}


@dataclass(frozen=True, slots=True)
class Described:
    """One metric, with the name that its samples have in a scrape, without suffixes of series."""

    name: str
    type: str
    labels: tuple[str, ...]
    text: str


class _Registry(CollectorRegistry):
    """A registry that lists its collectors."""

    def __init__(self) -> None:
        super().__init__()
        self.collectors: list[Collector] = []

    def register(self, collector: Collector) -> None:
        self.collectors.append(collector)
        super().register(collector)


def described() -> dict[str, list[Described]]:
    """Return the metrics of each section, in the order of the page; each is in one section."""
    extender = _of(Telemetry(_Registry()))
    console = [*_of(ViewTelemetry(_Registry(), "headroom_console_ready")), *_fleet()]
    processes = {
        "The extender": extender,
        "The console": console,
        "The webhook": _of(WebhookTelemetry(_Registry())),
        "The recorder": _of(RecorderTelemetry(_Registry())),
        "The controller of device taints": _of(TaintTelemetry(_Registry())),
    }
    everywhere = [
        each for each in extender if all(each in metrics for metrics in processes.values())
    ]
    both = [each for each in extender if each in console and each not in everywhere]
    shared = {"All components except agents": everywhere, "Extender and console": both}
    own = {
        name: [each for each in metrics if each not in everywhere and each not in both]
        for name, metrics in processes.items()
    }
    found = {**shared, **own, "The agent": _agent()}
    return {name: found[name] for name in _SECTIONS}


def page() -> str:
    """Return docs/reference/metrics.md."""
    alerts = _alerts()
    text = head("Metrics", "the help texts of the processes' metrics") + _INTRO
    for name, metrics in described().items():
        start = f"## {name}\n\n{_SECTIONS[name]}\n\n" if _SECTIONS[name] else f"## {name}\n\n"
        rows = (
            (
                code(each.name),
                each.type,
                _labels(each.labels),
                sentence(each.text),
                ", ".join(map(code, alerts.get(each.name, ()))),
            )
            for each in metrics
        )
        text += start + table("name | type | labels | description | alerts", rows)
    return text.rstrip("\n") + "\n"


def _of(telemetry: ProcessTelemetry) -> list[Described]:
    registry = telemetry.registry
    assert isinstance(registry, _Registry)
    # Every process except the agent serves a port with a certificate.
    return list(_families([*registry.collectors, CertificateCollector({"debug": Path("none")})]))


def _fleet() -> Iterator[Described]:
    cluster = ClusterWriter(Rules(), 90.0, 0.0).cluster
    return _families([FleetCollector(cluster, cluster.snapshot, Pending, 0, 90.0)])


def _agent() -> list[Described]:
    sample = Sample("", GPUNodeStatus(), 0.0)
    collectors = [AgentCollector(lambda: sample, {}, {}), SampleCollector(lambda: sample)]
    return list(_families(collectors))


def _families(collectors: Iterable[Collector]) -> Iterator[Described]:
    for collector in collectors:
        for family in collector.collect():
            # The library has no public name for the labels of a metric without series.
            of_family = getattr(family, "_labelnames", ())
            yield _described(family, getattr(collector, "_labelnames", of_family))


def _described(family: Metric, labels: Sequence[str]) -> Described:
    """Raise ``ValueError`` if the metric has no help text."""
    if not family.documentation:
        raise ValueError(f"{family.name} has no help text; add one to its definition")
    suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
    shown = {label for sample in family.samples for label in sample.labels} - {"le", *labels}
    kind = "gauge" if family.type == "info" else family.type
    return Described(family.name + suffix, kind, (*labels, *sorted(shown)), family.documentation)


def _labels(labels: Sequence[str]) -> str:
    pod = (*DEVICE_LABELS, *POD_LABELS)
    for start, name in ((pod, "*pod*"), (DEVICE_LABELS, "*device*")):
        if tuple(labels[: len(start)]) == start:
            return ", ".join((name, *labels[len(start) :]))
    return ", ".join(labels)


def _alerts() -> dict[str, list[str]]:
    """Return metric -> the alerts whose expressions use it."""
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yaml").read_text(encoding="utf-8"))
    found: dict[str, list[str]] = {}
    for group in rules["groups"]:
        for rule in group["rules"]:
            for name in set(re.findall(r"headroom_\w+", str(rule["expr"]))):
                if alert := rule.get("alert"):
                    found.setdefault(re.sub("_(bucket|count|sum)$", "", name), []).append(alert)
    return found
