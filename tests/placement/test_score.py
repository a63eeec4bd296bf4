"""Which node wins, and by what."""

import numpy as np
import pytest

from contract.kube import Pod
from extender.placement.score import Ranking, rank
from extender.placement.snapshot import NodeTerms
from tests.builders import GIB, container, device, judged, pod, promise, request, shared, weighed

SPREAD = {"headroom.gpu/policy": "spread"}


def ranked(asked: Pod, *nodes: NodeTerms) -> Ranking:
    snap, verdicts = judged(asked, *nodes)
    return rank(request(asked), snap, verdicts)


def winner(asked: Pod, *nodes: NodeTerms) -> str | None:
    place = ranked(asked, *nodes).winner
    return None if place is None else nodes[place].name


def holding(name: str, gib: int) -> NodeTerms:
    """One shared GPU on which so much is promised."""
    return weighed(shared(name), name=name, promises={"u": promise({name: gib * GIB})})


def test_packing_takes_the_fullest_that_still_fits() -> None:
    nodes = holding("empty", 0), holding("half", 12), holding("full", 20)
    assert winner(pod("8Gi"), *nodes) == "half"
    assert winner(pod("4Gi"), *nodes) == "full"


def test_spreading_takes_the_emptiest() -> None:
    nodes = holding("full", 16), holding("half", 12), holding("empty", 0)
    assert winner(pod("8Gi", annotations=SPREAD), *nodes) == "empty"


def test_what_does_not_fit_scores_nothing() -> None:
    assert ranked(pod("8Gi"), holding("empty", 0), holding("full", 20)).wire().tolist() == [10, 0]
    nobody = ranked(pod("8Gi"), holding("full", 20))
    assert (nobody.winner, nobody.wire().tolist()) == (None, [0])


def test_equal_nodes_are_settled_by_name() -> None:
    names = ["c", "a", "b"]
    scores = ranked(pod("8Gi"), *(holding(name, 8) for name in names)).wire().tolist()
    assert scores.index(10) == 1
    assert max(scores[0], scores[2]) <= 9


def test_even_among_perfect_fits_only_one_gets_the_most() -> None:
    found = ranked(pod("24Gi"), *(weighed(device(n), name=n) for n in "ab"))
    assert found.scores[0] == found.scores[1]
    assert found.wire().tolist() == [10, 7]


def test_a_byte_decides_between_nodes_of_equal_score() -> None:
    one = weighed(shared("x"), name="a", promises={"u": promise({"x": 8 * GIB})})
    other = weighed(shared("x"), name="b", promises={"u": promise({"x": 8 * GIB + 1})})
    assert winner(pod("8Gi"), one, other) == "b"
    assert winner(pod("8Gi", annotations=SPREAD), one, other) == "a"


def test_scores_do_not_depend_on_who_else_is_offered() -> None:
    nodes = [holding("a", 4), holding("b", 8), holding("c", 12)]
    snap, together = judged("4Gi", *nodes)
    asked = request("4Gi")
    alone = judged("4Gi", *nodes)[1]
    assert (rank(asked, snap, together).scores == rank(asked, snap, alone).scores).all()
    _, two = snap, judged("4Gi", *nodes[:2])[1]
    assert (rank(asked, snap, two).scores == rank(asked, snap, together).scores[:2]).all()


def test_the_score_is_the_weighted_mean_of_its_named_terms() -> None:
    found = ranked(pod("4Gi"), holding("a", 4), holding("b", 12))
    weights = {"device_full": 4, "devices_even": 4, "node_full": 1}
    assert set(found.terms) == set(weights)
    weighted = sum(weight * found.terms[name] for name, weight in weights.items())
    assert np.allclose(found.scores, weighted / 9)
    assert ((found.scores >= 0) & (found.scores <= 1)).all()


def test_where_no_gpu_is_asked_for_nobody_wins() -> None:
    found = ranked(pod(None, container(gpus=0)), holding("a", 0), holding("b", 0))
    assert (found.winner, found.wire().tolist()) == (None, [0, 0])


@pytest.mark.parametrize("gpus", [1, 1 << 16])
def test_an_absurd_request_beside_one_that_fits_disturbs_nothing(gpus: int) -> None:
    """Its arithmetic runs over the nodes that refuse it, too."""
    asked = pod("16Ti", container(gpus=gpus), annotations=SPREAD)
    huge = weighed(device("h", memory_bytes=1 << 44), name="huge")
    with np.errstate(all="raise"):
        found = ranked(asked, huge, holding("a", 0))
    assert found.winner == (0 if gpus == 1 else None)
