"""Tests that the explanation of a node compares it with other nodes."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headroom.contract.annotations import MAX_SM, VRAM
from headroom.contract.gpunode import SmActivity
from headroom.contract.kube import Pod
from headroom.contract.reasons import Reason
from headroom.core.placement.explain import compare
from headroom.core.placement.policy import Weights
from headroom.core.placement.score import rank
from tests.builders import DISTRIBUTED, GIB, device, judged, pod, shared, weighed
from tests.examples import examples
from tests.placement.worlds import DrawnNode, pods, worlds


def test_all_failed_checks_are_listed_and_the_reason_of_filter_comes_first() -> None:
    busy = SmActivity(0.9, "dcgm")
    crowded = shared("A", free=0, allocated=4, healthy=False, sm_activity=busy)
    asks = pod(None, annotations={VRAM: "30Gi", MAX_SM: "50%"})
    verdicts = judged(asks, weighed(crowded, name="n", plugin=DISTRIBUTED, fresh_until_s=0.0))[1]
    shown = compare(verdicts, 0, Weights(), None)
    assert shown.failing == (Reason.STALE_REPORT, Reason.NO_REPLICA, Reason.MEMORY_ON_ANY)
    assert (shown.rank, shown.fits, shown.winner, shown.terms) == (None, 0, "", ())


def test_reasons_implied_by_a_broader_one_are_omitted() -> None:
    other = weighed(device(resource="nvidia.com/other"))
    assert compare(judged("1Gi", other)[1], 0, Weights(), None).failing == (
        Reason.NO_SUCH_RESOURCE,
    )
    unheard = weighed(name="u", reason=Reason.NO_REPORT, fresh_until_s=float("-inf"))
    assert compare(judged("1Gi", unheard)[1], 0, Weights(), None).failing == (Reason.NO_REPORT,)


def test_the_rank_counts_higher_scores_and_reports_ties() -> None:
    fleet = [
        weighed(device("A"), name="whole"),
        weighed(device("B"), name="twin"),
        weighed(device("C", memory_bytes=12 * GIB), name="tight"),
        weighed(device("D", memory_bytes=4 * GIB), name="small"),
    ]
    verdicts = judged("8Gi", *fleet)[1]
    whole, twin, tight, small = (compare(verdicts, i, Weights(), None) for i in range(4))
    assert [each.rank for each in (whole, twin, tight, small)] == [2, 2, 1, None]
    assert [each.tied for each in (whole, twin, tight, small)] == [1, 1, 0, 0]
    assert {each.winner for each in (whole, twin, tight, small)} == {"tight"}
    assert whole.fits == 3


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(worlds(), min_size=1, max_size=4), pods())
def test_terms_add_up_to_the_score_and_failures_match_filter(
    fleet: list[DrawnNode], asked: Pod
) -> None:
    verdicts = judged(asked, *(world.weighed(str(i)) for i, world in enumerate(fleet)))[1]
    for i in range(len(fleet)):
        shown = compare(verdicts, i, Weights(), None)
        assert (shown.failing[0] if shown.failing else None) == verdicts.reason(i)
        if shown.node.score is None:
            continue
        assert sum(term.part for term in shown.terms) == pytest.approx(1)
        mean = sum(term.part * term.value for term in shown.terms)
        assert shown.node.score == pytest.approx(mean)
        assert shown.winner_score is not None
        assert shown.winner_score >= shown.node.score
        assert (shown.rank == 1) == (shown.node.score == shown.winner_score)


def test_an_unknown_node_does_not_change_scores() -> None:
    never = float("-inf")
    silent = weighed(device("A"), name="silent", fresh_until_s=never)
    silent = msgspec.structs.replace(silent, ageing_from_s=never)
    verdicts = judged("8Gi", silent, weighed(device("B"), name="heard"))[1]
    shown = compare(verdicts, 1, Weights(), None)
    assert (shown.rank, shown.winner) == (1, "heard")
    assert rank(verdicts, Weights()).scores[0] == 0
