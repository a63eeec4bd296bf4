"""A stream of changes as server-sent events, and a list of the latest changes."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Annotated

from fastapi import APIRouter, Header, HTTPException, Query
from starlette.responses import Response

from headroom.console.feed.feed import MOST_FOLLOWERS, FeedEvent, Follower, TooManyFollowers
from headroom.console.responses import Body, listed, stamp
from headroom.console.times import Time
from headroom.console.view import View
from headroom.console.view_context import InContext, Newest
from headroom.console.views.decisions import AskedSince, moment_s
from headroom.contract.printable import printable_json
from headroom.runtime.server.streams import TimedStream

#: Seconds between comments on an idle stream, so that no proxy closes it.
HEARTBEAT_S = 15.0
#: Seconds between two checks for a new snapshot. The stream gets an event ``snapshot`` for each,
#: because measured use can change without any other event. Lists leave these events out.
SNAPSHOT_S = 0.5
Follow = Annotated[
    bool,
    Query(
        description="false: return a list of the latest changes; true: stream server-sent events.",
        examples=["false"],
    ),
]
OfNode = Annotated[
    str | None,
    Query(description="List only changes of this node and its devices.", examples=["gpu-a"]),
]
LastEventId = Annotated[
    str | None,
    Header(alias="Last-Event-ID", description="Continue after this event. EventSource sends it."),
]


class EventView(View):
    """One change. Fields that do not apply are null."""

    id: str
    """Unique on this replica. Send it as Last-Event-ID to continue after this event."""
    at: Time
    snapshot_generation: int
    kind: str
    node: str | None
    device: str | None
    namespace: str | None
    name: str | None
    uid: str | None
    decision_id: str | None
    cause: str | None
    message: str | None


class EventsBody(Body):
    events: list[EventView]
    """Oldest first."""


routes = APIRouter()


@routes.get(
    "/v1/events",
    response_model=EventsBody,
    responses={
        200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}},
        503: {"description": "Too many clients follow the stream"},
    },
)
async def events(
    context: InContext,
    snap: Newest,
    since: AskedSince = None,
    node: OfNode = None,
    follow: Follow = True,
    last_event_id: LastEventId = None,
) -> Response:
    """Stream or list the changes on this replica: reservations made and removed, decisions, lost
    reports, unhealthy devices, missed predictions. The last 4,096 are kept."""
    feed, replica = context.feed, context.replica
    after = _number(last_event_id, replica)
    # The id is exact, but the clock may have been set back since then.
    from_s = float("-inf") if since is None or after else moment_s(since, context.wall_s())
    if not follow:
        body = EventsBody(**context.head(snap), events=[])
        past = feed.past(after, from_s)
        found = (_view(each, replica) for each in past if node is None or each.node == node)
        return listed(body, "events", found)
    try:
        follower = feed.join()
    except TooManyFollowers:
        raise HTTPException(
            503, f"{MOST_FOLLOWERS} clients follow the stream already; poll with follow=false"
        ) from None
    # No event is lost between the two calls, because both run on the event loop without a pause.
    past = feed.past(after, from_s)
    pieces = _stream(follower, past, replica, node, lambda: context.cluster.generation)
    return TimedStream(pieces, lambda: feed.leave(follower))


async def _stream(
    follower: Follower,
    past: list[FeedEvent],
    replica: str,
    node: str | None,
    generation: Callable[[], int],
) -> AsyncGenerator[bytes]:
    """Yield the past events, and then new events until the feed closes or drops the follower. If
    ``node`` is set, yield only its events."""
    yield b"retry: 2000\n\n"  # milliseconds before the browser reconnects
    for feed_event in past:
        if node is None or feed_event.node == node:
            yield _as_sse(_view(feed_event, replica))
    known, idle_s = generation(), 0.0
    while not follower.dropped:
        try:
            newest = await asyncio.wait_for(follower.queue.get(), SNAPSHOT_S)
        except TimeoutError:
            idle_s += SNAPSHOT_S
            if (now := generation()) != known:
                known, idle_s = now, 0.0
                yield f"event: snapshot\ndata: {now}\n\n".encode()
            elif idle_s >= HEARTBEAT_S:
                idle_s = 0.0
                yield b": nothing new\n\n"
            continue
        if newest is None:
            return
        idle_s = 0.0
        of_node = node is None or newest.node == node
        yield _as_sse(_view(newest, replica)) if of_node else b": another node\n\n"


def _view(feed_event: FeedEvent, replica: str) -> EventView:
    fields = {name: getattr(feed_event, name, None) or None for name in EventView.model_fields}
    fields["id"] = f"{replica}.{feed_event.number}"
    fields |= {"at": stamp(feed_event.at_s), "snapshot_generation": feed_event.generation}
    return EventView.model_validate(fields)


def _as_sse(view: EventView) -> bytes:
    data = printable_json(view.model_dump_json())
    return f"id: {view.id}\nevent: {view.kind}\ndata: {data}\n\n".encode()


def _number(last: str | None, replica: str) -> int:
    """Return the number in an event id of this replica. For any other id, return 0, which precedes
    all events."""
    name, _, number = (last or "").rpartition(".")
    return int(number) if name == replica and number.isdecimal() else 0
