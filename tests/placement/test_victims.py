"""Compares victims of preemption with an independent search of all sets."""

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.core.cluster.trackers.pod_selectors import Budget
from headroom.core.preemption.victims import (
    NO_VICTIMS,
    Evictable,
    Rank,
    Tries,
    importance,
    rank,
    smallest,
    violators,
)

FEW = 10
NOT_STARTED_S = 1 << 62

PLENTY = 1 << 20


def pod(uid: str, priority: int = 0, started_s: int = 100) -> Evictable:
    return Evictable(uid, priority, started_s)


def chosen(
    pods: Sequence[Evictable],
    bytes_of: dict[str, int],
    need: int,
    *,
    budgets: Sequence[Budget] = (),
    devices: Sequence[set[str]] = (),
) -> set[str] | None:
    """Return the victims that free ``need`` on the whole node."""

    def frees(uids: frozenset[str]) -> bool:
        return sum(bytes_of[uid] for uid in uids) >= need

    floors = [(NO_VICTIMS, on) for on in devices]
    found = smallest(pods, budgets, floors, frees, frees, Tries(PLENTY))
    return None if found is None else set(found)


@pytest.mark.parametrize(
    ("pods", "sizes", "need", "leave"),
    [
        pytest.param([pod("a")], {"a": 4}, 0, set(), id="no victims if the pod fits"),
        pytest.param([pod("a")], {"a": 4}, 5, None, id="no victims if that does not help"),
        pytest.param(
            [pod("a"), pod("b")], {"a": 4, "b": 8}, 8, {"b"}, id="one sufficient pod, not two"
        ),
        pytest.param(
            [pod("a", 5), pod("b", 1), pod("c", 1)],
            {"a": 8, "b": 4, "c": 4},
            8,
            {"b", "c"},
            id="two of low priority instead of one of higher",
        ),
        pytest.param(
            [pod("a", 5), pod("b", 1), pod("c", 5)],
            {"a": 8, "b": 1, "c": 7},
            8,
            {"a"},
            id="the smallest sum for an equal highest priority",
        ),
        pytest.param(
            [pod("a", 1, 10), pod("b", 1, 20), pod("c", 1, 15)],
            dict.fromkeys("abc", 8),
            8,
            {"b"},
            id="the pod that started last",
        ),
        pytest.param(
            [pod("a", 1, 10), pod("b", 1, NOT_STARTED_S)],
            dict.fromkeys("ab", 8),
            8,
            {"b"},
            id="not the pod that started before all others",
        ),
        pytest.param(
            [pod("a", -5), pod("b", -5), pod("c", -5)],
            {"a": 4, "b": 4, "c": 8},
            8,
            {"c"},
            id="fewer pods for negative priorities",
        ),
    ],
)
def test_the_best_set_in_kube_schedulers_order_is_chosen(
    pods: list[Evictable], sizes: dict[str, int], need: int, leave: set[str] | None
) -> None:
    assert chosen(pods, sizes, need) == leave


def test_a_disruption_budget_outweighs_priority() -> None:
    pods = [pod("low", 1), pod("high", 9)]
    sizes = dict.fromkeys(("low", "high"), 8)
    none_left = Budget(0, frozenset({"low"}))
    assert chosen(pods, sizes, 8) == {"low"}
    assert chosen(pods, sizes, 8, budgets=[none_left]) == {"high"}
    # If no other set helps, the budget is violated, as in kube-scheduler.
    assert chosen(pods, sizes, 16, budgets=[none_left]) == {"low", "high"}


def test_a_budget_is_used_for_the_most_important_pods_first() -> None:
    pods = [pod("a", 1), pod("b", 5), pod("c", 3)]
    budget = Budget(1, frozenset({"a", "b", "c"}))
    assert violators(pods, [budget]) == ["c", "a"]
    assert violators(pods[:1], [budget]) == []


def test_victims_are_in_kube_schedulers_order() -> None:
    pods = [pod("young", 1, 9), pod("old", 1, 3), pod("high", 4, 5)]
    assert [each.uid for each in sorted(pods, key=importance)] == ["high", "old", "young"]


