"""Tests explanations derived from the verdicts."""

from dataclasses import asdict

import pytest
from msgspec.structs import replace

from headroom.contract.reasons import Reason
from headroom.core.placement.explain import Explanation, explain
from headroom.core.placement.policy import Weights
from headroom.core.placement.snapshot import NodeTerms
from tests.builders import GIB, device, judged, reservation, shared, weighed


def explained(vram: str, *nodes: NodeTerms, nearest: int = 5) -> Explanation:
    return explain(judged(vram, *nodes)[1], Weights(), nearest)


def holding(name: str, gib: int) -> NodeTerms:
    return weighed(shared(name), name=name, reservations={"u": reservation({name: gib * GIB})})


def test_reasons_are_counted_and_the_most_frequent_comes_first() -> None:
    stale = [weighed(device(), name=f"s{i}", fresh_until_s=0) for i in range(2)]
    shown = explained("8Gi", holding("a", 20), *stale, holding("b", 0))
    assert shown.fits == 1
    assert shown.reasons == ((Reason.STALE_REPORT, 2), (Reason.MEMORY_ON_ANY, 1))


def test_the_nearest_nodes_fit_or_lack_the_least_memory() -> None:
    nodes = holding("far", 22), holding("fits", 0), holding("near", 17)
    stale = weighed(device(), name="stale", fresh_until_s=0)
    shown = explained("8Gi", stale, *nodes)
    assert [n.node for n in shown.nearest] == ["fits", "near", "far", "stale"]
    assert [n.short_bytes for n in shown.nearest] == [0, GIB, 6 * GIB, None]
    assert [n.node for n in explained("8Gi", stale, *nodes, nearest=2).nearest] == ["fits", "near"]


def test_a_node_with_a_huge_reservation_lacks_the_most() -> None:
    absurd = weighed(shared("x"), name="a", reservations={"u": reservation({"x": 1 << 90})})
    shown = explained("16Ti", absurd, holding("b", 20))
    assert [n.node for n in shown.nearest] == ["b", "a"]


def test_the_largest_fitting_request_is_limited_by_the_worst_candidate_of_the_best_node() -> None:
    uneven = weighed(
        shared("x"), shared("y"), name="u", reservations={"u": reservation({"x": 16 * GIB})}
    )
    # The unconfirmed pod of x can get y as well, so its reservation counts on both.
    assert explained("20Gi", uneven, holding("b", 15)).largest_fitting_bytes == 9 * GIB
    stale = weighed(device(), name="s", fresh_until_s=0)
    assert explained("20Gi", stale).largest_fitting_bytes is None
    assert explained("20Gi", stale, holding("b", 15)).largest_fitting_bytes == 9 * GIB
    assert explained("8Gi", holding("over", 30)).largest_fitting_bytes == 0


def test_each_candidate_shows_what_it_needs_and_lacks() -> None:
    node = weighed(shared("x"), shared("y", used_bytes=20 * GIB, unattributed_bytes=20 * GIB))
    (shown,) = explained("8Gi", node).nearest
    assert shown.reason is Reason.MEMORY_ON_SOME
    assert [c.terms.device.uuid for c in shown.candidates] == ["x", "y"]
    assert [c.short_bytes for c in shown.candidates] == [0, shown.short_bytes]
    assert shown.short_bytes == 4 * GIB - (64 << 20)


def test_without_nodes_the_explanation_is_empty() -> None:
    shown = explained("8Gi")
    assert (shown.fits, shown.reasons, shown.nearest, shown.largest_fitting_bytes) == (
        0,
        (),
        (),
        None,
    )


def test_a_node_that_fits_has_its_score_and_terms() -> None:
    nodes = [weighed(shared(name), name=name) for name in ("a", "b")]
    full = weighed(shared("c"), name="c", reservations={"u": reservation({"c": 8 * GIB})})
    over = weighed(shared("d"), name="d", reservations={"u": reservation({"d": 23 * GIB})})
    shown = explained("8Gi", *nodes, over, full)
    assert [node.node for node in shown.nearest][::3] == ["c", "d"]
    scores = [node.score for node in shown.nearest]
    assert scores[0] is not None
    assert scores[0] > scores[1] == scores[2]
    assert scores[3] is None
    weights = asdict(Weights())
    assert shown.nearest[0].terms.keys() == weights.keys()
    mean = sum(weights[name] * value for name, value in shown.nearest[0].terms.items())
    assert scores[0] == pytest.approx(mean / sum(weights.values()))
    assert shown.nearest[3].terms == {}


@pytest.mark.parametrize("vram", ["8Gi", "20Gi"])
def test_problems_of_a_node_are_shown_even_if_the_pod_fits(vram: str) -> None:
    amiss = replace(holding("a", 10), detail="annotation steered has no effect")
    (shown,) = explained(vram, amiss).nearest
    assert (shown.reason is None) == (vram == "8Gi")
    assert shown.detail == "annotation steered has no effect"
