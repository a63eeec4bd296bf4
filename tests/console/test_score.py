"""Tests /v1/score, which compares the score of a pod on one node with all other nodes, now and at
the decision.
"""

from typing import Any

import msgspec
import numpy as np
import pytest

from headroom.console.views.requested_pods import new_not_tried, of_manifest
from headroom.contract.annotations import SCHEDULER
from headroom.contract.decision import decision_id
from headroom.contract.kube import Namespace, NodeSpec, ObjectMeta, SchedulingGate, Taint
from headroom.contract.reasons import Reason
from headroom.contract.watched import GPUNodeSeen, NamespaceSeen, NodeSeen, PodSeen
from headroom.core.journal.decision_records import TERMS, Candidate, Candidates, Ranked
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
    terms = {name: np.array([(n + 1) / 10]) for n, name in enumerate(TERMS)}
    kept = Candidates.of(("idle",), np.array([0.7]), terms)
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
    assert (device["pods_reserved_bytes"], device["replicas_free"]) == (0, 4)


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


def test_one_sentence_says_which_terms_decide_between_two_nodes(fleet: Asked) -> None:
    second = gpunode(shared("D", memory_bytes=48 * GIB), name="second", plugin=DISTRIBUTED)
    fleet.writer.apply([NodeSeen(kube_node("second")), GPUNodeSeen(second, 0.0)])
    url = "/v1/score?pod=default/waits&node="
    by_default = fleet.get(f"{url}second").json()["live"]["difference"]
    assert by_default.startswith("idle wins over second by packing +0.11")
    assert fleet.get("/v1/score?pod=default/waits").json()["difference"] == by_default
    # The order of the two nodes does not matter.
    for pair in ("second&against=idle", "idle&against=second", "idle"):
        assert fleet.get(url + pair).json()["live"]["difference"] == by_default
    assert fleet.get(f"{url}idle&against=none").json()["live"]["difference"] == (
        "idle fits; none cannot take it: no free GPU replica"
    )
    alone = fleet.get("/v1/score?pod=default/bound&node=idle&against=idle")
    assert (alone.status_code, "name two nodes" in alone.json()["detail"]) == (422, True)


