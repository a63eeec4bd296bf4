"""Who else gives out the GPUs of a node, from what they leave on nodes, pods and ResourceSlices.

Their commitments are not in our ledger, and ours are not in theirs: on a node that two give out,
both are right and the memory is promised twice. So a node on which one of these is seen takes
nothing from us. The list is closed:

=========  =================================================================================
KAI        a bound pod with label ``runai-gpu-group`` (fractions, and the reservation pods that
           hold the device for them), the annotation of a reservation, or the devices of an
           nvFractions container. A whole GPU that KAI's scheduler binds is a pod like any other
HAMi       the node's handshake, unless it says that HAMi left (``Deleted_…``), or its register
           of devices without one; a bound pod with its allocation, or its resources
gpushare   the node's ``aliyun.com/gpu-mem`` or ``gpu-count``; a bound pod with its device, or its
           resource
DRA        a ResourceSlice of driver ``gpu.nvidia.com`` with devices, of the node or its pool. So is
           a node recognised whose ``nvidia.com/gpu`` is backed by DRA (KEP-5004) and not by the
           plugin: it has no allocatable of it, and is not refused for that
=========  =================================================================================
"""

from collections.abc import Iterable, Iterator

from contract.kube import Node, Pod, ResourceSlice
from contract.reasons import Reason

#: What shows it: "node", "pod" or "slice", and its name or uid.
_Key = tuple[str, str]

#: In this order where several are seen on one node.
MANAGERS = (
    Reason.DRA_MANAGES,
    Reason.HAMI_MANAGES,
    Reason.KAI_MANAGES,
    Reason.GPUSHARE_MANAGES,
)

DRA_DRIVER = "gpu.nvidia.com"
_HAMI_HANDSHAKE = "hami.io/node-handshake"
_HAMI_REGISTER = "hami.io/node-nvidia-register"
_HAMI_NODE = "hami.io/vgpu-node"
_HAMI_LEFT = "Deleted"
_HAMI_RESOURCES = ("nvidia.com/gpumem", "nvidia.com/gpumem-percentage", "nvidia.com/gpucores")
_GPUSHARE_RESOURCES = ("aliyun.com/gpu-mem", "aliyun.com/gpu-count")
_KAI_GROUP = "runai-gpu-group"

#: Annotation of a pod -> who wrote it there when it bound the pod.
_MARKS = {
    "run.ai/reserve_for_gpu_index": Reason.KAI_MANAGES,
    "hami.io/vgpu-devices-allocated": Reason.HAMI_MANAGES,
    "hami.io/vgpu-devices-to-allocate": Reason.HAMI_MANAGES,
    "ALIYUN_COM_GPU_MEM_IDX": Reason.GPUSHARE_MANAGES,
}
#: Annotations of a node that HAMi's agent writes.
NODE_MARKS = (_HAMI_HANDSHAKE, _HAMI_REGISTER)
_RESOURCES = {
    **dict.fromkeys(_HAMI_RESOURCES, Reason.HAMI_MANAGES),
    **dict.fromkeys(_GPUSHARE_RESOURCES, Reason.GPUSHARE_MANAGES),
}


def of_node(node: Node) -> set[Reason]:
    """Who says on the node itself that its GPUs are theirs."""
    found: set[Reason] = set()
    annotations = node.metadata.annotations or {}
    handshake = annotations.get(_HAMI_HANDSHAKE)
    if handshake is None:
        hami = bool(annotations.get(_HAMI_REGISTER))
    else:
        hami = _HAMI_LEFT not in handshake
    if hami:
        found.add(Reason.HAMI_MANAGES)
    allocatable = (node.status.allocatable if node.status else None) or {}
    if any(_is_some(allocatable.get(resource)) for resource in _GPUSHARE_RESOURCES):
        found.add(Reason.GPUSHARE_MANAGES)
    return found


