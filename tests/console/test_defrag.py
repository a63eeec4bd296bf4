"""Checks that /v1/defrag returns pods to move, and changes nothing."""

from typing import Any

import pytest

from headroom.console.views import defrag
from headroom.contract.watched import PodSeen
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.rules.pod_requests import ResourceQuota
from tests.builders import GIB, NOW_S
from tests.builders import pod as waiting
from tests.console.asking import Asked
from tests.console.test_whatif import quota
from tests.state.digest import digest
from tests.state.evictions import On, newcomer
from tests.state.states import state_of
from tests.state.test_defrag import FRAGMENTED, node, world

UNCHECKED = "CPU, memory and other resources"


def console(state: ClusterWriter, quotas: list[ResourceQuota] | None = []) -> Asked:  # noqa: B006
    return Asked(NOW_S, state, quotas=lambda namespace: quotas)


def ask(asked: Asked, query: str) -> dict[str, Any]:
    asked.cluster.snapshot()
    before = digest(asked.cluster)
    answer = asked.get(f"/v1/defrag?{query}")
    assert answer.status_code == 200, answer.text
    assert digest(asked.cluster) == before
    shown: dict[str, Any] = answer.json()
    return shown


@pytest.fixture
def state() -> ClusterWriter:
    found = world(*FRAGMENTED)
    found.apply([PodSeen(newcomer(20))])
    return found


def test_the_answer_lists_the_moves_and_their_effect(state: ClusterWriter) -> None:
    shown = ask(console(state), "pod=default/new")
    (answer,) = shown["answers"]
    assert (answer["outcome"], answer["node"]) == ("move", "b")
    assert answer["message"] == "fits on node b after 1 pod is moved"
    assert (answer["gain_bytes"], answer["moved_bytes"]) == (20 * GIB, 6 * GIB)
    assert answer["devices"] == ["b-0"]
    (move,) = answer["moves"]
    assert (move["name"], move["owner_kind"], move["owner_name"]) == ("b-6", "ReplicaSet", "set")
    assert (move["places"], move["nodes"]) == (2, ["n", "c"])
    assert (shown["examined_nodes"], shown["cut_short"]) == (3, False)
    assert shown["not_checked"] == [UNCHECKED]


def test_all_pending_pods_are_answered_with_equal_pods_in_one_group(state: ClusterWriter) -> None:
    state.apply(
        [
            PodSeen(newcomer(20, name="second", created="2026-11-21T02:00:00Z")),
            PodSeen(newcomer(2, priority=500, name="small")),
            PodSeen(waiting("wrong", uid="u", name="unreadable")),
        ]
    )
    shown = ask(console(state), "")
    found = [(each["pod"], each["alike"], each["outcome"]) for each in shown["answers"]]
    assert found == [("default/small", 1, "fits"), ("default/new", 2, "move")]
    assert shown["unanswered"] == 0


def test_a_whole_node_can_be_freed(state: ClusterWriter) -> None:
    (answer,) = ask(console(state), "free_node=true&node=n")["answers"]
    assert answer["message"] == "the GPUs of node n hold no pod after 2 pods are moved"
    assert (answer["pod"], answer["node"], answer["gain_bytes"]) == (None, "n", 24 * GIB)


def test_a_search_that_runs_out_of_time_reports_it(
    state: ClusterWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defrag, "MOST_S", -1.0)
    shown = ask(console(state), "pod=default/new")
    assert shown["cut_short"] is True
    (answer,) = shown["answers"]
    assert answer["message"] == "no moves were found before the search reached its limit"
    everything = ask(console(state), "")
    assert (everything["answers"], everything["unanswered"]) == ([], 1)


@pytest.mark.parametrize(
    ("quotas", "outcome", "not_checked"),
    [
        pytest.param([quota("1", "2")], "none", [UNCHECKED], id="exceeded"),
        pytest.param([quota("2", "2")], "move", [UNCHECKED], id="full"),
        pytest.param(None, "move", [UNCHECKED, "ResourceQuotas"], id="unreadable"),
    ],
)
def test_a_pod_that_a_quota_could_reject_is_not_moved(
    state: ClusterWriter, quotas: list[ResourceQuota] | None, outcome: str, not_checked: list[str]
) -> None:
    shown = ask(console(state, quotas), "pod=default/new")
    (answer,) = shown["answers"]
    assert (answer["outcome"], shown["not_checked"]) == (outcome, not_checked)
    reasons = {each["reason"] for each in answer["stay"]}
    assert reasons == ({"quota"} if outcome == "none" else set())


def test_invalid_queries_are_rejected_with_a_message(state: ClusterWriter) -> None:
    asked = console(state)
    for query, status, detail in (
        ("pod=default/absent", 404, "pod default/absent is not known"),
        ("free_node=true&node=x", 404, "node x is not known"),
        (
            "pod=default/new&free_node=true",
            422,
            "query pod: cannot be combined with query free_node; remove one of them",
        ),
    ):
        answer = asked.get(f"/v1/defrag?{query}")
        assert (answer.status_code, detail in answer.json()["detail"]) == (status, True)
    bound = console(world(node("n", [On("here", 4)])))
    (answer,) = ask(bound, "pod=default/here")["answers"]
    assert (answer["outcome"], answer["message"]) == ("bound", "bound to node n")
    other = waiting("4Gi", uid="o", name="o")
    gated = console(state_of(PodSeen(other)))
    assert ask(gated, "pod=default/o")["answers"][0]["outcome"] == "none"
