"""Selects the rows of a node's report that are about pods of this node. Other rows do not count."""

from collections.abc import Iterator

import msgspec

from headroom.contract.gpunode import GPUNode, PodUse
from headroom.core.cluster.cluster import Cluster


def trusted_rows(cluster: Cluster, gpunode: GPUNode | None) -> Iterator[PodUse]:
    """Yield the rows of the node's report, except rows of pods that are not bound to the node.

    Names come from the API server. A pod that no longer exists there can still have a process. The
    row of such a pod gets an empty namespace, because otherwise an agent could report use for any
    namespace. Its name is then the reported namespace followed by the reported name.
    """
    if gpunode is None or gpunode.status is None or not gpunode.status.pods:
        return
    there = {(p.metadata.namespace, p.metadata.name) for p in cluster.pods_on(gpunode.name)}
    for use in gpunode.status.pods:
        pod = cluster.pod(use.uid) or cluster.gpu_users.get(use.uid)
        reservation = gpunode.spec.reservations.get(use.uid)
        if pod is not None and pod.node != gpunode.name:
            continue
        if pod is not None:
            namespace, name = pod.metadata.namespace, pod.metadata.name
        elif reservation is not None:
            namespace, name = reservation.namespace, reservation.name
        elif (use.namespace, use.name) in there or not use.name:
            namespace, name = use.namespace, use.name
        else:
            namespace, name = "", f"{use.namespace}/{use.name}"
        yield msgspec.structs.replace(use, namespace=namespace, name=name)
