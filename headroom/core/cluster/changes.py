"""The changes that ``ClusterWriter`` applies in addition to watch events, and their effects.

``at_s`` is in seconds of the receiver's monotonic clock. Only this clock decides whether a report
is stale.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from headroom.contract.dcgm import Key
from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Pod
from headroom.contract.watched import WatchEvent
from headroom.core.cluster.holds import HeldFor
from headroom.core.cluster.trackers.prediction_tracker import Outcome
from headroom.core.placement.device_reading import Activity


@dataclass(frozen=True, slots=True)
class GPUNodeWritten:
    """The API server's response to a write of this process.

    It can arrive after the watch has reported that the object was deleted and created again. So it
    replaces only an earlier version of the object with the same uid.
    """

    gpunode: GPUNode
    at_s: float


@dataclass(frozen=True, slots=True)
class DepartureMarked:
    """A pod with a reservation on the node no longer exists at the API server."""

    node: str
    uid: str
    #: The resourceVersion of the agent's Lease at that time. Empty if the node has no agent.
    lease_version: str
    #: When the pod was found deleted, on the monotonic clock, in seconds.
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TimePassed:
    """The monotonic clock has reached ``at_s``, so backoffs may have ended, and overuse may have
    lasted long enough to report it."""

    at_s: float


@dataclass(frozen=True, slots=True)
class ActivitySeen:
    """All SM activity from the metrics history that is not stale.

    ``nodes`` contains the nodes with at least one device whose activity has changed.
    """

    history: Mapping[Key, Activity]
    nodes: Collection[str]


@dataclass(frozen=True, slots=True)
class GpuUsersSeen:
    """All known pods that use GPUs without requesting a GPU that Headroom manages, by uid."""

    pods: Mapping[str, Pod]


@dataclass(frozen=True, slots=True)
class BindBegun:
    """This replica received a bind call for the pod and has not written the reservation yet."""

    pod: Pod
    node: str


@dataclass(frozen=True, slots=True)
class BindEnded:
    """A bind call has ended, and the reservation that it was about to write no longer counts.

    If the bind has written its reservation, ``GPUNodeWritten`` has already had the same effect.
    """

    uid: str
    node: str


@dataclass(frozen=True, slots=True)
class HoldsSeen:
    """All holds of the extenders, or None if no extender has sent its holds. Only the console
    receives this change."""

    holds: Sequence[HeldFor] | None


Event = (
    WatchEvent
    | GPUNodeWritten
    | DepartureMarked
    | TimePassed
    | ActivitySeen
    | GpuUsersSeen
    | BindBegun
    | BindEnded
    | HoldsSeen
)


@dataclass(slots=True)
class Effects:
    """Work that other parts of the process must do after changes were applied and nodes were
    weighed."""

    #: The events that were applied. They become visible when the changed nodes have been weighed.
    events: list[Event] = field(default_factory=list)
    #: The predictions that were compared with a report.
    outcomes: list[Outcome] = field(default_factory=list)
    #: Nodes that may have an orphaned or missing reservation since the change.
    unsettled: dict[str, None] = field(default_factory=dict)
