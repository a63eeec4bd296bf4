"""Checks that the agent's metrics equal the text that prometheus_client renders."""

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from agent.exposition import rendered

#: Every character that a file can contain, with a preference for special characters.
TEXTS = st.text(st.sampled_from('\\"\n\r{},= é') | st.characters(codec="utf-8"), max_size=12)
NUMBERS = st.floats() | st.integers(-(1 << 60), 1 << 60) | st.booleans()
SERIES = st.lists(st.tuples(st.tuples(TEXTS, TEXTS), NUMBERS), max_size=4)


class Of(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


@given(TEXTS, SERIES, NUMBERS)
def test_the_text_equals_the_client_librarys(
    text: str, series: list[tuple[tuple[str, str], float]], single: float
) -> None:
    labels = ("pod_uid", "UUID")
    gauge, counter = (
        kind(f"x_{kind.__name__}", text, labels=labels)
        for kind in (GaugeMetricFamily, CounterMetricFamily)
    )
    for values, figure in series:
        gauge.add_metric(values, figure)
        counter.add_metric(values, figure)
    info = InfoMetricFamily("x_build", text, value={"version": text})
    metrics = [gauge, GaugeMetricFamily("x_single", text, value=single), counter, info]
    registry = CollectorRegistry()
    registry.register(Of(metrics))
    assert rendered(metrics) == generate_latest(registry)
    names = [family.name for family in text_string_to_metric_families(rendered(metrics).decode())]
    assert len(names) == len(metrics)
