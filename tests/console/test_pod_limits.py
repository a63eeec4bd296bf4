"""Checks that views and metrics show the limits and the classes of pods."""

from typing import Any

from prometheus_client import CollectorRegistry

from headroom.console.metrics import FleetCollector
from headroom.contract.kube import Pod
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from headroom.core.cluster.changes import Event
from headroom.core.placement.policy import Rules
from headroom.core.whatif.pending_pods import Pending
from headroom.kubectl.top_pods import pods
from headroom.kubectl.why import why
from tests.builders import DISTRIBUTED, GIB, gpunode, kube_node, pod, reservation, shared, use
from tests.console.test_devices import since
from tests.console.test_suggestions import asked
from tests.recording import RecordingState

LIMIT = "headroom.gpu/vram-limit"
#: Limit and used GiB of each pod, which requests 4 GiB.
PODS: dict[str, tuple[str | None, int]] = {
    "bursts": ("8Gi", 6),
    "fixed": ("4Gi", 4),
    "free": (None, 4),
}


def made(name: str, limit: str | None) -> Pod:
    annotations = {} if limit is None else {LIMIT: limit}
    return pod(
        "4Gi", uid=f"u-{name}", name=name, node="a", phase="Running", annotations=annotations
    )


def node(limited: bool = True) -> list[Event]:
    """Return the events of a node with one GPU of 24 GiB."""
    held = {f"u-{each}": since(reservation({"GPU-a": 4 * GIB}, name=each)) for each in PODS}
    rows = [
        use(f"u-{each}", "GPU-a", used * GIB, replica=f"GPU-a::{i}", namespace="default", name=each)
        for i, (each, (_, used)) in enumerate(PODS.items())
    ]
    report = gpunode(
        shared("GPU-a", free=1, allocated=3, used_bytes=14 * GIB),
        name="a",
        reservations=held,
        pods=rows,
        plugin=DISTRIBUTED,
    )
    seen = [PodSeen(made(each, limit if limited else None)) for each, (limit, _) in PODS.items()]
    return [NodeSeen(kube_node("a")), *seen, GPUNodeSeen(report, 0.0)]


def test_top_pod_shows_limits_and_classes() -> None:
    body: Any = asked(*node()).get("/v1/nodes").json()
    assert body["nodes"][0]["pod_limits"] == [
        {"uid": "u-bursts", "device": "GPU-a", "limit_bytes": 8 * GIB, "memory_class": "burstable"},
        {"uid": "u-fixed", "device": "GPU-a", "limit_bytes": 4 * GIB, "memory_class": "guaranteed"},
    ]
    (over,) = body["nodes"][0]["overuse"]
    assert (over["name"], over["limit_bytes"], over["outcome"]) == ("bursts", 8 * GIB, "none")
    table = pods(body, None)
    assert table.columns[4:8] == ("RESERVED", "LIMIT", "USED", "CLASS")
    assert [(row[1], *row[4:8]) for row in table.rows] == [
        ("bursts", "4.0 GiB", "8.0 GiB", "6.0 GiB", "burstable"),
        ("fixed", "4.0 GiB", "4.0 GiB", "4.0 GiB", "guaranteed"),
        ("free", "4.0 GiB", "-", "4.0 GiB", "unlimited"),
    ]


def test_without_limits_top_pod_has_no_columns_for_them() -> None:
    body: Any = asked(*node(limited=False)).get("/v1/nodes").json()
    assert body["nodes"][0]["pod_limits"] == []
    columns = pods(body, None).columns
    assert columns[4:6] == ("RESERVED", "USED")
    del body["nodes"][0]["pod_limits"]  # an older console
    assert pods(body, None).columns == columns


def test_why_shows_limit_and_class() -> None:
    fleet = asked(*node())
    found = {each: fleet.get(f"/v1/explain?pod=default/{each}").json() for each in PODS}
    assert {each: body["memory_class"] for each, body in found.items()} == {
        "bursts": "burstable",
        "fixed": "guaranteed",
        "free": "unlimited",
    }
    assert why(found["bursts"])[1:3] == [
        "  requests 1 nvidia.com/gpu with 4Gi, limit 8Gi (container main; its annotation)",
        "  class burstable: it may use memory up to its limit while other pods do not need it, and "
        "is evicted if it uses more",
    ]
    assert why(found["fixed"])[2] == (
        "  class guaranteed: it is evicted if it uses more than it requests"
    )
    assert not any("class" in line for line in why(found["free"]))


def test_the_list_of_pods_shows_limit_and_class() -> None:
    listed = asked(*node()).get("/v1/pods?node=a").json()["pods"]
    assert {each["name"]: (each["request"], each["memory_class"]) for each in listed} == {
        "bursts": ("1 x nvidia.com/gpu with 4Gi, limit 8Gi", "burstable"),
        "fixed": ("1 x nvidia.com/gpu with 4Gi, limit 4Gi", "guaranteed"),
        "free": ("1 x nvidia.com/gpu with 4Gi", "unlimited"),
    }


def test_the_metric_counts_reserved_pods_by_class() -> None:
    state = RecordingState(Rules(), 90.0, 0.0)
    state.apply(node())
    registry = CollectorRegistry()
    registry.register(FleetCollector(state.cluster, state.cluster.snapshot, Pending, 10, 90.0))
    assert {
        each: registry.get_sample_value("headroom_reserved_pods", {"class": each})
        for each in ("guaranteed", "burstable", "unlimited")
    } == {"guaranteed": 1, "burstable": 1, "unlimited": 1}
