"""Checks that an explanation covers the nodes of the last attempt and the obstacles on each
node.
"""

from datetime import datetime, timedelta

import msgspec
import numpy as np
import pytest

from headroom.console.feed.feed import Feed
from headroom.contract.decision import decision_id
from headroom.contract.kube import Node, Pod
from headroom.contract.reasons import Reason
from headroom.contract.watched import NodeSeen, PodGone, PodSeen
from headroom.core.journal.decision_records import BindTried
from headroom.core.journal.journal import Decision, NodeSets
from headroom.kubectl.why import why
from tests.builders import GIB, pod
from tests.console.asking import WALL_S, Asked
from tests.console.explained import WAITS, asked, explained, kinds, node
from tests.console.test_devices import SINCE


def test_attempts_of_kube_scheduler_are_shown() -> None:
    fleet = asked(*node("a", whole=20), *node("b", full=20), *node("c", more=20))
    never = explained(fleet)["attempts"]
    assert isinstance(never, dict)
    assert (never["times"], never["offered_nodes"], never["again_by"]) == (0, None, None)
    assert never["message"].startswith("its scheduler has not called Headroom for this pod")
    which = decision_id(WAITS.metadata.uid, WAITS.metadata.resource_version)
    rejected = {Reason.MEMORY_ON_ANY: 2}
    at_s = datetime.fromisoformat(SINCE).timestamp()
    fleet.journal.record(Decision(WAITS, which, at_s, 7, offered=2, fits=0, rejected=rejected))
    tried = explained(fleet)["attempts"]
    assert isinstance(tried, dict)
    assert (tried["times"], tried["offered_nodes"], tried["not_offered_nodes"]) == (1, 2, 1)
    again = datetime.fromisoformat(tried["again_by"])
    assert again - datetime.fromisoformat(SINCE) == timedelta(minutes=5)
    assert "1 node did not pass kube-scheduler's own checks" in tried["message"]


@pytest.mark.parametrize("path", ["/v1/score?pod=default/waits&node=a"])
def test_a_score_shows_them_too(path: str) -> None:
    body = asked(*node("a", tiny=2, small=9)).get(path).json()
    assert [held["name"] for held in body["live"]["node"]["blockers"]] == ["small", "tiny"]


def closed(name: str, **spec: object) -> NodeSeen:
    """Return a Node whose spec has taints or a cordon."""
    wire = {"metadata": {"name": name, "labels": {"zone": name}}, "spec": spec}
    return NodeSeen(msgspec.convert(wire, Node))


TEAM = {"key": "team", "value": "x", "effect": "NoSchedule"}


def waiting_with(**spec: object) -> Pod:
    """Return the pending pod with additional fields in its spec."""
    wire = msgspec.to_builtins(WAITS)
    wire["spec"] |= spec
    return msgspec.convert(wire, Pod)


def record(
    fleet: Asked, *offered: str, waits: Pod = WAITS, at_s: float = WALL_S
) -> dict[str, object]:
    """Record a filter call that rejected the pod on each of these nodes."""
    snap = fleet.cluster.snapshot()
    rows = np.array([snap.row_of[name] for name in offered], np.int64)
    nodes = NodeSets().offered(snap.row_of, rows)
    which = decision_id(waits.metadata.uid, waits.metadata.resource_version)
    rejected = {Reason.MEMORY_ON_ANY: len(offered)}
    decision = Decision(waits, which, at_s, 7, len(offered), 0, rejected, offered_nodes=nodes)
    fleet.journal.record(decision)
    return explained(fleet)


@pytest.mark.parametrize(
    ("spec", "what", "advice"),
    [
        pytest.param(
            {"unschedulable": True},
            "cordoned",
            "uncordon: the pod would fit on node b",
            id="cordon",
        ),
        pytest.param(
            {"taints": [TEAM]},
            "taint team=x:NoSchedule, which the pod does not tolerate",
            "add a toleration for taint team=x:NoSchedule: the pod would fit on node b",
            id="taint",
        ),
    ],
)
def test_a_node_that_kube_scheduler_left_out_does_not_count_as_fitting(
    spec: dict[str, object], what: str, advice: str
) -> None:
    body = explained(asked(*node("a", whole=20), *node("b"), closed("b", **spec)))
    assert (body["verdict"], body["fits"]) == ("rejected", 0)
    assert body["message"] == "no node can take the pod"
    (kept_out,) = body["ineligible"]  # type: ignore[misc]
    assert (kept_out["message"], kept_out["nodes"]) == (what, 1)
    assert kinds(body) == ["wait", "eligible"]
    assert str(body["suggestions"][1]).startswith(advice)  # type: ignore[index]
    assert [each["node"] for each in body["nearest"]] == ["a"]  # type: ignore[attr-defined]


