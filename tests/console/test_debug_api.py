"""Checks that the views show the data that filter uses for its decisions."""

import asyncio
import re
import threading
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from extender.metrics import Telemetry
from headroom.console.app import console_app
from headroom.console.feed.journals import Journals
from headroom.console.responses import chunked, json_parts
from headroom.console.view_context import Context
from headroom.contract.kube import ObjectMeta, Pod
from headroom.contract.watched import NodeSeen, PodSeen
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.journal.journal import Journal
from headroom.core.placement.policy import Rules
from headroom.core.placement.snapshot import Snapshot
from tests.builders import kube_node
from tests.processes import starts_processes
from tests.serving import Server, binding, offer, pod, serving
from tests.waiting import until

GI = 1 << 30
FLEET = """
nodes:
  - {name: shared, gpus: 1, memory: 24Gi, sharing: time-slicing, replicas: 4}
  - {name: whole, gpus: 2, memory: 40Gi, reserved: 1Gi}
"""


class Named(BaseModel):
    name: str


class Listing(BaseModel):
    before: list[str]
    pods: list[Named]
    after: int


@pytest.fixture
@starts_processes
def server() -> Iterator[Server]:
    with serving(FLEET) as running:
        yield running


def test_a_rejected_pod_is_explained_with_numbers_and_suggestions(server: Server) -> None:
    holder = pod("holder", "20Gi")
    server.post("/filter", offer(holder, "shared"))
    server.post("/bind", binding(holder, "shared"))
    server.post("/filter", offer(pod("waits", "50Gi"), "shared", "whole"))
    told = server.get("/v1/explain?pod=default/waits").json()
    assert told["api_version"] == "headroom.gpu/v1"
    assert (told["verdict"], told["bound_to"], told["fits"]) == ("rejected", None, 0)
    assert told["reasons"] == [
        {
            "reason": "memory_on_any",
            "message": "insufficient GPU memory on any device",
            "nodes": 2,
            "evictable": True,
        }
    ]
    whole, shared = told["nearest"]
    assert (whole["node"], whole["short_bytes"]) == ("whole", 11 * GI)
    assert (shared["node"], shared["short_bytes"]) == ("shared", 46 * GI)
    assert shared["candidates"][0]["device"]["holders"][0]["name"] == "holder"
    assert told["suggestions"] == [
        "if the program needs no more than 39Gi, lower headroom.gpu/vram to it: that fits now"
    ]
    assert told["last_decision"]["filter"]["offered"] == 2
    assert told["last_decision"]["decision_id"] == "uid-waits.1"
    assert server.post("/filter", offer(pod("lower", "39936Mi"), "whole")).json()["NodeNames"]


def test_every_term_of_the_equation_is_shown_and_adds_up(server: Server) -> None:
    for node in server.get("/v1/nodes").json()["nodes"]:
        for d in node["devices"]:
            assert d["allocatable_bytes"] == (
                d["memory_bytes"] - d["driver_reserve_bytes"] - d["node_reserve_bytes"]
            )
            assert d["reserved_total_bytes"] == (
                d["pods_reserved_bytes"] + d["pods_unconfirmed_bytes"]
            )
            assert d["headroom_bytes"] == d["allocatable_bytes"] - (
                d["reserved_total_bytes"] + d["unreserved_pods_bytes"] + d["unattributed_bytes"]
            )


def test_unknown_pod_and_node_are_404_with_a_hint(server: Server) -> None:
    for path in ("/v1/explain?pod=default/unknown", "/v1/nodes/nowhere"):
        reply = server.get(path)
        assert reply.status == 404
        assert "detail" in reply.json()


def test_probes_and_metrics_are_served(server: Server) -> None:
    assert (server.get("/healthz").status, server.get("/healthz").body) == (200, b"ok\n")
    assert server.get("/readyz").status == 200
    server.post("/filter", offer(pod("p", "50Gi"), "shared"))
    counted = 'headroom_verb_duration_seconds_count{verb="filter"} 1.0'
    # Wait, because the metrics are updated after the response is sent.
    until(lambda: counted in server.get("/metrics").body.decode(), "the call is counted")
    text = server.get("/metrics").body.decode()
    (cpu_s,) = re.findall(r'headroom_verb_cpu_seconds_total{verb="filter"} (\S+)', text)
    assert 0.0 < float(cpu_s) < 5.0
    assert 'headroom_verb_cpu_seconds_total{verb="bind"}' not in text
    assert 'headroom_rejected_nodes_total{reason="memory_on_any"} 1.0' in text
    assert "# TYPE headroom_overcommitted_bytes gauge" in text
    assert "headroom_overcommitted_bytes{" not in text  # No node is ready.


