"""The data that the views of the debug API read, and how a view gets it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar
from zlib import crc32

import numpy as np
from fastapi import Depends
from starlette.requests import Request

from headroom.console.feed.feed import Feed
from headroom.console.feed.journals import Journals
from headroom.console.history.growth import Growing
from headroom.console.history.history import History
from headroom.console.history.ranges import PrometheusRanges
from headroom.console.metrics import Scrapes
from headroom.console.responses import stamp
from headroom.console.shared_answers import SharedAnswers
from headroom.console.views.process import ProcessStatus, SettingsView, enforcing, unknown_process
from headroom.contract.kube import Pod
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.holds import Hold
from headroom.core.placement.device_accounting import DeviceTerms
from headroom.core.placement.snapshot import Snapshot
from headroom.core.rules.pod_requests import ResourceQuota
from headroom.core.whatif.held_memory import seen_by
from headroom.runtime.follow.claims import Claims
from headroom.runtime.kube.profiles import Profiles
from headroom.runtime.server.auth import Guard, Sees, everything, visible_to
from headroom.runtime.telemetry import ViewTelemetry

_Kept = TypeVar("_Kept")


def no_quotas(namespace: str) -> Sequence[ResourceQuota]:
    """Return no quotas: the default of an application without an API server."""
    return ()


@dataclass(frozen=True, slots=True)
class Context:
    """The state and settings that views read."""

    cluster: Cluster
    journal: Journals
    telemetry: ViewTelemetry
    #: Returns why decisions cannot be made yet, as a sentence; "" if they can.
    unready: Callable[[], str]
    monotonic_s: Callable[[], float]
    wall_s: Callable[[], float]
    #: Name of this process; snapshot generations of another process are not comparable.
    replica: str = "one"
    feed: Feed = field(default_factory=Feed.over)
    process: Callable[[], ProcessStatus] = unknown_process
    #: Authorizes readers; None: every client may read.
    guard: Guard | None = None
    settings: Callable[[], SettingsView] = enforcing
    #: Returns which loops of the process make no progress, as a sentence; "" if all do.
    stuck: Callable[[], str] = str
    #: Reads the ResourceQuotas of a namespace from the API server, of all namespaces for ""; None
    #: if it cannot. Blocks.
    quotas: Callable[[str], Sequence[ResourceQuota] | None] = no_quotas
    #: Setting scheduler_name: the scheduler that calls Headroom.
    scheduler: str = "headroom"
    #: Returns setting gpu_hour_price; None if it is not set.
    gpu_hour_price: Callable[[], float | None] = lambda: None
    #: The peaks of past lives, for recommendations.
    profiles: Profiles = field(default_factory=Profiles)
    #: The claims of DRA, and the devices that they hold.
    claims: Claims = field(default_factory=Claims)
    #: The last hour of devices and pods; only its own thread, the event loop, may read it.
    history: History = field(default_factory=History)
    #: Reads history of any range; None without setting prometheus_url.
    ranges: PrometheusRanges | None = None
    #: Returns the devices whose use grows, by node.
    growing: Callable[[], Mapping[str, Sequence[Growing]]] = dict
    #: Answers that show the same to each reader.
    answers: SharedAnswers = field(default_factory=SharedAnswers)
    scrapes: Scrapes = field(default_factory=Scrapes)
    #: Whether every client may read the metrics (setting metrics_access).
    open_metrics: bool = False

    def schedulers(self) -> list[str]:
        """Return the schedulers known to call Headroom, the one of the settings first."""
        return list(dict.fromkeys((self.scheduler, *self.journal.schedulers)))

    def activity_age(self) -> Callable[[DeviceTerms], float | None]:
        """Return a function that returns the present age of a device's SM activity in seconds."""
        now_s, wall_s = self.monotonic_s(), self.wall_s()
        return lambda terms: self.cluster.activities.age_s(terms, now_s, wall_s)

    def head(self, snap: Snapshot) -> dict[str, Any]:
        """Return the fields of ``Body`` for an answer from this snapshot."""
        return {"generatedAt": stamp(self.wall_s()), "snapshot_generation": snap.generation}

    def overcommitted_bytes(self) -> int:
        return sum(over.excess_bytes for over in self.cluster.overcommits.now())

    def seen_by(self, pod: Pod | None, snap: Snapshot) -> Snapshot:
        """Return the snapshot as filter sees it for the pod. For None, all held memory counts."""
        return seen_by(self.cluster, pod, snap, self.monotonic_s())

    def holds_against(self, pod: Pod) -> Mapping[str, Sequence[Hold]]:
        """Return node -> the pods that go before the pod there."""
        return self.cluster.holds.against(pod, self.monotonic_s())

    def tag(self, snap: Snapshot, *more: object) -> str:
        """Return the weak ETag of a view of this snapshot; ``more`` are its other inputs.

        The tag is weak because bodies with the same tag differ in ``generatedAt`` and in ages. A
        report can become stale without a new snapshot, so the tag includes which reports are fresh.
        """
        fresh = np.packbits(snap.fresh_until_s >= self.monotonic_s())
        specs = self.cluster.node_specs
        held = sorted((name, *sorted(holds)) for name, holds in snap.held.items())
        more = (*more, *((f"{crc32(repr(held).encode()):x}",) if held else ()))
        parts = (snap.generation, f"{crc32(fresh.tobytes()):x}", specs, *more)
        return 'W/"{}"'.format(".".join(map(str, (self.replica, *parts))))


def shared(request: Request, kind: type[_Kept]) -> _Kept:
    """Return the one object of this class that the application keeps for all readers.

    The first call makes it.
    """
    kept: dict[type, Any] = request.app.state.kept
    if kind not in kept:
        kept.setdefault(kind, kind())
    found: _Kept = kept[kind]
    return found


async def _context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


#: Parameter of views: the context of the application that serves the request.
InContext = Annotated[Context, Depends(_context)]


async def _newest(context: InContext) -> Snapshot:
    return context.cluster.snapshot()


async def _visible(context: InContext, request: Request) -> Sees:
    return everything if context.guard is None else visible_to(request)


#: Parameter of views: the newest snapshot, which only the event loop may make.
Newest = Annotated[Snapshot, Depends(_newest)]


async def _seen(context: InContext, snap: Newest) -> Snapshot:
    return context.seen_by(None, snap)


#: Parameter of views: the same, where all memory that is held for pods counts as reserved.
NewestWithHolds = Annotated[Snapshot, Depends(_seen)]
#: Parameter of views: which pods the caller may see.
Visible = Annotated[Sees, Depends(_visible)]
