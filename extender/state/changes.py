"""The changes that ``ClusterWriter`` applies, and their effects, as values.

``at_s`` is in seconds of the receiver's monotonic clock. No other clock decides whether a report is
stale.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from contract.dcgm import Key
from contract.dra import DeviceClass, ResourceClaim
from contract.gpunode import GPUNode
from contract.kube import Lease, Namespace, Node, Pod, PodDisruptionBudget, ResourceSlice
from contract.vramprofile import VRAMProfile
from extender.placement.device_reading import Activity
from extender.placement.placement_record import Placement
from extender.state.holds import HeldFor
from extender.state.pod_selectors import key
from extender.state.prediction_tracker import Outcome


@dataclass(frozen=True, slots=True)
class PodSeen:
    pod: Pod


@dataclass(frozen=True, slots=True)
class PodGone:
    uid: str
    #: Whether the sender has proof that all containers ended. If false, the pod's last version
    #: decides.
    ended: bool = False
    #: Whether the stored version of the pod was its last one. If not, an unbound pod may have been
    #: bound before it was deleted.
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
class GPUNodeWritten:
    """The API server's answer to a write of this process.

    It can arrive after the watch has reported that the object was deleted, and created again. So it
    only replaces an earlier version of the same object, by uid.
    """

    gpunode: GPUNode
    at_s: float


@dataclass(frozen=True, slots=True)
class GPUNodeGone:
    name: str
    #: Uid of the object that a call of this process did not find; a later object of the same name
    #: has another uid. None: the watch, which reports changes in order, reported the deletion.
    uid: str | None = None


@dataclass(frozen=True, slots=True)
class HeartbeatSeen:
    """A version of the agent's Lease. The Lease has the name of its node."""

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


@dataclass(frozen=True, slots=True)
class DepartureMarked:
    """A pod with a reservation on the node was found deleted from the API server."""

    node: str
    uid: str
    #: The resourceVersion that the agent's Lease had then; empty if the node has no agent.
    lease_version: str
    #: When the pod was found deleted, on the monotonic clock, in seconds.
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TimePassed:
    """The monotonic clock has reached ``at_s``: back-offs may have ended, and overuse may have
    lasted long enough to report."""

    at_s: float


@dataclass(frozen=True, slots=True)
class ActivitySeen:
    """All SM activity from the metrics history that is not stale.

    ``nodes`` have at least one device whose activity has changed.
    """

    history: Mapping[Key, Activity]
    nodes: Collection[str]


@dataclass(frozen=True, slots=True)
class BindBegun:
    """This replica received a bind call for the pod and has not written the reservation yet."""

    pod: Pod
    node: str
    #: The placement that will be written; None if it is not computed yet.
    placement: Placement | None = None


@dataclass(frozen=True, slots=True)
class BindEnded:
    """A bind call has ended, with any outcome. A reservation it made is on the GPUNode by now."""

    uid: str
    node: str


@dataclass(frozen=True, slots=True)
class HoldsSeen:
    """All holds of the extenders; None: no extender has sent any. Only the console receives it."""

    holds: Sequence[HeldFor] | None


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

Event = (
    DraEvent
    | PodSeen
    | PodGone
    | NodeSeen
    | NodeGone
    | NamespaceSeen
    | NamespaceGone
    | GPUNodeSeen
    | GPUNodeWritten
    | GPUNodeGone
    | HeartbeatSeen
    | HeartbeatGone
    | BudgetSeen
    | BudgetGone
    | ProfileSeen
    | ProfileGone
    | DepartureMarked
    | TimePassed
    | ActivitySeen
    | BindBegun
    | BindEnded
    | HoldsSeen
    | Relisted
)


@dataclass(slots=True)
class Effects:
    """Work for the rest of the process that follows from applied changes and weighed nodes."""

    #: The events that were applied. They become visible once the changed nodes are weighed.
    events: list[Event] = field(default_factory=list)
    #: The predictions that were compared with a report.
    outcomes: list[Outcome] = field(default_factory=list)
    #: Nodes that may have got an orphaned or missing reservation.
    unsettled: dict[str, None] = field(default_factory=dict)


#: Pods: the uid. PodDisruptionBudgets and ResourceClaims: namespace and name. Others: the name.
ObjectKey = str | tuple[str, str]

_GONE: Mapping[type, Callable[[str], Event]] = {
    Node: NodeGone,
    Namespace: NamespaceGone,
    GPUNode: GPUNodeGone,
    Lease: HeartbeatGone,
    ResourceSlice: SliceGone,
    DeviceClass: ClassGone,
}


def changes_of(event: Relisted, known: Iterable[ObjectKey]) -> Iterator[Event | None]:
    """Yield the deletions of ``known`` objects that are not in the list, then the listed objects.
    Yield None after each step without a change, so that the caller can interrupt long lists."""
    listed: set[ObjectKey] = set()
    for o in event.objects:
        listed.add(_key(o))
        yield None
    for each in known:
        yield _gone(event.kind, each) if each not in listed else None
    for o in event.objects:
        yield _seen(o, event.at_s)


def _key(o: Listed) -> ObjectKey:
    if isinstance(o, PodDisruptionBudget):
        return key(o)
    if isinstance(o, ResourceClaim):
        return o.metadata.namespace, o.metadata.name
    return o.metadata.uid if isinstance(o, Pod) else o.metadata.name


def _gone(kind: type, each: ObjectKey) -> Event:
    if isinstance(each, tuple):
        return ClaimGone(*each) if kind is ResourceClaim else BudgetGone(*each)
    if kind is Pod:
        # The watch was down, so the pod may have had a later version than the stored one.
        return PodGone(each, is_last=False)
    return _GONE[kind](each)


def _seen(o: Listed, at_s: float) -> Event:
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
