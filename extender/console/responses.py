"""How views are answered: as JSON, whole or in pages, or not at all if the caller has the newest
already.

A list is encoded and sent in chunks, so that an answer of any length takes little memory.
"""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Annotated, Any

from fastapi import Depends, Header, Query
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

JSON = "application/json"
#: Minimum size of a chunk, except for the last.
_CHUNK_BYTES = 1 << 16


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
    body: BaseModel,
    name: str,
    views: Iterable[BaseModel],
    tag: str | None = None,
) -> Response:
    """The body with these views in its list ``name``, which is empty."""
    return streamed(json_parts(body, name, views), JSON, _headers(tag))


def streamed(
    parts: Iterable[bytes], media_type: str, headers: Mapping[str, str] | None = None
) -> Response:
    """The parts one after another, each made when it is sent."""
    return StreamingResponse(_on_threads(chunked(parts)), 200, headers, media_type)


async def _on_threads(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """What Starlette makes of an iterator, but for its end: there that is an exception that holds
    on to itself, and with it to all that the chunks were made of, until garbage is collected."""
    while (chunk := await run_in_threadpool(next, chunks, None)) is not None:
        yield chunk


def chunked(parts: Iterable[bytes]) -> Iterator[bytes]:
    chunk = bytearray()
    for part in parts:
        chunk += part
        if len(chunk) > _CHUNK_BYTES:
            yield bytes(chunk)
            chunk.clear()
    yield bytes(chunk)


def json_parts(body: BaseModel, name: str, views: Iterable[BaseModel]) -> Iterator[bytes]:
    """The JSON of the body with the views in its empty list of this name."""
    before, _, after = body.model_dump_json(by_alias=True).partition(f'"{name}":[]')
    yield f'{before}"{name}":['.encode()
    between = ""
    for view in views:
        yield (between + view.model_dump_json(by_alias=True)).encode()
        between = ","
    yield f"]{after}".encode()


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