def of_pod(pod: Pod) -> set[Reason]:
    """Who gave the pod a GPU in a way that is not the plugin's; none while it is not bound, or
    when it has ended."""
    if not pod.node or pod.ended:
        return set()
    found = {Reason.KAI_MANAGES for key in pod.metadata.labels or () if _is_group(key)}
    annotations = pod.metadata.annotations or {}
    for key in annotations:
        if key.startswith("hami.io/") and annotations.get(_HAMI_NODE, pod.node) != pod.node:
            continue  # copied from a pod that HAMi placed elsewhere
        if key in _MARKS:
            found.add(_MARKS[key])
        elif _is_kais_device(key):
            found.add(Reason.KAI_MANAGES)
    for resource, quantity in _asked(pod):
        if resource in _RESOURCES and _is_some(quantity):
            found.add(_RESOURCES[resource])
    return found


def is_mark(key: str) -> bool:
    """Whether ``of_pod`` reads the annotation of that key."""
    return key in _MARKS or key == _HAMI_NODE or _is_kais_device(key)


def node_of(piece: ResourceSlice) -> str:
    """The node whose GPUs a DRA driver publishes in this slice; empty where it is none."""
    spec = piece.spec
    if spec.driver != DRA_DRIVER or not spec.devices:
        return ""
    return spec.node_name or spec.pool.name


def _is_kais_device(key: str) -> bool:
    return key.startswith("nvidia.com/container.") and key.endswith(".gpus.devices")


def _is_group(label: str) -> bool:
    return label == _KAI_GROUP or label.startswith(_KAI_GROUP + "/")


def _is_some(quantity: str | int | None) -> bool:
    """What cannot be read is not taken for nothing."""
    return quantity is not None and str(quantity).strip() not in ("", "0")


def _asked(pod: Pod) -> Iterator[tuple[str, str | int]]:
    for container in (*(pod.spec.init_containers or ()), *(pod.spec.containers or ())):
        if container.resources is not None:
            yield from (container.resources.limits or {}).items()
            yield from (container.resources.requests or {}).items()


class ForeignAllocators:
    """What was seen of others, by who or what shows it, and who manages each node for it.

    One thread writes; any may ask ``manager``, which reads what is replaced, never changed.
    """

    def __init__(self) -> None:
        #: Node, pod or slice -> the node that it speaks of, and whose work it shows.
        self._signs: dict[_Key, tuple[str, frozenset[Reason]]] = {}
        #: Node -> who and what speaks of it.
        self._speakers: dict[str, set[_Key]] = {}
        self._managers: dict[str, Reason] = {}

    def manager(self, node: str) -> Reason | None:
        """Why the node takes nothing from us: somebody else gives out its GPUs."""
        return self._managers.get(node)

    def see_node(self, node: Node) -> set[str]:
        name = node.metadata.name
        return self._note(("node", name), name, of_node(node))

    def see_pod(self, pod: Pod) -> set[str]:
        return self._note(("pod", pod.metadata.uid), pod.node, of_pod(pod))

    def see_slice(self, piece: ResourceSlice) -> set[str]:
        node = node_of(piece)
        found = {Reason.DRA_MANAGES} if node else set()
        return self._note(("slice", piece.metadata.name), node, found)

    def lose_node(self, name: str) -> set[str]:
        return self._note(("node", name), "", ())

    def lose_pod(self, uid: str) -> set[str]:
        return self._note(("pod", uid), "", ())

    def lose_slice(self, name: str) -> set[str]:
        return self._note(("slice", name), "", ())

    def known(self, what: str) -> set[str]:
        """Names or uids of the nodes, pods or slices of which something was seen."""
        return {name for kind, name in self._signs if kind == what}

    def _note(self, key: _Key, node: str, found: Iterable[Reason]) -> set[str]:
        """Replace what ``key`` shows; returns the nodes whose manager is another now."""
        before = self._signs.pop(key, None)
        now = (node, frozenset(found))
        if before is None and not now[1]:
            return set()
        if before is not None:
            self._speakers[before[0]].discard(key)
            if not self._speakers[before[0]]:
                del self._speakers[before[0]]
        if now[1]:
            self._signs[key] = now
            self._speakers.setdefault(node, set()).add(key)
        return {name for name in {node, before[0] if before else node} if self._changed(name)}

    def _changed(self, node: str) -> bool:
        shown = {reason for key in self._speakers.get(node, ()) for reason in self._signs[key][1]}
        manager = next((reason for reason in MANAGERS if reason in shown), None)
        if manager is self._managers.get(node):
            return False
        if manager is None:
            del self._managers[node]
        else:
            self._managers[node] = manager
        return True
