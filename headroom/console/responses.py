"""Common parts of answers: fields, JSON bodies, pages of lists, and ETags.

The name of every quantity ends with its unit. Absent values are null. A list is encoded and sent in
chunks, so even a long answer takes little memory.
"""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import Depends, Header, HTTPException, Query
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from headroom.console.times import Time
from headroom.console.view import View
from headroom.contract.printable import printable_json
from headroom.contract.reasons import Reason
from headroom.contract.timestamps import age
from headroom.core.placement.request import ContainerAsk
from headroom.core.rules.eligible_nodes import Obstacle

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
#: Additional responses of views with an ETag, for /openapi.json.
TAGGED: dict[int | str, dict[str, Any]] = {
    304: {"description": "Only generated_at and ages have changed"}
}
UNKNOWN: dict[int | str, dict[str, Any]] = {404: {"description": "The object is not known"}}
BAD_BODY: dict[int | str, dict[str, Any]] = {
    400: {"description": "The body is not JSON in UTF-8"},
    413: {"description": "The body is too large"},
}


class Body(View):
    """The fields that every body has."""

    api_version: str = "headroom.gpu/v1"
    generated_at: Time
    snapshot_generation: int


class Recomputed(View):
    """A result that this process computed from its newest snapshot.

    In contrast, a decision is a result that an extender recorded.
    """

    source: Literal["recomputed"] = "recomputed"


class Paged(Body):
    """A list, or one page of it."""

    matching: int
    """Number of all matching items."""
    remaining: int
    """Number of matching items after this page."""
    continue_: str | None = Field(serialization_alias="continue")
    """Value of the query parameter ``continue`` for the next page; null on the last page."""


class AskView(View):
    container: str
    resource: str
    count: int
    amount: str
    """As written, such as 8Gi or 25%; "1 replica" if neither the pod nor its namespace has an
    annotation."""
    source: str
    """"annotation", "namespace", "recommendation" or "replica"."""
    limit: str | None
    """Its limit as written, such as 20Gi or 50%; null if it has none."""


class ReasonView(View):
    reason: str
    """A reason of Headroom. For nodes that kube-scheduler does not offer: cordoned, taint,
    selector or affinity."""
    message: str
    nodes: int
    evictable: bool
    """Whether evicting pods could resolve it."""


def ask_view(ask: ContainerAsk) -> AskView:
    return AskView(
        container=ask.name,
        resource=ask.resource,
        count=ask.count,
        amount=ask.amount_text,
        source=ask.source,
        limit=ask.limit_text or None,
    )


def reason_view(reason: Reason, nodes: int) -> ReasonView:
    return ReasonView(
        reason=reason.code, message=reason.sentence, nodes=nodes, evictable=reason.evictable
    )


def obstacle_view(obstacle: Obstacle, nodes: int) -> ReasonView:
    return ReasonView(reason=obstacle.code, message=obstacle.sentence, nodes=nodes, evictable=False)


def counted(count: int, noun: str) -> str:
    """Return the count with its noun, such as ``1 node`` or ``2 nodes``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def stamp(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="milliseconds")


def stamp_again(text: str) -> str | None:
    """Return an RFC 3339 time in the form of ``stamp``, or None if it is not a time."""
    at_s = age(text, 0.0)
    try:
        return None if at_s is None else stamp(-at_s)
    except (ValueError, OverflowError):  # in UTC, the year is below 1 or above 9999
        return None


class Page(View):
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
            description="Value of ``continue`` in the previous answer.",
            examples=["node-17"],
        ),
    ] = "",
) -> Page:
    return Page(limit=limit, after=after)


AskedPage = Annotated[Page, Depends(_page)]
PodKey = Annotated[
    str,
    Query(
        pattern="^[^/]+/[^/]+$",
        max_length=512,
        description="Namespace and name of the pod.",
        examples=["default/trainer-0"],
    ),
]


def _of_pod(pod: PodKey) -> tuple[str, str]:
    namespace, _, name = pod.partition("/")
    return namespace, name


#: Parameter of views about a pod: its namespace and name, from the query parameter ``pod``.
OfPod = Annotated[tuple[str, str], Depends(_of_pod)]
InNamespace = Annotated[
    str, Query(max_length=253, description="Only this namespace; default: all.", examples=["ml"])
]


def is_current(etag: str | None, tag: str) -> bool:
    """Return whether the caller's If-None-Match header contains this tag."""
    return etag is not None and (
        etag.strip() == "*" or tag in (each.strip() for each in etag.split(","))
    )


def unchanged(tag: str) -> Response:
    """Return status 304, because the client's copy is still valid."""
    return Response(status_code=304, headers=_headers(tag))


def encoded(body: View | str, tag: str | None = None) -> Response:
    text = body if isinstance(body, str) else as_json(body)
    return Response(text, media_type=JSON, headers=_headers(tag))


def as_json(body: View) -> str:
    """Return the body as JSON. Unprintable characters are escaped."""
    return printable_json(body.model_dump_json(by_alias=True))


def listed(body: View, name: str, views: Iterable[View], tag: str | None = None) -> Response:
    """Return the body, with ``views`` in its list ``name``, as a stream of chunks."""
    return streamed(json_parts(body, name, views), JSON, _headers(tag))


def joined(body: View, name: str, views: Iterable[View], tag: str | None = None) -> Response:
    """Return the same response as ``listed`` but unchunked, to share it between readers."""
    parts = json_parts(body, name, views)
    return Response(b"".join(parts), media_type=JSON, headers=_headers(tag))


def streamed(
    parts: Iterable[bytes], media_type: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response that computes each part only when it is sent."""
    return StreamingResponse(_on_threads(chunked(parts)), 200, headers, media_type)


async def _on_threads(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Iterate on threads, like Starlette, but without the exception that ends Starlette's
    iteration.

    The exception is part of a reference cycle, which would keep the data of all chunks in memory
    until the next garbage collection.
    """
    while (chunk := await run_in_threadpool(next, chunks, None)) is not None:
        yield chunk


def chunked(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Join small parts, because sending each part alone is slow."""
    chunk = bytearray()
    for part in parts:
        chunk += part
        if len(chunk) > _CHUNK_BYTES:
            yield bytes(chunk)
            chunk.clear()
    yield bytes(chunk)


def json_parts(body: View, name: str, views: Iterable[View]) -> Iterator[bytes]:
    """Yield the JSON of the body in parts, with ``views`` in its list ``name``."""
    before, _, after = as_json(body).partition(f'"{name}":[]')
    yield f'{before}"{name}":['.encode()
    between = ""
    for view in views:
        yield (between + as_json(view)).encode()
        between = ","
    yield f"]{after}".encode()


def _headers(tag: str | None) -> dict[str, str]:
    # no-cache allows clients to store the answer if they revalidate it each time.
    return (
        {"Cache-Control": "no-store"} if tag is None else {"ETag": tag, "Cache-Control": "no-cache"}
    )


def rounded_s(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def unknown_node(name: str) -> HTTPException:
    return HTTPException(404, f"node {name} is not known; GET /v1/nodes lists the known nodes")
