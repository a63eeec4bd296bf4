"""The data that the views of the debug API read, and the parameters through which they get it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
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
from headroom.console.views.process import SettingsView, enforcing
from headroom.contract.kube import Pod
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.holds import Hold
from headroom.core.placement.device_accounting import DeviceTerms
from headroom.core.placement.snapshot import Snapshot
from headroom.core.rules.pod_requests import ResourceQuota
from headroom.core.whatif.held_memory import seen_by
from headroom.runtime.follow.claims import Claims
from headroom.runtime.kube.profiles import Profiles
from headroom.runtime.kube.resources import Health
from headroom.runtime.server.auth import Guard, Sees, everything, visible_to
from headroom.runtime.telemetry import ViewTelemetry

_Kept = TypeVar("_Kept")


def no_quotas(namespace: str) -> Sequence[ResourceQuota]:
    """Return no quotas, as in an application without an API server."""
    return ()


@dataclass(frozen=True, slots=True)
class Context:
    """The state and settings that views read."""

    cluster: Cluster
    journal: Journals
    telemetry: ViewTelemetry
    #: A function that returns why decisions cannot be made yet, as a sentence, or "" if they can be
    #: made.
    unready: Callable[[], str]
    monotonic_s: Callable[[], float]
    wall_s: Callable[[], float]
    #: Name of this process. Snapshot generations of different processes cannot be compared.
    replica: str = "one"
    feed: Feed = field(default_factory=Feed.over)
    #: A function that returns the state of each watch of the API server.
    watches: Callable[[], Iterable[Health]] = tuple
    #: Authorizes readers. If it is None, every client may read.
    guard: Guard | None = None
    settings: Callable[[], SettingsView] = enforcing
    #: A function that returns a sentence about loops of the process that make no progress, or "" if
    #: all loops make progress.
    stuck: Callable[[], str] = str
    #: A function that reads the ResourceQuotas of a namespace from the API server, or of all
    #: namespaces for "". It blocks, and returns None if the quotas cannot be read.
    quotas: Callable[[str], Sequence[ResourceQuota] | None] = no_quotas
    #: The scheduler that calls Headroom (setting scheduler_name).
    scheduler: str = "headroom"
    #: A function that returns the setting gpu_hour_price, or None if it is not set.
    gpu_hour_price: Callable[[], float | None] = lambda: None
    #: The peaks of past lives, on which recommendations are based.
    profiles: Profiles = field(default_factory=Profiles)
    #: The DRA claims, and the devices that they hold.
    claims: Claims = field(default_factory=Claims)
    #: The last hour of devices and pods. Only the event loop may read it.
    history: History = field(default_factory=History)
    #: The reader of history of any range. None if the setting prometheus_url is missing.
    ranges: PrometheusRanges | None = None
    #: A function that returns the devices of each node whose use grows.
    growing: Callable[[], Mapping[str, Sequence[Growing]]] = dict
    #: Answers that are the same for all readers.
    answers: SharedAnswers = field(default_factory=SharedAnswers)
    scrapes: Scrapes = field(default_factory=Scrapes)
    #: Whether every client may read the metrics (setting metrics_access).
    open_metrics: bool = False

    def schedulers(self) -> list[str]:
        """Return the schedulers that are known to call Headroom, starting with the setting."""
        return list(dict.fromkeys((self.scheduler, *self.journal.schedulers)))

    def activity_age(self) -> Callable[[DeviceTerms], float | None]:
        """Return a function that returns the current age of a device's SM activity in seconds."""
        now_s, wall_s = self.monotonic_s(), self.wall_s()
        return lambda terms: self.cluster.activities.age_s(terms, now_s, wall_s)

    def head(self, snap: Snapshot) -> dict[str, Any]:
        """Return the fields of ``Body`` for an answer from this snapshot."""
        return {"generated_at": stamp(self.wall_s()), "snapshot_generation": snap.generation}

    def overcommitted_bytes(self) -> int:
        return sum(over.excess_bytes for over in self.cluster.overcommits.now())

    @property
    def observes(self) -> bool:
        """Whether the mode is observe."""
        return self.settings().mode == "observe"

    def seen_by(self, pod: Pod | None, snap: Snapshot) -> Snapshot:
        """Return the snapshot as filter sees it for the pod. If ``pod`` is None, memory that is
        held for any pod counts as reserved."""
        return seen_by(self.cluster, pod, snap, self.monotonic_s())

    def holds_against(self, pod: Pod) -> Mapping[str, Sequence[Hold]]:
        """Return the pods that have precedence over the pod, by node."""
        return self.cluster.holds.against(pod, self.monotonic_s())

    def tag(self, snap: Snapshot, *more: object) -> str:
        """Return the weak ETag of a view of this snapshot. ``more`` are the view's other inputs.

        The tag is weak because bodies with the same tag can differ in ``generated_at`` and in ages.
        A report can become stale without a new snapshot, so the tag depends on which reports are
        fresh.
        """
        fresh = np.packbits(snap.fresh_until_s >= self.monotonic_s())
        specs = self.cluster.node_specs
        held = sorted((name, *sorted(holds)) for name, holds in snap.held.items())
        more = (*more, *((f"{crc32(repr(held).encode()):x}",) if held else ()))
        parts = (snap.generation, f"{crc32(fresh.tobytes()):x}", specs, *more)
        return 'W/"{}"'.format(".".join(map(str, (self.replica, *parts))))


def shared(request: Request, kind: type[_Kept]) -> _Kept:
    """Return the object of this class that the application keeps for all readers, and create it
    on the first call."""
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


#: Parameter of views: the newest snapshot, which only the event loop may create.
Newest = Annotated[Snapshot, Depends(_newest)]


async def _seen(context: InContext, snap: Newest) -> Snapshot:
    return context.seen_by(None, snap)


#: Parameter of views: the newest snapshot, in which memory held for pods counts as reserved.
NewestWithHolds = Annotated[Snapshot, Depends(_seen)]
#: Parameter of views: which pods the caller may see.
Visible = Annotated[Sees, Depends(_visible)]
