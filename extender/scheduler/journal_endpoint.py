"""Streams the decisions of this extender to other processes."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from headroom.core.journal.journal import Journal
from headroom.runtime.follow.journal_stream import Cursor, HoldsLine, StateLine, encode
from headroom.runtime.server.streams import TimedStream, counted

MAX_STREAMS = 8
#: Number of seconds between two checks for new lines, and between two state lines on an idle
#: stream.
CHECK_S = 0.25
STATE_S = 5.0
#: Maximum number of lines that are sent before the event loop serves other tasks.
_CHUNK_LINES = 50
NDJSON = "application/x-ndjson"
#: Attribute of ``app.state`` with the number of open streams.
_STREAMS = "journal_streams"

AskedReplica = Annotated[
    str | None, Query(description="The extender that ``after`` was read from.", examples=["6f0c"])
]
AskedAfter = Annotated[
    int, Query(ge=0, description="Version of the last decision that was read.", examples=[1234])
]


@dataclass(slots=True)
class JournalSource:
    """The parts of an extender that the stream reads."""

    #: Name of the extender.
    name: str
    journal: Journal
    #: Functions that return the current state line, and the current line about holds.
    state: Callable[[], StateLine]
    holds: Callable[[], HoldsLine] = HoldsLine
    #: True when the process ends, so that open streams end too.
    ended: bool = False


def journal_routes(source: JournalSource) -> APIRouter:
    """Return the route of the stream."""
    routes = APIRouter()

    @routes.get(
        "/v1/journal",
        responses={
            200: {"content": {NDJSON: {"schema": {"type": "string"}}}},
            503: {"description": "Too many clients read the journal"},
        },
    )
    async def journal(
        request: Request, replica: AskedReplica = None, after: AskedAfter = 0
    ) -> Response:
        """Stream the decisions of this extender, and the memory that it holds for pods, to
        consoles, as lines of JSON. A line replaces the earlier lines of its decision, and a line
        about holds replaces the previous line about holds. The stream begins with all decisions on
        record, or with the decisions after the version ``after``."""
        closed = counted(
            request.app.state, _STREAMS, MAX_STREAMS, "clients read the journal already"
        )
        known = after if replica == source.name else 0
        cursor = Cursor(source.journal, known, source.holds)
        return TimedStream(_lines(source, cursor), closed, NDJSON)

    return routes


async def _lines(source: JournalSource, cursor: Cursor) -> AsyncGenerator[bytes]:
    """Yield new lines as they appear. A state line is sent first, after new lines, and while the
    stream is idle."""
    yield encode(source.state())
    idle_s = 0.0
    while not source.ended:
        chunk: list[bytes] = []
        for line in cursor.lines():
            chunk.append(encode(line))
            if len(chunk) == _CHUNK_LINES:
                yield b"".join(chunk)
                # A state line follows the last of several chunks.
                chunk, idle_s = [], STATE_S
        if chunk or idle_s >= STATE_S:
            yield b"".join([*chunk, encode(source.state())])
            idle_s = 0.0
        await asyncio.sleep(CHECK_S)
        idle_s += CHECK_S
