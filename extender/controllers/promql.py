"""PromQL queries for SM activity, and how their answers are read for each device.

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

The age of a sample is Prometheus' evaluation time minus the sample's own time, both from one
answer. Our clock and Prometheus' may differ by as much as a sample may be old. If they differ by
more, a cached old answer cannot be distinguished from a wrong clock, and nothing is used.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from extender.placement.device_reading import HISTORY, Activity
from extender.state.sm_activity import Key

METRIC = "DCGM_FI_PROF_SM_ACTIVE"
#: Label names of exporters and relabelling rules. Prometheus puts ``exported_`` before a label that
#: the scraped target also has; then the exporter's own label is the right one.
_UUIDS = ("exported_UUID", "exported_uuid", "UUID", "uuid", "GPU_UUID", "gpu_uuid")
_INSTANCES = ("exported_GPU_I_ID", "exported_gpu_i_id", "GPU_I_ID", "gpu_i_id")
_INSTANCE = re.compile("[0-9]{1,4}")
#: Counters of one moment may add up to slightly more than 1; a larger value is no ratio.
_MOST_RATIO = 1.01
#: A sample may appear to be this much newer than Prometheus' evaluation time.
_AHEAD_S = 30.0
#: A smaller change is ignored: it would change no decision that is worth the work.
MOVED_RATIO = 0.05

#: Length limit of a quoted error of Prometheus.
_MAX_QUOTED = 200
_OK = 200
_NOT_ITS = "its answer is not in the format of Prometheus"
#: Parts by device index on its node, which every release of dcgm-exporter calls ``gpu``. The last
#: part has the devices without that label, or with a larger index.
_PARTS = (*(f'gpu="{index}"' for index in range(8)), 'gpu!~"[0-7]"')


class Unreadable(Exception):
    """The answer cannot be used; the message gives the reason, and is constant per cause."""


@dataclass(frozen=True, slots=True)
class Span:
    """The quantile and the window to query, in seconds."""

    quantile: float
    window_s: float


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


@dataclass(slots=True)
class Answer:
    """One answer, by device; ages at the time of evaluation."""

    evaluated_at_s: float = math.nan
    ratios: dict[Key, float] = field(default_factory=dict)
    ages_s: dict[Key, float] = field(default_factory=dict)


def questions(span: Span) -> list[str]:
    """Return the PromQL queries. Their series have the label ``figure="ratio"`` or
    ``figure="at"``."""
    return [question for part in _PARTS for question in _pair(span, f"{METRIC}{{{part}}}")]


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
        raise Unreadable(_NOT_ITS if status == _OK else f"it answers {status}") from err
    if status != _OK:
        raise Unreadable(f"it answers {status}{_error_text(envelope)}")
    if envelope.status != "success":
        raise Unreadable(f"it answers with an error{_error_text(envelope)}")
    if envelope.data is None or envelope.data.result_type != "vector":
        raise Unreadable(_NOT_ITS)
    return envelope.warnings


def _error_text(envelope: _Envelope) -> str:
    quoted = ": ".join(text for text in (envelope.error_type, envelope.error) if text)
    return f": {quoted[:_MAX_QUOTED]}" if quoted else ""


def read(result: object) -> Answer:
    """Return the series of one answer; raise ``Unreadable``."""
    answer = Answer()
    try:
        for series in msgspec.convert(result, list[_Series]):
            _take_one(answer, series)
    except ValueError as err:
        raise Unreadable(_NOT_ITS) from err
    return answer


def _take_one(answer: Answer, series: _Series) -> None:
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


def history(
    answers: Sequence[Answer],
    before: Mapping[Key, Activity],
    span: Span,
    asked_at_s: float,
    wall_s: float,
    stale_after_s: float,
) -> dict[Key, Activity]:
    """Return all fresh history from these answers.

    ``asked_at_s`` is our monotonic clock at the query, ``wall_s`` our wall clock. Raise
    ``Unreadable``.
    """
    ratios: dict[Key, float] = {}
    ages_s: dict[Key, float] = {}
    for answer in answers:
        skew_s = answer.evaluated_at_s - wall_s
        if (answer.ratios or answer.ages_s) and not abs(skew_s) <= stale_after_s:
            raise Unreadable("its clock differs from ours by more than a sample may be old")
        for key, ratio in answer.ratios.items():
            ratios[key] = max(ratio, ratios.get(key, 0.0))
        for key, age_s in answer.ages_s.items():
            ages_s[key] = min(age_s, ages_s.get(key, math.inf))
    found: dict[Key, Activity] = {}
    for key, ratio in ratios.items():
        age_s = ages_s.get(key, math.inf)
        # A sample from the future would never expire by waiting.
        if -_AHEAD_S <= age_s <= stale_after_s:
            settled, sampled_at_s = _settled(ratio, before.get(key)), asked_at_s - max(0.0, age_s)
            found[key] = Activity(settled, HISTORY, span.quantile, span.window_s, sampled_at_s)
    return found


def _settled(ratio: float, had: Activity | None) -> float:
    return had.ratio if had is not None and abs(had.ratio - ratio) < MOVED_RATIO else ratio


def still_fresh(
    before: Mapping[Key, Activity], now_s: float, stale_after_s: float
) -> dict[Key, Activity]:
    """Return the history that is still fresh without a newer answer."""
    return {
        key: activity
        for key, activity in before.items()
        if now_s - activity.sampled_at_s <= stale_after_s
    }


def moved(before: Mapping[Key, Activity], after: Mapping[Key, Activity]) -> list[Key]:
    """Return the devices whose figure appeared, disappeared or changed."""
    gone = [key for key in before if key not in after]
    return gone + [
        key
        for key, now in after.items()
        if (was := before.get(key)) is None or was.ratio != now.ratio
    ]