def test_a_lower_request_is_suggested_only_for_nodes_that_the_pod_selects() -> None:
    waits = waiting_with(nodeSelector={"zone": "b"})
    fleet = asked(*node("a", some=10), *node("b", most=15), closed("a"), closed("b"), waits=waits)
    body = explained(fleet)
    lower = body["advice"][-1]  # type: ignore[index]
    assert lower["lower_to_bytes"] == 9 * GIB  # Node a has 14 GiB free, but is in zone a.
    obstacle = body["ineligible"][0]  # type: ignore[index]
    assert obstacle["message"] == "labels do not match the pod's nodeSelector zone=b"


def test_a_node_with_two_obstacles_gets_no_suggestion_for_only_one() -> None:
    waits = waiting_with(nodeSelector={"zone": "a"})
    fleet = asked(
        *node("a", whole=24), *node("b"), closed("a"), closed("b", taints=[TEAM]), waits=waits
    )
    assert "eligible" not in kinds(explained(fleet))


def test_without_an_eligible_node_the_headline_has_the_first_cause() -> None:
    body = explained(asked(*node("a"), closed("a", unschedulable=True)))
    assert body["message"] == "no node is eligible: 1 node: cordoned"


def test_only_the_nodes_of_the_last_filter_call_are_explained() -> None:
    fleet = asked(*node("a", some=10), *node("b", most=15))
    body = record(fleet, "b")
    assert (body["left_out_nodes"], body["not_checked"]) == (1, [])
    assert [each["node"] for each in body["nearest"]] == ["b"]  # type: ignore[attr-defined]
    assert body["suggestions"][-1] == (  # type: ignore[index]
        "if the program needs no more than 9Gi, lower headroom.gpu/vram to it: that fits now"
    )
    assert body["last_decision"]["filter"]["offered_nodes"] is None  # type: ignore[index]
    names = fleet.get("/v1/decisions?offered_nodes=true").json()["decisions"]
    assert names[0]["filter"]["offered_nodes"] == ["b"]


def test_without_a_filter_call_missing_checks_are_listed() -> None:
    spread = [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]
    waits = waiting_with(
        topologySpreadConstraints=spread,
        volumes=[{"persistentVolumeClaim": {"claimName": "data"}}],
    )
    fleet = asked(*node("a"), waits=waits)
    body = explained(fleet)
    unchecked = "CPU, memory and other resources, volumes, topology spread constraints"
    assert body["message"] == f"1 node has GPU memory for the pod (not checked: {unchecked})"
    full = asked(*node("a", whole=15), waits=waits)
    after = record(full, "a", waits=waits)
    assert after["suggestions"][-1] == (  # type: ignore[index]
        "if the program needs no more than 9Gi, lower headroom.gpu/vram to it: that much is free "
        "now (not checked: volumes, topology spread constraints)"
    )


def test_a_scheduling_gate_and_another_scheduler_are_reported() -> None:
    gated = explained(asked(*node("a"), waits=waiting_with(schedulingGates=[{"name": "queue"}])))
    assert (gated["verdict"], gated["message"]) == (
        "gated",
        "the pod has 1 scheduling gate (queue) and is not scheduled until it is removed",
    )
    other = explained(asked(*node("a"), waits=waiting_with(schedulerName="volcano")))
    assert (other["verdict"], other["message"]) == (
        "other_scheduler",
        "spec.schedulerName is volcano, which is not known to call Headroom; create the pod "
        "again with spec.schedulerName: default-scheduler",
    )


