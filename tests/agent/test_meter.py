"""Tests that the activity of processes is measured correctly despite clock changes."""

from typing import Any, cast

from agent.probes.nvml import Gate
from agent.probes.sm_activity import Meter

HOUR_US = 3_600_000_000


class Driver:
    """A driver that takes a sample of a process just before each call, and returns this sample."""

    def __init__(self) -> None:
        self.now_us = 10 * HOUR_US

    def ask(self, name: str, *args: Any) -> None:
        """Raise the error for a missing function in all other calls."""

    def process_samples(self, handle: Any, since_us: int) -> list[tuple[int, int, int]]:
        at_us = self.now_us - 1
        return [(7, at_us, 50)] if at_us > since_us else []


def test_a_clock_that_is_set_back_does_not_make_processes_idle() -> None:
    driver = Driver()
    meter = Meter(cast(Gate, driver), wall_us=lambda: driver.now_us)

    def sm_ratios() -> list[Any]:
        return [reading.sm_ratio for reading in meter.measure(None, "GPU-a")]

    assert sm_ratios() == [0.5]
    driver.now_us -= HOUR_US
    assert sm_ratios() == [0.5]
    driver.now_us += 5_000_000
    assert sm_ratios() == [0.5]
