"""Checks that a node backs off after an eviction, and takes no pods for this time."""

import msgspec
import pytest

from headroom.contract.gpunode import ADOPTED
from headroom.core.eviction.back_offs import BackOffs
from headroom.core.eviction.misplaced_pods import idle_on
from headroom.core.placement.policy import Rules
from tests.builders import GIB, STAMP, gpunode, pod, reservation, shared, use

FIRST_S = 10.0
FORGOTTEN_S = 900.0
LONGEST_S = 320.0


def test_a_node_takes_no_pods_for_a_while_after_an_eviction() -> None:
    backs = BackOffs()
    backs.note("n", {"p"}, 100.0)
    assert backs.holds("n")
    assert not backs.holds("m")
    assert backs.over(100.0 + FIRST_S - 0.1) == []
    assert backs.over(100.0 + FIRST_S) == ["n"]
    backs.end("n")
    assert not backs.holds("n")


def test_a_repeated_mark_counts_once() -> None:
    backs = BackOffs()
    for at_s in (100.0, 105.0, 109.0):
        backs.note("n", {"p"}, at_s)
    assert backs.over(100.0 + FIRST_S) == ["n"]
    assert backs.marks("n")
    backs.note("n", set(), 110.0)
    assert not backs.marks("n")


def test_each_further_eviction_doubles_the_back_off_up_to_a_limit() -> None:
    backs, at_s, took_s = BackOffs(), 0.0, []
    for number in range(8):
        backs.note("n", {f"p{number}"}, at_s)
        long_s = next(s for s in range(1000) if backs.over(at_s + s))
        took_s.append(long_s)
        at_s += long_s
    assert took_s == [10, 20, 40, 80, 160, 320, 320, LONGEST_S]


def test_the_back_off_is_reset_after_a_long_time_without_evictions() -> None:
    backs = BackOffs()
    backs.note("n", {"p"}, 0.0)
    backs.note("n", {"q"}, 1.0)
    backs.note("n", {"r"}, 1.0 + FORGOTTEN_S)
    assert backs.over(1.0 + FORGOTTEN_S + FIRST_S) == ["n"]


def test_the_back_off_of_a_deleted_node_is_dropped() -> None:
    backs = BackOffs()
    backs.note("n", {"p"}, 0.0)
    backs.gpunode_gone("n")
    assert not backs.holds("n")
    assert not backs.marks("n")
    backs.note("n", {"p"}, 1.0)
    assert backs.over(1.0 + FIRST_S) == ["n"]


WALL_S = 1_795_219_200.0
OLD = "2026-11-20T00:00:00+00:00"


@pytest.mark.parametrize(
    ("since", "created", "flags", "is_new"),
    [
        pytest.param(STAMP, OLD, [], True, id="just placed"),
        pytest.param(OLD, STAMP, [], False, id="placed long ago"),
        pytest.param(STAMP, STAMP, [ADOPTED], True, id="just bound without Headroom"),
        pytest.param(STAMP, OLD, [ADOPTED], False, id="bound without Headroom long ago"),
        pytest.param(STAMP, None, [ADOPTED], False, id="bound without Headroom, of unknown age"),
    ],
)
def test_a_new_pod_without_use_may_be_evicted_whoever_bound_it(
    since: str, created: str | None, flags: list[str], is_new: bool
) -> None:
    held = msgspec.structs.replace(reservation({"a": GIB}), since=since, flags=flags)
    node = gpunode(shared("a", allocated=1), reservations={"p": held}, pods=[use("p", "a")])
    there = pod(uid="p", node="n", phase="Running", created=created)
    found = idle_on(node, [there], WALL_S, Rules(evict_misses=True))
    assert found.keys() == ({"p"} if is_new else set())
    assert all(each.granted is (not flags) for each in found.values())
