"""Tests which node wins, and its score."""

from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.contract.kube import Pod
from headroom.core.placement.fit import fit
from headroom.core.placement.fit_cache import FitCache
from headroom.core.placement.policy import Weights
from headroom.core.placement.score import Ranking, best, highest, rank
from headroom.core.placement.snapshot import NodeTerms
from headroom.core.placement.snapshot_builder import build
from tests.builders import (
    GIB,
    NOW_S,
    container,
    device,
    judged,
    pod,
    request,
    reservation,
    shared,
    weighed,
)

SPREAD = {"headroom.gpu/policy": "spread"}


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5]) | st.floats(0, 1)), st.integers(1, 9))
def test_the_highest_scores_come_first(scores: list[float], most: int) -> None:
    expected = sorted(range(len(scores)), key=lambda index: -scores[index])[:most]
    assert highest(np.array(scores, float), most).tolist() == expected


def ranked(asked: Pod, *nodes: NodeTerms) -> Ranking:
    return rank(judged(asked, *nodes)[1], Weights())


def winner(asked: Pod, *nodes: NodeTerms) -> str | None:
    place = ranked(asked, *nodes).winner
    return None if place is None else nodes[place].name


def holding(name: str, gib: int) -> NodeTerms:
    """Return a node with one shared GPU on which this amount is reserved."""
    return weighed(shared(name), name=name, reservations={"u": reservation({name: gib * GIB})})


def test_packing_picks_the_fullest_node_that_fits() -> None:
    nodes = holding("empty", 0), holding("half", 12), holding("full", 20)
    assert winner(pod("8Gi"), *nodes) == "half"
    assert winner(pod("4Gi"), *nodes) == "full"


def test_spreading_picks_the_emptiest_node() -> None:
    nodes = holding("full", 16), holding("half", 12), holding("empty", 0)
    assert winner(pod("8Gi", annotations=SPREAD), *nodes) == "empty"


def test_a_node_that_does_not_fit_scores_zero() -> None:
    found = ranked(pod("8Gi"), holding("empty", 0), holding("full", 20))
    assert found.winner == 0
    assert found.scores[1] == 0
    nobody = ranked(pod("8Gi"), holding("full", 20))
    assert (nobody.winner, nobody.scores.tolist()) == (None, [0])


def test_ties_are_broken_by_the_pod_not_by_the_order() -> None:
    names = [f"n{i}" for i in range(8)]
    nodes = [holding(name, 8) for name in names]
    winners = {uid: winner(pod("8Gi", uid=uid), *nodes) for uid in map(str, range(64))}
    for uid in ("0", "1", "2"):
        assert winner(pod("8Gi", uid=uid), *reversed(nodes)) == winners[uid]
    burst = Counter(winners.values())
    assert set(burst) == set(names)
    assert max(burst.values()) <= 3 * 64 / 8


def test_one_of_several_perfect_fits_wins() -> None:
    found = ranked(pod("24Gi"), *(weighed(device(n), name=n) for n in "ab"))
    assert found.scores[0] == found.scores[1]
    assert found.winner is not None


def test_one_byte_decides_between_equal_scores() -> None:
    one = weighed(shared("x"), name="a", reservations={"u": reservation({"x": 8 * GIB})})
    other = weighed(shared("x"), name="b", reservations={"u": reservation({"x": 8 * GIB + 1})})
    assert winner(pod("8Gi"), one, other) == "b"
    assert winner(pod("8Gi", annotations=SPREAD), one, other) == "a"


def test_scores_do_not_depend_on_other_nodes() -> None:
    asked, nodes = request("4Gi"), [holding("a", 4), holding("b", 8), holding("c", 12)]
    snap = build(nodes)
    together = rank(fit(asked, snap, np.array([0, 1, 2]), NOW_S), Weights())
    two = rank(fit(asked, snap, np.array([1, 0]), NOW_S), Weights())
    assert two.scores.tolist() == together.scores[[1, 0]].tolist()


def test_the_score_is_the_weighted_mean_of_its_named_terms() -> None:
    weights = Weights(packing=3, prediction=1, sm_activity=0, slack=2, smallest_device=4, report=6)
    verdicts = judged(pod("4Gi"), holding("a", 4), holding("b", 12), holding("full", 24))[1]
    found = rank(verdicts, weights)
    assert set(found.terms) == set(asdict(weights))
    weighted = sum(weight * found.terms[name] for name, weight in asdict(weights).items())
    assert np.allclose(found.scores, np.asarray(weighted) / 16)
    assert ((found.scores >= 0) & (found.scores <= 1)).all()
    assert found.scores[2] == 0


def test_the_best_node_comes_first_and_the_others_by_score_and_name() -> None:
    nodes = holding("c", 0), holding("b", 0), holding("half", 12), holding("full", 20)
    asked = request(pod("8Gi"))
    snap, rows = build(nodes), np.arange(4)
    cached = FitCache(Weights()).weigh(asked, snap)
    ranking = cached.rank(asked, snap, rows, NOW_S)
    for most, names in ((5, ["half", "b", "c"]), (2, ["half", "c"])):  # the first two by row
        found = best(asked, snap, rows, ranking, cached.standing, NOW_S, None, most)
        assert list(found.names) == names
        assert found.scores.tolist() == sorted(ranking.scores, reverse=True)[: len(names)]
        total = sum(Weights().parts[name] * term for name, term in found.terms.items())
        assert total == pytest.approx(found.scores)


def test_without_a_gpu_request_no_node_wins() -> None:
    found = ranked(pod(None, container(gpus=0)), holding("a", 0), holding("b", 0))
    assert (found.winner, found.scores.tolist()) == (None, [0, 0])


@pytest.mark.parametrize("gpus", [1, 1 << 16])
def test_a_huge_request_of_another_resource_changes_no_score(gpus: int) -> None:
    """Scores are computed for rejected nodes, too."""
    asked = pod("16Ti", container(gpus=gpus), annotations=SPREAD)
    huge = weighed(device("h", memory_bytes=1 << 44), name="huge")
    with np.errstate(all="raise"):
        found = ranked(asked, huge, holding("a", 0))
    assert found.winner == (0 if gpus == 1 else None)
