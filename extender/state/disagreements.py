"""Where ledger, API server and agents do not say the same of a node.

All of it happens for a moment and passes: reports and watches take their time. What stays is a
fault of somebody's.
"""

from collections.abc import Iterator
from enum import Enum

from contract.gpunode import GPUNode
from contract.kube import Node
from extender.state.cluster_state import ClusterState


class Mismatch(Enum):
    #: The API server has a pod on the node to which the ledger promises nothing.
    BOUND_WITHOUT_RESERVATION = "bound_without_promise"
    #: The ledger promises something to a pod that is gone, has ended, or is bound elsewhere.
    RESERVED_WITHOUT_POD = "promised_without_pod"
    #: The agent shows a pod to which the ledger promises nothing.
    OBSERVED_WITHOUT_RESERVATION = "shown_without_promise"
    #: The agent shows a pod on a device that it was not promised.
    OUTSIDE_RESERVATION = "elsewhere_than_promised"


def unreported(state: ClusterState, node: Node) -> bool:
    """Whether the node has, or had, GPUs of ours, and no agent ever reported any."""
    gpunode = state.gpunode(node.metadata.name)
    if gpunode is not None:
        return gpunode.status is None
    offers = node.status.allocatable if node.status else None
    return any(state.rules.manages(resource) for resource in offers or ())


def mismatches(state: ClusterState, gpunode: GPUNode) -> Iterator[Mismatch]:
    """One for each pod that does not agree; may be called from any thread."""
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
            yield Mismatch.OBSERVED_WITHOUT_RESERVATION
        elif devices - {uuid for charge in reservation.charges for uuid in charge.candidates}:
            yield Mismatch.OUTSIDE_RESERVATION
