"""Tests /v1/score, which compares the score of a pod on one node with all other nodes, now and at
the decision.
"""

from typing import Any

import msgspec
import pytest

from headroom.contract.decision import decision_id
from headroom.contract.kube import NodeSpec, SchedulingGate, Taint
from headroom.contract.reasons import Reason
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from headroom.core.journal.decision_records import Candidate, Candidates, Ranked
from headroom.core.journal.journal import Decision
from tests.builders import DISTRIBUTED, GIB, gpunode, kube_node, pod, reservation, shared, use
from tests.console.asking import Asked


@pytest.fixture
def fleet() -> Asked:
    """A cluster in which pod ``bound`` holds 20 of 24 GiB on node ``busy``. Pod ``waits`` requests
    16 GiB.
    """
    asked = Asked()
    busy = gpunode(
        shared("A", free=3, allocated=1, used_bytes=18 * GIB),
        name="busy",
        reservations={"ub": reservation({"A": 20 * GIB}, name="bound")},
        pods=[use("ub", "A", 18 * GIB, replica="A::0")],
        plugin=DISTRIBUTED,
    )
    idle = gpunode(shared("B"), name="idle", plugin=DISTRIBUTED)
    taken = {"used_bytes": 20 * GIB, "unattributed_bytes": 20 * GIB}
    none = gpunode(shared("C", free=0, allocated=4, **taken), name="none", plugin=DISTRIBUTED)
    for each in (busy, idle, none):
        asked.writer.apply([NodeSeen(kube_node(each.name)), GPUNodeSeen(each, 0.0)])
    waits = pod("16Gi", uid="uw", name="waits")
    bound = pod("20Gi", uid="ub", name="bound", node="busy")
    asked.writer.apply([PodSeen(waits), PodSeen(bound)])
    rejected = {Reason.MEMORY_ON_ANY: 1}
    which = decision_id(waits.metadata.uid, waits.metadata.resource_version)
    asked.journal.record(Decision(waits, which, 0.0, 7, offered=2, fits=1, rejected=rejected))
    kept = Candidates((Candidate("idle", 700, tuple(range(100, 700, 100))),))
    for part in (Ranked(0.0, 5, 7, 1, "idle"), kept):
        asked.journal.note(waits, part, 0.0)
    return asked


def test_a_node_that_fits_shows_every_term_with_its_weight_and_its_rank(fleet: Asked) -> None:
    body = fleet.get("/v1/score?pod=default/waits&node=idle").json()
    live = body["live"]
    assert (live["rank"], live["fits"], live["wins"], live["winner"]) == (1, 1, True, "idle")
    assert live["failing"] == []
    assert {term["name"]: term["weight"] for term in live["terms"]} == {
        "packing": 5,
        "prediction": 5,
        "sm_activity": 2,
        "slack": 1,
        "smallest_device": 1,
        "report": 1,
    }
    added = sum(term["contribution_ratio"] for term in live["terms"])
    assert live["score_ratio"] == pytest.approx(added)
    # The recorded decision is also shown, although the state has changed.
    stored = body["stored"]
    assert stored["filter"]["reasons"][0]["reason"] == "memory_on_any"
    (kept,) = stored["prioritize"]["candidates"]
    assert (kept["node"], kept["score_ratio"]) == ("idle", 0.7)


def test_a_node_that_does_not_fit_shows_every_failed_check(fleet: Asked) -> None:
    live = fleet.get("/v1/score?pod=default/waits&node=none").json()["live"]
    assert [check["reason"] for check in live["failing"]] == ["no_replica", "memory_on_any"]
    assert (live["rank"], live["score_ratio"], live["terms"], live["wins"]) == (
        None,
        None,
        [],
        False,
    )
    assert live["winner"] == "idle"
    busy = fleet.get("/v1/score?pod=default/waits&node=busy").json()["live"]["node"]
    assert (busy["short_bytes"], busy["candidates"][0]["device"]["uuid"]) == (12 * GIB, "A")


def test_a_bound_pod_does_not_block_itself(fleet: Asked) -> None:
    body = fleet.get("/v1/score?pod=default/bound&node=busy").json()
    assert (body["bound_to"], body["taken_back"]) == ("busy", True)
    live = body["live"]
    assert live["failing"] == []
    device = live["node"]["candidates"][0]["device"]
    assert (device["reservation_bytes"], device["replicas_free"]) == (0, 4)