def test_the_number_of_tried_sets_is_limited() -> None:
    asked: list[frozenset[str]] = []

    def helps(uids: frozenset[str]) -> bool:
        asked.append(uids)
        return False

    pods = [pod(f"p{i}") for i in range(FEW)]
    tries = Tries(7)
    everybody = [(NO_VICTIMS, {p.uid for p in pods})]
    assert smallest(pods, [], everybody, lambda _: True, helps, tries) is None
    assert (len(asked), tries.left) == (7, 0)
    assert len(set(asked)) == len(asked)


def test_with_many_pods_victims_of_one_device_suffice() -> None:
    pods = [pod(f"d{d}-{i}", priority=d) for d in range(8) for i in range(7)]
    devices = [{p.uid for p in pods if p.uid.startswith(f"d{d}-")} for d in range(8)]

    def helps(uids: frozenset[str]) -> bool:
        return any(len(uids & on) >= 3 for on in devices)

    tries = Tries(PLENTY)
    floors = [(NO_VICTIMS, on) for on in devices]
    found = smallest(pods, [], floors, helps, helps, tries)
    assert found is not None
    assert len(found) == 3
    assert found < devices[0]
    # With fifty pods, the cheap check is called often, and the expensive one a few dozen times.
    assert PLENTY - tries.left < 200


Worlds = tuple[list[Evictable], list[Budget], list[tuple[Rank, set[str]]], set[frozenset[str]]]


@st.composite
def worlds(draw: st.DrawFn) -> Worlds:
    """Generate pods, and an arbitrary rule for which sets of victims help."""
    names = [f"p{i}" for i in range(draw(st.integers(0, 5)))]
    few = st.integers(-2, 2)
    pods = [
        Evictable(name, draw(few), draw(st.sampled_from([1, 2, NOT_STARTED_S]))) for name in names
    ]
    some = st.frozensets(st.sampled_from(names)) if names else st.just(frozenset[str]())
    budgets = [Budget(draw(st.integers(0, 2)), draw(some)) for _ in range(draw(st.integers(0, 2)))]
    helping = draw(st.sets(some, max_size=8))
    return pods, budgets, [(NO_VICTIMS, set(names))], set(helping)


def brute(world: Worlds) -> tuple[tuple[float, ...], frozenset[str]] | None:
    """Return the best of all sets that help, computed directly from the definition."""
    pods, budgets, _, helping = world
    best: tuple[tuple[float, ...], frozenset[str]] | None = None
    for size in range(len(pods) + 1):
        for group in combinations(pods, size):
            uids = frozenset(p.uid for p in group)
            if uids not in helping:
                continue
            left = {i: budget.allowed for i, budget in enumerate(budgets)}
            violations = 0
            for p in sorted(group, key=lambda p: (-p.priority, p.started_s, p.uid)):
                mine = [i for i, budget in enumerate(budgets) if p.uid in budget.uids]
                for i in mine:
                    left[i] -= 1
                violations += any(left[i] < 0 for i in mine)
            top = max((p.priority for p in group), default=float("-inf"))
            since = min((p.started_s for p in group if p.priority == top), default=0)
            key = (violations, top, sum(p.priority + 2**31 for p in group), size, -since)
            if best is None or key < best[0]:
                best = key, uids
    return best


@given(worlds())
def test_no_better_set_exists_and_every_victim_is_needed(world: Worlds) -> None:
    pods, budgets, devices, helping = world
    tries = Tries(PLENTY)
    found = smallest(pods, budgets, devices, lambda _: True, helping.__contains__, tries)
    expected = brute(world)
    if expected is None:
        assert found is None
        return
    assert found is not None
    of_found = [p for p in pods if p.uid in found]
    assert found in helping
    if found:
        assert rank(of_found, budgets) == expected[0]
    else:
        assert (rank(of_found), expected[1]) == (NO_VICTIMS, frozenset())
    for p in of_found:
        assert found - {p.uid} not in helping
    # If the bound is lower than the best rank, no set is found.
    again = smallest(
        pods, budgets, devices, lambda _: True, helping.__contains__, tries, rank(of_found, budgets)
    )
    assert again is None
