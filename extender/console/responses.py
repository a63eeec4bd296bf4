"""Answers of views: JSON bodies, pages of lists, and 304 if the caller has the newest answer.

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


IfNoneMatch = Annotated[
    str | None,
    Header(
        alias="If-None-Match",
        description="The ETag of an earlier answer: 304 if it is still valid.",
    ),
]
#: Additional answers in /openapi.json of views with an ETag.
TAGGED: dict[int | str, dict[str, Any]] = {
    304: {"description": "Nothing but generatedAt and ages has changed"}
}
UNKNOWN: dict[int | str, dict[str, Any]] = {404: {"description": "The object is not known"}}


class Page(BaseModel):
    """The requested part of a list."""

    limit: int | None
    after: str


def _page(
    limit: Annotated[
        int | None, Query(ge=1, le=100_000, description="Maximum number of items.", examples=[100])
    ] = None,
    after: Annotated[
        str,
        Query(
            alias="continue",
            max_length=512,
            description="Continue after this; the value of ``continue`` in the previous answer.",
            examples=["node-17"],
        ),
    ] = "",
) -> Page:
    return Page(limit=limit, after=after)


AskedPage = Annotated[Page, Depends(_page)]


def is_current(etag: str | None, tag: str) -> bool:
    """Return whether the caller's If-None-Match contains this tag."""
    return etag is not None and (
        etag.strip() == "*" or tag in (each.strip() for each in etag.split(","))
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
    """Return the body with the views in its empty list ``name``."""
    return streamed(json_parts(body, name, views), JSON, _headers(tag))


def streamed(
    parts: Iterable[bytes], media_type: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response that makes each part when it is sent."""
    return StreamingResponse(_on_threads(chunked(parts)), 200, headers, media_type)


async def _on_threads(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Iterate on threads, like Starlette, but without its exception at the end.

    That exception is part of a reference cycle, which keeps the data of all chunks until the next
    garbage collection.
    """
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
    """Yield the JSON of the body with the views in its empty list ``name``."""
    before, _, after = body.model_dump_json(by_alias=True).partition(f'"{name}":[]')
    yield f'{before}"{name}":['.encode()
    between = ""
    for view in views:
        yield (between + view.model_dump_json(by_alias=True)).encode()
        between = ","
    yield f"]{after}".encode()


def _headers(tag: str | None) -> dict[str, str]:
    # no-cache: clients may store the answer, but revalidate it each time.
    return (
        {"Cache-Control": "no-store"}
        if tag is None
        else {
            "ETag": tag,
            "Cache-Control": "no-cache",
        }
    )
