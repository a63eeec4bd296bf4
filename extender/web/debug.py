"""The debug API and its page: read-only views of what decides, on a port of their own.

Handlers are plain functions, which run on threads and encode their answers there: a view of the
whole fleet takes a while, and kube-scheduler's calls must not wait for it. So it is made and sent
piece by piece, by one thread at a time, which gives way to calls in between. What they read is
immutable; the snapshot is taken before them, on the event loop, which alone may make one.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
from fastapi import Depends, FastAPI, HTTPException
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse

from extender.cluster.state import ClusterState
from extender.journal import Journal
from extender.placement.equation import DeviceTerms
from extender.placement.explain import explain
from extender.placement.fit import fit
from extender.placement.request import VramRequest
from extender.placement.snapshot import Snapshot
from extender.telemetry import Telemetry
from extender.web.calls import Calls
from extender.web.drift import DriftBody, drift_body, drift_views
from extender.web.views import (
    ExplainBody,
    NodeBody,
    NodesBody,
    explain_body,
    node_view,
    stamp,
)

JSON = "application/json"
#: Sent at once, of a view that is made piece by piece.
_CHUNK_BYTES = 1 << 16
_PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def debug_app(
    cluster: ClusterState,
    journal: Journal,
    telemetry: Telemetry,
    calls: Calls,
    unready: Callable[[], str],
    monotonic_s: Callable[[], float],
    wall_s: Callable[[], float],
) -> FastAPI:
    """The ASGI application of the debug port; it describes itself in /openapi.json."""
    app = FastAPI(
        title="Headroom debug API",
        description="Why pods are where they are, from the objects that decided.",
        version="v1",
        # The usual viewers are loaded from elsewhere, which a closed network does not have.
        docs_url=None,
        redoc_url=None,
    )

    #: Each thread that computes has its share of the interpreter; together they have one.
    computes = threading.Lock()

    async def newest() -> Snapshot:
        return cluster.snapshot()

    Newest = Annotated[Snapshot, Depends(newest)]

    def streamed(body: BaseModel, name: str, views: Iterator[BaseModel]) -> Response:
        """The body, whose list of this name is empty, with these views in it."""
        return StreamingResponse(_chunks(body, name, views, calls, computes), media_type=JSON)

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    def page() -> str:
        return _PAGE

    @app.get("/healthz", response_class=PlainTextResponse)
    def healthz() -> str:
        """Whether the process answers at all."""
        return "ok\n"

    @app.get("/readyz", response_class=PlainTextResponse)
    def readyz() -> Response:
        """Whether decisions can be made; 503 with what is missing when not."""
        missing = unready()
        return PlainTextResponse(f"{missing or 'ok'}\n", 503 if missing else 200)

    @app.get("/metrics", response_class=PlainTextResponse)
    def metrics(snap: Newest) -> Response:
        telemetry.generation.set(snap.generation)
        return Response(generate_latest(telemetry.registry), media_type=CONTENT_TYPE_LATEST)

    def overcommitted_bytes() -> int:
        return sum(over.beyond_bytes for over in cluster.overcommits.now())

    @app.get("/v1/nodes", response_model=NodesBody)
    def nodes(snap: Newest) -> Response:
        """Every node with every term of the equation of every device."""
        body = NodesBody(
            generatedAt=stamp(wall_s()),
            snapshot_generation=snap.generation,
            nodes=[],
            overcommitted_bytes=overcommitted_bytes(),
        )
        views = (
            node_view(node, cluster, monotonic_s(), wall_s())
            for node in sorted(snap.nodes, key=lambda node: node.name)
        )
        return streamed(body, "nodes", views)

    @app.get("/v1/nodes/{name}", response_model=NodeBody)
    def one_node(name: str, snap: Newest) -> Response:
        """One node, as in the list of all."""
        if name not in snap.row_of:
            raise HTTPException(
                404, f"node {name} is not known; GET /v1/nodes lists those that are"
            )
        return _encoded(
            NodeBody(
                generatedAt=stamp(wall_s()),
                snapshot_generation=snap.generation,
                node=node_view(snap.nodes[snap.row_of[name]], cluster, monotonic_s(), wall_s()),
            )
        )

    @app.get("/v1/drift", response_model=DriftBody)
    def drift(snap: Newest, pods: bool = True) -> Response:
        """Every pod with a promise: what it was promised and what it uses, where it was predicted
        to be and where it is; how many predictions were right, and the misses one by one.
        ``pods=false`` leaves out the pods."""
        body = drift_body(cluster, snap.generation, wall_s(), monotonic_s())
        return streamed(body, "pods", drift_views(cluster) if pods else iter(()))

    @app.get("/v1/explain/pods/{namespace}/{name}", response_model=ExplainBody)
    def explain_pod(namespace: str, name: str, snap: Newest) -> Response:
        """Why the pod waits, or where it is: its request as understood, reasons counted, the
        nearest nodes with their devices, what would help."""
        decision = journal.of_pod(namespace, name)
        seen = cluster.pod_named(namespace, name)
        pod = seen or (decision.pod if decision else None)
        if pod is None:
            raise HTTPException(
                404,
                f"pod {namespace}/{name} was neither seen in the cluster nor offered by "
                "kube-scheduler; does it ask for a GPU?",
            )
        request = cluster.understand(pod)
        explanation = None
        if isinstance(request, VramRequest):
            rows = np.arange(len(snap.nodes), dtype=np.int64)
            with computes:
                calls.give_way()
                verdicts = fit(request, snap, rows, monotonic_s())
                market = cluster.usual.market
                explanation = explain(verdicts, cluster.rules.weights, market=market)
        changed = cluster.edits.of(pod.metadata.uid)
        now_s, at_s = monotonic_s(), wall_s()

        def aged(terms: DeviceTerms) -> float | None:
            return cluster.activities.age_s(terms, now_s, at_s)

        return _encoded(
            explain_body(pod, changed, decision, request, explanation, snap, aged, at_s)
        )

    return app


def _encoded(body: BaseModel) -> Response:
    return Response(body.model_dump_json(), media_type=JSON)


def _chunks(
    body: BaseModel, name: str, views: Iterable[BaseModel], calls: Calls, computes: threading.Lock
) -> Iterator[bytes]:
    """The JSON of the body with the views in its empty list of this name."""
    before, _, after = body.model_dump_json().partition(f'"{name}":[]')
    chunk = [f'{before}"{name}":['.encode()]
    size, views, between = 0, iter(views), b""
    while True:
        with computes:
            for view in views:
                piece = view.model_dump_json().encode()
                chunk += [between, piece]
                size, between = size + len(piece), b","
                calls.give_way()
                if size > _CHUNK_BYTES:
                    break
            else:
                break
        yield b"".join(chunk)
        chunk, size = [], 0
    yield b"".join([*chunk, b"]", after.encode()])
