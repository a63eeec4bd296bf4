"""Finds pods for which ledger, API server and agent disagree.

Each mismatch occurs for a moment in normal operation, because reports and watches lag. A mismatch
that stays shows a fault.
"""

from collections.abc import Iterator
from enum import Enum

from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Node
from headroom.contract.reasons import Reason
from headroom.core.cluster.cluster import Cluster


class Mismatch(Enum):
    #: The API server has a pod on the node that has no reservation.
    BOUND_WITHOUT_RESERVATION = "bound_without_reservation"
    #: The ledger has a reservation for a pod that is deleted, has ended, or is on another node.
    RESERVED_WITHOUT_POD = "reserved_without_pod"
    #: The agent reports a pod that has no reservation.
    OBSERVED_WITHOUT_RESERVATION = "observed_without_reservation"
    #: The agent reports a pod on a device outside its reservation.
    OUTSIDE_RESERVATION = "outside_reservation"


def unreported(state: Cluster, node: Node) -> bool:
    """Whether the node has, or had, GPUs managed by Headroom, and no agent ever reported them."""
    gpunode = state.gpunode(node.metadata.name)
    if gpunode is not None:
        return gpunode.status is None
    offers = node.status.allocatable if node.status else None
    return any(state.rules.manages(resource) for resource in offers or ())


def mismatches(state: Cluster, gpunode: GPUNode) -> Iterator[Mismatch]:
    """Yield one mismatch for each affected pod. May be called from any thread."""
    reservations = gpunode.spec.reservations
    for _ in state.unreserved_pods(gpunode.name):
        yield Mismatch.BOUND_WITHOUT_RESERVATION
    for uid in reservations:
        pod = state.pod(uid)
        if pod is None or pod.ended or (pod.node and pod.node != gpunode.name):
            yield Mismatch.RESERVED_WITHOUT_POD
    shown: dict[str, set[str]] = {}
    for use in gpunode.status.pods if gpunode.status else ():
        shown.setdefault(use.uid, set()).add(use.device)
    for uid, devices in shown.items():
        reservation = reservations.get(uid)
        if reservation is None:
            # Pods that hold devices by DRA need no reservation.
            if state.manager(gpunode.name) is not Reason.DRA_MANAGES:
                yield Mismatch.OBSERVED_WITHOUT_RESERVATION
        elif devices - {uuid for charge in reservation.charges for uuid in charge.candidates}:
            yield Mismatch.OUTSIDE_RESERVATION
