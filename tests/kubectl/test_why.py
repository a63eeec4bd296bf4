"""Tests the text of explanations, scores and scheduling attempts."""

import json
from typing import Any

import pytest

from headroom.kubectl.commands import app
from headroom.kubectl.debug_api_client import DebugApi
from headroom.kubectl.why import phases, score, why

FILTER = {"fits": 0, "offered": 2, "took_ms": 0.5}
NOTHING = {"filter": None, "prioritize": None, "preempt": None, "bind": None}
LIVE: dict[str, Any] = {
    "source": "recomputed",
    "node": {"node": "b", "lines": ["b: fits"]},
    "failing": [],
    "terms": [],
    "rank": 1,
    "fits": 2,
    "tied": 0,
    "winner": "b",
    "wins": True,
    "not_tried": None,
    "not_checked": ["CPU", "volumes"],
}
CANDIDATES = [{"node": "a", "score_ratio": 0.75}, {"node": "b", "score_ratio": 0.5}]
DECIDED: dict[str, Any] = {
    "source": "decision",
    "decision_id": "uid-p.7",
    "at": "2026-11-22T03:00:00Z",
    "filter": {"fits": 2, "offered": 3, "took_ms": 1.0},
    "prioritize": {"winner": "a", "offered": 2, "took_ms": 1.0, "candidates": CANDIDATES}
    | {"by_filter": False},
    "preempt": None,
    "bind": None,
}


BODY: dict[str, Any] = {
    "source": "recomputed",
    "snapshot_generation": 9,
    "namespace": "default",
    "name": "p",
    "message": "no node can take the pod",
    "changed": None,
    "group": None,
    "request": [],
    "unanswered": [{"peer": "10.0.0.9:8889", "message": "connection refused"}],
    "bound_to": None,
    "devices": [],
    "reasons": [],
    "ineligible": [],
    "left_out_nodes": 0,
    "advice": [],
    "nearest": [],
    "last_decision": DECIDED,
    "attempts": {"message": "tried twice"},
    "annotations": {},
    "caps": [],
    "overuse": [],
    "start": None,
}


def test_a_score_shows_the_rank_of_the_node_in_the_last_decision() -> None:
    found = {"snapshot_generation": 9, "live": LIVE, "stored": DECIDED}
    lines = score(found | {"unanswered": BODY["unanswered"]})
    at = lines.index("Decided at 2026-11-22T03:00:00Z (decision uid-p.7, source: decision)")
    assert lines[at - 4 : at] == [
        "  rank 1 of 2 nodes that fit",
        "  not checked: CPU, volumes",
        "  no journal from extender 10.0.0.9:8889: connection refused",
        "",
    ]
    assert "prioritize: a of 2 nodes" in lines[at + 2]
    assert lines[-1] == "  b had rank 2, with score 0.500"
    tied = score(
        {"snapshot_generation": 9, "unanswered": [], "live": {**LIVE, "tied": 1}, "stored": DECIDED}
    )
    assert "  rank 1 of 2 nodes that fit, tied with 1" in tied


def test_an_explanation_shows_recorded_and_recomputed_results() -> None:
    body = BODY
    lines = why(body)
    assert lines[:3] == [
        "Pod default/p: no node can take the pod",
        "  no journal from extender 10.0.0.9:8889: connection refused",
        "",
    ]
    assert "Last decision" in lines
    wide = why(body, wide=True)
    assert wide[2] == "  source: recomputed, generation 9"
    assert "Last decision uid-p.7 (source: decision)" in wide
    bound = why({**body, "bound_to": "a"}, wide=True)
    assert not [line for line in bound if "recomputed" in line]


def placement(containers: object) -> dict[str, str]:
    return {"headroom.gpu/placement": json.dumps({"node": "a", "containers": containers})}


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        (
            placement({"m": {"bytes": {"GPU-a": 8 << 30}}}),
            ["reserved 8.0 GiB on GPU-a (container m)"],
        ),
        (
            placement({"m": {"bytes": {"GPU-a": 8 << 30, "GPU-b": 9 << 30}}}),
            ["reserved 9.0 GiB on each of 2 GPUs that it could get, such as GPU-a (container m)"],
        ),
        (placement({"m": {}}), []),
        (placement([]), []),
        ({"headroom.gpu/placement": "not JSON"}, []),
        ({"headroom.gpu/vram": "8Gi"}, []),
    ],
)
def test_a_bound_pod_shows_its_reservation(
    annotations: dict[str, str], expected: list[str]
) -> None:
    caps = [{"device": "GPU-a", "message": "capped at 8.0 GiB by the driver"}]
    body = BODY | {"bound_to": "a", "annotations": annotations, "caps": caps, "devices": ["0", "1"]}
    lines = [line.strip() for line in why(body)]
    assert lines.index("on GPU 0, 1") < len(lines)
    assert [line for line in lines if line.startswith("reserved")] == expected
    assert "memory on GPU-a: capped at 8.0 GiB by the driver" in lines
    assert [line for line in why(body, wide=True) if "headroom.gpu/" in line] == [
        f"  {key}: {value}" for key, value in annotations.items()
    ]


