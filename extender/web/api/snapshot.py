"""All that decides, to be replayed elsewhere: ``headroom replay``."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Query
from starlette.responses import Response, StreamingResponse

from extender.cluster.inputs import FORMAT, Head, decided, facts, pods, settled
from extender.cluster.redaction import Redaction
from extender.placement.snapshot import Snapshot
from extender.web.api.answers import JSON, on_threads
from extender.web.api.asked import paced
from extender.web.api.context import Context
from extender.web.bodies import stamp

#: The last about so many pods.
MOST_DECISIONS = 100
#: Sent at once.
_CHUNK_BYTES = 1 << 16
_encode = msgspec.json.Encoder(order="deterministic").encode

Redact = Annotated[
    bool,
    Query(description="Numbers instead of names, and no sentences of agents.", examples=["true"]),
]


def router(context: Context) -> APIRouter:
    routes = APIRouter()
    Newest = Annotated[Snapshot, Depends(context.newest)]
    cluster = context.cluster

    @routes.get(
        "/v1/snapshot",
        response_class=Response,
        responses={200: {"content": {JSON: {"schema": {"type": "object"}}}}},
    )
    def snapshot(snap: Newest, redact: Redact = False) -> Response:
        """Nodes, reports, ledgers, pods, rules and the last decisions, in an order that is always
        the same; no values of variables. ``headroom replay FILE`` says of it what this replica
        says. But for ``head`` the same state is the same bytes."""
        head = Head(
            format=FORMAT,
            generated_at=stamp(context.wall_s()),
            snapshot_generation=snap.generation,
            redacted=redact,
            now_s=context.monotonic_s(),
            epoch_s=cluster.epoch_s,
        )
        rest, nodes, known = settled(cluster), facts(cluster, snap.nodes), pods(cluster)
        last = decided(context.journal.latest(MOST_DECISIONS))
        if redact:
            names = (terms.name for terms in snap.nodes)
            hidden = Redaction(cluster.rules, names, cluster.pods(), rest.namespaces)
            rest, nodes = hidden.settled(rest), map(hidden.facts, nodes)
            known, last = map(hidden.pod, known), map(hidden.decided, last)
        sections = {"nodes": nodes, "pods": known, "decisions": last}
        return StreamingResponse(
            on_threads(_chunks(context, {"head": head, "settled": rest}, sections)),
            media_type=JSON,
        )

    return routes


def _chunks(
    context: Context, first: dict[str, msgspec.Struct], sections: Mapping[str, Iterable[object]]
) -> Iterator[bytes]:
    """One JSON object, a line for each thing in it."""
    chunk = [b"{\n"]
    chunk += [b'"%b": %b,\n' % (name.encode(), _encode(one)) for name, one in first.items()]
    size, between = 0, b""
    for name, things in sections.items():
        chunk.append(b'%b"%b": [' % (between, name.encode()))
        between = b"\n"
        for piece in paced(context, map(_encode, things)):
            chunk += [between, piece]
            between = b",\n"
            size += len(piece)
            if size > _CHUNK_BYTES:
                yield b"".join(chunk)
                chunk, size = [], 0
        chunk.append(b"]")
        between = b",\n"
    yield b"".join([*chunk, b"\n}\n"])
