"""Checks that incrementally updated ranks equal newly computed ranks."""

from dataclasses import replace

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headroom.contract.annotations import MAX_SM, POLICY, PROCESSES, VRAM
from headroom.contract.kube import Pod
from headroom.contract.reasons import Reason
from headroom.core.placement.fit import fit
from headroom.core.placement.fit_cache import FitCache
from headroom.core.placement.policy import Rules, Weights
from headroom.core.placement.request import VramRequest, understand
from headroom.core.placement.score import rank
from headroom.core.placement.snapshot import NodeTerms, Snapshot
from headroom.core.placement.snapshot_builder import Table, build
from tests.builders import FRESH_S, NOW_S, gate, pod, request, shared, weighed
from tests.examples import examples
from tests.placement.worlds import DrawnNode, pods, worlds

LATE_S = FRESH_S + 1
names = st.sampled_from("abcde")


def agree(cached_fits: FitCache, what: VramRequest, snap: Snapshot, ranked: bool = True) -> None:
    rows = snap.rows([node.name for node in snap.nodes][::-1])
    cached = cached_fits.weigh(what, snap)
    for now_s in (NOW_S, LATE_S):
        verdicts = fit(what, snap, rows, now_s)
        assert cached.codes(snap, rows, now_s).tolist() == verdicts.codes.tolist()
        assert cached.large_enough[rows].tolist() == verdicts.large_enough().tolist()
        if not ranked:  # One node is left, or none.
            continue
        kept, afresh = cached.rank(what, snap, rows, now_s), rank(verdicts, Weights())
        assert kept.winner == afresh.winner
        assert kept.scores.tolist() == afresh.scores.tolist()


class Changes(RuleBasedStateMachine):
    """Nodes are added, changed and deleted between calls for pods of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.cached_fits = FitCache(Weights(), capacity=3)
        self.asked: list[VramRequest] = []

    @rule(
        name=names,
        world=worlds(),
        fresh_until_s=st.sampled_from([FRESH_S, LATE_S + 1]),
        gated=st.booleans(),
    )
    def put(self, name: str, world: DrawnNode, fresh_until_s: float, gated: bool) -> None:
        self.table.put(msgspec.structs.replace(world.weighed(name, fresh_until_s), gated=gated))

    @rule(name=names, reason=st.sampled_from([Reason.NO_REPORT, Reason.UNKNOWN_NODE]))
    def close(self, name: str, reason: Reason) -> None:
        self.table.put(NodeTerms(name, reason, FRESH_S))

    @rule(name=names)
    def drop(self, name: str) -> None:
        self.table.drop(name)

    @rule(asked=pods(), default=st.sampled_from([None, "2Gi"]), gated=st.booleans())
    def ask(self, asked: Pod, default: str | None, gated: bool) -> None:
        what = understand(asked, default, Rules())
        if isinstance(what, VramRequest) and what.asks:
            what = replace(what, gated=gated)
            self.asked = [*self.asked[-3:], what]
            agree(self.cached_fits, what, self.table.snapshot())

    @rule(which=st.integers(0, 3), ranked=st.booleans())
    def ask_again(self, which: int, ranked: bool) -> None:
        if which < len(self.asked):
            agree(self.cached_fits, self.asked[which], self.table.snapshot(), ranked)

    @invariant()
    def sums_match_the_columns(self) -> None:
        snap = self.table.snapshot()
        sharers = np.maximum(snap.columns.sharers, 1)
        memory = np.maximum(snap.columns.memory_bytes, 0)
        headroom = np.maximum(snap.columns.headroom_bytes, 0) // sharers
        assert snap.node_headroom_bytes.tolist() == headroom.sum(axis=1).tolist()
        assert snap.node_largest_device_bytes.tolist() == memory.max(axis=1, initial=0).tolist()
        assert snap.node_memory_bytes.tolist() == (memory // sharers).sum(axis=1).tolist()


TestChanges = Changes.TestCase
TestChanges.settings = settings(max_examples=examples(150), stateful_step_count=25, deadline=None)


@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                VRAM: st.sampled_from(["1Gi", "10Gi", "50%"]),
                MAX_SM: st.sampled_from(["10%", "90%"]),
                PROCESSES: st.sampled_from(["1", "4"]),
                POLICY: st.sampled_from(["pack", "spread"]),
            },
        ),
        min_size=2,
        max_size=6,
    ),
    st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_pod_kinds_have_separate_results(
    annotations: list[dict[str, str]], gated: list[bool]
) -> None:
    snap = build(
        [
            weighed(shared("a"), name="a"),
            weighed(shared("b", sharing="mps", free=4), name="b"),
            msgspec.structs.replace(weighed(shared("c"), name="c"), gated=True),
        ]
    )
    cached_fits = FitCache(Weights())
    for one, has_gate in zip(annotations, gated, strict=False):
        init = [gate()] if has_gate else []
        agree(cached_fits, request(pod(None, annotations=one, init=init)), snap)


def test_a_node_deleted_before_the_first_ranking_is_not_ranked() -> None:
    table, cached_fits, what = Table(), FitCache(Weights()), request(pod("1Gi"))
    for sizes in ({"a": 8, "b": 8, "c": 8}, {"b": 16, "c": 24}):
        for name, gib in sizes.items():
            table.put(weighed(shared(f"GPU-{name}", memory_bytes=gib << 30), name=name))
        agree(cached_fits, what, table.snapshot(), ranked=False)
    table.drop("a")
    agree(cached_fits, what, table.snapshot())
