"""Finds pods that use GPUs but do not request a GPU that Headroom manages.

For example, their image sets NVIDIA_VISIBLE_DEVICES, or they request a resource that the settings
do not name. The state keeps only pods that request managed GPUs. A report shows the use of all
pods, but an agent's report does not prove that a pod exists. So the console reads such pods from
the API server (``console.gpu_user_reader``), and the doctor lists all pods anyway.
"""

from collections.abc import Iterable

from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Pod


def gpu_users(gpunodes: Iterable[GPUNode], pods: Iterable[Pod]) -> dict[str, Pod]:
    """Return the pods that use a GPU of their node without a reservation, by uid."""
    users = {gpunode.name: unreserved_users(gpunode) for gpunode in gpunodes}
    return {pod.metadata.uid: pod for pod in pods if pod.metadata.uid in users.get(pod.node, ())}


def unreserved_users(gpunode: GPUNode) -> frozenset[str]:
    """Return the uids of the pods in the report of a node that have no reservation there."""
    uses = gpunode.status.pods if gpunode.status else ()
    return frozenset(use.uid for use in uses if use.uid) - gpunode.spec.reservations.keys()
