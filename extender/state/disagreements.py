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
    BOUND_WITHOUT_PROMISE = "bound_without_promise"
    #: The ledger promises something to a pod that is gone, has ended, or is bound elsewhere.
    PROMISED_WITHOUT_POD = "promised_without_pod"
    #: The agent shows a pod to which the ledger promises nothing.
    SHOWN_WITHOUT_PROMISE = "shown_without_promise"
    #: The agent shows a pod on a device that it was not promised.
    ELSEWHERE_THAN_PROMISED = "elsewhere_than_promised"


def unreported(state: ClusterState, node: Node) -> bool:
    """Whether the node has, or had, GPUs of ours, and no agent ever reported any."""
    gpunode = state.gpunode(node.metadata.name)
    if gpunode is not None:
        return gpunode.status is None
    offers = node.status.allocatable if node.status else None
    return any(state.rules.manages(resource) for resource in offers or ())


def mismatches(state: ClusterState, gpunode: GPUNode) -> Iterator[Mismatch]:
    """One for each pod that does not agree; may be called from any thread."""
    promises = gpunode.spec.reservations
    for _ in state.bystanders(gpunode.name):
        yield Mismatch.BOUND_WITHOUT_PROMISE
    for uid in promises:
        pod = state.pod(uid)
        if pod is None or pod.ended or (pod.node and pod.node != gpunode.name):
            yield Mismatch.PROMISED_WITHOUT_POD
    shown: dict[str, set[str]] = {}
    for use in gpunode.status.pods if gpunode.status else ():
        shown.setdefault(use.uid, set()).add(use.device)
    for uid, devices in shown.items():
        promise = promises.get(uid)
        if promise is None:
            yield Mismatch.SHOWN_WITHOUT_PROMISE
        elif devices - {uuid for charge in promise.charges for uuid in charge.candidates}:
            yield Mismatch.ELSEWHERE_THAN_PROMISED
