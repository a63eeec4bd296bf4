"""What people read of a score beside the attempt in which it was decided."""

from typing import Any

from headroom.kubectl.why import score

LIVE: dict[str, Any] = {
    "node": {"node": "b", "told": ["b: fits"]},
    "failing": [],
    "terms": [],
    "rank": 1,
    "fits": 2,
    "tied": 1,
    "winner": "b",
    "wins": True,
}
CANDIDATES = [{"node": "a", "score_ratio": 0.75}, {"node": "b", "score_ratio": 0.5}]
DECIDED: dict[str, Any] = {
    "decision_id": "uid-p.7",
    "at": "2026-11-22T03:00:00Z",
    "filter": {"fits": 2, "offered": 3, "took_ms": 1.0},
    "prioritize": {"winner": "a", "offered": 2, "took_ms": 1.0, "candidates": CANDIDATES},
    "preempt": None,
    "bind": None,
}


def test_a_score_says_how_the_node_did_when_it_was_decided() -> None:
    lines = score({"live": LIVE, "stored": DECIDED})
    at = lines.index("Decided at 2026-11-22T03:00:00Z (decision uid-p.7)")
    assert lines[at - 2 : at] == ["  rank 1 of 2 nodes that fit", ""]
    assert "prioritize: a of 2 nodes" in lines[at + 2]
    assert lines[-1] == "  b came second then, with 0.500"


def test_of_a_node_that_was_not_among_the_best_nothing_is_claimed() -> None:
    for decided in (DECIDED | {"prioritize": None}, None):
        lines = score({"live": LIVE, "stored": decided})
        assert not [line for line in lines if "came" in line]
