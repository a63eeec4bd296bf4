"""Metrics of the fleet, read from one snapshot when Prometheus scrapes.

The number of series is bounded: single devices are reported up to a maximum, whole nodes first, and
pods and nodes only if something is wrong with them.
"""

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from extender.placement.device_accounting import DeviceTerms
from extender.placement.snapshot import Snapshot
from extender.state.cluster_state import ClusterState
from extender.state.fleet_totals import (
    Totals,
    nodes_by_state,
    report_ages_s,
    some_devices,
    totals,
    unhealthy,
)
from extender.state.heartbeats import age
from extender.state.pending_pods import Pending

#: Maximum series of pods, and of nodes, per problem; the worst are reported.
MOST_OFFENDERS = 100

_FLEET = (
    ("capacity", "Physical memory of all devices, driver reserve included.", "capacity"),
    ("allocatable", "Part of the capacity that can be reserved.", "allocatable"),
    (
        "reserved",
        "Charged to pods whose device is known: the larger of request and use.",
        "reserved",
    ),
    (
        "unconfirmed",
        "Worst-case charge of unconfirmed pods, on each device that they may get; so more than "
        "they request.",
        "awaited",
    ),
    ("committed", "Allocatable memory that is taken in the worst case.", "committed"),
    ("used", "Measured use of all processes.", "used"),
    (
        "unattributed",
        "Used by no known pod, above the tolerance.",
        "unattributed",
    ),
    (
        "headroom",
        "Memory that can still be reserved; overcommitted devices count as full.",
        "headroom",
    ),
    (
        "overcommitted",
        "Committed above the devices' memory, in the worst case; must be 0.",
        "overcommitted",
    ),
)
_DRIFT = {
    "beyond": "beyond_request",
    "unused": "unused",
    "unreserved": "unreserved",
}
_OF_DEVICE: tuple[tuple[str, str, Callable[[DeviceTerms], int]], ...] = (
    ("capacity", "Physical memory, driver reserve included.", lambda d: d.device.memory_bytes),
    (
        "reserved",
        "Charged to pods that are known to use this device.",
        lambda d: d.reservation_bytes,
    ),
    ("used", "Measured use of all processes.", lambda d: d.device.used_bytes),
    (
        "headroom",
        "Memory that can still be reserved; negative if overcommitted.",
        lambda d: d.headroom_bytes,
    ),
)


class FleetCollector(Collector):
    """Collects from the newest snapshot, which ``snapshot`` returns on any thread. ``pending``
    returns the pending pods."""

    def __init__(
        self,
        cluster: ClusterState,
        snapshot: Callable[[], Snapshot | None],
        pending: Callable[[], Pending],
        most_devices: int,
        stale_after_s: float,
    ) -> None:
        self._cluster = cluster
        self._snapshot = snapshot
        self._pending = pending
        self._most_devices = most_devices
        self._stale_after_s = stale_after_s

    def describe(self) -> Iterable[Metric]:
        """Return no metrics: registering must not read the fleet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._overcommitted()
        yield from self._overusing()
        yield from self._waiting()
        snap = self._snapshot()
        if snap is None:
            return
        fleet = totals(snap)
        yield from _fleet(fleet)
        yield from self._nodes(snap)
        yield from self._devices(snap, fleet.devices)

    def _overcommitted(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "headroom_overcommitted_bytes",
            "Bytes committed, in the worst case, above the device's memory; absent if there are "
            "none. All replicas report the same value.",
            labels=["node", "device"],
        )
        worst = sorted(self._cluster.overcommits.now(), key=lambda over: -over.beyond_bytes)
        for over in worst[:MOST_OFFENDERS]:
            family.add_metric([over.node, over.device], over.beyond_bytes)
        yield family

    def _overusing(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "headroom_pod_overuse_bytes",
            "Bytes that a pod uses on a device above its request, if that has lasted longer than "
            "overuse_after_s; absent otherwise.",
            labels=["namespace", "pod", "node", "device"],
        )
        worst = sorted(self._cluster.overuses.lasting, key=lambda each: -each.beyond_bytes)
        for each in worst[:MOST_OFFENDERS]:
            labels = [each.namespace, each.name, each.node, each.device]
            family.add_metric(labels, each.beyond_bytes)
        yield family

    def _waiting(self) -> Iterator[Metric]:
        pending, now_s = self._pending(), time.time()
        pods = GaugeMetricFamily(
            "headroom_pending_pods",
            "Unbound pods that request GPUs, by the reason that rejected most nodes; not_asked: "
            "kube-scheduler has not called filter for them.",
            labels=["reason"],
        )
        oldest = GaugeMetricFamily(
            "headroom_pending_oldest_seconds",
            "Age of the oldest of these pods.",
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
            "Nodes by state: open to pods, or the reason that closes them.",
            labels=["state"],
        )
        for state, count in nodes_by_state(snap, now_s).items():
            nodes.add_metric([state], count)
        yield nodes
        devices = GaugeMetricFamily(
            "headroom_unhealthy_devices",
            "Devices on which nothing is placed, by reason; absent if there are none.",
            labels=["reason"],
        )
        for code, count in unhealthy(snap).items():
            devices.add_metric([code], count)
        yield devices
        ages_s = report_ages_s(snap, self._stale_after_s, now_s)
        yield GaugeMetricFamily(
            "headroom_report_oldest_age_seconds",
            "Age of the oldest report, among nodes that ever reported.",
            value=max(0.0, *ages_s.values(), 0.0),
        )
        stale = GaugeMetricFamily(
            "headroom_report_age_seconds",
            "Seconds since the last heartbeat of a node's agent, if its report is stale; absent "
            "otherwise.",
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
    for name, text, attribute in _FLEET:
        yield GaugeMetricFamily(
            f"headroom_fleet_{name}_bytes", text, value=getattr(fleet, attribute)
        )
    yield GaugeMetricFamily(
        "headroom_fleet_devices",
        "Devices; devices that share one memory count once.",
        value=fleet.devices,
    )
    drift = GaugeMetricFamily(
        "headroom_ledger_drift_bytes",
        "Difference between ledger and measurement, over all devices: used above the request "
        "(beyond_request), requested but unused (unused), used without a reservation there "
        "(unreserved).",
        labels=["kind"],
    )
    for attribute, kind in _DRIFT.items():
        drift.add_metric([kind], getattr(fleet, attribute))
    yield drift
