"""Tests the warning and the eviction of pods that use more than their limit."""

from collections.abc import Mapping

import pytest
from structlog.testing import capture_logs

from headroom.core.placement.policy import Rules
from headroom.errors import StoreRejected
from tests.builders import pod
from tests.controllers.test_overuse import Overuse

LIMIT = "headroom.gpu/vram-limit"


class Limited(Overuse):
    """The cluster of ``Overuse`` with setting on_overuse: report. Pod s has reserved 5 GiB, and its
    limit is 8 GiB.
    """

    def __init__(self, annotations: Mapping[str, str] | None = None) -> None:
        super().__init__(Rules())
        self.limit(annotations or {LIMIT: "8Gi"})

    def limit(self, annotations: Mapping[str, str]) -> None:
        self.store.delete_pod("default", "s")
        self.pods["s"] = pod(
            "5Gi", uid="s", name="s", node="n", phase="Running", annotations=annotations
        )
        self.store.admit(self.pods["s"])


@pytest.fixture
def world() -> Limited:
    return Limited()


def test_a_pod_above_its_limit_is_warned_and_evicted_without_pressure(world: Limited) -> None:
    world.report(p=5, s=9)
    assert world.round() == []
    assert {uid: decision.device for uid, decision in world.decided.items()} == {"s": "b"}
    assert world.posted[0].message == (
        "This pod uses 9.0 GiB of device b, and its limit is 8.0 GiB. It is evicted within seconds "
        "unless it uses less. Raise annotation headroom.gpu/vram-limit, or reduce its use."
    )
    assert world.round() == []  # It needs a newer sample.
    world.report(p=5, s=9)
    with capture_logs() as logs:
        assert world.round() == ["s"]
    assert [each["event"] for each in logs] == ["pod_evicted"]
    assert world.events == [("s", "GPUMemoryOveruseEviction"), ("s", "EvictedForGPUMemoryOveruse")]
    assert world.posted[1].message == (
        "This pod used more GPU memory than its limit. It was evicted, so that its controller "
        "creates a new one. To keep it, raise annotation headroom.gpu/vram-limit."
    )


def test_a_burst_within_the_limit_evicts_no_pod(world: Limited) -> None:
    for used_gib in (6, 7, 8, 8.5):
        world.report(p=5, s=used_gib)
        assert world.round() == []
    assert (world.decided, world.events) == ({}, [])


def test_a_pod_that_returns_below_its_limit_in_time_stays(world: Limited) -> None:
    world.report(p=5, s=9)
    world.round()
    world.report(p=5, s=7)
    assert world.round() == []
    assert world.decided == {}
    assert world.counted("withdrawn") == 1


def test_a_limit_that_is_raised_or_removed_before_the_eviction_withdraws_it(world: Limited) -> None:
    """The policy rejects such a change of a bound pod. Without the policy, no pod is evicted for a
    limit that it no longer has.
    """
    for later in ({LIMIT: "10Gi"}, {LIMIT: "none"}, {LIMIT: "4Gi"}, {}):
        world.limit({LIMIT: "8Gi"})
        world.report(p=5, s=9)
        world.round()
        assert world.decided.keys() == {"s"}
        world.limit(later)
        world.report(p=5, s=9)
        assert world.round() == []
        assert world.decided == {}


def test_a_restarted_replica_and_a_clock_that_jumps_need_a_newer_sample(world: Limited) -> None:
    world.report(p=5, s=9)
    world.round()
    for ahead_s in (3600.0, -3600.0):
        world.ahead_s = ahead_s
        world.controller = world.replica()
        assert world.round() == []  # The sample may be older than this replica's decision.
    world.report(p=5, s=9)
    assert world.round() == ["s"]
    assert world.counted("decided") == 1


def test_a_rejected_eviction_is_repeated_after_the_back_off(world: Limited) -> None:
    world.evictor.forbidden["s"] = StoreRejected("would violate the pod's disruption budget")
    world.report(p=5, s=9)
    world.round()
    world.report(p=5, s=9)
    assert world.round() == []
    assert world.counted("rejected") == 1
    world.round()
    assert (world.decided, world.unresolved) == ({}, 0)  # No other pod lacks memory.
    world.now_s += 31
    del world.evictor.forbidden["s"]
    world.report(p=5, s=9)
    assert world.round() == ["s"]


def test_in_mode_observe_the_pod_is_only_logged(world: Limited) -> None:
    for _ in range(2):
        world.report(p=5, s=9)
        with capture_logs() as logs:
            assert world.round(observes=True) == []
    (logged,) = [each for each in logs if each["event"] == "pod_would_be_evicted"]
    assert logged["exceeded_limit_bytes"] == 8 << 30
    assert (world.decided, world.counted("would_evict")) == ({}, 1)
