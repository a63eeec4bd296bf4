"""Selects the rows of a report that count, because a report counts only for pods of its own
node."""

from collections.abc import Iterator

import msgspec

from headroom.contract.gpunode import GPUNode, PodUse
from headroom.core.cluster.cluster import Cluster


def own_rows(cluster: Cluster, gpunode: GPUNode | None) -> Iterator[PodUse]:
    """Yield the rows of the node's report, without those of pods that are not bound to the node.

    Names are those of the API server. A pod that the API server does not know, such as a deleted
    pod that still has a process, belongs to no namespace. Its name is the name in the report, with
    the reported namespace in front. Otherwise an agent could report use of any namespace.
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
