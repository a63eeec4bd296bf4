"""What is left to be tidied: promises whose pod no longer needs them, nodes without a ledger.

Only suggestions from what we happen to have seen: whoever acts on them asks the store again.
"""

from contract.annotations import FINALIZER
from contract.kube import Node
from extender.cluster.freshness import age
from extender.cluster.state import ClusterState


def leftovers(state: ClusterState, wall_s: float, orphan_after_s: float) -> list[tuple[str, str]]:
    """(node, pod uid) of promises to pods that ended, went elsewhere, or never came.

    A bind in progress has a promise and no bound pod yet: such a one is left alone until it is
    ``orphan_after_s`` old. What a report still shows on a device stays charged whatever became of
    the pod: its memory is not free.
    """
    found: list[tuple[str, str]] = []
    for gpunode in state.gpunodes():
        seen = {use.uid for use in gpunode.status.pods} if gpunode.status else set()
        for uid, promise in gpunode.spec.reservations.items():
            pod = state.pod(uid)
            if pod is not None and pod.node == gpunode.name and not pod.ended:
                continue
            if uid in seen:
                continue
            settled = state.departed(uid) if pod is None else pod.ended or bool(pod.node)
            since_s = age(promise.since, wall_s)
            if settled or since_s is None or since_s > orphan_after_s:
                found.append((gpunode.name, uid))
    return found


def dying(state: ClusterState) -> list[str]:
    """Names of GPUNodes that somebody deletes and that our finalizer still holds."""
    return [
        gpunode.name
        for gpunode in state.gpunodes()
        if gpunode.metadata.deletion_timestamp and FINALIZER in (gpunode.metadata.finalizers or ())
    ]


def uninitialised(state: ClusterState) -> list[Node]:
    """Nodes that offer GPUs of ours and whose ledger can be set up now: those without an object,
    and those whose object waits no longer for a report that names its devices."""
    found: list[Node] = []
    for node in state.nodes():
        offers = node.status.allocatable if node.status else None
        if any(state.rules.manages(resource) for resource in offers or ()):
            gpunode = state.gpunode(node.metadata.name)
            reported = gpunode is not None and gpunode.status and gpunode.status.devices
            if gpunode is None or (reported and not gpunode.spec.initialised):
                found.append(node)
    return found
