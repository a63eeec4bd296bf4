"""Reads the history of any range from Prometheus, in the form in which the console records the last
hour.

The agents export the use and SM activity of devices and the use of pods. The console exports the
reservations (for devices, setting ``device_series`` limits them) and the sums over the fleet.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import BoundedSemaphore
from typing import NamedTuple

from headroom.errors import PrometheusUnreadable
from headroom.runtime.promql import EVERY_CLUSTER, Queries, RangeQuery, own_labels

#: Maximum number of values of a series, except for the first.
MOST_VALUES = 360
#: Shortest time between two values: the usual scrape interval.
LEAST_STEP_S = 15.0
#: Shortest time between two values that are summed, in seconds.
SUMMED_EVERY_S = 15
#: Maximum number of values that are summed for a step.
SUMMED_IN_STEP = 5
#: Seconds in which all queries must be answered.
WITHIN_S = 10.0
#: Maximum number of readers at a time. Each of them occupies one of the threads that answer all
#: views and probes.
MOST_READERS = 16
#: Limit of a value, so that sums are finite. No metric of the queries is negative.
MOST_VALUE = 1e24


class Found(NamedTuple):
    """One series, with a value for each time of the range; None if there is no value for the
    time."""

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
        """Return the times of all values, up to the end or just after it."""
        count = math.ceil((self.end_s - self.begin_s) / self.step_s)
        return [self.begin_s + number * self.step_s for number in range(count + 1)]


@dataclass(frozen=True, slots=True)
class PrometheusRanges:
    """Reads ranges from one Prometheus. ``url`` may contain a user and a password."""

    url: str
    token_file: Path | None = None
    ca: Path | None = None
    queries: Queries = EVERY_CLUSTER
    _readers: BoundedSemaphore = field(
        default_factory=lambda: BoundedSemaphore(MOST_READERS), repr=False, compare=False
    )

    def read(self, queries: Sequence[RangeQuery], within: Range) -> list[Found]:
        """Return the series of all queries. Blocks. Raises ``PrometheusUnreadable``, which happens
        at once if too many readers already wait."""
        if not self._readers.acquire(blocking=False):
            raise PrometheusUnreadable(f"{MOST_READERS} readers wait for it already; try again")
        try:
            return self._read(queries, within)
        finally:
            self._readers.release()

    def _read(self, queries: Sequence[RangeQuery], within: Range) -> list[Found]:
        # The client of Prometheus is slow to import, and few readers ask for long ranges.
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
                    # Several scrapes of a target can differ in whether they honor labels.
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
    """Yield the value at each time, None where Prometheus has none."""
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
    """Return the queries about GPU seconds and byte seconds of each namespace and state, and about
    the seconds for which there are values. Each value is the sum over the step before it."""
    every_s = max(SUMMED_EVERY_S, math.ceil(within.step_s / SUMMED_IN_STEP))
    return [*queries.held(within.step_s, every_s), queries.covered(within.step_s, every_s)]
