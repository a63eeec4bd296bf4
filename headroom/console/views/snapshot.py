"""Dumps all inputs of decisions for ``headroom replay``."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from starlette.responses import Response

from headroom.console.facts.redaction import Redaction
from headroom.console.responses import JSON, stamp, streamed
from headroom.console.view_context import InContext, Newest
from headroom.contract.printable import printable_json
from headroom.core.journal.dump import FORMAT, Head, decided, facts, pods, settled

#: Maximum number of decisions in a dump. The latest are included.
MOST_DECISIONS = 100
_encoder = msgspec.json.Encoder(order="deterministic")

Redact = Annotated[
    bool,
    Query(
        description="true: replace names with numbers, and leave out messages of agents.",
        examples=["true"],
    ),
]

routes = APIRouter()


@routes.get(
    "/v1/snapshot",
    response_class=Response,
    responses={200: {"content": {JSON: {"schema": {"type": "object"}}}}},
)
def snapshot(context: InContext, snap: Newest, redact: Redact = False) -> Response:
    """Dump nodes, reports, ledgers, pods, rules and the last decisions, in a fixed order,
    without the values of environment variables. ``headroom replay FILE`` gives the same
    explanations as this replica. Except for ``head``, equal states give equal bytes."""
    cluster = context.cluster
    head = Head(
        format=FORMAT,
        generated_at=stamp(context.wall_s()),
        snapshot_generation=snap.generation,
        redacted=redact,
        now_s=context.monotonic_s(),
        epoch_s=cluster.epoch_s,
    )
    general, nodes, known_pods = settled(cluster), facts(cluster, snap.nodes), pods(cluster)
    latest = decided(context.journal.latest(MOST_DECISIONS))
    if redact:
        names = (terms.name for terms in snap.nodes)
        spaces = {*general.namespaces, *general.exempt}
        redaction = Redaction(cluster.rules, names, cluster.pods(), spaces)
        general, nodes = redaction.settled(general), map(redaction.facts, nodes)
        known_pods, latest = map(redaction.pod, known_pods), map(redaction.decided, latest)
    lists = {"nodes": nodes, "pods": known_pods, "decisions": latest}
    return streamed(_parts({"head": head, "settled": general}, lists), JSON)


def _parts(
    objects: dict[str, msgspec.Struct], lists: Mapping[str, Iterable[object]]
) -> Iterator[bytes]:
    """Yield one JSON object in parts: first the objects, then the lists. Each object and each list
    item is on its own line."""
    yield b"{"
    between = b"\n"
    for name, one in objects.items():
        yield b'%b"%b": %b' % (between, name.encode(), _encoded(one))
        between = b",\n"
    for name, items in lists.items():
        yield b',\n"%b": [' % name.encode()
        between = b"\n"
        for item in items:
            yield between + _encoded(item)
            between = b",\n"
        yield b"]"
    yield b"\n}\n"


def _encoded(item: object) -> bytes:
    return printable_json(_encoder.encode(item).decode()).encode()
