"""The events of the watches: an object was seen, an object is gone, or a complete list arrived.

``at_s`` is in seconds of the receiver's monotonic clock. Only this clock decides whether a report
is stale.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from headroom.contract.dra import DeviceClass, ResourceClaim
from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Lease, Namespace, Node, Pod, PodDisruptionBudget, ResourceSlice
from headroom.contract.vramprofile import VRAMProfile


@dataclass(frozen=True, slots=True)
class PodSeen:
    pod: Pod


@dataclass(frozen=True, slots=True)
class PodGone:
    uid: str
    #: Whether the sender has proof that all containers have ended. If not, this is decided from the
    #: pod's last version.
    ended: bool = False
    #: Whether the stored version of the pod was its last version. If not, an unbound pod may have
    #: been bound before it was deleted.
    is_last: bool = True


@dataclass(frozen=True, slots=True)
class NodeSeen:
    node: Node


@dataclass(frozen=True, slots=True)
class NodeGone:
    name: str


@dataclass(frozen=True, slots=True)
class NamespaceSeen:
    namespace: Namespace


@dataclass(frozen=True, slots=True)
class NamespaceGone:
    name: str


@dataclass(frozen=True, slots=True)
class GPUNodeSeen:
    gpunode: GPUNode
    at_s: float


@dataclass(frozen=True, slots=True)
class GPUNodeGone:
    name: str
    #: Uid of the object that a call of this process did not find. A later object of the same name
    #: has another uid. None if the watch, which reports changes in order, has reported the
    #: deletion.
    uid: str | None = None


@dataclass(frozen=True, slots=True)
class HeartbeatSeen:
    """A version of the agent's Lease, which has the name of its node."""

    lease: Lease
    at_s: float


@dataclass(frozen=True, slots=True)
class HeartbeatGone:
    name: str


@dataclass(frozen=True, slots=True)
class BudgetSeen:
    budget: PodDisruptionBudget


@dataclass(frozen=True, slots=True)
class BudgetGone:
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class SliceSeen:
    piece: ResourceSlice


@dataclass(frozen=True, slots=True)
class SliceGone:
    name: str


@dataclass(frozen=True, slots=True)
class ClaimSeen:
    claim: ResourceClaim


@dataclass(frozen=True, slots=True)
class ClaimGone:
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class ClassSeen:
    device_class: DeviceClass


@dataclass(frozen=True, slots=True)
class ClassGone:
    name: str


@dataclass(frozen=True, slots=True)
class ProfileSeen:
    profile: VRAMProfile


@dataclass(frozen=True, slots=True)
class ProfileGone:
    namespace: str
    name: str


Listed = (
    Pod
    | Node
    | Namespace
    | GPUNode
    | Lease
    | ResourceSlice
    | ResourceClaim
    | DeviceClass
    | PodDisruptionBudget
    | VRAMProfile
)


@dataclass(frozen=True, slots=True)
class Relisted:
    """A complete list of one kind. Objects that are not in it have been deleted."""

    kind: type[Listed]
    objects: tuple[Listed, ...]
    at_s: float


DraEvent = SliceSeen | SliceGone | ClaimSeen | ClaimGone | ClassSeen | ClassGone
WatchEvent = (
    DraEvent
    | PodSeen
    | PodGone
    | NodeSeen
    | NodeGone
    | NamespaceSeen
    | NamespaceGone
    | GPUNodeSeen
    | GPUNodeGone
    | HeartbeatSeen
    | HeartbeatGone
    | BudgetSeen
    | BudgetGone
    | ProfileSeen
    | ProfileGone
    | Relisted
)

#: The uid of a pod, namespace and name of a PodDisruptionBudget or ResourceClaim, or the name of
#: any other object.
ObjectKey = str | tuple[str, str]

_GONE: Mapping[type, Callable[[str], WatchEvent]] = {
    Node: NodeGone,
    Namespace: NamespaceGone,
    GPUNode: GPUNodeGone,
    Lease: HeartbeatGone,
    ResourceSlice: SliceGone,
    DeviceClass: ClassGone,
}


def changes_of(event: Relisted, known: Iterable[ObjectKey]) -> Iterator[WatchEvent | None]:
    """Yield the deletions of ``known`` objects that are not in the list, then the listed objects.

    Yield None after each step without a change, so that the caller can interrupt long lists.
    """
    listed: set[ObjectKey] = set()
    for o in event.objects:
        listed.add(_key(o))
        yield None
    for each in known:
        yield _gone(event.kind, each) if each not in listed else None
    for o in event.objects:
        yield _seen(o, event.at_s)


def _key(o: Listed) -> ObjectKey:
    if isinstance(o, PodDisruptionBudget | ResourceClaim):
        return o.metadata.namespace, o.metadata.name
    return o.metadata.uid if isinstance(o, Pod) else o.metadata.name


def _gone(kind: type, each: ObjectKey) -> WatchEvent:
    if isinstance(each, tuple):
        return ClaimGone(*each) if kind is ResourceClaim else BudgetGone(*each)
    if kind is Pod:
        # The watch was down, so the pod may have had a later version than the stored one.
        return PodGone(each, is_last=False)
    return _GONE[kind](each)


def _seen(o: Listed, at_s: float) -> WatchEvent:
    match o:
        case Pod():
            return PodSeen(o)
        case Node():
            return NodeSeen(o)
        case Namespace():
            return NamespaceSeen(o)
        case GPUNode():
            return GPUNodeSeen(o, at_s)
        case Lease():
            return HeartbeatSeen(o, at_s)
        case ResourceSlice():
            return SliceSeen(o)
        case ResourceClaim():
            return ClaimSeen(o)
        case DeviceClass():
            return ClassSeen(o)
        case PodDisruptionBudget():
            return BudgetSeen(o)
        case VRAMProfile():
            return ProfileSeen(o)
