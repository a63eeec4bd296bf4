"""Checks that decisions are selected by pod, node and time, and merged over all replicas."""

import pytest

from headroom.console.feed.journals import Followed
from headroom.console.views.decision_bodies import DecisionsBody
from headroom.contract.annotations import PLACEMENT
from headroom.contract.watched import PodSeen
from headroom.core.journal.decision_records import Asked as Requested
from headroom.core.journal.decision_records import BindTried, Filtered, Ranked
from headroom.core.journal.journal import Journal
from headroom.kubectl.why import why
from headroom.runtime.follow.journal_stream import StateLine
from tests.builders import GPU, pod
from tests.console.asking import WALL_S, Asked


@pytest.fixture
def asked() -> Asked:
    asked = Asked()
    for number, name in enumerate(("p", "q", "p", "r")):
        at_s = WALL_S + number
        note(asked, f"uid-{number}.1", name, Filtered(at_s, 400, 7, 5, 2, {1: 3}, ()), at_s)
    bound = BindTried(WALL_S + 9, 15_000, "gpu-b", "bound", 0, "")
    note(asked, "uid-1.1", "q", bound, WALL_S + 9, "gpu-b")
    asked.now_s = 100.0
    return asked


def note(
    asked: Asked, decision_id: str, name: str, part: Filtered | Ranked | BindTried, at_s: float,
    node: str = "",
) -> None:  # fmt: skip
    asked.journal.records.note(decision_id, "default", name, part, at_s, node)


def ids(asked: Asked, query: str = "") -> list[str]:
    body = asked.get(f"/v1/decisions?{query}").json()
    return [each["decision_id"] for each in body["decisions"]]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        pytest.param("", [1, 3, 2, 0], id="all, the newest first"),
        pytest.param("pod=default/p", [2, 0], id="a pod and a pod of the same name"),
        pytest.param("pod=other/p", [], id="another namespace"),
        pytest.param("namespace=default", [1, 3, 2, 0], id="a namespace"),
        pytest.param("namespace=other", [], id="a namespace without decisions"),
        pytest.param("uid=uid-2", [2], id="a uid"),
        pytest.param("node=gpu-b", [1], id="a node"),
        pytest.param("since=2026-11-21T00:00:02Z", [1, 3, 2], id="a time"),
        pytest.param("since=97s", [1, 3], id="an age"),
        pytest.param("limit=2", [1, 3], id="a page"),
    ],
)
def test_decisions_are_selected_by_pod_node_and_time(
    asked: Asked, query: str, found: list[int]
) -> None:
    assert ids(asked, query) == [f"uid-{number}.1" for number in found]


def test_a_decision_shows_the_request_and_the_limit_that_filter_read() -> None:
    asked = Asked()
    requested = (Requested("main", GPU, 1, "8Gi", "annotation", "12Gi"),)
    old = (Requested("main", GPU, 1, "8Gi", "annotation"),)
    for number, part in enumerate((requested, old)):
        record = Filtered(WALL_S, 400, 7, 5, 2, {}, part)
        note(asked, f"uid-{number}.1", "p", record, WALL_S + number)
    asked.now_s = 100.0
    found = asked.get("/v1/decisions").json()["decisions"]
    assert [each["request"][0]["limit"] for each in found] == [None, "12Gi"]
    assert found[1]["request"][0]["amount"] == "8Gi"


@pytest.mark.parametrize("since", ["yesterday", "15", "15w", "-5m"])
def test_an_invalid_time_is_rejected_with_an_example(asked: Asked, since: str) -> None:
    answer = asked.get(f"/v1/decisions?since={since}")
    assert (answer.status_code, "Example: since=15m" in answer.text) == (422, True)


def pages(asked: Asked, limit: int) -> list[str]:
    seen: list[str] = []
    after: str | None = ""
    while after is not None:
        body = asked.get(f"/v1/decisions?limit={limit}&continue={after}").json()
        seen += [each["decision_id"] for each in body["decisions"]]
        after = body["continue"]
    return seen


def test_pages_contain_every_decision(asked: Asked) -> None:
    assert pages(asked, 3) == ["uid-1.1", "uid-3.1", "uid-2.1", "uid-0.1"]


def test_a_decision_of_two_extenders_is_on_one_page(asked: Asked) -> None:
    other = Asked()
    bound = BindTried(WALL_S + 20, 15_000, "gpu-b", "bound", 0, "")
    note(other, "uid-0.1", "p", bound, WALL_S + 20, "gpu-b")
    asked.followed = [followed(other)]
    assert pages(asked, 2) == ["uid-0.1", "uid-1.1", "uid-3.1", "uid-2.1"]
    whole = asked.get("/v1/decisions?since=10s").json()["decisions"]
    assert [each["decision_id"] for each in whole] == []


def followed(other: Asked, trouble: str = "") -> Followed:
    state = StateLine(other.context.replica, "1.2.3", WALL_S, 7, "", "enforce")
    return Followed("10.0.0.7:8889", other.journal, state, 0.5, trouble)


def test_an_unknown_decision_is_404_with_the_extenders_that_did_not_answer(asked: Asked) -> None:
    asked.followed = [followed(Asked(), "rejected")]
    answer = asked.get("/v1/decisions/uid-9.1")
    assert answer.status_code == 404
    assert "extender 10.0.0.7:8889 does not answer" in answer.json()["detail"]


