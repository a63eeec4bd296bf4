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

#: Pods and nodes with something wrong, of each kind; the worst are told.
MOST_OFFENDERS = 100

_FLEET = (
    ("capacity", "Physical memory of all devices, driver reserve included.", "capacity"),
    ("allocatable", "What of it can be promised.", "allocatable"),
    (
        "reserved",
        "Charged to pods that sit on a device for certain: the larger of request and use.",
        "reserved",
    ),
    (
        "awaited",
        "What pods that no report shows yet add in the worst case, on every device that they may "
        "be given; so more than they ask for.",
        "awaited",
    ),
    ("committed", "All that is taken of what can be promised, in the worst case.", "committed"),
    ("used", "Measured use, whoever uses it.", "used"),
    (
        "unattributed",
        "Used by nobody that is known to be a pod, beyond the tolerance.",
        "unattributed",
    ),
    ("headroom", "What can still be promised; overcommitted devices count as full.", "headroom"),
    (
        "overcommitted",
        "Committed beyond what devices have, in the worst case; must be 0.",
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
    ("reserved", "Charged to pods that sit here for certain.", lambda d: d.reservation_bytes),
    ("used", "Measured use, whoever uses it.", lambda d: d.device.used_bytes),
    (
        "headroom",
        "What can still be promised; negative if overcommitted.",
        lambda d: d.headroom_bytes,
    ),
)


class FleetCollector(Collector):
    """``snapshot`` returns the newest that there is, on any thread; ``pending`` who waits."""

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
        """Nothing is read off the fleet to be registered."""
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
            "Bytes committed, in the worst case, beyond what the device has; absent where nothing "
            "is. Every replica tells the same.",
            labels=["node", "device"],
        )
        worst = sorted(self._cluster.overcommits.now(), key=lambda over: -over.beyond_bytes)
        for over in worst[:MOST_OFFENDERS]:
            family.add_metric([over.node, over.device], over.beyond_bytes)
        yield family

    def _overusing(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "headroom_pod_overuse_bytes",
            "What a pod uses of a device beyond what it asked for, where it has done so for longer "
            "than overuse_after_s; absent for all others.",
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
            "Pods that ask for GPUs and that no node has, by the reason that refused most nodes "
            "for them; not_asked: kube-scheduler has not asked about them.",
            labels=["reason"],
        )
        oldest = GaugeMetricFamily(
            "headroom_pending_oldest_seconds",
            "Age of the oldest of them.",
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
            "Nodes by whether they are open to pods, else by the reason that closes them.",
            labels=["state"],
        )
        for state, count in nodes_by_state(snap, now_s).items():
            nodes.add_metric([state], count)
        yield nodes
        devices = GaugeMetricFamily(
            "headroom_unhealthy_devices",
            "Devices on which nothing is placed, by the reason; absent where there is none.",
            labels=["reason"],
        )
        for code, count in unhealthy(snap).items():
            devices.add_metric([code], count)
        yield devices
        ages_s = report_ages_s(snap, self._stale_after_s, now_s)
        yield GaugeMetricFamily(
            "headroom_report_oldest_age_seconds",
            "Age of the oldest report, of nodes that ever reported.",
            value=max(0.0, *ages_s.values(), 0.0),
        )
        stale = GaugeMetricFamily(
            "headroom_report_age_seconds",
            "Since when nothing was heard of the agent of a node, where that is too long; absent "
            "for all others.",
            labels=["node"],
        )
        late = {name: age_s for name, age_s in ages_s.items() if age_s > self._stale_after_s}
        for name in sorted(late, key=lambda name: -late[name])[:MOST_OFFENDERS]:
            stale.add_metric([name], late[name])
        yield stale

    def _devices(self, snap: Snapshot, devices: int) -> Iterator[Metric]:
        told = list(some_devices(snap, self._most_devices))
        for name, text, figure in _OF_DEVICE:
            family = GaugeMetricFamily(
                f"headroom_ledger_device_{name}_bytes", text, labels=["node", "device"]
            )
            for node, terms in told:
                if terms.believed:
                    family.add_metric([node, terms.device.uuid], figure(terms))
            yield family
        yield GaugeMetricFamily(
            "headroom_ledger_devices_left_out",
            "Devices that are in the sums and have no series of their own (setting device_series).",
            value=devices - len(told),
        )


def _fleet(fleet: Totals) -> Iterator[Metric]:
    for name, text, attribute in _FLEET:
        yield GaugeMetricFamily(
            f"headroom_fleet_{name}_bytes", text, value=getattr(fleet, attribute)
        )
    yield GaugeMetricFamily("headroom_fleet_devices", "Memories of devices.", value=fleet.devices)
    drift = GaugeMetricFamily(
        "headroom_ledger_drift_bytes",
        "By how much ledger and measurement differ, over all devices: used by pods beyond what "
        "they asked for; asked for and not used; used by pods that were promised nothing there.",
        labels=["kind"],
    )
    for attribute, kind in _DRIFT.items():
        drift.add_metric([kind], getattr(fleet, attribute))
    yield drift
