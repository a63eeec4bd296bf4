"""Tests /v1/status: readiness, reports, mismatches, journal and peers."""

from typing import Any

import msgspec
import pytest

from headroom.console.feed.journals import Followed
from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import NodeStatus, Pod
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from headroom.core.cluster.mismatches import mismatches
from headroom.core.journal.decision_records import Filtered
from headroom.core.journal.journal import Decision, Journal
from headroom.runtime.follow.journal_stream import StateLine
from tests.builders import gpunode, kube_node, pod, reservation, shared, use
from tests.console.asking import STALE_AFTER_S, WALL_S, Asked
from tests.serving import serving
from tests.waiting import until

FLEET = "nodes: [{name: a, gpus: 1, memory: 24Gi, sharing: time-slicing, replicas: 4}]"


def status(asked: Asked) -> Any:
    return asked.get("/v1/status").json()


def test_nodes_are_counted_by_the_state_of_their_reports() -> None:
    asked = Asked()
    asked.add_node("old")
    asked.now_s = STALE_AFTER_S + 10
    asked.add_node("again")
    report = gpunode(shared("GPU-x"), name="again", version="2", observed_at="2026-11-21T00:01:30Z")
    asked.writer.apply([GPUNodeSeen(report, asked.now_s)])
    offers = msgspec.structs.replace(
        kube_node("silent"), status=NodeStatus(allocatable={"nvidia.com/gpu": "8"})
    )
    without = msgspec.structs.replace(kube_node("cpu"), status=NodeStatus(allocatable={"cpu": "8"}))
    asked.writer.apply([NodeSeen(offers), NodeSeen(without)])
    body = status(asked)
    assert body["reports"] == {"fresh": 1, "stale": 1, "missing": 1, "oldest_age_s": 100.0}
    assert (body["counts"]["nodes"], body["counts"]["gpu_nodes"]) == (4, 2)
    assert (body["counts"]["devices"], body["counts"]["devices_unhealthy"]) == (3, 0)
    assert (body["ready"], body["not_ready_because"]) == (True, None)


@pytest.mark.parametrize(
    ("node", "pods", "found"),
    [
        pytest.param({}, [], [], id="nothing there"),
        pytest.param(
            {"reservations": {"uid-p": reservation({"GPU-0": 1})}, "pods": [use("uid-p", "GPU-0")]},
            [pod(node="n")],
            [],
            id="all three agree",
        ),
        pytest.param(
            {"reservations": {"uid-p": reservation({"GPU-0": 1})}},
            [pod()],
            [],
            id="it is being bound",
        ),
        pytest.param({}, [pod(node="n")], ["bound_without_reservation"], id="bound around us"),
        pytest.param(
            {"reservations": {"uid-p": reservation({"GPU-0": 1})}},
            [pod(node="n", phase="Failed")],
            ["reserved_without_pod"],
            id="the pod has ended",
        ),
        pytest.param(
            {"reservations": {"uid-p": reservation({"GPU-0": 1})}},
            [],
            ["reserved_without_pod"],
            id="the pod is gone",
        ),
        pytest.param(
            {"reservations": {"uid-p": reservation({"GPU-0": 1})}},
            [pod(node="other")],
            ["reserved_without_pod"],
            id="the pod is elsewhere",
        ),
        pytest.param(
            {"pods": [use("uid-x", "GPU-0"), use("uid-x", "GPU-1")]},
            [],
            ["observed_without_reservation"],
            id="the agent shows unattributed use",
        ),
        pytest.param(
            {"reservations": {"uid-p": reservation({"GPU-0": 1})}, "pods": [use("uid-p", "GPU-1")]},
            [pod(node="n")],
            ["outside_reservation"],
            id="it drew another device",
        ),
    ],
)
def test_ledger_api_server_and_agents_are_compared(
    node: dict[str, Any], pods: list[Pod], found: list[str]
) -> None:
    asked = Asked()
    held: GPUNode = gpunode(shared("GPU-0"), shared("GPU-1"), name="n", **node)
    asked.writer.apply([NodeSeen(kube_node("n")), GPUNodeSeen(held, 0.0)])
    asked.writer.apply([PodSeen(each) for each in pods])
    assert [each.value for each in mismatches(asked.cluster, held)] == found
    shown = status(asked)["mismatches"]
    assert {name for name, count in shown.items() if count} == set(found)
    assert len(shown) == 4


def test_status_shows_the_size_and_the_limits_of_the_journal() -> None:
    asked = Asked()
    assert status(asked)["journal"]["oldest_age_s"] is None
    asked.journal.records.note("u.1", "d", "p", Filtered(WALL_S, 4, 7, 5, 2, {1: 3}, ()), WALL_S)
    assert status(asked)["journal"]["pods_shown"] == 0
    asked.journal.record(Decision(pod(), "uid-p.1", WALL_S + 1, 7, 5, 2, {}))
    asked.now_s = 30.0
    journal = status(asked)["journal"]
    assert (journal["decisions"], journal["oldest_age_s"]) == (2, 30.0)
    assert journal["pods_shown"] == 1
    assert 1000 < journal["bytes"] < 2000
    assert (journal["most_decisions"], journal["most_age_s"]) == (10_000, 86_400.0)


def test_status_lists_peers() -> None:
    asked = Asked()
    state = StateLine("other", "1.2.3", WALL_S, 7, "Headroom only observes", "observe")
    asked.followed = [
        Followed("10.0.0.8:8889", Journal(), state, 0.25, ""),
        Followed("10.0.0.9:8889", Journal(), None, None, "connection refused"),
    ]
    body = status(asked)
    assert body["peers"] == [
        {
            "replica": "other",
            "version": "1.2.3",
            "ready": False,
            "not_ready_because": "Headroom only observes",
            "snapshot_generation": 7,
            "mode": "observe",
            "contact_age_s": 0.25,
        }
    ]
    assert body["unanswered"] == [{"peer": "10.0.0.9:8889", "message": "connection refused"}]


@pytest.mark.slow
def test_a_real_process_reports_its_memory_and_loop_lag() -> None:
    with serving(FLEET) as server:
        until(lambda: server.get("/v1/status").json()["loop_lag"], "the lag was sampled")
        body = server.get("/v1/status").json()
    assert 20 << 20 < body["memory_bytes"] < 1 << 30
    assert 0 <= body["loop_lag"]["p50_s"] <= body["loop_lag"]["p99_s"] <= body["loop_lag"]["max_s"]
    assert body["python"].startswith("3.")
    assert (body["behind"], body["reports"]["fresh"]) == (False, 1)
