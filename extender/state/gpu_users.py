"""Pods that use GPUs and request none, for example by their image's NVIDIA_VISIBLE_DEVICES.

The state keeps only pods that request GPUs. A report shows the use of all pods, but the names only
of those to which the kubelet gave a device. So the console looks up the others
(``observability.gpu_user_reader``), and the doctor lists all pods anyway.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from contract.gpunode import GPUNode
from contract.kube import Pod

_NONE: Mapping[str, Pod] = MappingProxyType({})


class GpuUsers:
    """The pods that were found. May be read by any thread."""

    def __init__(self) -> None:
        #: By uid; replaced as a whole.
        self.pods: Mapping[str, Pod] = _NONE

    def replace(self, pods: Mapping[str, Pod]) -> None:
        self.pods = pods

    def find(self, gpunodes: Iterable[GPUNode], pods: Iterable[Pod]) -> None:
        """Replace the pods by those of ``pods`` that use a GPU of their node without a name in its
        report."""
        unnamed = {gpunode.name: unnamed_users(gpunode) for gpunode in gpunodes}
        self.replace(
            {pod.metadata.uid: pod for pod in pods if pod.metadata.uid in unnamed.get(pod.node, ())}
        )


def unnamed_users(gpunode: GPUNode) -> frozenset[str]:
    """Return the uids of the pods that the report of a node shows without a name, and that have
    neither a device of the kubelet nor a reservation there."""
    uses = gpunode.status.pods if gpunode.status else ()
    holders = {use.uid for use in uses if use.replica} | gpunode.spec.reservations.keys()
    return frozenset(use.uid for use in uses if use.uid and not use.name) - holders