def test_a_pod_that_does_not_exist_yet_is_ranked_like_an_existing_pod(fleet: Asked) -> None:
    manifest = {
        "metadata": {"annotations": {"headroom.gpu/vram": "16Gi"}},
        "spec": {"containers": [{"name": "m", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]},
    }
    new = fleet.post("/v1/score", {"manifest": manifest}).json()
    old = fleet.get("/v1/score?pod=default/waits").json()
    assert new["nodes"] == old["nodes"]
    assert (new["namespace"], new["name"], new["source"]) == ("default", "new", "recomputed")
    assert "ResourceQuotas" in new["not_checked"]
    one = fleet.post("/v1/score?node=busy", {"manifest": manifest}).json()
    assert [each["reason"] for each in one["live"]["failing"]] == ["memory_on_any"]
    assert one["stored"] is None
    for bad, message in (
        ({"metadata": {}, "spec": {"nodeName": "idle"}}, "body manifest: remove spec.nodeName"),
        (
            {"metadata": {}, "spec": {"containers": []}},
            "body manifest: requests no GPU that Headroom manages",
        ),
        ({"spec": 5}, "send a pod as printed by kubectl get pod -o json"),
        ({**manifest, "metadata": {"annotations": {"headroom.gpu/vram": "8GB"}}}, "8GB"),
    ):
        answer = fleet.post("/v1/score", {"manifest": bad})
        assert (answer.status_code, message in answer.json()["detail"]) == (422, True), answer.text


def test_a_new_pod_without_a_scheduler_is_tried_because_the_webhook_sets_the_scheduler() -> None:
    asked = Asked()
    label = {SCHEDULER: "none"}
    exempt = Namespace(metadata=ObjectMeta(name="exempt", labels=label))
    asked.writer.apply([NamespaceSeen(exempt)])
    for namespace, scheduler, note in (
        ("default", None, ""),
        ("default", "default-scheduler", ""),
        ("default", "headroom", ""),
        ("default", "volcano", "spec.schedulerName is volcano, which is not known to call"),
        ("exempt", None, "spec.schedulerName is default-scheduler, which is not known to call"),
    ):
        metadata = {"namespace": namespace}
        manifest = {"metadata": metadata, "spec": {"schedulerName": scheduler}}
        new = of_manifest(manifest, "body manifest", "new")
        found = new_not_tried(asked.cluster, new, ["headroom"])
        end = " Headroom; set spec.schedulerName: headroom" if note else ""
        assert found == f"{note}{end}", (namespace, scheduler)


def test_a_past_decision_shows_the_recorded_terms_of_its_nodes(fleet: Asked) -> None:
    body = fleet.get("/v1/score?pod=default/waits&decision=last").json()
    assert (body["source"], body["decided_at"][:19]) == ("decision", "1970-01-01T00:00:00")
    (idle,) = body["nodes"]
    assert (idle["node"], idle["rank"], idle["score_ratio"]) == ("idle", 1, 0.7)
    assert idle["score_terms"]["packing"] == 0.1
    assert (body["fits"], body["unrecorded"], body["matching"]) == (1, 0, 1)
    assert [(r["reason"], r["nodes"]) for r in body["reasons"]] == [("memory_on_any", 1)]
    # 0.7 is not the weighted mean of these terms, so the weights have changed since.
    assert (body["parts"], body["difference"]) == ({}, None)
    by_id = fleet.get(f"/v1/score?pod=default/waits&decision={body['decision_id']}").json()
    assert by_id["nodes"] == body["nodes"]


def test_a_past_decision_says_how_many_nodes_are_not_on_record(fleet: Asked) -> None:
    asked = pod("1Gi", uid="um", name="many")
    which = decision_id("um", asked.metadata.resource_version)
    names = tuple(f"n{number:02d}" for number in range(50))
    scores = np.linspace(0.9, 0.41, 50)
    terms = {name: scores for name in TERMS}
    fleet.journal.record(Decision(asked, which, 0.0, 7, offered=70, fits=60, rejected={}))
    for part in (Ranked(0.0, 5, 7, 60, "n00"), Candidates.of(names, scores, terms)):
        fleet.journal.note(asked, part, 0.0)
    body = fleet.get("/v1/score?pod=default/many&decision=last&limit=20").json()
    assert (body["fits"], body["matching"], body["unrecorded"]) == (60, 50, 10)
    assert (len(body["nodes"]), body["remaining"], body["continue"]) == (20, 30, "20")
    assert body["parts"]["packing"] == pytest.approx(1 / 3)
    assert body["difference"].startswith("n00 wins over n01 by ") or "equal" in body["difference"]
    rest = fleet.get("/v1/score?pod=default/many&decision=last&limit=40&continue=20").json()
    assert [each["node"] for each in body["nodes"] + rest["nodes"]] == list(names)
    # A decision about a pod is not shown for another pod.
    other = fleet.get(f"/v1/score?pod=default/waits&decision={which}")
    assert (other.status_code, "no longer on record" in other.json()["detail"]) == (404, True)
    both = fleet.get("/v1/score?pod=default/many&decision=last&node=idle")
    assert (both.status_code, "remove query node" in both.json()["detail"]) == (422, True)


def test_a_record_with_fewer_numbers_than_nodes_is_read_as_far_as_it_goes() -> None:
    assert Candidates(("a", "b"), b"\0" * 14 + b"\1").first() == [
        Candidate("a", 0.0, dict.fromkeys(TERMS, 0.0))
    ]


@pytest.mark.parametrize(
    ("query", "status", "message"),
    [
        ("pod=default/waits&node=nowhere", 404, "GET /v1/nodes lists"),
        ("pod=default/nobody&node=idle", 404, "is not known"),
        ("pod=waits&node=idle", 422, "Example: pod=default/trainer-0"),
        ("node=idle", 422, "query pod: "),
        ("pod=default/waits&against=idle", 422, "Example: node=gpu-a&against=idle"),
        ("pod=default/waits&node=idle&against=nowhere", 404, "GET /v1/nodes lists"),
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
