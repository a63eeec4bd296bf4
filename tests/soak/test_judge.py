"""Tests the rules about the memory of processes with invented figures."""

import pytest

from tests.soak.judge import MIB, Memory, findings, limits

FLAT = [100.0] * 24
#: A process whose caches fill for ten hours.
FILLING = [100.0 + min(hour, 10) for hour in range(24)]
#: A process that grows by a third of a MiB per hour during the whole day.
LEAKING = [100.0 + hour / 3 for hour in range(24)]
#: A process whose allocator keeps 20 MiB after one hour in the second half.
ONE_PEAK = [100.0] * 18 + [120.0] + [100.0] * 5


def memory(rests_mib: list[float], peak_mib: float = 150) -> dict[str, Memory]:
    rests = [round(each * MIB) for each in rests_mib]
    return {"console": Memory(rests, round(peak_mib * MIB))}


@pytest.mark.parametrize("rests", [FLAT, FILLING, ONE_PEAK])
def test_filled_caches_and_a_single_step_are_not_growth(rests: list[float]) -> None:
    measured = memory(rests)
    assert measured["console"].grown_per_day() == 0
    assert findings(measured, {"console": 896 * MIB}) == []


def test_growth_that_reaches_the_limit_before_the_next_upgrade_is_reported() -> None:
    measured = memory(LEAKING)
    assert measured["console"].grown_per_day() == pytest.approx(8 * MIB, rel=0.01)
    (found,) = findings(measured, {"console": 896 * MIB})
    assert "console: grows by 8.0 MiB a day, so it has 1110 MiB after 120 days" in found
    assert findings(measured, {"console": 1200 * MIB}) == []


def test_a_peak_at_the_limit_is_reported() -> None:
    (found,) = findings(memory(FLAT, peak_mib=896), {"console": 896 * MIB})
    assert found == "console: 896 MiB, the limit is 896 MiB"


def test_limits_are_read_from_the_manifests() -> None:
    assert limits() == {
        "extender": 768 * MIB,
        "console": 896 * MIB,
        "webhook": 512 * MIB,
        "recorder": 768 * MIB,
        "agent": 256 * MIB,
        "certs": 256 * MIB,
    }
