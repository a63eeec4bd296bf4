"""Reads metrics of a history from Prometheus, one day at a time, so that no answer is too large."""

import time
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import unquote, urlsplit

import requests
from prometheus_api_client import PrometheusConnect
from prometheus_api_client.exceptions import PrometheusApiClientException

from extender.errors import BadSettings
from extender.plan.metrics_history import AT_END, EACH_DAY, Answers, Sample, history_of
from extender.plan.workload import DAY_S, History

#: Limit of one query; a day of a large cluster takes seconds.
_TIMEOUT_S = 120.0
#: Length limit of a quoted answer.
_MOST_QUOTED = 200


def read_prometheus(
    url: str, days: int, nodes: Mapping[str, str], end_s: float | None = None
) -> History:
    """Return the history of ``days`` days until the Unix time ``end_s``; None: until now.

    ``nodes``: labels that the nodes must have. Raises ``BadSettings`` if Prometheus cannot be read
    or has too little data.
    """
    parts = urlsplit(url)
    public = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
    auth = (unquote(parts.username), unquote(parts.password or "")) if parts.username else None
    end_s = time.time() if end_s is None else end_s
    with requests.Session() as session:
        session.trust_env = False  # a proxy or .netrc must not decide where metrics come from
        connection = PrometheusConnect(public, auth=auth, session=session, timeout=_TIMEOUT_S)
        try:
            answers = _read(connection, days, end_s)
        except (PrometheusApiClientException, requests.RequestException) as err:
            raise BadSettings(
                f"--prometheus {public}: {_reason(err)}. To check the address: curl "
                f"{public}/api/v1/query?query=up"
            ) from err
        except (KeyError, TypeError, ValueError) as err:
            raise BadSettings(
                f"--prometheus {public}: its answer is not in the format of Prometheus. Example: "
                "--prometheus http://prometheus.monitoring:9090"
            ) from err
    return history_of(answers, end_s - days * DAY_S, end_s, nodes)


def _reason(err: Exception) -> str:
    """Return why a query failed: the connection's error without the long URL, or else ``err``."""
    root: BaseException = err
    while (cause := root.__cause__ or root.__context__) is not None:
        root = cause
    strerror = root.strerror if isinstance(root, OSError) else None
    # A page of HTML explains nothing.
    return strerror or str(err).partition(" (b'<")[0][:_MOST_QUOTED]


def _read(connection: PrometheusConnect, days: int, end_s: float) -> Answers:
    found: Answers = {name: [] for name in (*EACH_DAY, *AT_END)}
    for day in range(days):
        at_s = end_s - (days - 1 - day) * DAY_S
        for name, promql in EACH_DAY.items():
            found[name] += _samples(connection, promql, at_s)
    for name, promql in AT_END.items():
        found[name] += _samples(connection, promql, end_s)
    return found


def _samples(connection: PrometheusConnect, promql: str, at_s: float) -> Iterator[Sample]:
    result: Sequence[Mapping[str, object]] = connection.custom_query(
        promql, params={"time": f"{at_s:.3f}", "timeout": f"{_TIMEOUT_S:g}s"}
    )
    for series in result:
        labels, value = series["metric"], series["value"]
        if not isinstance(labels, dict) or not isinstance(value, list):
            raise TypeError(promql)
        yield Sample(labels, float(value[1]))