def test_the_api_serves_its_openapi_document(server: Server) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    assert {"/v1/nodes", "/v1/nodes/{name}", "/v1/explain"} <= set(paths)


def test_embedded_routes_reject_invalid_requests_and_change_nothing(server: Server) -> None:
    before = server.get("/v1/nodes").json()["nodes"]
    assert server.debug_post("/embedded/v1/reports", {"node": "shared"}).status == 400
    nobody = [{"node": "shared", "status": {}}, {"node": "nobody", "status": {}}]
    assert server.debug_post("/embedded/v1/reports", nobody).status == 404
    assert server.delete("/embedded/v1/pods/default/nobody").status == 404
    after = server.get("/v1/nodes").json()["nodes"]
    assert [node["devices"] for node in after] == [node["devices"] for node in before]


def context(cluster: Cluster) -> Context:
    telemetry, clocks = Telemetry(CollectorRegistry()), (lambda: 0.0, lambda: 0.0)
    return Context(cluster, Journals("one", Journal()), telemetry, lambda: "", *clocks)


class Owned(Cluster):
    """Records the thread of each snapshot request as if the snapshot had to be built."""

    def __init__(self, writer: ClusterWriter) -> None:
        super().__init__(writer.parts)
        self.asked_by: list[int] = []

    def snapshot(self) -> Snapshot:
        self.asked_by.append(threading.get_ident())
        return super().snapshot()


@pytest.mark.parametrize(
    "path",
    ["/metrics", "/v1/nodes", "/v1/nodes/n", "/v1/drift", "/v1/explain?pod=default/p"],
)
def test_only_the_event_loop_builds_snapshots(path: str) -> None:
    """A snapshot built by another thread during a change would hide the changed nodes forever."""

    async def play() -> None:
        writer = ClusterWriter(Rules(), stale_after_s=90.0, epoch_s=0.0)
        cluster = Owned(writer)
        waits = Pod(metadata=ObjectMeta(name="p", namespace="default", uid="u"))
        writer.apply([NodeSeen(kube_node()), PodSeen(waits)])
        app = console_app(context(cluster))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://debug") as client:
            answer = await client.get(path)
        assert answer.status_code in (200, 404), answer.text
        assert set(cluster.asked_by) == {threading.get_ident()}

    asyncio.run(play())


def test_a_view_of_many_nodes_is_sent_in_pieces_that_form_the_whole() -> None:
    misses = ['a "word", and "pods":[] within', ""]
    whole = Listing(before=misses, pods=[Named(name=f"{n} é" * n) for n in range(400)], after=1)
    empty = whole.model_copy(update={"pods": []})
    told: list[str] = []

    def views() -> Iterator[Named]:
        for view in whole.pods:
            told.append(view.name)
            yield view

    chunks = []
    for chunk in chunked(json_parts(empty, "pods", views())):
        chunks.append(chunk)
        assert sum(map(len, chunks)) + 10_000 > sum(map(len, told))  # built while it is sent
    assert len(chunks) > 2
    assert b"".join(chunks).decode() == whole.model_dump_json()
    nothing = b"".join(json_parts(empty, "pods", iter(())))
    assert nothing.decode() == empty.model_dump_json()


def test_the_lag_of_the_event_loop_is_a_metric(server: Server) -> None:
    def samples() -> float:
        text = server.get("/metrics").body.decode()
        (count,) = (
            line.split()[1]
            for line in text.splitlines()
            if line.startswith("headroom_loop_lag_seconds_count")
        )
        assert 'headroom_loop_lag_seconds_bucket{le="0.005"}' in text
        return float(count)

    until(lambda: samples() > 2, "the loop's lag is sampled")
