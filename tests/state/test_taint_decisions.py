"""Checks that a DRA device is tainted while its excess is too high."""

import pytest

from headroom.core.cluster.claimed_devices import DraDevice
from headroom.dra_taints.taint_decisions import TaintDecisions

TAINTED_FROM_BYTES = 512 << 20
CLEARED_BELOW_BYTES = 256 << 20
FIRST_HOLD_S = 3.0
LONGEST_HOLD_S = 300.0
FORGOTTEN_AFTER_S = 600.0
UNKNOWN_AFTER_S = 600.0
MAX_TAINTS = 100

GPU = DraDevice("n", "gpu-0")
HIGH, LOW = TAINTED_FROM_BYTES, CLEARED_BELOW_BYTES - 1


class Played:
    def __init__(self) -> None:
        self.decisions = TaintDecisions()
        self.now_s = 0.0
        self.exists = self.known = True

    def after(self, seconds: float, excess_bytes: int) -> bool:
        """Return whether the device is tainted with this excess, after this many further
        seconds."""
        self.now_s += seconds
        given = {GPU: excess_bytes} if excess_bytes else {}
        decided = self.decisions.decide(
            given, lambda _: self.exists, lambda _: self.known, self.now_s
        )
        return GPU in decided


@pytest.fixture
def played() -> Played:
    return Played()


def test_a_taint_begins_at_once_and_ends_when_the_excess_stays_low(played: Played) -> None:
    assert not played.after(0, HIGH - 1)
    assert played.after(1, HIGH)
    assert played.after(1, CLEARED_BELOW_BYTES)  # Between the limits nothing changes.
    assert played.after(1, LOW)
    assert played.after(FIRST_HOLD_S - 0.5, LOW)
    assert played.after(0.25, HIGH)
    assert played.after(1, LOW)
    assert not played.after(FIRST_HOLD_S, 0)


def test_a_device_with_intermittent_excess_is_tainted_only_a_few_times(played: Played) -> None:
    """High and low use alternate every ten seconds, for an hour."""
    changes = before = 0
    for second in range(3600):
        tainted = played.after(1, HIGH if second % 20 < 10 else 0)
        changes += tainted is not bool(before)
        before = tainted
    # The taint is removed after 3 s and after 6 s of low use. Then 12 s are needed, but low use
    # lasts only 10 s.
    assert changes == 5
    assert before


def test_the_minimum_time_of_a_taint_doubles_up_to_a_limit_and_is_reset(played: Played) -> None:
    held_s = []
    for _ in range(9):
        assert played.after(1, HIGH)
        waited_s = 0.0
        while played.after(1, 0):
            waited_s += 1.0
        held_s.append(waited_s)
    assert held_s == [3, 6, 12, 24, 48, 96, 192, LONGEST_HOLD_S, LONGEST_HOLD_S]
    assert not played.after(FORGOTTEN_AFTER_S + 1, 0)
    assert played.after(0, HIGH)
    assert played.after(0, 0)
    assert not played.after(FIRST_HOLD_S, 0)


def test_without_a_report_a_taint_neither_begins_nor_ends_soon(played: Played) -> None:
    played.known = False
    assert not played.after(1, HIGH)
    played.known = True
    assert played.after(1, HIGH)
    played.known = False
    assert played.after(UNKNOWN_AFTER_S, 0)
    assert not played.after(1, 0)


def test_a_taint_ends_with_its_device(played: Played) -> None:
    assert played.after(1, HIGH)
    played.exists = False
    assert not played.after(0, 0)


def test_taints_of_an_earlier_process_are_continued(played: Played) -> None:
    played.decisions.adopt([GPU], played.now_s)
    assert played.after(1, 0)
    assert not played.after(FIRST_HOLD_S, 0)


def test_the_number_of_taints_is_limited_and_the_largest_excess_comes_first() -> None:
    decisions = TaintDecisions()
    devices = {DraDevice("n", f"gpu-{i}"): HIGH + i for i in range(MAX_TAINTS + 5)}
    everything = lambda _: True  # noqa: E731
    tainted = decisions.decide(devices, everything, everything, 0.0)
    assert tainted == {DraDevice("n", f"gpu-{i}") for i in range(5, MAX_TAINTS + 5)}
    assert decisions.untainted == 5
