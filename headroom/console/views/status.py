"""The state of Headroom itself: this replica, its inputs, and the other extenders."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from headroom.console.responses import Body, counted, encoded, rounded_s, stamp
from headroom.console.view import View
from headroom.console.view_context import Context, InContext, Newest
from headroom.console.views.decision_bodies import Unanswered
from headroom.console.views.decisions import unread_extenders
from headroom.console.views.process import LagView, SettingsView, SourceView, enforcing
from headroom.contract.timestamps import age
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.memory_totals import cordoned, unhealthy
from headroom.core.cluster.mismatches import Mismatch, mismatches, unreported
from headroom.core.journal.journal import MAX_SHOWN_BYTES
from headroom.core.placement.snapshot import Snapshot

#: Maximum number of nodes named in a message.
MOST_NAMED = 3


class ReportsView(View):
    """Numbers of nodes by the state of their reports."""

    fresh: int
    stale: int
    missing: int
    """Nodes with GPUs whose agent has never reported."""
    oldest_age_s: float | None
    """Age of the oldest report, by the clock of the node."""


class CountsView(View):
    nodes: int
    gpu_nodes: int
    devices: int
    devices_unhealthy: int
    devices_cordoned: int
    pods_bound: int
    pods_waiting: int
    reservations: int


class JournalView(View):
    """Totals over the journals of all extenders."""

    decisions: int
    bytes: int
    pods_shown: int
    """Number of pods in the last filter calls, which binds need. A pod usually takes 3 KiB."""
    pods_shown_bytes: int
    oldest_age_s: float | None
    most_decisions: int
    """Limits of each journal, from the settings."""
    most_bytes: int
    most_shown_bytes: int
    most_age_s: float


class PeerView(View):
    """Another extender, as in the last state line that it sent."""

    replica: str
    version: str
    ready: bool
    not_ready_because: str | None
    snapshot_generation: int
    mode: str
    """As in ``settings.mode``."""
    contact_age_s: float | None
    """Seconds since the last line that it sent."""


class StatusBody(Body):
    replica: str
    version: str
    """Version of Headroom."""
    python: str
    """Version of Python."""
    started_at: str
    """RFC 3339."""
    settings: SettingsView = Field(default_factory=enforcing)
    ready: bool
    not_ready_because: str | None
    """Why /readyz returns 503; null if it returns 200."""
    sources: list[SourceView]
    """The watches of the API server."""
    behind: bool
    """Whether received changes are not applied yet."""
    reports: ReportsView
    counts: CountsView
    mismatches: dict[str, int]
    """Number of pods about which ledger, API server and agents disagree, by kind."""
    overcommitted_bytes: int
    """Sum over all nodes."""
    journal: JournalView
    memory_bytes: int | None
    """Memory that this process uses."""
    loop_lag: LagView | None
    """Delay of the event loop."""
    peers: list[PeerView]
    """The extenders that this process follows."""
    unanswered: list[Unanswered]


class InputView(View):
    kind: str
    """"agents", "api_server" or "extender"."""
    place: str | None
    """The address of an extender; null for the others."""
    replica: str | None
    """The name of an extender; null until it has been read."""
    age_s: float | None
    """Seconds since the last contact; null before the first. For agents, the oldest of all agents
    counts, and for the API server the oldest of all kinds of objects."""
    message: str | None
    """Why the input is out of date; null if it is current."""


class InputsBody(Body):
    inputs: list[InputView]


routes = APIRouter()


@routes.get("/v1/status", response_model=StatusBody)
def status(context: InContext, snap: Newest) -> Response:
    """Return whether this replica is ready and its inputs are current, what it stores, whether
    ledger, API server and agents agree, and the state of the other extenders."""
    process, cluster = context.process(), context.cluster
    not_ready_because = context.unready()
    mismatched_pods = Counter(
        mismatch.value
        for gpunode in cluster.gpunodes()
        for mismatch in mismatches(cluster, gpunode)
    )
    body = StatusBody(
        **context.head(snap),
        replica=context.replica,
        version=process.version,
        python=process.python,
        started_at=stamp(process.started_at_s),
        settings=context.settings(),
        ready=not not_ready_because,
        not_ready_because=not_ready_because or None,
        sources=process.sources,
        behind=process.behind,
        reports=_reports(context, snap),
        counts=_counts(cluster, snap),
        mismatches={each.value: mismatched_pods[each.value] for each in Mismatch},
        overcommitted_bytes=context.overcommitted_bytes(),
        journal=_journal(context),
        memory_bytes=process.memory_bytes,
        loop_lag=process.loop_lag,
        peers=[
            PeerView(
                replica=state.replica,
                version=state.version,
                ready=not state.not_ready_because,
                not_ready_because=state.not_ready_because or None,
                snapshot_generation=state.generation,
                mode=state.mode,
                contact_age_s=rounded_s(each.line_age_s),
            )
            for each in context.journal.followed()
            if not (each.problem or each.is_gone) and (state := each.state) is not None
        ],
        unanswered=unread_extenders(context),
    )
    return encoded(body)


@routes.get("/v1/inputs", response_model=InputsBody)
def read(context: InContext, snap: Newest) -> Response:
    """Return the age of each input of the views, and which inputs are out of date."""
    body = InputsBody(**context.head(snap), inputs=inputs(context, snap))
    return encoded(body)


def _reports(context: Context, snap: Snapshot) -> ReportsView:
    cluster = context.cluster
    now_s, wall_s = context.monotonic_s(), context.wall_s()
    by_freshness = Counter[bool]()
    oldest_s: float | None = None
    missing = sum(unreported(cluster, node) for node in cluster.nodes())
    for gpunode in cluster.gpunodes():
        row = snap.row_of.get(gpunode.name)
        if gpunode.status is None or row is None:
            continue
        by_freshness[bool(snap.fresh_until_s[row] >= now_s)] += 1
        age_s = age(gpunode.status.observed_at, wall_s)
        if age_s is not None:
            oldest_s = max(age_s, oldest_s or 0.0)
    return ReportsView(
        fresh=by_freshness[True],
        stale=by_freshness[False],
        missing=missing,
        oldest_age_s=rounded_s(oldest_s),
    )


def _counts(cluster: Cluster, snap: Snapshot) -> CountsView:
    gpunodes = cluster.gpunodes()
    pods, waiting = len(cluster.pods()), len(cluster.unbound())
    columns = snap.columns
    return CountsView(
        nodes=len(snap.nodes),
        gpu_nodes=len(gpunodes),
        devices=int((columns.replicas >= 0).sum()),
        devices_unhealthy=sum(unhealthy(snap).values()),
        devices_cordoned=cordoned(snap),
        pods_bound=pods - waiting,
        pods_waiting=waiting,
        reservations=sum(len(each.spec.reservations) for each in gpunodes),
    )


def _journal(context: Context) -> JournalView:
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


def inputs(context: Context, snap: Snapshot) -> list[InputView]:
    """Return the agents, the API server, and each followed extender."""
    return [*_agents(context, snap), *_api_server(context), *_extenders(context)]


def _agents(context: Context, snap: Snapshot) -> Iterator[InputView]:
    """Yield the agents as one input, or nothing if no agent has ever reported."""
    rows = np.flatnonzero(np.isfinite(snap.fresh_until_s))
    if not len(rows):
        return
    stale_after_s = context.cluster.stale_after_s
    ages_s = context.monotonic_s() - (snap.fresh_until_s[rows] - stale_after_s)
    late = [snap.nodes[row].name for row in rows[ages_s > stale_after_s]]
    message = None
    if late:
        named = ", ".join(late[:MOST_NAMED]) + (", ..." if len(late) > MOST_NAMED else "")
        message = (
            f"no heartbeat for {stale_after_s:.0f} s from {counted(len(late), 'node')}: {named}"
        )
    yield _input_view("agents", float(ages_s.max()), message)


def _api_server(context: Context) -> Iterator[InputView]:
    """Yield the API server as one input, or nothing if this process watches none."""
    ages_s = [each.contact_age_s for each in context.process().sources]
    if ages_s:
        known_s = [age_s for age_s in ages_s if age_s is not None]
        age_s = max(known_s) if len(known_s) == len(ages_s) else None
        yield _input_view("api_server", age_s, context.unready() or None)


def _extenders(context: Context) -> Iterator[InputView]:
    for each in context.journal.followed():
        if not each.is_gone:
            replica = each.state.replica if each.state else None
            yield _input_view(
                "extender", each.line_age_s, each.problem or None, each.address, replica
            )


def _input_view(
    kind: str,
    age_s: float | None,
    message: str | None,
    place: str | None = None,
    replica: str | None = None,
) -> InputView:
    rounded = None if age_s is None else rounded_s(max(age_s, 0.0))
    return InputView(kind=kind, place=place, replica=replica, age_s=rounded, message=message)
