"""Checks that a node without a fresh report or heartbeat takes no pods."""

import pytest

from headroom.contract.annotations import OBSERVED_AT
from headroom.contract.kube import Lease, ObjectMeta
from headroom.contract.reasons import Reason
from headroom.contract.watched import GPUNodeGone, HeartbeatGone, HeartbeatSeen
from tests.builders import (
    NOW_S,
    device,
    gpunode,
    kube_node,
)
from tests.state.states import STALE_AFTER_S, lease, reason, seen, state_of


class TestFreshness:
    def test_a_node_without_heartbeats_becomes_stale(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(device())))
        assert reason(state, at_s=NOW_S + STALE_AFTER_S) is None
        assert reason(state, at_s=NOW_S + STALE_AFTER_S + 1) is Reason.STALE_REPORT

    def test_an_old_report_is_stale_even_when_it_is_first_seen(self) -> None:
        old = gpunode(device(), observed_at="2026-11-20T00:00:00Z")
        assert reason(state_of(*seen(kube_node(), old))) is Reason.STALE_REPORT

    def test_heartbeats_keep_an_unchanged_report_fresh(self) -> None:
        state = state_of(
            *seen(kube_node(), gpunode(device())),
            HeartbeatSeen(lease("2026-11-21T00:00:00Z"), NOW_S),
            HeartbeatSeen(lease("2026-11-21T00:01:00Z"), NOW_S + 60),
        )
        assert reason(state, at_s=NOW_S + 150) is None
        state.apply([HeartbeatGone("n")])
        assert reason(state, at_s=NOW_S + 150) is Reason.STALE_REPORT

    @pytest.mark.parametrize(
        "other",
        [
            pytest.param({"gpunode": "another"}, id="another object"),
            pytest.param({"observed_at": "2026-11-20T00:00:00Z"}, id="another status"),
        ],
    )
    def test_a_heartbeat_for_another_report_does_not_confirm_this_one(
        self, other: dict[str, str]
    ) -> None:
        state = state_of(
            *seen(kube_node(), gpunode(device())),
            HeartbeatSeen(lease("2026-11-21T00:00:00Z", **other), NOW_S),
            HeartbeatSeen(lease("2026-11-21T00:01:00Z", **other), NOW_S + 60),
        )
        assert reason(state, at_s=NOW_S + 91) is Reason.STALE_REPORT

    @pytest.mark.parametrize("text", [None, "", "{}", "[1", "2026-11-21T00:01:00Z"])
    def test_a_lease_that_confirms_no_report_is_not_a_heartbeat(self, text: str | None) -> None:
        annotations = None if text is None else {OBSERVED_AT: text}
        silent = Lease(metadata=ObjectMeta(name="n", annotations=annotations))
        state = state_of(
            *seen(kube_node(), gpunode(device())),
            HeartbeatSeen(lease("2026-11-21T00:00:00Z"), NOW_S),
            HeartbeatSeen(lease("2026-11-21T00:01:00Z"), NOW_S + 60),
            HeartbeatSeen(silent, NOW_S + 80),
        )
        assert reason(state, at_s=NOW_S + 91) is Reason.STALE_REPORT

    def test_a_heartbeat_that_arrives_before_its_report_counts_later(self) -> None:
        later = "2026-11-21T00:00:30Z"
        state = state_of(
            *seen(kube_node(), gpunode(device())),
            HeartbeatSeen(lease("2026-11-21T00:00:31Z", observed_at=later), NOW_S + 31),
            HeartbeatSeen(lease("2026-11-21T00:01:01Z", observed_at=later), NOW_S + 61),
        )
        assert reason(state, at_s=NOW_S + 91) is Reason.STALE_REPORT
        state.apply(seen(gpunode(device(), version="2", observed_at=later), at_s=NOW_S + 62))
        assert reason(state, at_s=NOW_S + 152) is None

    def test_a_new_version_with_an_equal_sample_is_not_a_heartbeat(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(device())))
        state.apply(seen(gpunode(device(), version="2"), at_s=NOW_S + 80))
        assert reason(state, at_s=NOW_S + 100) is Reason.STALE_REPORT

    def test_a_recreated_object_counts_as_new(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(device())))
        state.apply([GPUNodeGone("n")])
        again = gpunode(device(), uid="other", observed_at="2026-11-20T23:00:00Z")
        state.apply(seen(again))
        assert reason(state) is Reason.STALE_REPORT
