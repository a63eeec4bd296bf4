"""Tests the decaying histogram of peaks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.core.recommend.histogram import (
    Histogram,
    bucket_of,
    highest,
    quantile,
    upper_end,
    weight_above,
)

MAX_BUCKETS = 64

GIB = 1 << 30
DAY_S = 86400.0


@pytest.mark.parametrize(
    ("peak", "bucket", "end"),
    [
        pytest.param(0, 0, 33554432, id="the first bucket begins at zero"),
        pytest.param(33554432, 0, 33554432, id="a bucket includes its upper end"),
        pytest.param(33554433, 1, 33889977, id="the next byte is in the next bucket"),
        pytest.param(8 * GIB, 558, 8651202193, id="8 GiB"),
        pytest.param(1 << 50, 1120, 2321071549006, id="the last bucket has no end"),
    ],
)
def test_a_peak_is_in_its_bucket(peak: int, bucket: int, end: int) -> None:
    assert bucket_of(peak) == bucket
    assert upper_end(bucket) == end


@given(st.integers(33554433, 2 << 40))
def test_the_value_of_a_peak_is_at_most_one_percent_above_it(peak: int) -> None:
    assert peak <= upper_end(bucket_of(peak)) <= peak * 1.0101


def test_a_weight_halves_in_a_half_life_and_is_dropped_after_ten() -> None:
    histogram = Histogram(as_of_s=100.0)
    histogram.add(GIB)
    histogram.decay(100.0 + 10 * DAY_S, 10 * DAY_S)
    assert histogram.total == pytest.approx(0.5)
    histogram.decay(50.0, 10 * DAY_S)  # Time never goes back.
    assert (histogram.total, histogram.as_of_s) == (pytest.approx(0.5), 100.0 + 10 * DAY_S)
    histogram.decay(100.0 + 100 * DAY_S, 10 * DAY_S)
    assert not histogram.weights


def test_quantile_and_highest_value_are_computed() -> None:
    weights = {100: 6.0, 200: 3.0, 300: 1.0}
    assert [quantile(weights, share) for share in (0.0, 0.6, 0.61, 0.9, 1.0)] == [
        upper_end(bucket) for bucket in (100, 100, 200, 200, 300)
    ]
    assert highest(weights) == upper_end(300)
    assert highest({100: 6.0, 200: 0.01}) == upper_end(200)
    assert (quantile({}, 0.5), highest({})) == (0, 0)
    assert weight_above(weights, upper_end(150)) == 4.0
    assert weight_above(weights, upper_end(300)) == 0.0


@given(st.lists(st.integers(1, 1 << 41), min_size=1, max_size=300))
def test_a_histogram_is_limited_in_size_and_only_rounds_up(peaks: list[int]) -> None:
    histogram = Histogram()
    for peak in peaks:
        histogram.add(peak)
    assert len(histogram.weights) <= MAX_BUCKETS
    assert histogram.total == pytest.approx(len(peaks))
    ordered = sorted(peaks)
    for share in (0.5, 0.9, 1.0):
        assert quantile(histogram.weights, share) >= ordered[int(share * len(peaks) + 0.999) - 1]


def test_a_checkpoint_keeps_thousandths_and_drops_invalid_data() -> None:
    histogram = Histogram({10: 2.0, 20: 0.0304, 30: 0.0002}, 5.0)
    assert histogram.checkpoint() == {"10": 2000, "20": 30}
    hostile = {"10": 2000, "20": 30, "-1": 5, "x": 5, "1121": 5, "40": 0, "41": -7, "²": 5}
    assert Histogram.restored(hostile, 5.0) == Histogram({10: 2.0, 20: 0.03}, 5.0)
    assert len(Histogram.restored({str(n): 1 for n in range(1000)}, 0.0).weights) == MAX_BUCKETS


def test_merged_histograms_decay_to_the_later_time() -> None:
    one, other = Histogram({10: 1.0}, 0.0), Histogram({10: 1.0, 11: 1.0}, DAY_S)
    one.merge(other, DAY_S)
    assert (one.as_of_s, one.weights) == (DAY_S, {10: 1.5, 11: 1.0})
