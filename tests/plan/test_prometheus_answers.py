"""Tests responses of Prometheus that are not measurements, or that arrive only at another
attempt.
"""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from headroom.errors import BadSettings, PrometheusUnreadable
from headroom.planner.prometheus_source import read_prometheus
from headroom.planner.workload import History
from headroom.runtime.prometheus import Connection
from headroom.runtime.promql import EVERY_CLUSTER as QUERIES
from tests.plan.test_metrics_history import OLD, answers

URL = "http://127.0.0.1:9"
BAD = pytest.mark.parametrize("bad", ["NaN", "+Inf", "-Inf", "1e308", "-5"])


class Prometheus:
    """Answers each query of a plan. ``values`` replaces the values of some responses."""

    def __init__(self, values: Mapping[str, str]) -> None:
        texts = QUERIES.totals(1) | QUERIES.lives | QUERIES.nodes
        texts |= {name: each.promql for name, each in QUERIES.use.items()}
        self.names = {promql: name for name, promql in texts.items()}
        self.values = values
        self.found = answers("Hostname", OLD)
        #: Errors of the next queries.
        self.errors: list[str] = []

    def custom_query(self, promql: str, params: object) -> list[dict[str, Any]]:
        if self.errors:
            raise PrometheusUnreadable(self.errors.pop())
        if (name := self.names.get(promql)) is None:
            return []  # About impossible values.
        return [
            {"metric": each.labels, "value": [1.0, self.values.get(name, str(each.value))]}
            for each in self.found[name]
        ]

    @contextmanager
    def connected(self, *args: object, **options: object) -> Iterator[Connection]:
        yield Connection(self, {})

    def read(self, *seconds: float) -> History:
        """Read the history of a day, with this clock, and without pauses between attempts."""
        clock = itertools.chain(seconds, itertools.repeat(0.0))
        return read_prometheus(
            URL,
            1,
            {},
            90_000.0,
            connect=self.connected,
            monotonic_s=lambda: next(clock),
            pauses_s=(0.0, 0.0),
        )


@BAD
@pytest.mark.parametrize(
    "name", [name for name, found in answers("Hostname", OLD).items() if found]
)
def test_values_that_are_not_measurements_are_skipped(name: str, bad: str) -> None:
    prometheus = Prometheus({name: bad})
    if name in ("gpus", "node", "fb_total", "devices"):
        with pytest.raises(BadSettings, match="Prometheus has no "):
            prometheus.read()
        return
    (life,) = prometheus.read().lives
    assert life.peak_bytes == (None if name == "fb_used" else 6000 << 20)
    assert 0 < life.run_s <= 90_000


def test_a_value_that_is_not_a_number_is_an_error() -> None:
    with pytest.raises(BadSettings, match=f"--prometheus {URL}: 'abc' is not a number. To check"):
        Prometheus({"gpus": "abc"}).read()


def test_a_query_that_fails_early_is_retried_twice() -> None:
    busy = Prometheus({})
    busy.errors = ["it answers 503"] * 2
    assert len(busy.read().lives) == 1
    busy.errors = ["it answers 503"] * 3
    with pytest.raises(BadSettings, match="it answers 503"):
        busy.read()
    busy.errors = ["the answer came too late"]
    with pytest.raises(BadSettings, match="the answer came too late"):
        busy.read(0.0, 31.0)
