"""The age of each input: the agents' reports, the API server's watches, and each extender's stream.

A view is only as recent as its inputs, so a reader has to see which of them are late.
"""

from collections.abc import Iterator

import numpy as np
from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import Response

from extender.console.bodies import Body, counted, stamp
from extender.console.context import Context
from extender.console.responses import encoded
from extender.placement.snapshot import Snapshot

#: Maximum number of nodes named in a message.
MOST_NAMED = 3


class InputView(BaseModel):
    #: "agents", "api_server" or "extender".
    kind: str
    #: The address of an extender; null for the others.
    place: str | None
    #: The name of an extender; null until it has been read.
    replica: str | None
    #: Seconds since the last contact. For agents and the API server, the oldest of all agents and
    #: of all kinds of objects. Null before the first contact.
    age_s: float | None
    #: Why the input is out of date; null if it is not.
    message: str | None


class InputsBody(Body):
    inputs: list[InputView]


def router(context: Context) -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/inputs", response_model=InputsBody)
    async def read() -> Response:
        """Return the age of each input of the views, and which inputs are out of date."""
        snap = context.cluster.snapshot()
        return encoded(
            InputsBody(
                generatedAt=stamp(context.wall_s()),
                snapshot_generation=snap.generation,
                inputs=inputs(context, snap),
            )
        )

    return routes


def inputs(context: Context, snap: Snapshot) -> list[InputView]:
    return [*_agents(context, snap), *_api_server(context), *_extenders(context)]


def _agents(context: Context, snap: Snapshot) -> Iterator[InputView]:
    """Yield the agents as one input; nothing if no agent ever reported."""
    reported = np.flatnonzero(np.isfinite(snap.fresh_until_s))
    if not len(reported):
        return
    stale_after_s = context.cluster.stale_after_s
    ages_s = context.monotonic_s() - (snap.fresh_until_s[reported] - stale_after_s)
    late = [snap.nodes[row].name for row in reported[ages_s > stale_after_s]]
    message = None
    if late:
        named = ", ".join(late[:MOST_NAMED]) + (", ..." if len(late) > MOST_NAMED else "")
        message = (
            f"no heartbeat for {stale_after_s:.0f} s from {counted(len(late), 'node')}: {named}"
        )
    yield _view("agents", float(ages_s.max()), message)


def _api_server(context: Context) -> Iterator[InputView]:
    """Yield the API server; nothing if this process watches none."""
    ages_s = [each.contact_age_s for each in context.machinery().sources]
    if ages_s:
        known_s = [age_s for age_s in ages_s if age_s is not None]
        age_s = max(known_s) if len(known_s) == len(ages_s) else None
        yield _view("api_server", age_s, context.unready() or None)


def _extenders(context: Context) -> Iterator[InputView]:
    for each in context.journal.followed():
        if not each.is_gone:
            replica = each.state.replica if each.state else None
            yield _view("extender", each.line_age_s, each.problem or None, each.address, replica)


def _view(
    kind: str,
    age_s: float | None,
    message: str | None,
    place: str | None = None,
    replica: str | None = None,
) -> InputView:
    rounded = None if age_s is None else round(max(age_s, 0.0), 3)
    return InputView(kind=kind, place=place, replica=replica, age_s=rounded, message=message)