def test_without_a_node_all_nodes_are_ranked_with_every_term_and_reason(fleet: Asked) -> None:
    spec = NodeSpec(taints=[Taint("team", "a", "NoSchedule")])
    tainted = msgspec.structs.replace(kube_node("tainted"), spec=spec)
    second = gpunode(shared("D", memory_bytes=48 * GIB), name="second", plugin=DISTRIBUTED)
    far = gpunode(shared("E"), name="tainted", plugin=DISTRIBUTED)
    fleet.writer.apply([NodeSeen(kube_node("second")), GPUNodeSeen(second, 0.0)])
    fleet.writer.apply([NodeSeen(tainted), GPUNodeSeen(far, 0.0)])
    body = fleet.get("/v1/score?pod=default/waits").json()
    rows = [(n["node"], n["rank"], n["fits"], n["eligible"], n["reason"]) for n in body["nodes"]]
    assert sorted(rows[:2]) == [("idle", 1, True, True, None), ("second", 2, True, True, None)]
    assert rows[2:] == [
        ("none", None, False, True, "no_replica"),
        ("busy", None, False, True, "memory_on_any"),
        ("tainted", None, False, False, "taint"),
    ]
    assert (body["fits"], body["matching"], body["remaining"], body["continue"]) == (2, 5, 0, None)
    first, other = body["nodes"][:2]
    for each in (first, other):
        added = sum(body["parts"][name] * term for name, term in each["score_terms"].items())
        assert each["score_ratio"] == pytest.approx(added)
        # The view of a single node shows the same score.
        live = fleet.get(f"/v1/score?pod=default/waits&node={each['node']}").json()["live"]
        assert (live["rank"], live["score_ratio"]) == (each["rank"], each["score_ratio"])
    assert first["certainty"] == "exact"
    assert first["score_ratio"] >= other["score_ratio"]
    assert body["difference"].startswith(f"{first['node']} wins over {other['node']} by ")


def test_the_ranking_has_pages(fleet: Asked) -> None:
    whole = fleet.get("/v1/score?pod=default/waits").json()["nodes"]
    assert [each["node"] for each in whole] == ["idle", "none", "busy"]
    pages, after = [], ""
    for remaining in (2, 1, 0):
        body = fleet.get(f"/v1/score?pod=default/waits&limit=1&continue={after}").json()
        assert (body["matching"], body["remaining"]) == (3, remaining)
        assert body["difference"] is None  # the pod fits on one node only
        pages += body["nodes"]
        after = body["continue"]
    assert (pages, after) == (whole, None)


def test_a_bound_pod_is_ranked_as_if_its_memory_were_free(fleet: Asked) -> None:
    body = fleet.get("/v1/score?pod=default/bound").json()
    assert (body["bound_to"], body["taken_back"]) == ("busy", True)
    assert {each["node"] for each in body["nodes"] if each["fits"]} == {"busy", "idle"}


@pytest.mark.parametrize(
    ("query", "status", "message"),
    [
        ("pod=default/waits&node=nowhere", 404, "GET /v1/nodes lists"),
        ("pod=default/nobody&node=idle", 404, "is not known"),
        ("pod=waits&node=idle", 422, "Example: pod=default/trainer-0"),
        ("node=idle", 422, "query pod: "),
        ("pod=default/waits&continue=idle", 422, "is not a number of nodes. Example: continue=100"),
    ],
)
def test_unknown_pods_or_nodes_and_missing_parameters_are_rejected(
    fleet: Asked, query: str, status: int, message: str
) -> None:
    answer = fleet.get(f"/v1/score?{query}")
    assert (answer.status_code, message in answer.json()["detail"]) == (status, True), answer.text


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scheduling_gates": [SchedulingGate("queue")]}, "the pod has 1 scheduling gate (queue)"),
        ({"scheduler_name": "other"}, "spec.schedulerName is other"),
    ],
)
def test_a_pod_that_kube_scheduler_does_not_try_wins_no_node(
    fleet: Asked, changed: dict[str, Any], message: str
) -> None:
    plain = pod("1Gi", uid="uh", name="held")
    held = msgspec.structs.replace(plain, spec=msgspec.structs.replace(plain.spec, **changed))
    fleet.writer.apply([PodSeen(plain)])
    assert fleet.get("/v1/score?pod=default/held&node=busy").json()["live"]["not_tried"] is None
    fleet.writer.apply([PodSeen(held)])
    live = fleet.get("/v1/score?pod=default/held&node=busy").json()["live"]
    assert live["not_tried"].startswith(message)
    assert (live["rank"], live["winner"], live["wins"]) == (1, "busy", False)
    assert live["not_checked"] == ["CPU, memory and other resources"]
