"""Finds GPU resources that nodes offer but Headroom does not manage.

A pod that requests such a resource is bound without a reservation, and without a check of GPU
memory.
"""

from collections.abc import Callable, Iterable

from headroom.contract.kube import Node, Pod
from headroom.core.cluster.cluster import Cluster

#: Label of nodes with GPUs, written by GPU feature discovery.
_GPU_NODE = "nvidia.com/gpu.count"
_VENDOR = "nvidia.com/"


def unmanaged_gpus(state: Cluster) -> dict[str, list[str]]:
    """Map each GPU resource that the settings do not manage to the nodes that offer it."""
    nodes_of: dict[str, list[str]] = {}
    for node in state.nodes():
        name = node.metadata.name
        report = state.report(name, state.gpunode(name))
        reported = {device.resource for device in (report.devices if report else None) or ()}
        for resource in unmanaged_on(node, reported, state.rules.manages):
            nodes_of.setdefault(resource, []).append(name)
    return {resource: sorted(nodes_of[resource]) for resource in sorted(nodes_of)}


def unmanaged_on(node: Node, reported: Iterable[str], manages: Callable[[str], bool]) -> set[str]:
    """Return the GPU resources of the node that Headroom does not manage.

    ``reported`` contains the resources under which the device plugin offers the GPUs that the
    node's agent reports. A node without a managed resource has no report. If its label shows that
    it has GPUs, all of the vendor's resources on it count.
    """
    allocatable = set((node.status.allocatable if node.status else None) or ())
    found = {resource for resource in reported if resource and resource in allocatable}
    if _GPU_NODE in (node.metadata.labels or {}) and not any(map(manages, allocatable)):
        found |= {resource for resource in allocatable if resource.startswith(_VENDOR)}
    return {resource for resource in found if not manages(resource)}


def unmanaged_requests(pod: Pod, manages: Callable[[str], bool]) -> list[str]:
    """Return the GPU resources that the pod requests and that are not managed."""
    found = {
        resource
        for container in (*(pod.spec.init_containers or ()), *(pod.spec.containers or ()))
        for resource in (container.resources and container.resources.limits) or ()
        if resource.startswith(_VENDOR) and not manages(resource)
    }
    return sorted(found)
