"""Tests /v1/inputs, the age of the inputs of views, and `source`, the origin of an answer."""

from dataclasses import replace
from typing import Any

from headroom.console.feed.journals import Followed
from headroom.console.views.status import inputs as inputs_of
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from headroom.core.journal.journal import Decision, Journal
from headroom.runtime.follow.journal_stream import StateLine
from headroom.runtime.kube.resources import Health
from tests.builders import gpunode, kube_node, pod, shared
from tests.console.asking import STALE_AFTER_S, WALL_S, Asked


def inputs(asked: Asked) -> dict[str, dict[str, Any]]:
    found = asked.get("/v1/inputs").json()["inputs"]
    return {each["place"] or each["kind"]: each for each in found}


def test_without_watches_and_journals_there_are_no_ages() -> None:
    assert inputs(Asked()) == {}


def test_the_longest_silent_agent_gives_the_age_and_all_late_agents_are_listed() -> None:
    asked = Asked()
    asked.add_node("old")
    asked.now_s = 5.0
    report = gpunode(shared("GPU-x"), name="new", observed_at="2026-11-21T00:00:05Z")
    asked.writer.apply([NodeSeen(kube_node("new")), GPUNodeSeen(report, asked.now_s)])
    assert (inputs(asked)["agents"]["age_s"], inputs(asked)["agents"]["message"]) == (5.0, None)
    asked.now_s = STALE_AFTER_S + 1.0
    late = inputs(asked)["agents"]
    assert (late["age_s"], late["message"]) == (91.0, "no heartbeat for 90 s from 1 node: old")


def test_the_longest_silent_watch_gives_the_age_of_the_api_server() -> None:
    def watched(*ages_s: float | None) -> Any:
        watches = [Health("pods", True, age_s, 0, 1, 0) for age_s in ages_s]
        context = replace(
            Asked().context,
            watches=lambda: watches,
            unready=lambda: "Headroom has not yet listed: pods" if None in ages_s else "",
        )
        snap = context.cluster.snapshot()
        (api_server,) = inputs_of(context, snap)
        return api_server.age_s, api_server.message

    assert watched(1.0, 7.5) == (7.5, None)
    assert watched(1.0, None) == (None, "Headroom has not yet listed: pods")


def test_each_followed_extender_has_an_age_and_a_message() -> None:
    asked = Asked()
    state = StateLine("other", "1.2.3", WALL_S, 7, "", "enforce")
    asked.followed = [
        Followed("10.0.0.7:8889", Journal(), state, 99.0, "it is gone", is_gone=True),
        Followed("10.0.0.8:8889", Journal(), state, 0.25, ""),
        Followed("10.0.0.9:8889", Journal(), state, 16.5, "it sent nothing for 15 s"),
        Followed("10.0.0.10:8889", Journal(), None, None, "connection refused"),
    ]
    found = inputs(asked)
    assert [(each["age_s"], each["message"]) for each in found.values()] == [
        (0.25, None),
        (16.5, "it sent nothing for 15 s"),
        (None, "connection refused"),
    ]
    assert found["10.0.0.8:8889"]["replica"] == "other"
    assert found["10.0.0.10:8889"]["replica"] is None


def test_recorded_and_recomputed_results_have_different_sources() -> None:
    asked = Asked()
    asked.add_node("a")
    waiting = pod("90Gi")
    asked.writer.apply([PodSeen(waiting)])
    asked.journal.record(Decision(waiting, "uid-p.1", WALL_S, 7, 1, 0, {}))
    explained = asked.get("/v1/explain?pod=default/p").json()
    assert explained["source"] == "recomputed"
    assert explained["last_decision"]["source"] == "decision"
    assert explained["last_decision"]["filter"]["snapshot_generation"] == 7
    generation = asked.cluster.snapshot().generation
    assert explained["snapshot_generation"] == generation != 7
    assert [each["source"] for each in asked.get("/v1/pending").json()["pods"]] == ["recomputed"]
    assert [each["source"] for each in asked.get("/v1/decisions").json()["decisions"]] == [
        "decision"
    ]
    assert asked.get("/v1/decisions/uid-p.1").json()["decision"]["source"] == "decision"
    scored = asked.get("/v1/score?pod=default/p&node=a").json()
    assert (scored["live"]["source"], scored["stored"]["source"]) == ("recomputed", "decision")
