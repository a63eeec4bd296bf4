"""Checks that the watchdog for hostile inputs detects each kind of harm."""

import re
from collections.abc import Callable

import pytest
import structlog

from tests.fuzz.watchdog import Tally, Target, attacked
from tests.waiting import PATIENCE_S


class Planted(Target):
    """A target that reacts to inputs in one harmful way."""

    name = "planted"
    seeds = (b"x",)

    def __init__(self, does: Callable[[], object]) -> None:
        self._does = does

    def take(self, data: bytes) -> bool:
        self._does()
        return True


def fed(does: Callable[[], object], inputs: int = 1, cpu_s: float = PATIENCE_S) -> Tally:
    return attacked(lambda: Planted(does), range(inputs), 1, cpu_s)


def spin() -> None:
    while True:
        pass


def swallow_all() -> None:
    try:
        spin()
    except Exception:  # noqa: BLE001 - as a reader might
        return


def caught_by_a_reader() -> None:
    try:
        raise KeyError("x")
    except KeyError:
        structlog.get_logger().exception("source_broken")


_kept: list[bytes] = []


def test_an_infinite_loop_inside_an_except_is_reported() -> None:
    (failure,) = fed(swallow_all, cpu_s=0.3).failures
    assert failure.startswith("planted --seed 1 --only 0: Hang")


@pytest.mark.parametrize(
    ("does", "message"),
    [
        pytest.param(lambda: {}["x"], "KeyError", id="an undeclared exception"),
        pytest.param(
            lambda: bytearray(200 << 20), "Harm: [0-9]+ MiB for", id="much memory for one input"
        ),
        pytest.param(
            caught_by_a_reader,
            "Harm: only logged: source_broken",
            id="an exception that was only logged",
        ),
    ],
)
def test_each_kind_of_harm_is_reported(does: Callable[[], object], message: str) -> None:
    (failure,) = fed(does).failures
    assert re.match(f"planted --seed 1 --only 0: {message}", failure)


def test_memory_that_is_not_freed_is_reported() -> None:
    try:
        failures = fed(lambda: _kept.append(bytes(range(256)) * 4096), 300).failures
    finally:
        _kept.clear()
    assert any("stay of 300 inputs" in failure for failure in failures)
