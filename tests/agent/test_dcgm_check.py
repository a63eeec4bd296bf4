"""Checks whether DCGM's memory values can belong to NVML's devices."""

import pytest

from agent.probes.dcgm_exposition import CrossCheck, DcgmReading
from agent.probes.nvml import Memory
from agent.probes.readings import DeviceReading
from tests.driver import GIB

TOTAL, RESERVED = 80 * GIB, GIB


def nvml(used_bytes: int) -> list[DeviceReading]:
    memory = Memory(TOTAL, TOTAL - RESERVED - used_bytes, RESERVED)
    return [DeviceReading("nvml", "GPU-a", 0, memory=memory)]


def dcgm(used_bytes: int | None = None, **more: int) -> list[DcgmReading]:
    return [DcgmReading("GPU-a", None, used_bytes=used_bytes, **more)]


def after(check: CrossCheck, *used: tuple[float, int, int | None]) -> list[str]:
    """Return the result after these (time, NVML's used, DCGM's used), each from a new scrape."""
    wrong: list[str] = []
    for scrape, (now_s, own, other) in enumerate(used, start=1):
        wrong = check.compare(now_s, scrape, nvml(own), dcgm(other))
    return wrong


def test_a_value_from_half_a_minute_ago_is_not_a_disagreement() -> None:
    assert (
        after(CrossCheck(), (0, 40 * GIB, 40 * GIB), *((t, 0, 40 * GIB) for t in range(5, 55, 5)))
        == []
    )


def test_a_value_that_was_never_true_is_reported_after_three_scrapes() -> None:
    figures = [(float(t), 0, 40 * GIB) for t in (10, 20, 30)]
    assert after(CrossCheck(), *figures[:2]) == []
    assert after(CrossCheck(), *figures) == ["GPU-a: its used memory differs from NVML's report"]


def test_an_outdated_value_is_reported_in_time() -> None:
    figures = [(0.0, 40 * GIB, 40 * GIB), *((float(t), 0, 40 * GIB) for t in range(10, 100, 10))]
    assert after(CrossCheck(), *figures) != []


def test_a_repeated_scrape_counts_once() -> None:
    check = CrossCheck()
    for now_s in range(10):
        assert check.compare(now_s, 1, nvml(0), dcgm(40 * GIB)) == []


@pytest.mark.parametrize("used_bytes", [5 * GIB, 5 * GIB + RESERVED])
def test_the_drivers_reserve_may_or_may_not_count_as_used(used_bytes: int) -> None:
    assert after(CrossCheck(), *((float(t), 5 * GIB, used_bytes) for t in range(5))) == []


def test_the_total_is_checked_as_reported_or_as_the_sum_of_its_parts() -> None:
    parts = {"used_bytes": 0, "free_bytes": TOTAL - RESERVED, "reserved_bytes": RESERVED}
    check = CrossCheck()
    assert check.compare(0, 1, nvml(0), dcgm(**parts)) == []
    message = ["GPU-a: its memory differs from NVML's report"]
    assert check.compare(1, 2, nvml(0), dcgm(**{**parts, "free_bytes": GIB})) == message
    assert check.compare(2, 3, nvml(0), dcgm(total_bytes=TOTAL)) == []
    assert check.compare(3, 4, nvml(0), dcgm(total_bytes=TOTAL // 2)) == message
