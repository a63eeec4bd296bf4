"""Decides which pods may be moved to another node, and simulates where their successors fit.

To move a pod means to evict it. Its controller then creates a successor, and the scheduler places
the successor on a node that is not known in advance. So a pod counts as movable only if its
successor fits on at least ``LEAST_PLACES`` other nodes, on every device that the plugin could
choose there.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from headroom.contract.annotations import ON_OVERUSE, OnOveruse
from headroom.contract.gpunode import Charge
from headroom.contract.kube import Pod
from headroom.core.cluster.cluster import Cluster
from headroom.core.journal.journal import scheduler_of
from headroom.core.placement.dra_nodes import by_headroom
from headroom.core.placement.fit import fit
from headroom.core.placement.request import Kind, VramRequest
from headroom.core.placement.snapshot import Rows, Snapshot
from headroom.core.preemption.evictable_pods import CRITICAL
from headroom.core.rules.eligible_nodes import (
    Eligible,
    eligibility_key,
    eligible_nodes,
    not_modeled,
)
from headroom.core.whatif.simulation import Placed, Simulation

#: Kinds of controllers that create a pod again on any node.
MOVABLE_KINDS = ("Job", "ReplicaSet", "ReplicationController", "StatefulSet")
#: A pod is moved only if its successor fits on at least this many other nodes.
LEAST_PLACES = 2
#: The highest priority of a pod that may be moved when no pod waits for its memory.
MOST_PRIORITY = CRITICAL - 1


class Stays(Enum):
    """Why a pod is not moved. The value continues a sentence about the pod."""

    CONTROLLER = f"no controller of kind {', '.join(MOVABLE_KINDS[:-1])} or {MOVABLE_KINDS[-1]}"
    PRIORITY = "a higher priority than the waiting pod, or a critical one"
    ANNOTATION = f"annotation {ON_OVERUSE}: {OnOveruse.REPORT.value}"
    ENDING = "an overdue deletion"
    SCHEDULER = "a scheduler that is not known to call Headroom"
    UNMODELED = "volumes, spread, affinity, host ports or claims, which are not simulated"
    UNREADABLE = "a request that cannot be read"
    BUDGET = "a PodDisruptionBudget that allows no eviction now"
    QUOTA = "an exceeded ResourceQuota, which could reject its successor"
    PLACES = f"fewer than {LEAST_PLACES} other nodes on which it fits"


@dataclass(frozen=True, slots=True)
class Move:
    """A pod to evict."""

    pod: Pod
    #: The memory that becomes free when the pod's reservation ends.
    reserved_bytes: int
    #: The nodes on which the pod's successor fits in the simulation, best first.
    places: tuple[str, ...]


class Movers:
    """Decides which pods may be moved, on one snapshot.

    ``schedulers`` are the schedulers that are known to call Headroom. They place the successors.
    ``quota_exceeded`` returns whether a ResourceQuota of the namespace is exceeded.
    """

    def __init__(
        self,
        state: Cluster,
        snap: Snapshot,
        now_s: float,
        schedulers: Sequence[str],
        quota_exceeded: Callable[[str], bool] = lambda namespace: False,
    ) -> None:
        self.state, self.snap, self.now_s = state, snap, now_s
        self._schedulers = schedulers
        self._quota_exceeded = quota_exceeded
        self._eligible: dict[bytes, Eligible] = {}
        #: For each kind of request and eligibility key of a pod, the rows of the snapshot on which
        #: the pod fits now.
        self._fitting: dict[tuple[Kind, bytes], Rows] = {}

    def eligible(self, pod: Pod) -> Eligible:
        """Return the eligible nodes of the pod."""
        key = eligibility_key(pod)
        if key not in self._eligible:
            self._eligible[key] = eligible_nodes(pod, self.snap, self.state.node)
        return self._eligible[key]

    def why_stays(self, pod: Pod, most_priority: int = MOST_PRIORITY) -> Stays | None:
        """Return why a bound pod may not be moved, or None if it may be moved."""
        owners = pod.metadata.owner_references or ()
        if not any(each.controller and each.kind in MOVABLE_KINDS for each in owners):
            return Stays.CONTROLLER
        if pod.priority > min(most_priority, MOST_PRIORITY):
            return Stays.PRIORITY
        if pod.annotation(ON_OVERUSE) == OnOveruse.REPORT.value:
            return Stays.ANNOTATION
        if pod.metadata.deletion_timestamp:
            return Stays.ENDING
        if scheduler_of(pod) not in self._schedulers:
            return Stays.SCHEDULER
        if not_modeled(pod):
            return Stays.UNMODELED
        budgets = self.state.budgets
        if budgets.unlisted or any(each.allowed < 1 for each in budgets.over([pod])):
            return Stays.BUDGET
        request = self.state.understand(pod)
        if not isinstance(request, VramRequest):
            return Stays.UNREADABLE
        fitting = self._fits_on(pod, request)
        here = self.snap.row_of.get(pod.node, -1)
        if (fitting != here).sum() < LEAST_PLACES:
            return Stays.PLACES
        return Stays.QUOTA if self._quota_exceeded(pod.metadata.namespace) else None

    def _fits_on(self, pod: Pod, request: VramRequest) -> Rows:
        key = request.kind, eligibility_key(pod)
        if key not in self._fitting:
            rows = self.eligible(pod).rows
            found = fit(by_headroom(request), self.snap, rows, self.now_s)
            self._fitting[key] = rows[found.fits]
        return self._fitting[key]

    def moved(
        self, simulation: Simulation, node: str, pods: Iterable[Pod]
    ) -> tuple[Move, ...] | None:
        """Move the pods away from the node, largest first. Return None if a successor fits on too
        few nodes.

        Each successor takes the best node on which it fits, so that later pods find its memory
        taken. On a steered node it also gets its devices before the next pod moves, because the
        node reserves other devices only for the pods after it.
        """
        here, moves = self.snap.row_of[node], []
        reserved = {pod.metadata.uid: self._reserved_bytes(pod) for pod in pods}
        order = sorted(pods, key=lambda pod: (-reserved[pod.metadata.uid], pod.metadata.uid))
        for pod in order:
            uid, request = pod.metadata.uid, self.state.understand(pod)
            assert isinstance(request, VramRequest), "the request of a movable pod is readable"
            # The successor needs another uid: in the cluster, the pod's own uid is still bound to
            # this node.
            successor = replace(request, uid=f"{uid}+1")
            rows = self.eligible(pod).rows
            elsewhere = Eligible(rows[rows != here], {})
            simulation.release(uid)
            places = simulation.places(successor, elsewhere)
            if len(places) < LEAST_PLACES:
                return None
            placed = simulation.place(successor, elsewhere)
            assert isinstance(placed, Placed), "it fits on these nodes"
            simulation.confirm(successor.uid, placed)
            moves.append(Move(pod, reserved[uid], tuple(places)))
        return tuple(moves)

    def _reserved_bytes(self, pod: Pod) -> int:
        gpunode = self.state.gpunode(pod.node)
        held = gpunode.spec.reservations.get(pod.metadata.uid) if gpunode else None
        return sum(map(charged_bytes, held.charges)) if held else 0


def charged_bytes(charge: Charge) -> int:
    """Return the memory that the charge reserves, which is the sum of its maximum on each
    device."""
    beyond = set(charge.beyond)
    counted = [amount for uuid, amount in charge.candidates.items() if uuid not in beyond]
    most_bytes = charge.count * max(counted, default=0)
    if not charge.containers:
        return most_bytes
    # Containers on one device have one candidate together.
    return min(most_bytes, sum(each.device_bytes * each.count for each in charge.containers))


def only(rows: Sequence[int]) -> Eligible:
    """Return an ``Eligible`` with exactly these rows."""
    return Eligible(np.array(rows, np.int64), {})
