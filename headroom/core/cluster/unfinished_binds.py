"""Tracks which nodes have reservations of pods that are not bound yet.

A bind that times out, or whose extender is killed, leaves its reservation in the ledger. When
kube-scheduler tries the pod again, this memory still belongs to the pod, so the pod must not be
rejected because the memory is reserved.
"""

from collections.abc import Mapping

from headroom.contract.gpunode import GPUNode, Reservation
from headroom.contract.kube import Pod
from headroom.core.cluster.object_cache import NOTHING, ObjectCache
from headroom.core.tracker import LastSeen, Tracker


class UnfinishedBinds(Tracker):
    """Indexes reservations of pods that are not known to be bound. Any thread may read."""

    def __init__(self, objects: ObjectCache) -> None:
        self._objects = objects
        #: Names of the nodes by pod uid.
        self._nodes: dict[str, frozenset[str]] = {}
        #: The reservations of each node that were last indexed.
        self._indexed: dict[str, Mapping[str, Reservation]] = {}

    def nodes_of(self, uid: str) -> frozenset[str]:
        """Return the nodes that have a reservation of the unbound pod."""
        return self._nodes.get(uid, frozenset())

    def gpunode_seen(self, gpunode: GPUNode, at_s: float) -> None:
        self._index(gpunode.name, gpunode.spec.reservations)

    def gpunode_gone(self, name: str) -> None:
        self._index(name, NOTHING)

    def pod_seen(self, pod: Pod, managed: bool) -> None:
        if pod.node or pod.ended:
            self._nodes.pop(pod.metadata.uid, None)

    def pod_gone(self, uid: str, last: LastSeen | None) -> None:
        self._nodes.pop(uid, None)

    def _index(self, name: str, reservations: Mapping[str, Reservation]) -> None:
        before = self._indexed.pop(name, NOTHING)
        if reservations:
            self._indexed[name] = reservations
        for uid in before.keys() - reservations.keys():
            nodes = self.nodes_of(uid) - {name}
            if nodes:
                self._nodes[uid] = nodes
            else:
                self._nodes.pop(uid, None)
        for uid in reservations.keys() - before.keys():
            pod = self._objects.pods.get(uid)
            if pod is None or not (pod.node or pod.ended):
                self._nodes[uid] = self.nodes_of(uid) | {name}
