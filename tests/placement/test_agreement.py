"""Tests properties that hold for every node and pod, with random nodes and pods."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headroom.contract.annotations import POLICY, VRAM
from headroom.contract.kube import Pod
from headroom.core.placement.explain import explain
from headroom.core.placement.fit import fit
from headroom.core.placement.policy import Weights
from headroom.core.placement.score import rank
from headroom.core.placement.snapshot import REASONS, SHARING
from headroom.core.placement.snapshot_builder import build
from tests.builders import NOW_S, judged, pod, request
from tests.examples import examples
from tests.placement import oracle
from tests.placement.worlds import DrawnNode, nodes_and_pods, pods, worlds

MOST_BYTES = 1 << 61

pytestmark = pytest.mark.slow

fleets = st.lists(worlds(), min_size=1, max_size=5)


@settings(max_examples=examples(700), deadline=None)
@given(st.one_of(nodes_and_pods(), st.tuples(worlds(), pods())))
def test_fit_matches_the_oracle(case: tuple[DrawnNode, Pod]) -> None:
    world, asked = case
    _, verdicts = judged(asked, world.weighed())
    reason = verdicts.reason(0)
    expected = oracle.reasons(
        asked,
        world.status,
        world.reservations,
        world.reserve_bytes,
        world.tolerance_bytes,
        world.cordoned,
    )
    assert (reason is None) == (not expected)
    assert reason is None or reason in expected


@settings(max_examples=examples(200), deadline=None)
@given(worlds(), pods())
def test_headroom_matches_the_oracle(world: DrawnNode, asked: Pod) -> None:
    snap, verdicts = judged(asked, world.weighed())
    for slot, device in enumerate(world.status.devices):
        if oracle.contradictory(device, world.status):
            continue  # Its content is not explained.
        room = oracle.room(
            device, world.status, world.reservations, world.reserve_bytes, world.tolerance_bytes
        )
        assert snap.columns.free_bytes[0, slot] == max(-MOST_BYTES, room)
        for verdict in verdicts.asks:
            if verdict.candidates[0, slot]:
                need = oracle.needed(
                    asked, device, world.status, world.reserve_bytes, verdict.ask.resource
                )
                assert verdict.need_bytes[0, slot] == need


@settings(max_examples=examples(200), deadline=None)
@given(fleets, st.sampled_from(["1M", "1Gi", "6Gi", "12Gi", "24Gi", "1Ti"]))
def test_a_smaller_request_fits_on_at_least_the_same_nodes(
    fleet: list[DrawnNode], largest: str
) -> None:
    nodes = [world.weighed(str(i)) for i, world in enumerate(fleet)]
    sizes = ["1M", "1Gi", "6Gi", "12Gi", "24Gi", "1Ti"]
    asked = reversed(sizes[: sizes.index(largest) + 1])
    fits = [set(np.flatnonzero(judged(size, *nodes)[1].fits).tolist()) for size in asked]
    assert all(more <= less for more, less in pairwise(fits))


@settings(max_examples=examples(200), deadline=None)
@given(fleets, pods())
def test_the_explanation_matches_filter(fleet: list[DrawnNode], asked: Pod) -> None:
    nodes = [world.weighed(str(i)) for i, world in enumerate(fleet)]
    verdicts = judged(asked, *nodes)[1]
    shown = explain(verdicts, Weights(), nearest=len(nodes))
    assert sorted(node.node for node in shown.nearest) == sorted(node.name for node in nodes)
    for node in shown.nearest:
        assert node.reason == verdicts.reason(int(node.node))
    assert shown.fits == verdicts.fits.sum()
    assert shown.fits + sum(n for _, n in shown.reasons) == len(nodes)
    assert all(node.short_bytes == 0 for node in shown.nearest if node.reason is None)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(worlds(mps=False), min_size=1, max_size=5))  # Its limit is a separate reason.
def test_the_largest_fitting_request_fits_and_one_more_byte_does_not(
    fleet: list[DrawnNode],
) -> None:
    nodes = [world.weighed(str(i)) for i, world in enumerate(fleet)]
    verdicts = judged("1M", *nodes)[1]
    largest = explain(verdicts, Weights()).largest_fitting_bytes
    if largest is None:
        assert not verdicts.fits.any()
        return
    assert largest == 0 or judged(str(largest), *nodes)[1].fits.any()
    assert not judged(str(largest + 1), *nodes)[1].fits.any()


@settings(max_examples=examples(200), deadline=None)
@given(fleets)
def test_columns_equal_the_terms(fleet: list[DrawnNode]) -> None:
    snap = build([world.weighed(str(i)) for i, world in enumerate(fleet)])
    columns = snap.columns
    for row, node in enumerate(snap.nodes):
        assert (columns.resource[row, len(node.devices) :] == -1).all()
        for slot, terms in enumerate(node.devices):
            at = row, slot
            assert columns.allocatable_bytes[at] == terms.allocatable_bytes
            assert columns.headroom_bytes[at] == max(-MOST_BYTES, terms.headroom_bytes)
            assert columns.free_bytes[at] >= columns.headroom_bytes[at]
            assert columns.replicas_unconfirmed[at] == terms.unconfirmed_replicas
            assert REASONS[columns.health_issue[at]] is terms.health_issue
            assert SHARING[columns.sharing[at]] == terms.device.sharing
            assert snap.resources[terms.device.resource] == columns.resource[at]
            assert columns.sharers[at] == terms.sharers


@settings(max_examples=examples(200), deadline=None)
@given(fleets, pods(), st.randoms(use_true_random=False))
def test_verdicts_do_not_depend_on_other_rows_or_their_order(
    fleet: list[DrawnNode], asked: Pod, random: object
) -> None:
    nodes = [world.weighed(str(i)) for i, world in enumerate(fleet)]
    snap, together = judged(asked, *nodes)
    what = request(asked)
    order = list(range(len(nodes)))
    random.shuffle(order)  # type: ignore[attr-defined]
    mixed = fit(what, snap, snap.rows([str(i) for i in order]), NOW_S)
    assert mixed.codes.tolist() == [together.codes[i] for i in order]
    for one, all_of_them in zip(mixed.asks, together.asks, strict=True):
        assert (one.candidates == all_of_them.candidates[order]).all()
        assert (one.need_bytes == all_of_them.need_bytes[order]).all()
        assert (one.free_bytes == all_of_them.free_bytes[order]).all()
    for i, _ in enumerate(nodes):
        alone = fit(what, snap, snap.rows([str(i)]), NOW_S)
        assert alone.codes[0] == together.codes[i]
        for one, all_of_them in zip(alone.asks, together.asks, strict=True):
            slots = one.candidates[0]
            assert (slots == all_of_them.candidates[i]).all()
            assert (one.need_bytes[0][slots] == all_of_them.need_bytes[i][slots]).all()


@settings(max_examples=examples(200), deadline=None)
@given(
    fleets,
    st.sampled_from(["1M", "4Gi", "12Gi"]),
    st.sampled_from(["pack", "spread"]),
    st.randoms(use_true_random=False),
)
def test_the_best_node_does_not_depend_on_the_order(
    fleet: list[DrawnNode], vram: str, policy: str, random: object
) -> None:
    # Equal nodes are the hardest case, so each world occurs twice.
    nodes = [world.weighed(f"{i}{twin}") for i, world in enumerate(fleet) for twin in "ab"]
    what = request(pod(None, annotations={VRAM: vram, POLICY: policy}))
    verdicts = judged(what, *nodes)[1]
    names = [node.name for node in nodes]
    ranking = rank(verdicts, Weights())
    before = dict(zip(names, ranking.scores.tolist(), strict=True))
    winner = None if ranking.winner is None else names[ranking.winner]
    random.shuffle(names)  # type: ignore[attr-defined]
    shuffled = build([next(n for n in nodes if n.name == name) for name in names])
    again = rank(fit(what, shuffled, shuffled.rows(names), NOW_S), Weights())
    assert dict(zip(names, again.scores.tolist(), strict=True)) == before
    assert (None if again.winner is None else names[again.winner]) == winner
    assert (winner is not None) == bool(verdicts.fits.any())
    assert all(0 <= score <= 1 for score in before.values())
    assert winner is None or before[winner] == max(before.values())
    assert all(
        before[node.name] == 0 for node, fits in zip(nodes, verdicts.fits, strict=True) if not fits
    )
