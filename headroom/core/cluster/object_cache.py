"""Stores the objects of the cluster as they were last seen, with indexes to find them.

Only one thread writes. Any thread may look up single objects, because values are replaced and never
changed in place.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from headroom.contract.annotations import DEFAULT_VRAM, MAX_SM, NO_SCHEDULER, SCHEDULER
from headroom.contract.gpunode import GPUNode, Reservation
from headroom.contract.kube import Namespace, Node, Pod

#: A mapping without reservations.
NOTHING: Mapping[str, Reservation] = MappingProxyType({})


class ObjectCache:
    """Nodes, GPUNodes, and the pods that request GPU resources managed by Headroom."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        #: Names of the cordoned nodes.
        self.cordoned: set[str] = set()
        #: A number that grows with every change of a node's taints or cordon, which snapshots do
        #: not contain.
        self.node_specs = 0
        self.gpunodes: dict[str, GPUNode] = {}
        #: All pods by uid.
        self.pods: dict[str, Pod] = {}
        #: The pods that are not bound and have not ended.
        self.unbound: dict[str, Pod] = {}
        #: Uids of unbound pods with ``headroom.gpu/max-sm``.
        self.with_max_sm: set[str] = set()
        self.uids_on: dict[str, tuple[str, ...]] = {}
        self._uid_of: dict[tuple[str, str], str] = {}
        #: Pods bound to each node that had not ended when the node was last weighed.
        self._pods_on: dict[str, tuple[Pod, ...]] = {}
        #: The lowest priority of the pods of each node with pods in ``_pods_on``.
        self.lowest_priorities: dict[str, int] = {}

    def put_node(self, node: Node) -> Node | None:
        """Store a node, and return its previous version."""
        name = node.metadata.name
        before = self.nodes.get(name)
        if before is None or before.spec != node.spec:
            self.node_specs += 1
        self.nodes[name] = node
        if node.spec and node.spec.unschedulable:
            self.cordoned.add(name)
        else:
            self.cordoned.discard(name)
        return before

    def drop_node(self, name: str) -> None:
        """Remove a node if it is known."""
        self.nodes.pop(name, None)
        self.cordoned.discard(name)

    def uid_of_gpunode(self, name: str) -> str | None:
        """Return the uid of the GPUNode with this name, or None if there is none."""
        gpunode = self.gpunodes.get(name)
        return gpunode.metadata.uid if gpunode else None

    def reserved(self, name: str) -> Mapping[str, Reservation]:
        """Return the reservations in the GPUNode of this name, by pod uid."""
        gpunode = self.gpunodes.get(name)
        return gpunode.spec.reservations if gpunode else NOTHING

    def put_pod(self, pod: Pod) -> None:
        """Store a pod whose previous version was dropped."""
        uid = pod.metadata.uid
        self.pods[uid] = pod
        self._uid_of[pod.metadata.namespace, pod.metadata.name] = uid
        if pod.node:
            self.uids_on[pod.node] = (*self.uids_on.get(pod.node, ()), uid)
        elif not pod.ended:
            self.unbound[uid] = pod
            if pod.annotation(MAX_SM) is not None:
                self.with_max_sm.add(uid)

    def drop_pod(self, uid: str) -> Pod | None:
        """Remove a pod, and return its last version."""
        pod = self.pods.pop(uid, None)
        if pod is None:
            return None
        self.unbound.pop(uid, None)
        self.with_max_sm.discard(uid)
        key = (pod.metadata.namespace, pod.metadata.name)
        if self._uid_of.get(key) == uid:
            del self._uid_of[key]
        if pod.node:
            if others := tuple([other for other in self.uids_on[pod.node] if other != uid]):
                self.uids_on[pod.node] = others
            else:
                del self.uids_on[pod.node]
        return pod

    def pod_named(self, namespace: str, name: str) -> Pod | None:
        return self.pods.get(self._uid_of.get((namespace, name), ""))

    def nodes_of(self, uids: Iterable[str]) -> set[str]:
        """Return the nodes to which these pods are bound. Unknown pods are skipped."""
        pods = filter(None, map(self.pods.get, uids))
        return {pod.node for pod in pods if pod.node}

    def pods_on(self, name: str) -> tuple[Pod, ...]:
        """Return the pods bound to the node that have not ended."""
        return self._pods_on.get(name, ())

    def update_pods(self, name: str) -> None:
        """Recompute the pods of a node."""
        pods = (self.pods[uid] for uid in self.uids_on.get(name, ()))
        self._put_pods(name, tuple(pod for pod in pods if not pod.ended))

    def add_pod(self, pod: Pod) -> None:
        """Replace or add one pod of its node."""
        uid = pod.metadata.uid
        others = (other for other in self.pods_on(pod.node) if other.metadata.uid != uid)
        self._put_pods(pod.node, (*others, pod))

    def drop_pods_of(self, name: str) -> None:
        self._pods_on.pop(name, None)
        self.lowest_priorities.pop(name, None)

    def _put_pods(self, name: str, pods: tuple[Pod, ...]) -> None:
        self._pods_on[name] = pods
        if pods:
            self.lowest_priorities[name] = min(pod.priority for pod in pods)
        else:
            self.lowest_priorities.pop(name, None)

    def nodes_with_pods_in(self, namespace: str) -> list[str]:
        """Return the nodes with a pod of this namespace."""
        return [
            name
            for name, pods in self._pods_on.items()
            if any(pod.metadata.namespace == namespace for pod in pods)
        ]

    def has_leaving_pod(self, name: str) -> bool:
        """Return whether a pod of the node is being deleted."""
        return any(pod.metadata.deletion_timestamp for pod in self.pods_on(name))

    def has_unsettled(self, name: str) -> bool:
        """Return whether the node may have an orphaned or a missing reservation.

        This is the case if a pod with a reservation is gone, has ended or is on another node, or if
        a pod on the node has no reservation.
        """
        gpunode = self.gpunodes.get(name)
        if gpunode is None:
            return False
        reserved = gpunode.spec.reservations.keys()
        bound = {pod.metadata.uid for pod in self.pods_on(name)}
        if gpunode.spec.initialised and not bound <= reserved:
            return True
        pods = (self.pods.get(uid) for uid in reserved - bound)
        return any(pod is None or pod.ended or pod.node not in ("", name) for pod in pods)


