"""The history of any range from Prometheus, in the form in which the console records the last hour.

The agents export the use and SM activity of devices and the use of pods, the console the
reservations (setting ``device_series`` limits those of devices) and the sums over the fleet.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import BoundedSemaphore
from typing import NamedTuple

from extender.errors import PrometheusUnreadable

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
#: Maximum number of readers at a time. Each has a thread of those that answer all views and probes.
MOST_READERS = 16
#: Limit of a value, so that sums are finite. No metric of the queries is negative.
MOST_VALUE = 1e24
#: Fields of ``/v1/history/fleet`` -> unit and metric.
FLEET = {
    "allocatable": ("bytes", "headroom_fleet_allocatable_bytes"),
    "reserved": ("bytes", "headroom_fleet_reserved_bytes + headroom_fleet_unconfirmed_bytes"),
    "used": ("bytes", "headroom_fleet_used_bytes"),
    "unattributed": ("bytes", "headroom_fleet_unattributed_bytes"),
    "headroom": ("bytes", "headroom_fleet_headroom_bytes"),
    "overcommitted_devices": ("count", "count by (instance) (headroom_overcommitted_bytes > 0)"),
    "pending_pods": ("count", "sum by (instance) (headroom_pending_pods)"),
}


class Query(NamedTuple):
    """A query whose series become series of the history."""

    kind: str
    unit: str
    promql: str


class Found(NamedTuple):
    """One series, with a value for each time of the range; None where there is none."""

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
    _readers: BoundedSemaphore = field(
        default_factory=lambda: BoundedSemaphore(MOST_READERS), repr=False, compare=False
    )

    def read(self, queries: Sequence[Query], within: Range) -> list[Found]:
        """Return the series of all queries. Blocks; raises ``PrometheusUnreadable``, at once if
        too many readers wait already."""
        if not self._readers.acquire(blocking=False):
            raise PrometheusUnreadable(f"{MOST_READERS} readers wait for it already; try again")
        try:
            return self._read(queries, within)
        finally:
            self._readers.release()

    def _read(self, queries: Sequence[Query], within: Range) -> list[Found]:
        # The client of Prometheus is slow to import, and few readers ask for long ranges.
        from extender.prometheus import connected, read_range

        times = within.times()
        found: list[Found] = []
        with connected(self.url, WITHIN_S, self.token_file, self.ca) as connection:
            for query in queries:
                for each in read_range(
                    connection, query.promql, times[0], times[-1], within.step_s
                ):
                    values = list(_at_times(times, within.step_s, each.values))
                    found.append(Found(query.kind, query.unit, each.metric, values))
        return found


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


def of_device(uuid: str) -> list[Query]:
    """Return the queries about a device."""
    of = f"{{UUID={_quoted(uuid)}}}"
    reserved = f"headroom_ledger_device_reserved_bytes{{device={_quoted(uuid)}}}"
    pods = f"sum by (namespace, pod, pod_uid) (headroom_pod_used_bytes{of})"
    return [
        Query("reserved", "bytes", f"max({reserved})"),
        Query("used", "bytes", f"max(headroom_device_used_bytes{of})"),
        Query("sm", "ratio", f"max(headroom_device_sm_activity_ratio{of})"),
        Query("pod", "bytes", pods),
    ]


def of_pod(namespace: str, name: str) -> list[Query]:
    """Return the query about a pod, whose series are its devices."""
    of = f"{{namespace={_quoted(namespace)}, pod={_quoted(name)}}}"
    by = "sum by (namespace, pod, pod_uid, UUID)"
    return [Query("pod", "bytes", f"{by} (headroom_pod_used_bytes{of})")]


def of_fleet() -> list[Query]:
    """Return the queries about the fleet. Each console exports the sums: the highest counts."""
    return [Query(kind, unit, f"max({promql})") for kind, (unit, promql) in FLEET.items()]


def of_holdings(within: Range) -> list[Query]:
    """Return the queries about GPU seconds and byte seconds of each namespace and state, of which
    each value is the sum over the step before it."""
    return [
        _seconds(of, f"max by (namespace, state) (headroom_held_{of})", within)
        for of in ("gpus", "bytes")
    ]


def covered(within: Range) -> Query:
    """Return the query about the seconds for which there are values of ``of_holdings``."""
    return _seconds("covered", "max(headroom_fleet_devices) * 0 + 1", within)


def _seconds(kind: str, promql: str, within: Range) -> Query:
    every_s = max(SUMMED_EVERY_S, math.ceil(within.step_s / SUMMED_IN_STEP))
    # A range with both of its ends would contain one value too many in each step that begins with a
    # value, so it is a millisecond shorter than the step.
    step_ms = round(1000 * within.step_s) - 1
    summed = f"sum_over_time(({promql})[{step_ms}ms:{every_s}s])"
    return Query(kind, "s", f"{summed} * {every_s}")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
