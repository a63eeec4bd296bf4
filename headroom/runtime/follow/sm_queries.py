"""Queries Prometheus for the SM activity of each device, and reads the answers.

The queries return a high quantile over a window, and the time of the newest sample. Several series
can cover a device, because dcgm-exporter repeats a device for each pod that shares it, and because
there can be two exporters or two Prometheus servers. The highest value among the series that exist
now and contain a ratio is used. If the exporter labels a series with one pod of the device, the
series starts and ends with that pod. In this case, the figure covers only the pods that are on the
device now, and only the part of the window in which they ran. Values that are not a ratio (NaN,
infinities, DCGM's marks for missing figures) are ignored.

A subquery over the highest value at each step would be more exact, but would cost Prometheus three
times as much.

The fleet is queried in parts, because a JSON decoder holds the interpreter's lock until it has read
a whole answer. A single answer for 5,000 nodes has 10 MB, and would block the event loop for 50 to
200 ms.
"""

import math

from headroom.contract.dcgm import key_of_series
from headroom.errors import PrometheusUnreadable
from headroom.runtime.follow.sm_source import Answer, QuerySource
from headroom.runtime.prometheus import BAD_FORMAT, Series, connected, series
from headroom.runtime.promql import MOST_RATIO

#: An abandoned query ends on its own this number of seconds after its timeout.
_EXTRA_S = 1.0


def query(source: QuerySource) -> tuple[list[Answer], list[str]]:
    """Return one answer for each query, and warnings that answers may be incomplete.

    Raises ``PrometheusUnreadable``, and the errors of requests and urllib3.
    """
    within_s = source.timeout_s + _EXTRA_S
    limits = {"timeout": f"{source.timeout_s:g}s"}
    with connected(source.url, within_s, source.token_file, source.ca) as connection:
        answers = [
            read(connection.client.custom_query(promql, params=limits))
            for promql in source.queries.sm_activity(source.span.quantile, source.span.window_s)
        ]
        return answers, list(connection.warnings)


def read(result: object) -> Answer:
    """Return the series of one answer. Raises ``PrometheusUnreadable``."""
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
        if figure <= MOST_RATIO:
            answer.ratios[key] = max(answer.ratios.get(key, 0.0), min(figure, 1.0))
    else:
        age_s = answer.evaluated_at_s - figure
        answer.ages_s[key] = min(age_s, answer.ages_s.get(key, math.inf))
