"""Tests the replay itself with figures computed by hand: waiting, ends, memory and its limits."""

import pytest

from headroom.planner.life_replay import Outcome, Replay
from headroom.planner.placers import ByCounting, ByHeadroom, Placer, Request
from headroom.planner.simulated_fleet import Sharing
from headroom.planner.workload import Life, Machine

GIB = 1 << 30


def life(
    created_s: float, run_s: float, peak_gib: int, gpus: int = 1, sm: float | None = None
) -> Life:
    name = f"at-{created_s}"
    return Life(name, "w", created_s, run_s, gpus, None, peak_gib * GIB, sm)


def one(gpus: int = 1, memory_gib: int = 24) -> list[Machine]:
    return [Machine("a", "L4", gpus, memory_gib * GIB)]


def request(each: Life, shared: bool = True) -> Request:
    need_bytes = each.peak_bytes if shared else None
    return Request(each.gpus, need_bytes, each.models, each.cpu_milli, each.host_bytes)


def played(
    lives: list[Life], machines: list[Machine], placer: Placer, shared: bool = True
) -> Outcome:
    requests = [request(each, shared) for each in lives]
    outcome = Replay(lives, requests, machines, placer).run()
    assert outcome is not None
    return outcome


def test_unshared_pods_wait_for_each_other() -> None:
    lives = [life(0, 100, 4), life(10, 50, 4), life(20, 50, 4)]
    found = played(lives, one(), ByHeadroom(one(), Sharing(), 1), shared=False)
    assert list(found.waited_s) == [0, 90, 130]
    assert found.mean_wait_s == pytest.approx(220 / 3)
    assert found.wait_s(0.5) == 90
    assert (found.most_running, found.out_of_memory, found.never_ran) == (1, 0, 0)
    # From 0 to 20 s, one pod with 4 of 24 GiB.
    assert found.memory_ratio == pytest.approx(4 / 24)


def test_shared_pods_run_concurrently_while_memory_is_free() -> None:
    lives = [life(0, 100, 10, sm=0.5), life(10, 100, 10, sm=0.25), life(20, 50, 10)]
    found = played(lives, one(), ByHeadroom(one(), Sharing(4, steered=True), 1))
    assert list(found.waited_s) == [0, 0, 80]
    assert found.most_running == 2
    assert found.memory_ratio == pytest.approx((10 * 10 + 20 * 10) / (24 * 20))
    assert found.sm_ratio == pytest.approx((0.5 * 10 + 0.75 * 10) / 20)


def test_memory_is_also_counted_if_all_pods_start_at_once() -> None:
    lives = [life(0, 100, 6, sm=0.5), life(0, 50, 6, sm=0.25)]
    found = played(lives, one(), ByHeadroom(one(), Sharing(4, steered=True), 1))
    assert found.memory_ratio == pytest.approx(12 / 24)
    assert found.sm_ratio == pytest.approx(0.75)


def test_replica_counting_lets_pods_run_out_of_memory() -> None:
    lives = [life(0, 100, 10), life(10, 100, 10), life(20, 50, 10), life(115, 5, 10)]
    found = played(lives, one(), ByCounting(one(), Sharing(4), 1))
    assert list(found.waited_s) == [0, 0, 0, 0]
    assert found.out_of_memory == 1  # The third pod. The fourth starts after two have ended.


def test_a_pod_that_fits_nowhere_never_runs_and_blocks_no_other() -> None:
    lives = [life(0, 10, 30), life(1, 10, 10), life(2, 10, 30), life(3, 10, 10)]
    found = played(lives, one(), ByHeadroom(one(), Sharing(2, steered=True), 1))
    assert found.never_ran == 2
    assert list(found.waited_s) == [0, 0]


def test_cpu_host_memory_model_and_gpu_size_exclude_nodes() -> None:
    machines = [
        Machine("small", "T4", 2, 16 * GIB, cpu_milli=4000, host_bytes=8 * GIB),
        Machine("large", "L4", 2, 24 * GIB, cpu_milli=8000, host_bytes=64 * GIB),
    ]
    placer = ByHeadroom(machines, Sharing(), 1)
    requests = [
        Request(1, None, frozenset({"L4"}), 3000, 0),
        # Only node large has that many, when the first pod ends.
        Request(1, None, frozenset(), 6000, 0),
        Request(1, None, frozenset(), 0, 16 * GIB),
        Request(1, None, frozenset({"T4"}), 0, 0, least_bytes=20 * GIB),
    ]
    lives = [life(at, 100, 1) for at in range(4)]
    found = Replay(lives, requests, machines, placer).run()
    assert found is not None
    assert sorted(found.waited_s) == [0, 0, 99]
    assert found.never_ran == 1


def test_a_replay_stops_early_if_the_wait_exceeds_the_limit() -> None:
    lives = [life(0, 100, 4), *(life(at, 100, 4) for at in range(1, 50))]
    requests = [request(each, shared=False) for each in lives]
    limited = Replay(lives, requests, one(), ByHeadroom(one(), Sharing(), 1))
    assert limited.run(most_wait_s=60.0) is None
    assert len(limited._waited_s) < 10
    allowed = Replay(lives, requests, one(), ByHeadroom(one(), Sharing(), 1)).run(1e6)
    assert allowed is not None
    assert allowed.pods == 50


def test_use_above_the_request_blocks_later_pods() -> None:
    lives = [life(0, 100, 14), life(10, 50, 12), life(120, 100, 12), life(130, 50, 14)]
    requests = [Request(1, gib * GIB, frozenset(), 0, 0) for gib in (4, 12, 12, 4)]
    placer = ByHeadroom(one(), Sharing(4, steered=True), 1)
    found = Replay(lives, requests, one(), placer).run()
    assert found is not None
    # The second pod waits for the first, which uses 14 of 24 GiB although it requests 4 GiB. The
    # fourth waits for the second. It fits by its request, but uses more than the free 12 GiB.
    assert list(found.waited_s) == [0, 90, 0, 20]
    assert found.out_of_memory == 1
