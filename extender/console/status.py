"""The state of Headroom itself: this replica, its inputs, and the other extenders."""

from collections import Counter
from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field
from starlette.responses import Response

from extender.console.bodies import Body, stamp
from extender.console.context import Context
from extender.console.decision_bodies import Unanswered
from extender.console.decisions import unread_extenders
from extender.console.process_bodies import LagView, SettingsView, SourceView, enforcing
from extender.console.responses import encoded
from extender.placement.snapshot import Snapshot
from extender.state.heartbeats import age
from extender.state.journal import MAX_SHOWN_BYTES
from extender.state.reconcile_queue import Mismatch, mismatches, unreported


class ReportsView(BaseModel):
    """Number of nodes by the state of their reports."""

    fresh: int
    stale: int
    #: Nodes with GPUs whose agent never reported.
    missing: int
    #: Age of the oldest report, by the clock of its node.
    oldest_age_s: float | None


class CountsView(BaseModel):
    nodes: int
    gpu_nodes: int
    devices: int
    devices_unhealthy: int
    pods_bound: int
    pods_waiting: int
    reservations: int


class JournalView(BaseModel):
    """Totals over the journals of all extenders."""

    decisions: int
    bytes: int
    #: Pods of the last filter calls, which binds need; usually 3 KiB each.
    pods_shown: int
    pods_shown_bytes: int
    oldest_age_s: float | None
    #: Limits of each journal, from the settings.
    most_decisions: int
    most_bytes: int
    most_shown_bytes: int
    most_age_s: float


class PeerView(BaseModel):
    """Another extender, as in its last state line."""

    replica: str
    version: str
    ready: bool
    not_ready_because: str | None
    snapshot_generation: int
    #: As ``settings.mode``.
    mode: str
    #: Seconds since its last line.
    heard_s: float | None


class StatusBody(Body):
    replica: str
    version: str
    python: str
    started_at: str
    settings: SettingsView = Field(default_factory=enforcing)
    ready: bool
    not_ready_because: str | None
    sources: list[SourceView]
    #: Whether received changes are not applied yet.
    behind: bool
    reports: ReportsView
    counts: CountsView
    #: Number of pods on which ledger, API server and agents disagree, by kind.
    mismatches: dict[str, int]
    overcommitted_bytes: int
    journal: JournalView
    memory_bytes: int | None
    loop_lag: LagView | None
    peers: list[PeerView]
    unanswered: list[Unanswered]


def router(context: Context) -> APIRouter:
    routes = APIRouter()
    Newest = Annotated[Snapshot, Depends(context.newest)]
    cluster = context.cluster

    @routes.get("/v1/status", response_model=StatusBody)
    def status(snap: Newest) -> Response:
        """Return whether this replica is ready and its inputs are current, what it stores, whether
        ledger, API server and agents agree, and the state of the other extenders."""
        machinery, missing = context.machinery(), context.unready()
        found = Counter(
            mismatch.value
            for gpunode in cluster.gpunodes()
            for mismatch in mismatches(cluster, gpunode)
        )
        body = StatusBody(
            generatedAt=stamp(context.wall_s()),
            snapshot_generation=snap.generation,
            replica=context.replica,
            version=machinery.version,
            python=machinery.python,
            started_at=stamp(machinery.started_at_s),
            settings=context.settings(),
            ready=not missing,
            not_ready_because=missing or None,
            sources=machinery.sources,
            behind=machinery.behind,
            reports=_reports(snap),
            counts=_counts(snap),
            mismatches={each.value: found[each.value] for each in Mismatch},
            overcommitted_bytes=context.overcommitted_bytes(),
            journal=_journal(),
            memory_bytes=machinery.memory_bytes,
            loop_lag=machinery.loop_lag,
            peers=[
                PeerView(
                    replica=state.replica,
                    version=state.version,
                    ready=not state.not_ready_because,
                    not_ready_because=state.not_ready_because or None,
                    snapshot_generation=state.generation,
                    mode=state.mode,
                    heard_s=each.heard_s and round(each.heard_s, 3),
                )
                for each in context.journal.followed()
                if not (each.trouble or each.is_gone) and (state := each.state) is not None
            ],
            unanswered=unread_extenders(context),
        )
        return encoded(body)

    def _reports(snap: Snapshot) -> ReportsView:
        now_s, at_s = context.monotonic_s(), context.wall_s()
        reported = Counter[bool]()
        oldest_s: float | None = None
        missing = sum(unreported(cluster, node) for node in cluster.nodes())
        for gpunode in cluster.gpunodes():
            row = snap.row_of.get(gpunode.name)
            if gpunode.status is None or row is None:
                continue
            reported[bool(snap.fresh_until_s[row] >= now_s)] += 1
            age_s = age(gpunode.status.observed_at, at_s)
            if age_s is not None:
                oldest_s = max(age_s, oldest_s or 0.0)
        return ReportsView(
            fresh=reported[True],
            stale=reported[False],
            missing=missing,
            oldest_age_s=None if oldest_s is None else round(oldest_s, 3),
        )

    def _counts(snap: Snapshot) -> CountsView:
        gpunodes = cluster.gpunodes()
        pods, waiting = len(cluster.pods()), len(cluster.unbound())
        columns = snap.columns
        return CountsView(
            nodes=len(snap.nodes),
            gpu_nodes=len(gpunodes),
            devices=int((columns.replicas >= 0).sum()),
            devices_unhealthy=int((columns.health_issue > 0).sum()),
            pods_bound=pods - waiting,
            pods_waiting=waiting,
            reservations=sum(len(each.spec.reservations) for each in gpunodes),
        )

    def _journal() -> JournalView:
        journals = [journal for _, journal in context.journal.each()]
        bounds = context.journal.own.records.bounds
        ages_s = [
            context.wall_s() - oldest_at_s
            for journal in journals
            if (oldest_at_s := journal.records.oldest_at_s) is not None
        ]
        return JournalView(
            decisions=sum(len(journal.records) for journal in journals),
            bytes=sum(journal.records.size_bytes for journal in journals),
            pods_shown=sum(journal.shown for journal in journals),
            pods_shown_bytes=sum(journal.shown_bytes for journal in journals),
            oldest_age_s=round(max(ages_s), 3) if ages_s else None,
            most_decisions=bounds.decisions,
            most_bytes=bounds.size_bytes,
            most_shown_bytes=MAX_SHOWN_BYTES,
            most_age_s=bounds.age_s,
        )

    return routes
