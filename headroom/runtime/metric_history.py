"""Reads the metrics of past days from Prometheus, for plans and for the recorder.

The functions do no I/O. They are generators that yield queries and receive the samples, so each
caller can wait for Prometheus in its own way.

A value is impossible if it is NaN, negative, a ratio above 1, or more memory than the device has.
If a series has such a value on a day, its maximum or mean of that day is queried again without the
value.
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from headroom.contract.dcgm import Key, key_of_series
from headroom.runtime.promql import TOTALS, Measured

DAY_S = 86_400.0
#: Maximum number of values that are queried again. Other such values are omitted.
MAX_REPEATED = 200
#: Used memory may exceed the usual total by this factor, because the driver's reserve can change.
_TOLERANCE = 1.01
#: Maximum of a value. Larger values cannot be measurements.
_MOST_VALUE = float(1 << 60)


@dataclass(frozen=True, slots=True)
class Sample:
    labels: Mapping[str, str]
    value: float


class Asked(NamedTuple):
    promql: str
    #: Unix time at which the query is evaluated.
    at_s: float


T = TypeVar("T")
#: The samples of all days, by the name of their query.
Answers = dict[str, list[Sample]]
#: A generator that yields queries, is sent their samples, and returns a result.
Reading = Generator[Asked, Sequence[Sample], T]


def answered(reading: Reading[T], ask: Callable[[Asked], Sequence[Sample]]) -> T:
    """Return the result of a reading. ``ask`` answers each query."""
    try:
        asked = next(reading)
        while True:
            asked = reading.send(ask(asked))
    except StopIteration as end:
        result: T = end.value
        return result


def read_days(
    totals: Mapping[str, str],
    queries: Mapping[str, str],
    measured: Mapping[str, Measured],
    days: int,
    end_s: float,
) -> Reading[Answers]:
    """Return the samples of all queries. Each query in ``queries`` and ``measured`` covers one day.

    ``totals`` is the result of ``Queries.totals``. The answers to these queries are the limits for
    memory values.
    """
    found: Answers = {name: [] for name in (*totals, *queries, *measured)}
    memory_bytes: dict[Key, float] = {}
    repeats = 0
    for name, promql in totals.items():
        found[name] = measurements((yield Asked(promql, end_s)))
        for sample in found[name]:
            if (key := key_of_series(sample.labels)) is not None:
                size_bytes = sample.value * TOTALS[name]
                memory_bytes[key] = max(size_bytes, memory_bytes.get(key, 0.0))
    for day in reversed(range(days)):
        at_s = end_s - day * DAY_S
        for name, promql in queries.items():
            found[name] += measurements((yield Asked(promql, at_s)))
        for name, each in measured.items():
            samples = yield Asked(each.promql, at_s)
            suspects = (yield Asked(each.suspects, at_s)) if each.suspects else ()
            impossible = {_identity(sample.labels) for sample in suspects}
            for sample in samples:
                most = _most(each, sample, memory_bytes)
                if 0 <= sample.value <= most and _identity(sample.labels) not in impossible:
                    found[name].append(sample)
                elif (repeats := repeats + 1) <= MAX_REPEATED:
                    again = yield Asked(each.possible(sample.labels, most), at_s)
                    own = _identity(sample.labels)
                    found[name] += [s for s in measurements(again) if _identity(s.labels) == own]
    return found


def _most(of: Measured, sample: Sample, memory_bytes: Mapping[Key, float]) -> float:
    """Return the largest possible value of a series, in the unit of its metric."""
    if of.unit_bytes is None:
        return of.most
    key = key_of_series(sample.labels)
    total_bytes = math.inf if key is None else memory_bytes.get(key, math.inf)
    return min(of.most, _TOLERANCE * total_bytes / of.unit_bytes)


def measurements(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples whose values are finite numbers of at least 0."""
    return [sample for sample in samples if 0 <= sample.value <= _MOST_VALUE]


def _identity(labels: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """Return the labels without the metric's name, because only some queries return the name."""
    return frozenset(item for item in labels.items() if item[0] != "__name__")