def test_a_request_larger_than_every_device_has_its_own_message() -> None:
    body = explained(asked(*node("a", some=4), waits=pod("25Gi", uid="uw", name="waits")))
    assert body["message"] == (
        "no node can take the pod: it needs 25.0 GiB, larger than any GPU that it may use "
        "(24.0 GiB)"
    )


def test_a_cordoned_node_is_shown_at_once_without_a_new_snapshot() -> None:
    fleet = asked(*node("a"))
    before = fleet.get("/v1/nodes")
    fleet.writer.apply([closed("a", unschedulable=True, taints=[TEAM])])
    after = fleet.get("/v1/nodes", {"If-None-Match": before.headers["ETag"]})
    (shown,) = after.json()["nodes"]
    assert (shown["cordoned"], shown["taints"]) == (True, ["team=x:NoSchedule"])


def test_pending_pods_are_listed_with_their_explained_reasons() -> None:
    fleet = asked(*node("a", whole=20), *node("b"), closed("b", unschedulable=True))
    (listed,) = fleet.get("/v1/pending").json()["pods"]
    body = explained(fleet)
    assert (listed["fits"], listed["message"]) == (0, body["message"])
    assert (listed["ineligible"], listed["nearest"]) == (body["ineligible"], "a")


def test_a_score_on_a_node_that_is_not_eligible_has_no_rank() -> None:
    fleet = asked(*node("a"), *node("b"), closed("b", taints=[TEAM]))
    live = fleet.get("/v1/score?pod=default/waits&node=b").json()["live"]
    assert (live["eligible"], live["fits"], live["rank"], live["wins"]) == (False, 1, None, False)
    assert [each["reason"] for each in live["failing"]] == ["taint"]
    there = fleet.get("/v1/score?pod=default/waits&node=a").json()["live"]
    assert (there["eligible"], there["fits"], there["rank"], there["wins"]) == (True, 1, 1, True)


def test_decisions_about_an_earlier_pod_of_the_same_name_are_ignored() -> None:
    earlier = pod("16Gi", uid="u-earlier", name="waits")
    fleet = asked(*node("a", whole=20), waits=waiting_with(schedulerName="volcano"))
    body = record(fleet, "a", waits=earlier)
    assert (body["verdict"], body["last_decision"]) == ("other_scheduler", None)


def test_a_deleted_pod_has_its_record_and_no_suggestions() -> None:
    fleet = asked(*node("a", whole=20))
    rejected = record(fleet, "a")
    assert rejected["advice"]
    fleet.writer.apply([PodGone(WAITS.metadata.uid)])
    body = explained(fleet)
    assert (body["verdict"], body["message"]) == ("deleted", "deleted before it was bound")
    assert (body["advice"], body["nearest"], body["reasons"]) == ([], [], [])
    attempts = body["attempts"]
    assert isinstance(attempts, dict)
    assert "it retries" not in attempts["message"]
    assert attempts["again_by"] is None


def test_a_deleted_pod_that_was_bound_says_where_it_was() -> None:
    feed = Feed(lambda: WALL_S + 40, lambda: 1)
    fleet = Asked(feed=feed)
    fleet.writer.apply([*node("a", whole=20), PodSeen(WAITS)])
    record(fleet, "a")
    fleet.journal.note(WAITS, BindTried(WALL_S + 1, 1, "a", "bound", 0, ""), WALL_S + 1, "a")
    fleet.writer.apply([PodGone(WAITS.metadata.uid)])
    assert explained(fleet)["message"] == (
        "deleted; it was bound to node a at 2026-11-21T00:00:01Z"
    )
    feed.publish("reservation_removed", node="a", uid=WAITS.metadata.uid)
    lines = why(explained(fleet))
    assert lines[0] == (
        "Pod default/waits: deleted before 2026-11-21T00:00:40Z, when its reservation was "
        "removed; it was bound to node a at 2026-11-21T00:00:01Z"
    )
    assert "Suggestions" not in lines
    assert "  bind: bound to a, in 0.0 ms" in lines


def test_a_pod_of_a_filter_call_that_the_watch_has_not_shown_yet_is_not_deleted() -> None:
    fleet = asked(*node("a", whole=20), waits=pod("1Gi", uid="other", name="other"))
    record(fleet, "a")
    assert explained(fleet)["verdict"] == "rejected"
