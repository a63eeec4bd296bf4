"""Detects foreign GPU allocators by their traces on nodes, pods and ResourceSlices.

Allocations of other allocators are not in Headroom's ledger, and other allocators do not see
Headroom's allocations. So on a node with two allocators the memory would be reserved twice.
Headroom places no pods on a node with a trace of one of these allocators:

* KAI: a bound pod with label ``runai-gpu-group`` (fractions, and the reservation pods that hold the
  device for them), with the annotation of a reservation, or with the devices of an nvFractions
  container. A pod with whole GPUs that KAI's scheduler has bound is not a trace.
* HAMi: the node's handshake annotation, unless it shows that HAMi was removed (``Deleted_…``), or
  its device register without a handshake, or a bound pod with HAMi's allocation annotation or with
  HAMi's resources.
* gpushare: the node's ``aliyun.com/gpu-mem`` or ``gpu-count``, or a bound pod with gpushare's
  device annotation or with gpushare's resources.
* DRA: a ResourceSlice of driver ``gpu.nvidia.com`` with devices, for the node or its pool. If the
  node's device plugin offers no GPU, kube-scheduler can also serve ``nvidia.com/gpu`` by DRA there
  (``cluster.dra_allocation``).
"""

from collections.abc import Iterable, Iterator

from headroom.contract.foreign_keys import (
    GPUSHARE_DEVICE,
    HAMI_ALLOCATED,
    HAMI_ALLOCATES,
    HAMI_HANDSHAKE,
    HAMI_NODE,
    HAMI_REGISTER,
    KAI_RESERVES,
    is_kai_device,
)
from headroom.contract.kube import Node, Pod
from headroom.contract.reasons import Reason
from headroom.contract.watched import DraEvent, SliceGone, SliceSeen
from headroom.core.cluster.dra_allocation import DraAllocation, node_of
from headroom.core.tracker import LastSeen, Tracker

#: The kind of the object with the trace ("node", "pod" or "slice"), and its name or uid.
_Key = tuple[str, str]

#: If several allocators are detected on one node, the first in this list is its manager.
MANAGERS = (
    Reason.DRA_MANAGES,
    Reason.HAMI_MANAGES,
    Reason.KAI_MANAGES,
    Reason.GPUSHARE_MANAGES,
)

_HAMI_LEFT = "Deleted"
_HAMI_RESOURCES = ("nvidia.com/gpumem", "nvidia.com/gpumem-percentage", "nvidia.com/gpucores")
_GPUSHARE_RESOURCES = ("aliyun.com/gpu-mem", "aliyun.com/gpu-count")
_KAI_GROUP = "runai-gpu-group"

#: The allocator that writes an annotation when it binds a pod, by the annotation.
_MARKS = {
    KAI_RESERVES: Reason.KAI_MANAGES,
    HAMI_ALLOCATED: Reason.HAMI_MANAGES,
    HAMI_ALLOCATES: Reason.HAMI_MANAGES,
    GPUSHARE_DEVICE: Reason.GPUSHARE_MANAGES,
}
_RESOURCES = {
    **dict.fromkeys(_HAMI_RESOURCES, Reason.HAMI_MANAGES),
    **dict.fromkeys(_GPUSHARE_RESOURCES, Reason.GPUSHARE_MANAGES),
}


def of_node(node: Node) -> set[Reason]:
    """Return the allocators with a trace on the Node object."""
    found: set[Reason] = set()
    annotations = node.metadata.annotations or {}
    handshake = annotations.get(HAMI_HANDSHAKE)
    if handshake is None:
        hami = bool(annotations.get(HAMI_REGISTER))
    else:
        hami = _HAMI_LEFT not in handshake
    if hami:
        found.add(Reason.HAMI_MANAGES)
    allocatable = (node.status.allocatable if node.status else None) or {}
    if any(_is_nonzero(allocatable.get(resource)) for resource in _GPUSHARE_RESOURCES):
        found.add(Reason.GPUSHARE_MANAGES)
    return found


