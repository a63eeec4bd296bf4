"""The questions that Prometheus is asked, and what its answers say of each device.

Of every device: a high quantile over a window, and when its newest sample was taken. Of the series
that tell of a device now, and tell a ratio, the highest counts: dcgm-exporter repeats a device for
each pod that shares it, and two exporters or two Prometheus may tell of it. Where it names one pod
of a device, a series begins and ends with the pod: then the figure is of those who are there, over
as much of the window as they have been, and not of those who have left. What is no ratio (NaN,
infinities, DCGM's marks for figures that it does not have) is no figure.

A subquery over the highest at each step would be purer, and costs Prometheus three times as much.

The fleet is asked about in parts. A JSON decoder holds the interpreter's lock until it has read a
whole answer: one answer for 5,000 nodes has 10 MB, and would stop the event loop for 50 to 150 ms.

The age of a sample is the time at which Prometheus evaluated less the sample's own time, both of
one answer. Our clock and Prometheus' may differ by as much as a sample may be old; if they differ
by more, an old answer that somebody kept cannot be told from a wrong clock, and nothing is used.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from extender.placement.sm_reading import HISTORY, Activity
from extender.state.sm_activity import Key

METRIC = "DCGM_FI_PROF_SM_ACTIVE"
#: As exporters and relabelling rules spell them; Prometheus puts ``exported_`` before a label that
#: the scraped target has as well, and then the exporter's own is the one that we mean.
_UUIDS = ("exported_UUID", "exported_uuid", "UUID", "uuid", "GPU_UUID", "gpu_uuid")
_INSTANCES = ("exported_GPU_I_ID", "exported_gpu_i_id", "GPU_I_ID", "gpu_i_id")
_INSTANCE = re.compile("[0-9]{1,4}")
#: Counters of one moment may add up to a little more than all; more than this is no ratio.
_MOST_RATIO = 1.01
#: A sample may seem to be taken so much later than Prometheus evaluated.
_AHEAD_S = 30.0
#: A figure that moved by less is told as it was: it would change no decision worth the work.
MOVED_RATIO = 0.05

#: Of an error that it tells.
_MOST_SAID = 200
_OK = 200
_NOT_ITS = "its answer is not as Prometheus writes it"
#: By the index of a device on its node, which every release of dcgm-exporter calls ``gpu``. What
#: has no such label, or a larger index, is in the last part.
_PARTS = (*(f'gpu="{index}"' for index in range(8)), 'gpu!~"[0-7]"')


class Unreadable(Exception):
    """Not an answer to the question; says why, and always the same for the same cause."""


@dataclass(frozen=True, slots=True)
class Span:
    """What is asked of a device's past."""

    quantile: float
    window_s: float


class _Series(msgspec.Struct):
    metric: dict[str, str]
    value: tuple[float, str]


class _Data(msgspec.Struct):
    result: msgspec.Raw
    result_type: str = msgspec.field(name="resultType")


class _Envelope(msgspec.Struct):
    """All of the answer but its series."""

    status: str
    data: _Data | None = None
    error_type: str = msgspec.field(default="", name="errorType")
    error: str = ""
    warnings: list[str] = msgspec.field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """What one answer says of each device; ages at the time of evaluation."""

    evaluated_at_s: float = math.nan
    ratios: dict[Key, float] = field(default_factory=dict)
    ages_s: dict[Key, float] = field(default_factory=dict)


def questions(span: Span) -> list[str]:
    """PromQL: series with ``told="ratio"`` and ``told="at"`` for each device, and no others."""
    return [question for part in _PARTS for question in _pair(span, f"{METRIC}{{{part}}}")]


def _pair(span: Span, series: str) -> tuple[str, str]:
    by = f"max by ({', '.join((*_UUIDS, *_INSTANCES))})"
    now = f"(({series} >= 0) <= {_MOST_RATIO})"
    past = f"quantile_over_time({span.quantile:g}, {series}[{span.window_s:.0f}s])"
    ratio = f"{by} (((({past}) >= 0) <= {_MOST_RATIO}) and {now})"
    at = f"{by} (timestamp({series}) and {now})"
    return (
        f'label_replace({ratio}, "told", "ratio", "", "")',
        f'label_replace({at}, "told", "at", "", "")',
    )


def examine(status: int, body: bytes) -> list[str]:
    """Return the warnings of an answer that is one; they say why it may be only a part.

    Raises ``Unreadable`` with what the server says of a query that failed.
    """
    try:
        envelope = msgspec.json.decode(body, type=_Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise Unreadable(_NOT_ITS if status == _OK else f"it answers {status}") from err
    if status != _OK:
        raise Unreadable(f"it answers {status}{_said(envelope)}")
    if envelope.status != "success":
        raise Unreadable(f"it answers with an error{_said(envelope)}")
    if envelope.data is None or envelope.data.result_type != "vector":
        raise Unreadable(_NOT_ITS)
    return envelope.warnings


def _said(envelope: _Envelope) -> str:
    said = ": ".join(text for text in (envelope.error_type, envelope.error) if text)
    return f": {said[:_MOST_SAID]}" if said else ""


def read(result: object) -> Answer:
    """Read the series of one answer. Raises ``Unreadable``."""
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
    if series.metric.get("told") == "ratio":
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
    """All history that is fresh, as those answers have it.

    ``asked_at_s`` is our monotonic clock when it was asked for, and ``wall_s`` our wall clock.
    Raises ``Unreadable``.
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
        # A sample from the future is not made old by waiting for it.
        if -_AHEAD_S <= age_s <= stale_after_s:
            settled, sampled_at_s = _settled(ratio, before.get(key)), asked_at_s - max(0.0, age_s)
            found[key] = Activity(settled, HISTORY, span.quantile, span.window_s, sampled_at_s)
    return found


def _settled(ratio: float, had: Activity | None) -> float:
    return had.ratio if had is not None and abs(had.ratio - ratio) < MOVED_RATIO else ratio


def still_fresh(
    before: Mapping[Key, Activity], now_s: float, stale_after_s: float
) -> dict[Key, Activity]:
    """What of it may still be used though nothing newer has come."""
    return {
        key: activity
        for key, activity in before.items()
        if now_s - activity.sampled_at_s <= stale_after_s
    }


def moved(before: Mapping[Key, Activity], after: Mapping[Key, Activity]) -> list[Key]:
    """The devices whose figure came, went or changed."""
    gone = [key for key in before if key not in after]
    return gone + [
        key
        for key, now in after.items()
        if (was := before.get(key)) is None or was.ratio != now.ratio
    ]
