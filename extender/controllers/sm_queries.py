"""Queries Prometheus for the SM activity of each device: PromQL, HTTP, and how answers are read.

The queries ask for a high quantile over a window, and for the time of the newest sample. Among the
series that exist now and contain a ratio, the highest counts: dcgm-exporter repeats a device for
each pod that shares it, and two exporters or two Prometheus servers may cover it. If the exporter
labels a series with one pod of the device, the series starts and ends with that pod. The figure
then covers the pods on the device now, over as much of the window as they have run, and not pods
that have left. Values that are no ratio (NaN, infinities, DCGM's marks for missing figures) are
ignored.

A subquery over the highest value at each step would be more exact, and costs Prometheus three times
as much.

The fleet is queried in parts. A JSON decoder holds the interpreter's lock until it has read a whole
answer: one answer for 5,000 nodes has 10 MB, and would block the event loop for 50 to 200 ms.
"""

import math

from contract.dcgm import INSTANCES, SM_ACTIVITY, UUIDS, key_of_series
from extender.controllers.sm_history import Answer, QuerySource, Span
from extender.errors import PrometheusUnreadable
from extender.prometheus import BAD_FORMAT, Series, connected, series

#: Counters of one moment may add up to slightly more than 1; a larger value is no ratio.
_MOST_RATIO = 1.01
#: Parts by device index on its node, which every release of dcgm-exporter calls ``gpu``. The last
#: part has the devices without that label, or with a larger index.
_PARTS = (*(f'gpu="{index}"' for index in range(8)), 'gpu!~"[0-7]"')
#: An abandoned query ends by itself this long after its timeout.
_EXTRA_S = 1.0


def query(source: QuerySource) -> tuple[list[Answer], list[str]]:
    """Return one answer per query, and warnings that they may be incomplete.

    Raise ``PrometheusUnreadable``, and the errors of requests and urllib3.
    """
    within_s = source.timeout_s + _EXTRA_S
    limits = {"timeout": f"{source.timeout_s:g}s"}
    with connected(source.url, within_s, source.token_file, source.ca) as connection:
        answers = [
            read(connection.client.custom_query(promql, params=limits))
            for promql in queries(source.span)
        ]
        return answers, list(connection.warnings)


def queries(span: Span) -> list[str]:
    """Return the PromQL queries. Their series have the label ``figure="ratio"`` or
    ``figure="at"``."""
    return [promql for part in _PARTS for promql in _pair(span, part)]


def _pair(span: Span, part: str) -> tuple[str, str]:
    by = f"max by ({', '.join((*UUIDS, *INSTANCES))})"
    ratios, times = [], []
    # One selector with both names would fail: without their names, old and new series of an
    # upgraded exporter can have the same labels.
    for selector in (f"{metric}{{{part}}}" for metric in SM_ACTIVITY):
        now = f"(({selector} >= 0) <= {_MOST_RATIO})"
        past = f"quantile_over_time({span.quantile:g}, {selector}[{span.window_s:.0f}s])"
        ratios.append(f"(((({past}) >= 0) <= {_MOST_RATIO}) and {now})")
        times.append(f"(timestamp({selector}) and {now})")
    ratio, at = (f"{by} ({' or '.join(each)})" for each in (ratios, times))
    return (
        f'label_replace({ratio}, "figure", "ratio", "", "")',
        f'label_replace({at}, "figure", "at", "", "")',
    )


def read(result: object) -> Answer:
    """Return the series of one answer; raise ``PrometheusUnreadable``."""
    answer = Answer()
    try:
        for each in series(result):
            _add(answer, each)
    except ValueError as err:
        raise PrometheusUnreadable(BAD_FORMAT) from err
    return answer


def _add(answer: Answer, of: Series) -> None:
    answer.evaluated_at_s, figure = of.value[0], float(of.value[1])
    key = key_of_series(of.metric)
    if key is None or not math.isfinite(figure) or figure < 0:
        return
    if of.metric.get("figure") == "ratio":
        if figure <= _MOST_RATIO:
            answer.ratios[key] = max(answer.ratios.get(key, 0.0), min(figure, 1.0))
    else:
        age_s = answer.evaluated_at_s - figure
        answer.ages_s[key] = min(age_s, answer.ages_s.get(key, math.inf))
