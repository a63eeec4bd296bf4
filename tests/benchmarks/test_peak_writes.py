"""Checks that peaks cause few additional reports, because most peaks are written with reports of
other changes.
"""

import pytest

from benchmarks.peak_writes import writes


@pytest.mark.parametrize(
    ("scenario", "with_peaks", "without", "with_overuse"),
    [
        pytest.param("churn", 356, 342, 360, id="containers start, end and use more for some time"),
        pytest.param("steady", 8, 7, 8, id="nothing changes"),
        pytest.param("marks", 37, 7, 37, id="only peaks change, every two minutes"),
    ],
)
@pytest.mark.slow
def test_peaks_add_few_reports_in_an_hour(
    scenario: str, with_peaks: int, without: int, with_overuse: int
) -> None:
    counted = [each["report", "accepted"] for each in writes(scenario, hours=1.0, seed=1)]
    assert counted == [with_peaks, without, with_overuse]
    assert with_peaks - without <= 60  # A change of only peaks is written at most once a minute.
