"""Adds up the memory of devices: of the fleet for metrics, and of a node for Kubernetes.

The sum for a node is the value of its extended resource in MiB. It is the capacity and not the free
memory, because Kubernetes itself subtracts the requests of pods.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from headroom.contract.annotations import MIRROR
from headroom.contract.errors import BadQuantity
from headroom.contract.kube import Node
from headroom.contract.quantity import parse_bytes
from headroom.contract.reasons import Reason
from headroom.core.cluster.cluster import Cluster
from headroom.core.placement.device_accounting import DeviceTerms, first_of_each_memory
from headroom.core.placement.policy import MIB
from headroom.core.placement.snapshot import CODE_OF, REASONS, NodeTerms, Snapshot

#: State of a node that takes pods. All other states are codes of reasons.
OPEN = "open"
STALE, NO_REPORT = Reason.STALE_REPORT.code, Reason.NO_REPORT.code


@dataclass(slots=True)
class Totals:
    """Sums in bytes, and the number of devices.

    Devices that share one memory count once. A device with implausible values counts only in
    ``devices``.
    """

    devices: int = 0
    capacity: int = 0
    allocatable: int = 0
    reserved: int = 0
    unconfirmed: int = 0
    committed: int = 0
    used: int = 0
    unattributed: int = 0
    headroom: int = 0
    overcommitted: int = 0
    #: Measured use above the requests of pods.
    overuse: int = 0
    #: Requested memory that pods do not use.
    underuse: int = 0
    #: Measured use of pods without a reservation, except on nodes on which DRA allocates.
    unreserved: int = 0

    def add(self, terms: DeviceTerms, by_dra: bool = False) -> None:
        """Add a device. ``by_dra`` states whether kube-scheduler allocates it by DRA without
        reservations."""
        self.devices += 1
        if not terms.believed:
            return
        headroom_bytes = terms.headroom_bytes
        self.capacity += terms.device.memory_bytes
        self.allocatable += terms.allocatable_bytes
        self.reserved += terms.reservation_bytes
        self.unconfirmed += terms.unconfirmed_bytes
        self.committed += terms.committed_bytes
        self.used += terms.device.used_bytes
        self.unattributed += terms.unattributed_bytes
        self.headroom += max(0, headroom_bytes)
        self.overcommitted += max(0, -headroom_bytes)
        self.unreserved += 0 if by_dra else terms.unreserved_pods_bytes
        for holder in terms.holders:
            if holder.measured_bytes is not None:
                excess_bytes = holder.measured_bytes - holder.requested_bytes
                self.overuse += max(0, excess_bytes)
                self.underuse += max(0, -excess_bytes)


def totals(snap: Snapshot) -> Totals:
    """Return the sums over all devices of the snapshot."""
    found = Totals()
    for node in snap.nodes:
        for terms in first_of_each_memory(node.devices):
            found.add(terms, node.reason is Reason.DRA_MANAGES)
    return found


def nodes_by_state(snap: Snapshot, now_s: float) -> dict[str, int]:
    """Return the number of nodes by state: ``open``, or the code of the reason why a node takes no
    pods.

    ``open``, ``STALE`` and ``NO_REPORT`` are always included, even if they are 0.
    """
    closed = snap.node_reason > 0
    stale = ~closed & (snap.fresh_until_s < now_s)
    found = _by_reason(snap.node_reason)
    found[STALE] = found.get(STALE, 0) + int(stale.sum())
    return {OPEN: int((~closed & ~stale).sum()), NO_REPORT: 0, **found}


def report_ages_s(snap: Snapshot, stale_after_s: float, now_s: float) -> dict[str, float]:
    """Return the seconds since the last heartbeat of each agent that ever sent one, by node."""
    ages = now_s - (snap.fresh_until_s - stale_after_s)
    reported = np.flatnonzero(np.isfinite(ages))
    return {snap.nodes[row].name: float(ages[row]) for row in reported.tolist()}


def unhealthy(snap: Snapshot) -> dict[str, int]:
    """Return the number of unhealthy devices, by the code of the reason."""
    issues = snap.columns.health_issue
    return _by_reason(issues[(issues > 0) & (issues != CODE_OF[Reason.CORDONED_DEVICE])])


def cordoned(snap: Snapshot) -> int:
    """Return the number of devices that take no new pods only because they are cordoned."""
    return int((snap.columns.health_issue == CODE_OF[Reason.CORDONED_DEVICE]).sum())


def _by_reason(codes: NDArray[np.signedinteger]) -> dict[str, int]:
    counts = np.bincount(codes, minlength=len(REASONS)).tolist()
    return {reason.code: n for reason, n in zip(REASONS, counts, strict=True) if reason and n}


def some_devices(snap: Snapshot, max_devices: int) -> Iterator[tuple[str, DeviceTerms]]:
    """Return at most ``max_devices`` pairs (node, device), in the order of node names.

    Repeated calls return the same devices until a node is added or removed.
    """
    nodes = (snap.nodes[row] for row in np.argsort(snap.name_rank).tolist())
    devices = ((node.name, d) for node in nodes for d in first_of_each_memory(node.devices))
    return islice(devices, max_devices)


@dataclass(frozen=True, slots=True)
class CapacityChange:
    """The value of the extended resource to be written to a node, or None to remove the
    resource."""

    node: str
    mib: int | None


def capacity_changes(cluster: Cluster, wanted: bool) -> Iterator[CapacityChange]:
    """Yield the nodes whose extended resource must change.

    ``wanted`` states whether nodes should have the resource. A node whose devices are unknown keeps
    its value.
    """
    snap = cluster.snapshot()
    for node in cluster.nodes():
        name, current_mib = node.metadata.name, _current_mib(node)
        row = snap.row_of.get(name) if wanted else None
        mib = None if row is None else _capacity_mib(snap.nodes[row], cluster)
        if not wanted and current_mib is not None:
            yield CapacityChange(name, None)
        elif mib is not None and current_mib != mib:
            yield CapacityChange(name, mib)


def _capacity_mib(terms: NodeTerms, cluster: Cluster) -> int | None:
    """Return the allocatable memory of the node's healthy managed devices, in MiB.

    Only the reserved memory of cordoned devices counts. Devices that share one memory count once.
    Return None if no managed device is known.
    """
    devices = [each for each in terms.devices if cluster.rules.manages(each.device.resource)]
    return sum(_offered_mib(each) for each in devices) if devices else None


def _offered_mib(terms: DeviceTerms) -> int:
    mib = terms.allocatable_bytes // max(terms.sharers, 1) // MIB
    if terms.cordoned:
        # kube-scheduler and the kubelet count the requests of the pods on cordoned devices. Without
        # the memory of these pods they would reject pods although other devices are free.
        return min(mib, -(-terms.reservation_bytes // max(terms.sharers, 1) // MIB))
    return mib if terms.health_issue is None else 0


def _current_mib(node: Node) -> int | None:
    """Return the current value in MiB, None if there is none, or -1 if it is not a quantity."""
    quantity = ((node.status and node.status.allocatable) or {}).get(MIRROR)
    try:
        # The API server returns 80000 as 80k.
        return None if quantity is None else parse_bytes(str(quantity))
    except BadQuantity:
        return -1
