"""The rules about the memory of processes, on invented figures."""

import os

import pytest

from tests.soak.judge import MIB, Memory, findings, limits

FLAT = [100.0] * 24
#: Caches fill for ten hours.
FILLING = [100.0 + min(hour, 10) for hour in range(24)]
#: A third of a MiB an hour, from the beginning to the end.
LEAKING = [100.0 + hour / 3 for hour in range(24)]
#: The allocator keeps 20 MiB after one hour of the second half.
ONE_PEAK = [100.0] * 18 + [120.0] + [100.0] * 5


def memory(rests_mib: list[float], peak_mib: float = 150) -> dict[str, Memory]:
    rests = [round(each * MIB) for each in rests_mib]
    return {"console": Memory(rests, round(peak_mib * MIB))}


@pytest.mark.parametrize("rests", [FLAT, FILLING, ONE_PEAK])
def test_what_fills_and_stays_is_no_growth(rests: list[float]) -> None:
    measured = memory(rests)
    assert measured["console"].grown_per_day() == 0
    assert findings(measured, {"console": 896 * MIB}) == []


def test_growth_that_reaches_the_limit_before_the_next_upgrade_is_found() -> None:
    measured = memory(LEAKING)
    assert measured["console"].grown_per_day() == pytest.approx(8 * MIB, rel=0.01)
    (found,) = findings(measured, {"console": 896 * MIB})
    assert "console: grows by 8.0 MiB a day, so it has 1110 MiB after 120 days" in found
    assert findings(measured, {"console": 1200 * MIB}) == []


def test_a_peak_at_the_limit_is_found() -> None:
    (found,) = findings(memory(FLAT, peak_mib=896), {"console": 896 * MIB})
    assert found == "console: 896 MiB, the limit is 896 MiB"


def test_limits_are_those_of_the_manifests() -> None:
    assert limits() == {
        "extender": 768 * MIB,
        "console": 896 * MIB,
        "webhook": 512 * MIB,
        "recorder": 768 * MIB,
        "agent": 256 * MIB,
        "certs": 256 * MIB,
    }


def test_memory_is_what_the_kernel_shows() -> None:
    measured = Memory()
    measured.sample(os.getpid())
    held = b"x" * (64 * MIB)
    measured.sample(os.getpid())
    before, after = measured.rests
    assert 60 * MIB < after - before < 68 * MIB
    assert measured.peak >= after
    del held