class Namespaces:
    """The namespaces, and the default VRAM request of the pods in each of them."""

    def __init__(self) -> None:
        self._held: dict[str, Namespace] = {}
        self._default_vram: dict[str, str] = {}

    def put(self, namespace: Namespace) -> bool:
        """Store the namespace. Return whether the assumptions about its pods changed."""
        name, was_exempt = namespace.metadata.name, self.are_exempt(namespace.metadata.name)
        self._held[name] = namespace
        changed = self._put_default(name, (namespace.metadata.annotations or {}).get(DEFAULT_VRAM))
        return changed or self.are_exempt(name) != was_exempt

    def drop(self, name: str) -> bool:
        """Remove the namespace, and return whether the default request of its pods changed."""
        self._held.pop(name, None)
        return self._put_default(name, None)

    def _put_default(self, name: str, text: str | None) -> bool:
        if self._default_vram.get(name) == text:
            return False
        if text is None:
            del self._default_vram[name]
        else:
            self._default_vram[name] = text
        return True

    def known(self) -> set[str]:
        return set(self._held)

    def annotation(self, name: str, key: str) -> str | None:
        """Return an annotation of the namespace, or None if it or the namespace is unknown."""
        namespace = self._held.get(name)
        return (namespace.metadata.annotations or {}).get(key) if namespace else None

    def are_exempt(self, name: str) -> bool:
        """Return whether the label of the namespace exempts its pods from Headroom."""
        namespace = self._held.get(name)
        labels = (namespace.metadata.labels if namespace else None) or {}
        return labels.get(SCHEDULER) == NO_SCHEDULER

    def default_vram(self, name: str) -> str | None:
        return self._default_vram.get(name)

    def default_vrams(self) -> dict[str, str]:
        """Return the default VRAM requests of all namespaces that have one, by namespace."""
        return dict(self._default_vram)
