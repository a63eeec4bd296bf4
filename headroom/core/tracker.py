"""The common interface of all trackers, with one method for each kind of change.

``ClusterWriter`` calls the trackers that define the method, on the thread that owns the state. If a
tracker raises an exception, the other trackers still get the change.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Node, Pod
from headroom.core.placement.device_accounting import DeviceTerms


@dataclass(frozen=True, slots=True)
class LastSeen:
    """The last state of a deleted pod. ``node`` is empty if the pod was unbound."""

    node: str
    ended: bool

    def settles(self, node: str) -> bool:
        """Return whether it is certain that no container of the pod runs on this node."""
        return self.ended or self.node != node


@dataclass(frozen=True, slots=True)
class WeighedNode:
    """A node that was just weighed. For a deleted node, all fields except the name are empty."""

    name: str
    gpunode: GPUNode | None = None
    #: The pods bound to the node that have not ended.
    pods: Sequence[Pod] = ()
    devices: Sequence[DeviceTerms] = ()
    #: The same devices without the reservations of assumed binds.
    written_devices: Sequence[DeviceTerms] = ()


class Tracker:
    """Follows the cluster.

    The ``..._seen`` and ``..._gone`` methods may return other nodes whose terms have changed. They
    need not return the node that the change is about.
    """

    def pod_seen(self, pod: Pod, managed: bool) -> Iterable[str] | None:
        """Handle a created or updated pod.

        ``managed`` states whether the pod requests GPU resources that Headroom manages.
        """
        return None

    def pod_gone(self, uid: str, last: LastSeen | None) -> Iterable[str] | None:
        """Handle a deleted pod. ``last`` is None if the last state of the pod is unknown."""
        return None

    def node_seen(self, node: Node, before: Node | None) -> Iterable[str] | None:
        return None

    def node_gone(self, name: str) -> Iterable[str] | None:
        return None

    def gpunode_seen(self, gpunode: GPUNode, at_s: float) -> Iterable[str] | None:
        """Handle a created or updated GPUNode. ``at_s`` is the monotonic time at which it was
        received.

        The same version may arrive twice if another tracker raised an exception.
        """
        return None

    def gpunode_gone(self, name: str) -> Iterable[str] | None:
        return None

    def node_weighed(self, node: WeighedNode) -> None:
        pass


def followers(*trackers: Tracker) -> Mapping[str, Sequence[Tracker]]:
    """Return the trackers that follow each kind of change, by the name of the method, in their
    order."""
    return {
        kind: [tracker for tracker in trackers if getattr(type(tracker), kind) is not ignored]
        for kind, ignored in vars(Tracker).items()
        if not kind.startswith("_")
    }