def test_a_pod_that_uses_more_than_it_reserved_shows_whether_it_is_evicted() -> None:
    over = {
        "device": "GPU-a",
        "used_bytes": 13 << 30,
        "reserved_bytes": 8 << 30,
        "message": "evicted within seconds",
    }
    lines = why(BODY | {"bound_to": "a", "overuse": [over]})
    line = "  overuse on GPU-a: uses 13.0 GiB, but has reserved 8.0 GiB; evicted within seconds"
    assert line in lines


def test_a_suggestion_has_the_command_or_yaml_to_copy() -> None:
    yaml = 'metadata:\n  annotations:\n    headroom.gpu/vram: "79.5Gi"'
    steer = {"sentence": "steer it; kubectl annotate it", "fix": "kubectl annotate it"}
    advice = [{"sentence": "request less", "fix": yaml}, steer, {"sentence": "wait", "fix": None}]
    lines = why(BODY | {"advice": advice})
    begin = lines.index("Suggestions")
    assert lines[begin + 1 : begin + 7] == [
        "  request less",
        "      metadata:",
        "        annotations:",
        '          headroom.gpu/vram: "79.5Gi"',
        "  steer it; kubectl annotate it",
        "  wait",
    ]


def test_a_request_shows_its_source_and_all_its_gpus() -> None:
    ask = {"count": 1, "resource": "nvidia.com/gpu", "amount": "8Gi", "container": "m"}
    asks = [ask | {"source": "annotation"}, ask | {"count": 2, "source": "namespace"}]
    assert why(BODY | {"request": asks})[1:3] == [
        "  requests 1 nvidia.com/gpu with 8Gi (container m; its annotation)",
        "  requests 2 nvidia.com/gpu with 8Gi each (container m; its namespace's default)",
    ]


@pytest.mark.parametrize(
    ("amount", "shown"), [("7838315316", "7.3 GiB"), ("25", "25 bytes"), ("25%", "25%")]
)
def test_an_amount_in_bytes_has_a_unit(amount: str, shown: str) -> None:
    ask = {"count": 1, "resource": "nvidia.com/gpu", "amount": amount, "container": "m"}
    line = why(BODY | {"request": [ask | {"source": "annotation"}]})[1]
    assert line == f"  requests 1 nvidia.com/gpu with {shown} (container m; its annotation)"


def test_the_number_of_hidden_nodes_is_shown() -> None:
    nearest = [{"lines": [f"n{number}: full"]} for number in range(5)]
    assert "  2 more with -o wide" in why(BODY | {"nearest": nearest})
    assert not [line for line in why(BODY | {"nearest": nearest}, wide=True) if "more" in line]


def test_the_score_of_a_pod_of_a_foreign_scheduler_has_a_note() -> None:
    gated = {"not_tried": "the pod has 1 scheduling gate (queue)", "wins": False}
    lines = score(
        {"snapshot_generation": 9, "unanswered": [], "live": LIVE | gated, "stored": None}
    )
    assert lines[:3] == [
        "b: fits",
        "  source: recomputed, generation 9",
        "  the pod has 1 scheduling gate (queue)",
    ]
    assert not [line for line in lines if "wins" in line]


def test_a_node_that_was_not_among_the_best_shows_no_recorded_score() -> None:
    for decided in (DECIDED | {"prioritize": None}, None):
        lines = score({"snapshot_generation": 9, "unanswered": [], "live": LIVE, "stored": decided})
        assert not [line for line in lines if "came" in line]


def test_victims_are_shown_between_filter_and_bind() -> None:
    preempt = {"took_ms": 4.12, "lines": ["team/a (priority 0) leaves node n", "they asked"]}
    bind = {"outcome": "bound", "message": None, "node": "n", "took_ms": 9.0}
    assert phases(NOTHING | {"filter": FILTER, "preempt": preempt, "bind": bind}) == [
        "filter: 0 of 2 nodes fit, in 0.5 ms",
        "preempt: in 4.1 ms",
        "  team/a (priority 0) leaves node n",
        "  they asked",
        "bind: bound to n, in 9.0 ms",
    ]


def test_a_ranking_by_filter_is_not_shown_as_a_call_of_prioritize() -> None:
    filtered = {"fits": 1, "offered": 1, "took_ms": 1.0}
    ranked = DECIDED["prioritize"] | {"by_filter": True}
    assert phases(NOTHING | {"filter": filtered, "prioritize": ranked}) == [
        "filter: 1 of 1 node fits, in 1.0 ms",
        "filter returned only the best: a of 2 nodes",
    ]


def test_decisions_name_the_extenders_whose_decisions_may_be_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"decisions": [], "continue": None, "unanswered": BODY["unanswered"]}
    monkeypatch.setattr(DebugApi, "get", lambda self, *path, **query: body)
    app(["--server", "https://console", "decisions", "-A"], standalone_mode=False)
    assert capsys.readouterr().err.splitlines() == [
        "no such decision is on record",
        "no journal from extender 10.0.0.9:8889: connection refused",
    ]


def test_a_pod_that_starts_alone_shows_whether_it_waits_for_a_restart() -> None:
    bound = BODY | {"bound_to": "a", "start": "has started alone"}
    assert "  has started alone" in why(bound)
    assert why(bound | {"start": None}) == why(BODY | {"bound_to": "a"})