def test_decisions_of_several_extenders_are_merged(asked: Asked) -> None:
    other = Asked()
    ranked = Ranked(WALL_S + 5, 200, 3, 2, "gpu-b")
    note(other, "uid-1.1", "q", ranked, WALL_S + 5, "gpu-b")
    again = Filtered(WALL_S + 4, 900, 3, 5, 1, {2: 4}, ())
    note(other, "uid-1.1", "q", again, WALL_S + 4)
    note(other, "uid-8.1", "only", again, WALL_S + 4)
    gone = Followed("10.0.0.9:8889", Journal(), None, None, "rejected")
    asked.followed = [followed(other), gone]
    body = asked.get("/v1/decisions").json()
    assert DecisionsBody.model_validate(body)
    assert [each["decision_id"] for each in body["decisions"]] == [
        "uid-1.1",
        "uid-8.1",
        "uid-3.1",
        "uid-2.1",
        "uid-0.1",
    ]
    whole = body["decisions"][0]
    assert (whole["filter"]["times"], whole["filter"]["fits"]) == (2, 1)
    assert whole["filter"]["replica"] == whole["prioritize"]["replica"] == other.context.replica
    assert whole["bind"]["replica"] == asked.context.replica
    assert body["unanswered"] == [{"peer": "10.0.0.9:8889", "message": "rejected"}]
    assert asked.get("/v1/decisions/uid-8.1").json()["decision"]["name"] == "only"
    asked.followed = []
    assert "uid-8.1" not in ids(asked)


def torn(asked: Asked, uid: str = "uid-t", at_s: float = WALL_S) -> None:
    """Record a rejected attempt, then a filter call and a bind of two versions of the pod."""
    none = Filtered(at_s + 20, 400, 7, 2, 0, {1: 2}, ())
    note(asked, f"{uid}.691", "t", none, at_s + 20)
    note(asked, f"{uid}.693", "t", Filtered(at_s + 30, 8100, 8, 2, 2, {}, ()), at_s + 30)
    ranked = Ranked(at_s + 30.1, 9000, 8, 2, "gpu-b")
    note(asked, f"{uid}.693", "t", ranked, at_s + 30.1, "gpu-b")
    bound = BindTried(at_s + 30.5, 392_600, "gpu-b", "bound", 0, "")
    note(asked, f"{uid}.733", "t", bound, at_s + 30.5, "gpu-b")


def test_a_bind_is_joined_with_the_filter_call_of_an_earlier_version_of_its_pod() -> None:
    asked = Asked()
    torn(asked)
    assert ids(asked) == ["uid-t.733", "uid-t.691"]
    for query in ("/v1/decisions", "/v1/decisions/uid-t.733"):
        body = asked.get(query).json()
        one = body["decision"] if "decision" in body else body["decisions"][0]
        assert (one["filter"]["fits"], one["prioritize"]["winner"]) == (2, "gpu-b")
        assert (one["bind"]["outcome"], one["filter_decision_id"]) == ("bound", "uid-t.693")
    assert asked.get("/v1/decisions/uid-t.693").json()["decision"]["filter"]["fits"] == 2


def test_a_bind_without_a_successful_filter_call_is_joined_with_none() -> None:
    asked = Asked()
    none = Filtered(WALL_S + 20, 400, 7, 2, 0, {1: 2}, ())
    note(asked, "uid-t.691", "t", none, WALL_S + 20)
    bound = BindTried(WALL_S + 30.5, 392_600, "gpu-b", "bound", 0, "")
    note(asked, "uid-t.733", "t", bound, WALL_S + 30.5, "gpu-b")
    assert ids(asked) == ["uid-t.733", "uid-t.691"]
    assert asked.get("/v1/decisions/uid-t.733").json()["decision"]["filter"] is None


def test_pages_are_full_although_decisions_are_joined() -> None:
    asked = Asked()
    for number in range(4):
        torn(asked, f"uid-{number}", WALL_S + 100 * number)
    assert len(ids(asked, "limit=3")) == 3
    found = pages(asked, 3)
    assert {each for each in found if each.endswith(".733")} == {f"uid-{n}.733" for n in range(4)}


def test_why_has_the_attempt_that_placed_a_pod_whose_version_changed() -> None:
    asked = Asked()
    asked.add_node("gpu-b")
    bound = pod("4Gi", uid="uid-t", name="t", node="gpu-b", annotations={PLACEMENT: "{}"})
    asked.writer.apply([PodSeen(bound)])
    torn(asked)
    lines = why(asked.get("/v1/explain?pod=default/t").json())
    assert not [each for each in lines if "no longer on record" in each]
    assert "  filter: 2 of 2 nodes fit, in 8.1 ms" in lines
    assert "  bind: bound to gpu-b, in 392.6 ms" in lines


def test_why_says_that_a_pod_with_a_node_name_had_no_attempt() -> None:
    asked = Asked()
    asked.add_node("gpu-b")
    asked.writer.apply([PodSeen(pod("4Gi", uid="uid-t", name="t", node="gpu-b"))])
    message = asked.get("/v1/explain?pod=default/t").json()["attempts"]["message"]
    assert message == "it was bound without Headroom: by spec.nodeName or by another scheduler"
