"""Checks that the referee chooses devices like the plugin, and detects overcommitment."""

import ast
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

from benchmarks.demo import referee as module
from benchmarks.demo.referee import Gpu, Referee

GIB = 1 << 30
SHARED = Gpu(24 * GIB, replicas=4)


def placed(gpus: list[Gpu], *sizes_gib: int, seed: int = 1) -> Referee:
    """Return a referee of node n that has admitted the pods p0, p1 and so on, in this order."""
    referee = Referee({"n": gpus}, seed)
    for i, size in enumerate(sizes_gib):
        referee.bound(f"p{i}", "n", 1, size * GIB)
        referee.admit()
    return referee


def test_the_referee_imports_only_the_standard_library() -> None:
    """The referee must not share code with the schedulers that it judges."""
    tree = ast.parse(Path(module.__file__).read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or "relative"]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= sys.stdlib_module_names
    assert not any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree))


@pytest.mark.parametrize("seed", range(20))
def test_the_device_with_the_fewest_pods_is_chosen_regardless_of_memory(seed: int) -> None:
    """`distributed` counts replicas, so it chooses a full device if this device has fewer pods."""
    referee = Referee({"n": [SHARED] * 4}, seed)
    for i in range(3):
        referee.bound(f"p{i}", "n", 1, GIB)
    taken = {place.devices[0] for place in referee.admit()}
    referee.bound("last", "n", 1, GIB)
    (last,) = referee.admit()
    assert len(taken) == 3
    assert last.devices[0] not in taken


def test_ties_are_broken_with_equal_probability() -> None:
    drawn: Counter[int] = Counter()
    for seed in range(3000):
        referee = Referee({"n": [SHARED] * 4}, seed)
        referee.bound("first", "n", 1, GIB)
        first = referee.admit()[0].devices[0]
        referee.bound("second", "n", 1, GIB)
        drawn[(referee.admit()[0].devices[0] - first) % 4] += 1
    assert drawn[0] == 0
    assert all(abs(drawn[i] - 1000) < 130 for i in (1, 2, 3)), drawn


def test_a_device_without_a_free_replica_is_never_picked() -> None:
    gpus = [Gpu(24 * GIB, 2), Gpu(24 * GIB, 4)]
    referee = placed(gpus, *[1] * 6)
    assert referee.verdict(0).turned_away == frozenset()
    referee.bound("seventh", "n", 1, GIB)
    assert referee.admit() == []
    assert referee.verdict(0).turned_away == {"seventh"}


def test_a_pod_that_ended_leaves_its_replica_and_memory_to_the_next_pod() -> None:
    referee = Referee({"n": [Gpu(24 * GIB, 1)]}, 1)
    referee.bound("first", "n", 1, 20 * GIB)
    referee.admit()
    referee.ended("first")
    referee.bound("second", "n", 1, 20 * GIB)
    assert [place.pod for place in referee.admit()] == ["second"]
    assert referee.verdict(0).devices_overcommitted == 0


def test_a_pod_of_several_gpus_takes_distinct_unshared_devices() -> None:
    referee = Referee({"n": [Gpu(16 * GIB, 1)] * 8}, 3)
    referee.bound("two", "n", 2, None)
    referee.bound("six", "n", 6, None)
    landed = referee.admit()
    assert sorted(i for place in landed for i in place.devices) == list(range(8))
    assert referee.verdict(0).devices_overcommitted == 0


def test_admission_order_is_random_but_fixed_by_the_seed() -> None:
    def order(seed: int) -> list[str]:
        referee = Referee({"n": [Gpu(24 * GIB, 20)]}, seed)
        for i in range(10):
            referee.bound(f"p{i}", "n", 1, GIB)
        return [place.pod for place in referee.admit()]

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(20)}) == 20


def test_overcommitment_is_detected_and_measured() -> None:
    """The pods use 60 GiB of 24 GiB, as in the four-pod example."""
    verdict = placed([SHARED], 16, 20, 16, 8).verdict(0)
    assert verdict.devices_overcommitted == 1
    assert verdict.worst_ratio == Fraction(60, 24)
    assert verdict.worst_excess_bytes == 36 * GIB


def test_ratio_and_excess_are_computed_per_device() -> None:
    """The small device has the highest ratio, and the large device has the most excess bytes."""
    small, large = Gpu(8 * GIB, 4), Gpu(80 * GIB, 4)
    referee = Referee({"small": [small], "large": [large]}, 0)
    referee.bound("a", "small", 1, 20 * GIB)
    referee.bound("b", "large", 1, 120 * GIB)
    referee.admit()
    verdict = referee.verdict(0)
    assert (verdict.worst_ratio, verdict.worst_excess_bytes) == (Fraction(5, 2), 12 * GIB)
    assert Referee({"n": [small]}, 0).verdict(0).worst_excess_bytes == 0


def test_a_full_device_is_not_overcommitted_but_one_more_byte_is() -> None:
    referee = placed([SHARED], 16, 8)
    assert referee.verdict(0).devices_overcommitted == 0
    assert referee.verdict(0).worst_ratio == 1
    referee.bound("one-byte", "n", 1, 1)
    referee.admit()
    assert referee.verdict(0).devices_overcommitted == 1
    assert referee.verdict(0).worst_excess_bytes == 1


def test_a_pod_that_does_not_fit_is_killed_and_a_later_pod_that_fits_runs() -> None:
    verdict = placed([SHARED], 16, 20, 16, 8).verdict(0)
    assert verdict.died == {"p1", "p2"}
    assert verdict.too_large == frozenset()
    assert verdict.working_bytes == 24 * GIB


def test_a_pod_larger_than_its_device_is_killed() -> None:
    verdict = placed([SHARED], 25).verdict(0)
    assert verdict.died == verdict.too_large == {"p0"}
    assert verdict.devices_overcommitted == 1


@pytest.mark.parametrize(
    ("sizes_gib", "stranded_gib"),
    [
        pytest.param((12,), 0, id="the free memory is useful"),
        pytest.param((20,), 4, id="the free memory is too small"),
        pytest.param((1, 1, 1, 1), 20, id="no replica is free"),
        pytest.param((16, 20, 2, 2), 4, id="dead pods keep their replica but not their memory"),
    ],
)
def test_stranded_memory_is_free_memory_that_no_pod_can_use(
    sizes_gib: tuple[int, ...], stranded_gib: int
) -> None:
    assert placed([SHARED], *sizes_gib).verdict(10 * GIB).stranded_bytes == stranded_gib * GIB


def test_an_empty_device_has_no_stranded_memory_even_if_too_small() -> None:
    assert placed([SHARED]).verdict(25 * GIB).stranded_bytes == 0


def test_unshared_devices_count_for_overcommit_but_not_as_shared_memory() -> None:
    verdict = placed([Gpu(16 * GIB, 1)], 17).verdict(0)
    assert verdict.devices_overcommitted == 1
    assert verdict.shared_bytes == verdict.stranded_bytes == 0
