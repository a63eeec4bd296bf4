"""The one question that Prometheus is asked, and what its answer says of each device.

Of every device: a high quantile over a window, and when its newest sample was taken. Of the series
that tell of a device now, and tell a ratio, the highest counts: dcgm-exporter repeats a device for
each pod that shares it, and two exporters or two Prometheus may tell of it. Where it names one pod
of a device, a series begins and ends with the pod: then the figure is of those who are there, over
as much of the window as they have been, and not of those who have left. What is no ratio (NaN,
infinities, DCGM's marks for figures that it does not have) is no figure.

A subquery over the highest at each step would be purer, and costs Prometheus three times as much.

All times are compared within one answer: how old a sample is, is the time at which Prometheus
evaluated less the sample's own time. Our clock and Prometheus' may differ by as much as a sample
may be old; if they differ by more, an old answer that somebody kept cannot be told from a wrong
clock, and nothing of it is used.

A large answer is decoded piece by piece, because a decoder holds the interpreter's lock.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from extender.cluster.activity import Key
from extender.placement.activity import HISTORY, Activity

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
_NOT_ITS = "its answer is not as Prometheus writes it"
_SCANNER = json.JSONDecoder()
_RESULT = re.compile(rb'"result"\s*:\s*\[')
#: Between two series, as every server of this API writes it; within a string the quotes would be
#: escaped.
_NEXT = b',{"metric"'
_PIECE_BYTES = 16 << 10
#: More than the labels that we ask for can be.
_MOST_SERIES_BYTES = 64 << 10
#: Devices to go through before others have a turn.
_TOGETHER = 256


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
    """What was told of each device; ages at the time of evaluation."""

    evaluated_at_s: float = math.nan
    ratios: dict[Key, float] = field(default_factory=dict)
    sampled_at_s: dict[Key, float] = field(default_factory=dict)
    #: Why it may be only a part; empty for all of it.
    warnings: list[str] = field(default_factory=list)


def question(span: Span) -> str:
    """PromQL: series with ``told="ratio"`` and ``told="at"`` for each device, and no others."""
    by = f"max by ({', '.join((*_UUIDS, *_INSTANCES))})"
    now = f"(({METRIC} >= 0) <= {_MOST_RATIO})"
    past = f"quantile_over_time({span.quantile:g}, {METRIC}[{span.window_s:.0f}s])"
    ratio = f"{by} (((({past}) >= 0) <= {_MOST_RATIO}) and {now})"
    at = f"{by} (timestamp({METRIC}) and {now})"
    return (
        f'label_replace({ratio}, "told", "ratio", "", "") or '
        f'label_replace({at}, "told", "at", "", "")'
    )


def read(body: bytes) -> Iterator[Answer]:
    """Decode an answer: yields it between pieces, incomplete, and last when it is whole.

    Raises ``Unreadable``.
    """
    begin = _RESULT.search(body)
    if begin is None:
        _envelope(body)
        raise Unreadable(_NOT_ITS)
    at = begin.end()
    end = _end(body, at)
    answer = Answer(warnings=_envelope(body[:at] + body[end:]).warnings)
    while at < end:
        cut = body.find(_NEXT, at + _PIECE_BYTES, end)
        cut = end if cut < 0 else cut
        if cut - at > _PIECE_BYTES + _MOST_SERIES_BYTES:
            raise Unreadable(_NOT_ITS)
        _take(answer, body[at:cut])
        yield answer
        at = cut + 1
    yield answer


def _end(body: bytes, at: int) -> int:
    """Where the list of series ends that begins there."""
    if body[at : at + 1] == b"]":
        return at
    last = max(at, body.rfind(_NEXT) + 1)
    try:
        # A character for each byte: what matters of it is ASCII.
        text = body[last : last + _MOST_SERIES_BYTES].decode("latin-1")
        _, length = _SCANNER.raw_decode(text)
    except (ValueError, RecursionError) as err:
        raise Unreadable(_NOT_ITS) from err
    return last + length


def _envelope(body: bytes) -> _Envelope:
    try:
        envelope = msgspec.json.decode(body, type=_Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError) as err:
        raise Unreadable(_NOT_ITS) from err
    if envelope.status != "success":
        raise Unreadable(f"it answers with an error{_said(envelope)}")
    if envelope.data is None or envelope.data.result_type != "vector":
        raise Unreadable(_NOT_ITS)
    return envelope


def fault(body: bytes) -> str:
    """What an answer that is none says of itself, after a colon; empty if nothing."""
    try:
        return _said(msgspec.json.decode(body, type=_Envelope))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def _said(envelope: _Envelope) -> str:
    said = ": ".join(text for text in (envelope.error_type, envelope.error) if text)
    return f": {said[:_MOST_SAID]}" if said else ""


_series = msgspec.json.Decoder(list[_Series])


def _take(answer: Answer, piece: bytes) -> None:
    try:
        found = _series.decode(b"[" + piece + b"]")
        for series in found:
            _take_one(answer, series)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as err:
        raise Unreadable(_NOT_ITS) from err


def _take_one(answer: Answer, series: _Series) -> None:
    answer.evaluated_at_s, figure = series.value[0], float(series.value[1])
    key = _key(series.metric)
    if key is None or not math.isfinite(figure) or figure < 0:
        return
    if series.metric.get("told") == "ratio":
        if figure <= _MOST_RATIO:
            answer.ratios[key] = max(answer.ratios.get(key, 0.0), min(figure, 1.0))
    else:
        answer.sampled_at_s[key] = max(answer.sampled_at_s.get(key, 0.0), figure)


def _key(labels: Mapping[str, str]) -> Key | None:
    uuid, instance = _label(labels, _UUIDS), _label(labels, _INSTANCES)
    if not uuid or (instance and not _INSTANCE.fullmatch(instance)):
        return None
    return uuid, int(instance) if instance else None


def _label(labels: Mapping[str, str], names: Iterable[str]) -> str:
    return next((labels[name] for name in names if labels.get(name)), "")


def history(
    answer: Answer,
    before: Mapping[Key, Activity],
    span: Span,
    asked_at_s: float,
    wall_s: float,
    stale_after_s: float,
) -> Iterator[dict[Key, Activity]]:
    """All history that is fresh, as that answer has it: yields it between pieces, last when whole.

    ``asked_at_s`` is our monotonic clock when it was asked for, and ``wall_s`` our wall clock.
    Raises ``Unreadable``.
    """
    skew_s = answer.evaluated_at_s - wall_s
    if answer.ratios and not abs(skew_s) <= stale_after_s:
        raise Unreadable("its clock differs from ours by more than a sample may be old")
    found: dict[Key, Activity] = {}
    for i, (key, ratio) in enumerate(answer.ratios.items()):
        age_s = answer.evaluated_at_s - answer.sampled_at_s.get(key, -math.inf)
        # A sample from the future is not made old by waiting for it.
        if -_AHEAD_S <= age_s <= stale_after_s:
            had = before.get(key)
            if had is not None and abs(had.ratio - ratio) < MOVED_RATIO:
                ratio = had.ratio
            sampled_at_s = asked_at_s - max(0.0, age_s)
            found[key] = Activity(ratio, HISTORY, span.quantile, span.window_s, sampled_at_s)
        if i % _TOGETHER == 0:
            yield found
    yield found


def still_fresh(
    before: Mapping[Key, Activity], now_s: float, stale_after_s: float
) -> Iterator[dict[Key, Activity]]:
    """What of it may still be used though nothing newer has come; as ``history`` yields."""
    found: dict[Key, Activity] = {}
    for i, (key, activity) in enumerate(before.items()):
        if now_s - activity.sampled_at_s <= stale_after_s:
            found[key] = activity
        if i % _TOGETHER == 0:
            yield found
    yield found


def moved(before: Mapping[Key, Activity], after: Mapping[Key, Activity]) -> Iterator[list[Key]]:
    """The devices whose figure came, went or changed; as ``history`` yields."""
    found: list[Key] = []
    for i, key in enumerate(chain(after, (key for key in before if key not in after))):
        was, now = before.get(key), after.get(key)
        if was is None or now is None or was.ratio != now.ratio:
            found.append(key)
        if i % _TOGETHER == 0:
            yield found
    yield found
