"""Reads the metrics of a history from Prometheus, one day at a time, because answers are large."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from urllib.parse import urlsplit

from headroom.errors import BadSettings, PrometheusUnreadable
from headroom.planner.metrics_history import reading
from headroom.planner.workload import History
from headroom.runtime.metric_history import Asked, Sample, answered
from headroom.runtime.prometheus import Connection, connected, read_moment
from headroom.runtime.promql import EVERY_CLUSTER, Queries

#: Time limit of one query. A query for a day of a large cluster takes seconds.
_TIMEOUT_S = 120.0
#: Size limit of one answer. An answer has a series for each pod of a day.
_MOST_BYTES = 256 << 20
#: Pauses before a query is repeated, if it failed within ``_EARLY_S``.
_PAUSES_S, _EARLY_S = (1.0, 3.0), 30.0
#: Maximum length of a quoted error.
_MOST_QUOTED = 200


#: A function that opens a connection to a URL, as ``connected`` does.
Connect = Callable[..., AbstractContextManager[Connection]]


def read_prometheus(
    url: str,
    days: int,
    nodes: Mapping[str, str],
    end_s: float | None = None,
    queries: Queries = EVERY_CLUSTER,
    connect: Connect = connected,
    monotonic_s: Callable[[], float] = time.monotonic,
    pauses_s: Sequence[float] = _PAUSES_S,
) -> History:
    """Return the history of ``days`` days before the Unix time ``end_s``, which defaults to now.

    ``nodes`` are the labels that a node must have. Raises ``BadSettings`` if Prometheus cannot be
    read or has too little data. A query that fails in the first ``_EARLY_S`` seconds is repeated
    after each of ``pauses_s``.
    """
    parts = urlsplit(url)
    public = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
    end_s = time.time() if end_s is None else end_s

    def ask(asked: Asked) -> list[Sample]:
        """Return the samples of one query, which is repeated if it fails early."""
        began_s, pauses = monotonic_s(), iter(pauses_s)
        while True:
            try:
                with connect(url, _TIMEOUT_S, most_bytes=_MOST_BYTES) as connection:
                    found = read_moment(connection, *asked, _TIMEOUT_S)
                return [Sample(*each) for each in found]
            except PrometheusUnreadable:
                pause_s = next(pauses, None)
                if pause_s is None or monotonic_s() - began_s > _EARLY_S:
                    raise
                time.sleep(pause_s)

    try:
        return answered(reading(queries, days, end_s, nodes), ask)
    except PrometheusUnreadable as err:
        raise BadSettings(
            f"--prometheus {public}: {_reason(err)}. To check the address: curl "
            f"{public}/api/v1/query?query=up"
        ) from err


def _reason(err: Exception) -> str:
    """Return why a query failed: the error of the connection without the long URL, or ``err``."""
    root: BaseException = err
    while (cause := root.__cause__ or root.__context__) is not None:
        root = cause
    strerror = root.strerror if isinstance(root, OSError) else None
    return (strerror or str(err))[:_MOST_QUOTED]
