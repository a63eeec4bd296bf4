"""How views are answered: as JSON, whole or in pages, or not at all if the caller has the newest
already.

A view of the whole fleet takes a while, and kube-scheduler's calls must not wait for it. So it is
made and sent piece by piece, by one thread at a time, which gives way to calls in between.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Header, Query
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from extender.web.api.context import Context

JSON = "application/json"
#: Sent at once, of a view that is made piece by piece.
_CHUNK_BYTES = 1 << 16

T = TypeVar("T")

Held = Annotated[
    str | None,
    Header(
        alias="If-None-Match",
        description="The ETag of an answer that the caller has: 304 where it still holds.",
    ),
]
#: What /openapi.json says of views with an ETag.
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
    body: BaseModel,
    name: str,
    views: Iterable[BaseModel],
    tag: str | None = None,
) -> Response:
    """The body with these views in its list ``name``, which is empty."""
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
