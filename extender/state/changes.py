"""What can happen to the cluster as far as we are concerned, as values.

``at_s`` is the receiver's own monotonic clock, in seconds: nobody else's clock decides freshness.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from contract.gpunode import GPUNode, Reservation
from contract.kube import Lease, Namespace, Node, Pod, PodDisruptionBudget, ResourceSlice
from extender.placement.placement_record import Placement
from extender.placement.sm_reading import Activity
from extender.state.nominations import Place
from extender.state.sm_activity import Key


@dataclass(frozen=True, slots=True)
class PodSeen:
    pod: Pod


@dataclass(frozen=True, slots=True)
class PodGone:
    uid: str
    #: Whoever tells knows that its containers had ended; false: what was seen before decides.
    ended: bool = False


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


@dataclass(frozen=True, slots=True)
class HeartbeatSeen:
    """The Lease of the agent on the node ``lease.metadata.name``."""

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
class DepartureMarked:
    """A pod with a promise on the node was gone from the store when the Lease of the node's agent
    had this version; empty if the node has no agent."""

    node: str
    uid: str
    lease_version: str
    #: On the monotonic clock, in seconds.
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BackOffEnded:
    """Enough time has passed since a pod was sent away from the node."""

    node: str


@dataclass(frozen=True, slots=True)
class ActivitySeen:
    """All the history of SM activity that is fresh, and nodes with a device in which it moved."""

    history: Mapping[Key, Activity]
    nodes: Collection[str]


@dataclass(frozen=True, slots=True)
class BindBegun:
    """This replica was asked to bind the pod to the node, and nothing is written down yet."""

    pod: Pod
    node: str
    #: What is about to be written down, where that is known already.
    placement: Placement | None = None


@dataclass(frozen=True, slots=True)
class BindEnded:
    """However it ended: what was promised is on the GPUNode by now."""

    uid: str
    node: str


@dataclass(frozen=True, slots=True)
class AssumedSeen:
    """All assumed binds and nominations of the extenders, for a process that decides nothing."""

    #: Node -> reservations that binds are about to write, by uid.
    binds: Mapping[str, Mapping[str, Reservation]]
    #: Uid -> place that is held for the pod; None: no extender says.
    nominations: Mapping[str, Place] | None


@dataclass(frozen=True, slots=True)
class Relisted:
    """A complete list of one kind: what it does not name is gone."""

    kind: (
        type[Pod]
        | type[Node]
        | type[Namespace]
        | type[GPUNode]
        | type[Lease]
        | type[ResourceSlice]
        | type[PodDisruptionBudget]
    )
    objects: tuple[
        Pod | Node | Namespace | GPUNode | Lease | ResourceSlice | PodDisruptionBudget, ...
    ]
    at_s: float


Event = (
    PodSeen
    | PodGone
    | NodeSeen
    | NodeGone
    | NamespaceSeen
    | NamespaceGone
    | GPUNodeSeen
    | GPUNodeGone
    | HeartbeatSeen
    | HeartbeatGone
    | SliceSeen
    | SliceGone
    | BudgetSeen
    | BudgetGone
    | DepartureMarked
    | BackOffEnded
    | ActivitySeen
    | BindBegun
    | BindEnded
    | AssumedSeen
    | Relisted
)
