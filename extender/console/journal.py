"""The stream by which other processes follow what this extender decides."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query
from starlette.responses import Response

from extender.console.context import Context
from extender.console.events import TimedStream
from extender.observability.journal_stream import Cursor, StateLine, encode

MAX_STREAMS = 8
#: Seconds between two checks for new lines, and between two state lines on an idle stream.
CHECK_S = 0.25
STATE_S = 5.0
#: Maximum number of lines sent at once, so that other tasks get their turn.
_CHUNK_LINES = 50
NDJSON = "application/x-ndjson"

AskedReplica = Annotated[
    str | None, Query(description="The extender that ``after`` was read from.", examples=["6f0c"])
]
AskedAfter = Annotated[
    int, Query(ge=0, description="Version of the last decision that was read.", examples=[1234])
]


def router(context: Context) -> APIRouter:
    routes = APIRouter()
    streams = 0

    def state() -> bytes:
        process = context.process()
        return encode(
            StateLine(
                context.replica,
                process.version,
                context.wall_s(),
                context.cluster.snapshot().generation,
                context.unready(),
                context.settings().mode,
                tuple(context.journal.own.schedulers),
            )
        )

    async def pieces(cursor: Cursor) -> AsyncGenerator[bytes]:
        yield state()
        idle_s = 0.0
        while not context.feed.closed:
            chunk: list[bytes] = []
            for line in cursor.lines():
                chunk.append(encode(line))
                if len(chunk) == _CHUNK_LINES:
                    yield b"".join(chunk)
                    chunk, idle_s = [], STATE_S
            if chunk or idle_s >= STATE_S:
                yield b"".join([*chunk, state()])
                idle_s = 0.0
            await asyncio.sleep(CHECK_S)
            idle_s += CHECK_S

    @routes.get(
        "/v1/journal",
        responses={
            200: {"content": {NDJSON: {"schema": {"type": "string"}}}},
            503: {"description": "Too many clients read the journal"},
        },
    )
    async def journal(replica: AskedReplica = None, after: AskedAfter = 0) -> Response:
        """Stream decisions, assumed binds and nominations of this extender to consoles, as lines of
        JSON. A line replaces the earlier lines of its decision; the line of assumed binds and
        nominations replaces the one before. The stream begins with all decisions on record, or
        with those after the version ``after``."""
        nonlocal streams
        if streams >= MAX_STREAMS:
            raise HTTPException(503, f"{MAX_STREAMS} clients read the journal already")

        def left() -> None:
            nonlocal streams
            streams -= 1

        streams += 1
        after = after if replica == context.replica else 0
        cursor = Cursor(context.journal.own, after, context.assumed)
        return TimedStream(pieces(cursor), left, NDJSON)

    return routes
