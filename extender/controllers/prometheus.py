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
answer: one answer for 5,000 nodes has 10 MB, and would block the event loop for 50 to 150 ms.
"""

import io
import math
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import requests
from prometheus_api_client import PrometheusConnect
from requests.adapters import HTTPAdapter

from extender.controllers.sm_history import (
    Answer,
    QuerySource,
    Span,
    Unreadable,
)
from extender.state.sm_activity import Key

METRIC = "DCGM_FI_PROF_SM_ACTIVE"
#: Names of the label in exporters and after relabelling, the preferred one first. If the scraped
#: target has a label of the same name, Prometheus renames the exporter's to ``exported_...``.
_UUIDS = ("exported_UUID", "exported_uuid", "UUID", "uuid", "GPU_UUID", "gpu_uuid")
_INSTANCES = ("exported_GPU_I_ID", "exported_gpu_i_id", "GPU_I_ID", "gpu_i_id")
_INSTANCE = re.compile("[0-9]{1,4}")
#: Counters of one moment may add up to slightly more than 1; a larger value is no ratio.
_MOST_RATIO = 1.01
#: Length limit of a quoted error of Prometheus.
_MAX_QUOTED = 200
_OK = 200
_BAD_FORMAT = "its answer is not in the format of Prometheus"
#: Parts by device index on its node, which every release of dcgm-exporter calls ``gpu``. The last
#: part has the devices without that label, or with a larger index.
_PARTS = (*(f'gpu="{index}"' for index in range(8)), 'gpu!~"[0-7]"')
#: Limit of one answer. For 5,000 nodes with 8 devices each, answers have 0.6 MB.
MAX_BYTES = 16 << 20
_CHUNK_BYTES = 64 << 10
#: An abandoned query ends by itself this long after its timeout.
_EXTRA_S = 1.0


class _Series(msgspec.Struct):
    metric: dict[str, str]
    value: tuple[float, str]


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


def query(source: QuerySource) -> tuple[list[Answer], list[str]]:
    """Return one answer per query, and warnings that they may be incomplete.

    Raise ``Unreadable``, and the errors of requests and urllib3.
    """
    url = urlsplit(source.url)
    # Errors quote the address, so it must not contain the password.
    public = url._replace(netloc=url.netloc.rpartition("@")[2]).geturl().rstrip("/")
    headers = {"Accept-Encoding": "gzip"}
    auth = None
    if url.username:
        auth = unquote(url.username), unquote(url.password or "")
    if source.token_file is not None:
        headers["Authorization"] = f"Bearer {_token(source.token_file)}"
    within_s = source.timeout_s + _EXTRA_S
    warnings: dict[str, None] = {}

    def note_warnings(response: requests.Response, *args: Any, **kwargs: Any) -> None:
        if not response.is_redirect:
            warnings.update(dict.fromkeys(examine(response.status_code, response.content)))

    with requests.Session() as session:
        session.trust_env = False  # else a .netrc would override these settings
        session.verify = True if source.ca is None else str(source.ca)
        session.hooks["response"].append(note_warnings)
        connection = PrometheusConnect(
            public, headers=headers, auth=auth, session=session, timeout=within_s
        )
        bounded = _Bounded(time.monotonic() + within_s)
        for prefix in ("http://", "https://", public):  # the last replaces one that retries
            session.mount(prefix, bounded)
        limits = {"timeout": f"{source.timeout_s:g}s"}
        answers = [
            read(connection.custom_query(promql, params=limits)) for promql in queries(source.span)
        ]
    return answers, list(warnings)


def _token(path: Path) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as err:
        raise Unreadable(f"prometheus_token_file: {path}: cannot be read") from err
    if not token.isprintable() or not token or " " in token:
        raise Unreadable(f"prometheus_token_file: {path}: holds no token")
    return token


class _Bounded(HTTPAdapter):
    """Sends a request once and reads the whole answer: at most ``MAX_BYTES``, until ``until_s``."""

    def __init__(self, until_s: float) -> None:
        super().__init__(max_retries=0)
        self._until_s = until_s

    def build_response(self, req: requests.PreparedRequest, resp: Any) -> requests.Response:
        response = super().build_response(req, resp)
        try:
            response.raw = io.BytesIO(self._body(resp))
        except BaseException:
            resp.close()
            raise
        resp.release_conn()
        response.encoding = "utf-8"  # of JSON; else requests guesses it from the whole body
        return response

    def _body(self, resp: Any) -> bytearray:
        body = bytearray()
        while chunk := resp.read1(_CHUNK_BYTES, decode_content=True):
            body += chunk
            if len(body) > MAX_BYTES:
                raise Unreadable(f"its answer is larger than {MAX_BYTES >> 20} MiB")
            if time.monotonic() > self._until_s:
                raise Unreadable("the answer came too late")
        return body


def queries(span: Span) -> list[str]:
    """Return the PromQL queries. Their series have the label ``figure="ratio"`` or
    ``figure="at"``."""
    return [promql for part in _PARTS for promql in _pair(span, f"{METRIC}{{{part}}}")]


def _pair(span: Span, series: str) -> tuple[str, str]:
    by = f"max by ({', '.join((*_UUIDS, *_INSTANCES))})"
    now = f"(({series} >= 0) <= {_MOST_RATIO})"
    past = f"quantile_over_time({span.quantile:g}, {series}[{span.window_s:.0f}s])"
    ratio = f"{by} (((({past}) >= 0) <= {_MOST_RATIO}) and {now})"
    at = f"{by} (timestamp({series}) and {now})"
    return (
        f'label_replace({ratio}, "figure", "ratio", "", "")',
        f'label_replace({at}, "figure", "at", "", "")',
    )


def examine(status: int, body: bytes) -> list[str]:
    """Return the warnings of an answer, which mean that it may be incomplete.

    Raise ``Unreadable`` with the server's error if the query failed.
    """
    try:
        envelope = msgspec.json.decode(body, type=_Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise Unreadable(_BAD_FORMAT if status == _OK else f"it answers {status}") from err
    if status != _OK:
        raise Unreadable(f"it answers {status}{_error_text(envelope)}")
    if envelope.status != "success":
        raise Unreadable(f"it answers with an error{_error_text(envelope)}")
    if envelope.data is None or envelope.data.result_type != "vector":
        raise Unreadable(_BAD_FORMAT)
    return envelope.warnings


def _error_text(envelope: _Envelope) -> str:
    quoted = ": ".join(text for text in (envelope.error_type, envelope.error) if text)
    return f": {quoted[:_MAX_QUOTED]}" if quoted else ""


def read(result: object) -> Answer:
    """Return the series of one answer; raise ``Unreadable``."""
    answer = Answer()
    try:
        for series in msgspec.convert(result, list[_Series]):
            _add(answer, series)
    except ValueError as err:
        raise Unreadable(_BAD_FORMAT) from err
    return answer


def _add(answer: Answer, series: _Series) -> None:
    answer.evaluated_at_s, figure = series.value[0], float(series.value[1])
    key = _key(series.metric)
    if key is None or not math.isfinite(figure) or figure < 0:
        return
    if series.metric.get("figure") == "ratio":
        if figure <= _MOST_RATIO:
            answer.ratios[key] = max(answer.ratios.get(key, 0.0), min(figure, 1.0))
    else:
        age_s = answer.evaluated_at_s - figure
        answer.ages_s[key] = min(age_s, answer.ages_s.get(key, math.inf))


def _key(labels: Mapping[str, str]) -> Key | None:
    uuid, instance = _label(labels, _UUIDS), _label(labels, _INSTANCES)
    if not uuid or (instance and not _INSTANCE.fullmatch(instance)):
        return None
    return uuid, int(instance) if instance else None


def _label(labels: Mapping[str, str], names: Iterable[str]) -> str:
    return next((labels[name] for name in names if labels.get(name)), "")
