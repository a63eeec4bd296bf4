"""What every view of the debug API is made from, given to each group of routes once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
from starlette.requests import Request

from extender.console.auth import Guard, visible_to
from extender.console.process_bodies import Machinery, SettingsView, enforcing, unknown
from extender.console.visible_pods import Sees, everything
from extender.observability.feed import Feed
from extender.observability.journal_merge import Journals
from extender.observability.journal_stream import AssumedLine, nothing_assumed
from extender.observability.metrics import ViewTelemetry
from extender.placement.snapshot import Snapshot
from extender.state.cluster_state import ClusterState
from extender.state.quotas import ResourceQuota


def no_quotas(namespace: str) -> Sequence[ResourceQuota]:
    """The quotas of an application without a cluster: none."""
    return ()


@dataclass(frozen=True, slots=True)
class Context:
    cluster: ClusterState
    journal: Journals
    telemetry: ViewTelemetry
    #: Why nothing can be decided yet, in a sentence; "" when it can.
    unready: Callable[[], str]
    monotonic_s: Callable[[], float]
    wall_s: Callable[[], float]
    #: Names this process: another one counts its generations anew.
    replica: str = "one"
    feed: Feed = field(default_factory=Feed.over)
    machinery: Callable[[], Machinery] = unknown
    #: Who may read; None: everybody who gets here.
    guard: Guard | None = None
    settings: Callable[[], SettingsView] = enforcing
    #: Which loops of the process make no progress, in a sentence; "" when all do.
    stuck: Callable[[], str] = str
    #: The ResourceQuotas of a namespace, read at the API server; None when they cannot be read.
    #: Blocks.
    quotas: Callable[[str], Sequence[ResourceQuota] | None] = no_quotas
    #: Setting scheduler_name: the scheduler that asks Headroom.
    scheduler: str = "headroom"
    #: What the journal says of assumed binds and nominations.
    assumed: Callable[[], AssumedLine] = nothing_assumed

    async def newest(self) -> Snapshot:
        """A dependency: taken on the event loop, which alone may make a snapshot."""
        return self.cluster.snapshot()

    async def visible(self, request: Request) -> Sees:
        """A dependency: which pods the caller may see."""
        return everything if self.guard is None else visible_to(request)

    def schedulers(self) -> list[str]:
        """The schedulers that are known to ask Headroom: the one of the settings first."""
        return list(dict.fromkeys((self.scheduler, *self.journal.schedulers)))

    def overcommitted_bytes(self) -> int:
        return sum(over.beyond_bytes for over in self.cluster.overcommits.now())

    def tag(self, snap: Snapshot, *more: object) -> str:
        """The weak ETag of a view of this snapshot, and of what ``more`` stands for.

        Weak: bodies with the same tag say the same of the cluster, though ``generatedAt`` and the
        ages, which count on from what a body says, are another moment's. A report that becomes
        stale is news without a new snapshot, so which reports are fresh is part of the tag.
        """
        fresh = np.packbits(snap.fresh_until_s >= self.monotonic_s())
        specs = self.cluster.node_specs
        parts = (snap.generation, f"{crc32(fresh.tobytes()):x}", specs, *more)
        return 'W/"{}"'.format(".".join(map(str, (self.replica, *parts))))
