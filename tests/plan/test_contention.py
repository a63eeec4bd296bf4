"""Tests pods that compete for SMs with figures computed by hand, and the limit that avoids
contention.
"""

import dataclasses

import numpy as np
import pytest

from headroom.planner.contention import Contentions
from headroom.planner.placers import ByHeadroom, Request, Spot
from headroom.planner.simulated_fleet import Sharing
from headroom.planner.workload import Life, Machine

GIB = 1 << 30


def life(workload: str, sm_ratio: float | None) -> Life:
    return Life(workload, workload, 0.0, 100.0, 1, None, GIB, sm_ratio)


def test_time_above_the_whole_gpu_counts_as_contention_and_is_partly_lost() -> None:
    found, here, there = Contentions([1.0]), Spot(0, (0,)), Spot(0, (1,))
    found.start(0, life("train", 0.9), here, 0.0)
    found.start(1, life("serve", 0.6), here, 10.0)
    found.start(2, life("serve", 0.9), there, 10.0)
    found.start(3, life("idle", None), here, 30.0)
    found.end(1, here, 50.0)
    found.end(0, here, 60.0)
    result = found.result()
    # Two pods run for 20 s and three for 20 s with a sum of 1.5. Train runs alone for 10 s before
    # and after.
    assert result.competing_s == 2 * 20 + 3 * 20
    assert result.run_s == 10 + 100 + 2 * 10
    assert result.lost_s == pytest.approx(100 / 3)
    assert result.pairs == (("serve", "train", 40.0),)
    assert result.competing_ratio == pytest.approx(100 / 130)


def test_pods_on_few_sms_compete_by_their_gpu_utilization_except_on_mig_instances() -> None:
    # Small kernels run one after the other, as measured in docs/design/gpu-check.md, line
    # contention.
    small = dataclasses.replace(life("small", 0.01), utilization_ratio=1.0)
    pair = dataclasses.replace(small, workload="half", sm_ratio=0.5)
    for sm_share, lost_ratio in ((1.0, 0.5), (0.5, 0.0)):
        found = Contentions([sm_share])
        found.start(0, small, Spot(0, (0,)), 0.0)
        found.start(1, pair, Spot(0, (1 if sm_share < 1.0 else 0,)), 0.0)
        found.end(0, Spot(0, (0,)), 10.0)
        found.end(1, Spot(0, (1 if sm_share < 1.0 else 0,)), 10.0)
        assert found.result().lost_ratio == pytest.approx(lost_ratio)


def test_max_sm_keeps_a_pod_from_a_busy_gpu_until_it_is_idle() -> None:
    placer = ByHeadroom([Machine("a", "L4", 1, 24 * GIB)], Sharing(4, steered=True), 1)
    free = Request(1, 4 * GIB, frozenset(), 0, 0)
    limited = Request(1, 4 * GIB, frozenset(), 0, 0, max_sm=50)
    row = np.arange(1)
    first = placer.place("a", free, row, 0.3)
    assert first is not None
    second = placer.place("b", limited, row, 0.3)
    assert second is not None
    assert placer.place("c", limited, row, 0.3) is None
    assert placer.place("d", free, row, 0.3) is not None
    placer.end("a", first)
    assert placer.place("c", limited, row, 0.3) is None  # 0.6 of b and d
    placer.end("b", second)
    assert placer.place("c", limited, row, 0.3) is not None


def test_less_busy_gpus_are_preferred_on_steered_nodes() -> None:
    placer = ByHeadroom([Machine("a", "L4", 2, 24 * GIB)], Sharing(4, steered=True), 1)
    row, busy = np.arange(1), Request(1, 4 * GIB, frozenset(), 0, 0)
    first = placer.place("a", busy, row, 1.0)
    second = placer.place("b", busy, row, 0.5)
    assert first is not None
    assert second is not None
    assert first.devices != second.devices
