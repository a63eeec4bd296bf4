"""Reads history of any range from Prometheus, in the form in which the console records the last
hour.

The agents export the use and SM activity of devices, and the use of pods. The console exports sums
over the fleet and the reservations on devices, which setting ``device_series`` limits.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import BoundedSemaphore
from typing import NamedTuple

from headroom.errors import PrometheusUnreadable
from headroom.runtime.promql import EVERY_CLUSTER, Queries, RangeQuery, own_labels

#: Maximum number of values of a series, not counting the first.
MOST_VALUES = 360
#: Minimum seconds between two values: the usual scrape interval.
LEAST_STEP_S = 15.0
#: Minimum seconds between two values that are summed.
SUMMED_EVERY_S = 15
#: Maximum number of values that are summed in one step.
SUMMED_IN_STEP = 5
#: Time in which Prometheus must answer all queries, in seconds.
WITHIN_S = 10.0
#: Maximum number of readers at a time. Each of them occupies a thread, and the same threads serve
#: all views and probes.
MOST_READERS = 16
#: Upper limit of a value, which keeps sums finite. No metric in the queries is negative.
MOST_VALUE = 1e24


class Found(NamedTuple):
    """One series, with a value for each time of the range. A value is None if Prometheus has
    none."""

    kind: str
    unit: str
    labels: dict[str, str]
    values: list[float | None]


class Range(NamedTuple):
    begin_s: float
    end_s: float

    @property
    def step_s(self) -> float:
        least_s = math.ceil((self.end_s - self.begin_s) / MOST_VALUES)
        return max(LEAST_STEP_S, float(least_s))

    def times(self) -> list[float]:
        """Return the times of all values. The last is at the end of the range or just after it."""
        count = math.ceil((self.end_s - self.begin_s) / self.step_s)
        return [self.begin_s + number * self.step_s for number in range(count + 1)]


@dataclass(frozen=True, slots=True)
class PrometheusRanges:
    """Reads ranges from one Prometheus. ``url`` may contain a user name and a password."""

    url: str
    token_file: Path | None = None
    ca: Path | None = None
    queries: Queries = EVERY_CLUSTER
    _readers: BoundedSemaphore = field(
        default_factory=lambda: BoundedSemaphore(MOST_READERS), repr=False, compare=False
    )

    def read(self, queries: Sequence[RangeQuery], within: Range) -> list[Found]:
        """Return the series of all queries. This blocks. Raises ``PrometheusUnreadable``, without
        waiting if too many readers wait already."""
        if not self._readers.acquire(blocking=False):
            raise PrometheusUnreadable(f"{MOST_READERS} readers wait for it already; try again")
        try:
            return self._read(queries, within)
        finally:
            self._readers.release()

    def _read(self, queries: Sequence[RangeQuery], within: Range) -> list[Found]:
        # Importing the client of Prometheus is slow, and few readers ask for long ranges.
        from headroom.runtime.prometheus import connected, read_range

        times = within.times()
        found: dict[tuple[str, frozenset[tuple[str, str]]], Found] = {}
        with connected(self.url, WITHIN_S, self.token_file, self.ca) as connection:
            for query in queries:
                for each in read_range(
                    connection, query.promql, times[0], times[-1], within.step_s
                ):
                    labels = own_labels(each.metric)
                    values = list(_at_times(times, within.step_s, each.values))
                    # Scrape jobs for the same target can differ in whether they honor labels.
                    same = query.kind, frozenset(labels.items())
                    if (other := found.get(same)) is not None:
                        values = list(map(_larger, other.values, values))
                    found[same] = Found(query.kind, query.unit, labels, values)
        return list(found.values())


def _larger(one: float | None, other: float | None) -> float | None:
    return max((each for each in (one, other) if each is not None), default=None)


def _at_times(
    times: Sequence[float], step_s: float, values: Sequence[tuple[float, str]]
) -> Iterator[float | None]:
    """Yield the value at each time, or None if Prometheus has none."""
    known: dict[int, float] = {}
    for at_s, text in values:
        try:
            figure = float(text)
        except ValueError as err:
            raise PrometheusUnreadable(f"{text[:40]!r} is not a number") from err
        if 0.0 <= figure <= MOST_VALUE:
            known[round((at_s - times[0]) / step_s)] = figure
    for number in range(len(times)):
        yield known.get(number)


def of_holdings(queries: Queries, within: Range) -> list[RangeQuery]:
    """Return the queries for GPU seconds and byte seconds by namespace and state, and for the
    seconds that have values. Each value is the sum over the step before it."""
    every_s = max(SUMMED_EVERY_S, math.ceil(within.step_s / SUMMED_IN_STEP))
    return [*queries.held(within.step_s, every_s), queries.covered(within.step_s, every_s)]
