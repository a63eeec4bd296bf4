"""The state of Headroom itself: this replica, its inputs, and the other extenders."""

from collections.abc import Iterator

import numpy as np
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from headroom.console.responses import Body, counted, encoded, rounded_s
from headroom.console.view import View
from headroom.console.view_context import Context, InContext, Newest
from headroom.console.views.decision_bodies import Unanswered
from headroom.console.views.decisions import unread_extenders
from headroom.console.views.process import SettingsView, SourceView, enforcing, source_views
from headroom.core.placement.snapshot import Snapshot
from headroom.version import own_version

#: Maximum number of nodes named in a message.
MOST_NAMED = 3


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
    settings: SettingsView = Field(default_factory=enforcing)
    ready: bool
    not_ready_because: str | None
    """Why /readyz returns 503; null if it returns 200."""
    sources: list[SourceView]
    """The watches of the API server."""
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
    """Return whether this replica is ready, its settings, its watches, and the state of the other
    extenders."""
    not_ready_because = context.unready()
    body = StatusBody(
        **context.head(snap),
        replica=context.replica,
        version=own_version(),
        settings=context.settings(),
        ready=not not_ready_because,
        not_ready_because=not_ready_because or None,
        sources=source_views(context.watches()),
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
    """Yield the API server as one input; nothing if this process watches none."""
    ages_s = [each.contact_age_s for each in context.watches()]
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
