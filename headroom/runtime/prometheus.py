"""A connection to one Prometheus, with limits on its answers and without retries.

Queries use ``prometheus_api_client``. Callers query in parts, because a JSON decoder holds the
interpreter's lock until it has read a whole answer.
"""

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import requests
from prometheus_api_client import PrometheusConnect
from prometheus_api_client.exceptions import PrometheusApiClientException
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError

from headroom.errors import PrometheusUnreadable

#: Maximum length of a quoted error of Prometheus.
_MAX_QUOTED = 200
_OK = 200
BAD_FORMAT = "its answer is not in the format of Prometheus"
#: Maximum bytes of one answer.
MAX_BYTES = 16 << 20
_CHUNK_BYTES = 64 << 10
#: Types of results: for a query at one time, and for a query over a range.
VECTOR, MATRIX = "vector", "matrix"


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection, and the warnings in its answers. A warning means that the answer may be
    incomplete."""

    client: PrometheusConnect
    #: The keys are the warnings, in the order in which they arrived. The values are unused.
    warnings: dict[str, None]


class Series(msgspec.Struct):
    """A series of an instant vector: its newest value, and the time of that value."""

    metric: dict[str, str]
    value: tuple[float, str]


class RangeSeries(msgspec.Struct):
    """A series with its times and values."""

    metric: dict[str, str]
    values: list[tuple[float, str]]


class _Data(msgspec.Struct):
    result: msgspec.Raw
    result_type: str = msgspec.field(name="resultType")


class _Envelope(msgspec.Struct):
    """An answer without its series."""

    status: str
    data: _Data | None = None
    error_type: str = msgspec.field(default="", name="errorType")
    error: str = ""
    warnings: list[str] = msgspec.field(default_factory=list)


@contextmanager
def connected(
    url: str,
    within_s: float,
    token_file: Path | None = None,
    ca: Path | None = None,
    most_bytes: int | None = None,
) -> Iterator[Connection]:
    """Yield a connection. All its answers must be complete within ``within_s``.

    ``url`` may contain a user name and a password, which no error quotes. Raises
    ``PrometheusUnreadable``. Queries raise it too, and the errors of requests and urllib3.
    """
    parts = urlsplit(url)
    # Errors quote the address, so it must not contain the password.
    public = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
    headers = {"Accept-Encoding": "gzip"}
    auth = None
    if parts.username:
        auth = unquote(parts.username), unquote(parts.password or "")
    if token_file is not None:
        headers["Authorization"] = f"Bearer {_token(token_file)}"
    warnings: dict[str, None] = {}

    def note_warnings(response: requests.Response, *args: Any, **kwargs: Any) -> None:
        if not response.is_redirect:
            expected = MATRIX if urlsplit(response.url).path.endswith("/query_range") else VECTOR
            found = examine(response.status_code, response.content, expected)
            warnings.update(dict.fromkeys(found))

    with requests.Session() as session:
        session.trust_env = False  # otherwise a .netrc file would override these settings
        session.verify = True if ca is None else str(ca)
        session.hooks["response"].append(note_warnings)
        client = PrometheusConnect(
            public, headers=headers, auth=auth, session=session, timeout=within_s
        )
        bounded = _Bounded(time.monotonic() + within_s, most_bytes or MAX_BYTES)
        for prefix in ("http://", "https://", public):  # the last replaces an adapter that retries
            session.mount(prefix, bounded)
        yield Connection(client, warnings)


def _token(path: Path) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as err:
        raise PrometheusUnreadable(f"prometheus_token_file: {path}: cannot be read") from err
    if not token.isprintable() or not token or " " in token:
        raise PrometheusUnreadable(f"prometheus_token_file: {path}: holds no token")
    return token


class _Bounded(HTTPAdapter):
    """Sends a request once. Reads at most ``most_bytes`` of the answer, and gives up at
    ``until_s``."""

    def __init__(self, until_s: float, most_bytes: int) -> None:
        super().__init__(max_retries=0)
        self._until_s, self._most_bytes = until_s, most_bytes

    def build_response(self, req: requests.PreparedRequest, resp: Any) -> requests.Response:
        response = super().build_response(req, resp)
        try:
            response.raw = io.BytesIO(self._body(resp))
        except BaseException:
            resp.close()
            raise
        resp.release_conn()
        response.encoding = "utf-8"  # JSON is UTF-8; otherwise requests guesses from the whole body
        return response

    def _body(self, resp: Any) -> bytearray:
        body = bytearray()
        while chunk := resp.read1(_CHUNK_BYTES, decode_content=True):
            body += chunk
            if len(body) > self._most_bytes:
                most = f"{self._most_bytes >> 20} MiB"
                raise PrometheusUnreadable(f"its answer is larger than {most}")
            if time.monotonic() > self._until_s:
                raise PrometheusUnreadable("the answer came too late")
        return body


def examine(status: int, body: bytes, expected: str = VECTOR) -> list[str]:
    """Return the warnings of an answer, which mean that it may be incomplete.

    ``expected`` is the expected type of its result. If the query failed, raise
    ``PrometheusUnreadable`` with the server's error.
    """
    try:
        envelope = msgspec.json.decode(body, type=_Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise PrometheusUnreadable(BAD_FORMAT if status == _OK else f"it answers {status}") from err
    if status != _OK:
        raise PrometheusUnreadable(f"it answers {status}{_error_text(envelope)}")
    if envelope.status != "success":
        raise PrometheusUnreadable(f"it answers with an error{_error_text(envelope)}")
    if envelope.data is None or envelope.data.result_type != expected:
        raise PrometheusUnreadable(BAD_FORMAT)
    return envelope.warnings


def _error_text(envelope: _Envelope) -> str:
    quoted = ": ".join(text for text in (envelope.error_type, envelope.error) if text)
    return f": {quoted[:_MAX_QUOTED]}" if quoted else ""


def series(result: object) -> list[Series]:
    """Return the series of one answer. Raises ``PrometheusUnreadable``."""
    try:
        return msgspec.convert(result, list[Series])
    except ValueError as err:
        raise PrometheusUnreadable(BAD_FORMAT) from err


def read_moment(
    connection: Connection, promql: str, at_s: float, timeout_s: float
) -> list[tuple[dict[str, str], float]]:
    """Return the labels and the value of each series at a Unix time. Raises
    ``PrometheusUnreadable``.

    Prometheus itself ends the query after ``timeout_s``.
    """
    params = {"time": f"{at_s:.3f}", "timeout": f"{timeout_s:g}s"}
    try:
        found = series(connection.client.custom_query(promql, params=params))
        return [(each.metric, _number(each.value[1])) for each in found]
    except ValueError as err:
        raise PrometheusUnreadable(BAD_FORMAT) from err
    except (PrometheusApiClientException, requests.RequestException, HTTPError) as err:
        raise PrometheusUnreadable(f"{type(err).__name__}: {err}"[:_MAX_QUOTED]) from err


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as err:
        raise PrometheusUnreadable(f"{text[:40]!r} is not a number") from err


def read_range(
    connection: Connection, promql: str, begin_s: float, end_s: float, step_s: float
) -> list[RangeSeries]:
    """Return the series of a query between two Unix times, with one value for each step.

    Raises ``PrometheusUnreadable``.
    """
    begin, end = (datetime.fromtimestamp(at_s, UTC) for at_s in (begin_s, end_s))
    try:
        found = connection.client.custom_query_range(promql, begin, end, f"{step_s:g}")
        return msgspec.convert(found, list[RangeSeries])
    except ValueError as err:
        raise PrometheusUnreadable(BAD_FORMAT) from err
    except (PrometheusApiClientException, requests.RequestException, HTTPError) as err:
        raise PrometheusUnreadable(f"{type(err).__name__}: {err}"[:_MAX_QUOTED]) from err