def of_pod(pod: Pod) -> set[Reason]:
    """Return the foreign allocators that gave the pod a GPU. A pod that is unbound or has ended has
    none."""
    if not pod.node or pod.ended:
        return set()
    found = {Reason.KAI_MANAGES for key in pod.metadata.labels or () if _is_group(key)}
    annotations = pod.metadata.annotations or {}
    for key in annotations:
        if key.startswith("hami.io/") and annotations.get(HAMI_NODE, pod.node) != pod.node:
            continue  # copied from a pod that HAMi placed elsewhere
        if key in _MARKS:
            found.add(_MARKS[key])
        elif is_kai_device(key):
            found.add(Reason.KAI_MANAGES)
    for resource, quantity in _quantities(pod):
        if resource in _RESOURCES and _is_nonzero(quantity):
            found.add(_RESOURCES[resource])
    return found


def _is_group(label: str) -> bool:
    return label == _KAI_GROUP or label.startswith(_KAI_GROUP + "/")


def _is_nonzero(quantity: str | int | None) -> bool:
    """Return whether the quantity is not zero. A quantity that cannot be parsed counts as not
    zero."""
    return quantity is not None and str(quantity).strip() not in ("", "0")


def _quantities(pod: Pod) -> Iterator[tuple[str, str | int]]:
    for container in (*(pod.spec.init_containers or ()), *(pod.spec.containers or ())):
        if container.resources is not None:
            yield from (container.resources.limits or {}).items()
            yield from (container.resources.requests or {}).items()


class ForeignAllocators(Tracker):
    """The traces of foreign allocators, and the manager of each node derived from them.

    Only one thread writes. Any thread may call ``manager``.
    """

    def __init__(self) -> None:
        #: The node and the allocators that each object with a trace indicates.
        self._traces: dict[_Key, tuple[str, frozenset[Reason]]] = {}
        #: The objects with a trace that concern each node.
        self._keys_of: dict[str, set[_Key]] = {}
        self._managers: dict[str, Reason] = {}
        #: The classes, slices and claims of DRA.
        self.allocation = DraAllocation()

    def manager(self, node: str) -> Reason | None:
        """Return the reason that names the foreign allocator of the node, or None if there is
        none."""
        return self._managers.get(node)

    def node_seen(self, node: Node, before: Node | None) -> set[str]:
        name = node.metadata.name
        return self._note(("node", name), name, of_node(node))

    def pod_seen(self, pod: Pod, managed: bool) -> set[str]:
        return self._note(("pod", pod.metadata.uid), pod.node, of_pod(pod))

    def apply(self, event: DraEvent) -> tuple[set[str], set[str]]:
        """Apply a change of DRA's objects. Return the affected nodes and the uids of the affected
        pods."""
        nodes, uids = self.allocation.apply(event)
        match event:
            case SliceSeen(piece):
                node = node_of(piece)
                found = {Reason.DRA_MANAGES} if node else set[Reason]()
                nodes |= self._note(("slice", piece.metadata.name), node, found)
            case SliceGone(name):
                nodes |= self._note(("slice", name), "", ())
        return nodes, uids

    def node_gone(self, name: str) -> set[str]:
        return self._note(("node", name), "", ())

    def pod_gone(self, uid: str, last: LastSeen | None) -> set[str]:
        return self._note(("pod", uid), "", ())

    def known(self, what: str) -> set[str]:
        """Return the names or uids of the objects with a trace. ``what`` is "node", "pod" or
        "slice"."""
        return {name for kind, name in self._traces if kind == what}

    def _note(self, key: _Key, node: str, found: Iterable[Reason]) -> set[str]:
        """Replace the trace on an object, and return the nodes whose manager has changed."""
        before = self._traces.pop(key, None)
        now = (node, frozenset(found))
        if before is None and not now[1]:
            return set()
        if before is not None:
            self._keys_of[before[0]].discard(key)
            if not self._keys_of[before[0]]:
                del self._keys_of[before[0]]
        if now[1]:
            self._traces[key] = now
            self._keys_of.setdefault(node, set()).add(key)
        return {name for name in {node, before[0] if before else node} if self._changed(name)}

    def _changed(self, node: str) -> bool:
        shown = {reason for key in self._keys_of.get(node, ()) for reason in self._traces[key][1]}
        manager = next((reason for reason in MANAGERS if reason in shown), None)
        if manager is self._managers.get(node):
            return False
        if manager is None:
            del self._managers[node]
        else:
            self._managers[node] = manager
        return True
