"""How views are answered: as JSON or as a table, whole or in pages, or not at all where the caller
has them already.

A view of the whole fleet takes a while, and kube-scheduler's calls must not wait for it. So it is
made and sent piece by piece, by one thread at a time, which gives way to calls in between.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Header, Query
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from extender.web.api.context import Context
from extender.web.api.tables import Columns, Table, written

JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
#: Sent at once, of a view that is made piece by piece.
_CHUNK_BYTES = 1 << 16

T = TypeVar("T")
V = TypeVar("V", bound=BaseModel)


class Form(Enum):
    JSON = "json"
    TABLE = "table"


AskedForm = Annotated[
    Form,
    Query(alias="format", description="table: plain text in columns.", examples=["table"]),
]
Held = Annotated[
    str | None,
    Header(
        alias="If-None-Match",
        description="The ETag of an answer that the caller has: 304 where it still holds.",
    ),
]
#: Of views that come as a table too, and with an ETag: what /openapi.json says besides.
TABLE_TOO: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}}
}
TAGGED: dict[int | str, dict[str, Any]] = {
    304: {"description": "Nothing has changed but generatedAt and ages, which count on"}
}
UNKNOWN: dict[int | str, dict[str, Any]] = {404: {"description": "There is no such thing"}}


class Page(BaseModel):
    """Which part of a list is asked for."""

    limit: int | None
    after: str


def _page(
    limit: Annotated[
        int | None, Query(ge=1, le=100_000, description="At most so many.", examples=[100])
    ] = None,
    after: Annotated[
        str,
        Query(
            alias="continue",
            max_length=512,
            description="Go on after this, as the answer before said.",
            examples=["node-17"],
        ),
    ] = "",
) -> Page:
    return Page(limit=limit, after=after)


AskedPage = Annotated[Page, Depends(_page)]


def holds(held: str | None, tag: str) -> bool:
    """Whether the caller's If-None-Match names this tag."""
    return held is not None and (
        held.strip() == "*" or tag in (each.strip() for each in held.split(","))
    )


def unchanged(tag: str) -> Response:
    return Response(status_code=304, headers=_headers(tag))


def encoded(body: BaseModel, tag: str | None = None) -> Response:
    return Response(body.model_dump_json(by_alias=True), media_type=JSON, headers=_headers(tag))


def listed(
    context: Context,
    form: Form,
    body: BaseModel,
    name: str,
    views: Iterable[V],
    table: Table[V],
    tag: str | None = None,
    more: str | None = None,
) -> Response:
    """The body, whose list of this name is empty, with these views in it; or these as a table, with
    a last line where there are ``more`` to continue with."""
    if form is Form.TABLE:
        lines = table_chunks(context, views, table, more)
        return StreamingResponse(on_threads(lines), media_type=TEXT, headers=_headers(tag))
    chunks = json_chunks(context, body, name, views)
    return StreamingResponse(on_threads(chunks), media_type=JSON, headers=_headers(tag))


async def on_threads(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """What Starlette makes of an iterator, but for its end: there that is an exception that holds
    on to itself, and with it to all that the chunks were made of, until garbage is collected."""
    while (chunk := await run_in_threadpool(next, chunks, None)) is not None:
        yield chunk


def only(context: Context, found: Iterable[T], wanted: Callable[[T], bool]) -> list[T]:
    """Those that are wanted; calls go before the next one is looked at."""
    some = []
    with context.computes:
        for each in found:
            if wanted(each):
                some.append(each)
            context.calls.give_way()
    return some


def json_chunks(
    context: Context, body: BaseModel, name: str, views: Iterable[BaseModel]
) -> Iterator[bytes]:
    """The JSON of the body with the views in its empty list of this name."""
    before, _, after = body.model_dump_json(by_alias=True).partition(f'"{name}":[]')
    chunk = [f'{before}"{name}":['.encode()]
    size, views, between = 0, iter(views), b""
    while True:
        with context.computes:
            for view in views:
                piece = view.model_dump_json(by_alias=True).encode()
                chunk += [between, piece]
                size, between = size + len(piece), b","
                context.calls.give_way()
                if size > _CHUNK_BYTES:
                    break
            else:
                break
        yield b"".join(chunk)
        chunk, size = [], 0
    yield b"".join([*chunk, b"]", after.encode()])


def table_chunks(
    context: Context, views: Iterable[V], table: Table[V], more: str | None
) -> Iterator[bytes]:
    """The views in columns, which are as wide as the widest of all fields in them."""
    rows: list[Sequence[str]] = [table.headers]
    columns = Columns(table.headers)
    with context.computes:
        for view in views:
            for fields in table.rows(view):
                rows.append(tuple(map(written, fields)))
                columns.fit(rows[-1])
            context.calls.give_way()
    chunk, size = list[str](), 0
    for row in rows:
        chunk.append(columns.line(row))
        size += len(chunk[-1])
        if size > _CHUNK_BYTES:
            yield "".join(chunk).encode()
            chunk, size = [], 0
            context.calls.give_way()
    if more:
        chunk.append(f"# there are more: continue={more}\n")
    yield "".join(chunk).encode()


def _headers(tag: str | None) -> dict[str, str]:
    # no-cache: kept, and asked about each time.
    return (
        {"Cache-Control": "no-store"}
        if tag is None
        else {
            "ETag": tag,
            "Cache-Control": "no-cache",
        }
    )
