"""Tests the parsing of Prometheus responses, and which responses are rejected."""

import json
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest

from headroom.contract.dcgm import Key
from headroom.core.placement.device_reading import Activity
from headroom.errors import PrometheusUnreadable
from headroom.runtime.follow.sm_history import changed, history, still_fresh
from headroom.runtime.follow.sm_queries import read
from headroom.runtime.follow.sm_source import Span
from headroom.runtime.prometheus import examine
from headroom.runtime.promql import EVERY_CLUSTER

HISTORY = "dcgm-history"

AT_S = 1_795_219_200.25
SPAN = Span(0.95, 900)
ASKED_S = 5000.0


def ratio(value: object, at_s: float = AT_S, **labels: str) -> dict[str, Any]:
    """Return a series of the first query, with a ratio and these labels."""
    return {"metric": {"figure": "ratio", **labels}, "value": [at_s, str(value)]}


def sampled(age_s: float, **labels: str) -> dict[str, Any]:
    """Return a series of the second query. Its sample is ``age_s`` seconds old."""
    return {"metric": {"figure": "at", **labels}, "value": [AT_S, str(AT_S - age_s)]}


def body(*series: dict[str, Any], **other: Any) -> bytes:
    """Return a response body in Prometheus' format, which has no spaces and has labels before
    values.
    """
    answer = {
        "status": "success",
        "data": {"resultType": "vector", "result": list(series)},
        **other,
    }
    return json.dumps(answer, separators=(",", ":"), ensure_ascii=False).encode()


def shown(
    *series: dict[str, Any],
    others: Sequence[dict[str, Any]] = (),
    wall_s: float = AT_S,
    **before: Activity,
) -> dict[Key, Activity]:
    """Return the values that are read from two responses. The second response contains
    ``others``.
    """
    answers = [read(list(each)) for each in (series, others)]
    had = {(uuid, None): activity for uuid, activity in before.items()}
    return history(answers, had, SPAN, ASKED_S, wall_s, 180.0)


def test_a_device_gets_the_value_of_its_series() -> None:
    assert shown(ratio(0.42, UUID="GPU-a"), sampled(12.5, UUID="GPU-a")) == {
        ("GPU-a", None): Activity(0.42, HISTORY, 0.95, 900, ASKED_S - 12.5)
    }


@pytest.mark.parametrize(
    ("labels", "key"),
    [
        pytest.param({"UUID": "G"}, ("G", None), id="upper case"),
        pytest.param({"uuid": "G"}, ("G", None), id="lower case"),
        pytest.param({"gpu_uuid": "G"}, ("G", None), id="another spelling"),
        pytest.param({"UUID": "target", "exported_UUID": "G"}, ("G", None), id="exported"),
        pytest.param({"UUID": "G", "GPU_I_ID": "7"}, ("G", 7), id="a GPU instance"),
        pytest.param({"uuid": "G", "gpu_i_id": "0"}, ("G", 0), id="instance 0, lower case"),
        pytest.param({"UUID": "G", "GPU_I_ID": ""}, ("G", None), id="an empty label is none"),
        pytest.param({"UUID": "G", "GPU_I_ID": "x"}, None, id="no instance number"),
        pytest.param({"gpu": "0", "Hostname": "n"}, None, id="a device without a UUID"),
    ],
)
def test_the_device_is_identified_by_the_labels_of_a_series(
    labels: dict[str, str], key: Key | None
) -> None:
    assert list(shown(ratio(0.5, **labels), sampled(1, **labels))) == ([] if key is None else [key])


@pytest.mark.parametrize(
    ("value", "is_told"),
    [
        ("0", 0.0), ("1", 1.0), ("1.004", 1.0), ("1e-3", 0.001),
        ("NaN", None), ("+Inf", None), ("-Inf", None), ("-0.1", None), ("1.02", None), ("87", None),
        ("140737488355330", None),
    ],
)  # fmt: skip
def test_only_a_ratio_is_accepted(value: str, is_told: float | None) -> None:
    found = shown(ratio(value, UUID="G"), sampled(1, UUID="G"))
    assert [a.ratio for a in found.values()] == ([] if is_told is None else [is_told])


def test_with_two_series_of_a_device_the_higher_value_and_the_newer_sample_count() -> None:
    one, other = {"UUID": "G"}, {"uuid": "G"}
    high, low = (ratio(0.6, **one), sampled(15, **one)), (ratio(0.3, **other), sampled(90, **other))
    for found in (shown(*high, *low), shown(*high, others=low), shown(*low, others=high)):
        assert [(a.ratio, ASKED_S - a.sampled_at_s) for a in found.values()] == [(0.6, 15.0)]


@pytest.mark.parametrize(
    ("age_s", "counts_as_s"),
    [
        pytest.param(180, 180.0, id="at the age limit"),
        pytest.param(181, None, id="too old"),
        pytest.param(-20, 0.0, id="a little ahead: now"),
        pytest.param(-40, None, id="too far ahead"),
        pytest.param(math.nan, None, id="no time"),
    ],
)
def test_the_age_of_a_value_is_the_age_of_its_newest_sample(
    age_s: float, counts_as_s: float | None
) -> None:
    found = shown(ratio(0.5, UUID="G"), sampled(age_s, UUID="G"))
    ages = [ASKED_S - a.sampled_at_s for a in found.values()]
    assert ages == ([] if counts_as_s is None else [counts_as_s])


def test_without_a_sample_there_is_no_value() -> None:
    assert shown(ratio(0.5, UUID="G"), sampled(1, UUID="other")) == {}


def test_a_small_clock_difference_is_ignored_and_a_large_one_is_an_error() -> None:
    series = ratio(0.5, UUID="G"), sampled(10, UUID="G")
    assert shown(*series, wall_s=AT_S + 179) == shown(*series, wall_s=AT_S - 179) == shown(*series)
    for wrong_s in (AT_S + 181, AT_S - 181, math.nan):
        with pytest.raises(PrometheusUnreadable, match="its clock differs from ours"):
            shown(*series, wall_s=wrong_s)
        with pytest.raises(PrometheusUnreadable, match="its clock differs from ours"):
            shown(others=series, wall_s=wrong_s)
    assert shown(wall_s=0.0) == {}  # The time is unknown, because there was no response.


def test_a_small_change_keeps_the_value_and_updates_its_age() -> None:
    had = Activity(0.5, HISTORY, 0.95, 900, ASKED_S - 30)
    series = sampled(5, UUID="G")
    (kept,) = shown(ratio(0.549, UUID="G"), series, G=had).values()
    assert (kept.ratio, ASKED_S - kept.sampled_at_s) == (0.5, 5.0)
    (new,) = shown(ratio(0.551, UUID="G"), series, G=had).values()
    assert new.ratio == 0.551


def test_new_removed_and_changed_values_count_as_changes() -> None:
    def activities(**ratios: float) -> dict[Key, Activity]:
        return {(uuid, None): Activity(ratio, HISTORY) for uuid, ratio in ratios.items()}

    before, after = activities(same=0.1, gone=0.2, other=0.3), activities(same=0.1, other=0.4, n=0)
    assert sorted(changed(before, after)) == [("gone", None), ("n", None), ("other", None)]
    assert changed({}, {}) == []
    assert changed(after, after) == []


def test_without_a_response_values_stay_until_they_expire() -> None:
    held: dict[Key, Activity] = {
        (name, None): Activity(0.5, HISTORY, sampled_at_s=at_s)
        for name, at_s in (("old", 1000.0), ("new", 1001.0))
    }
    assert list(still_fresh(held, 1180.0, 180.0)) == [("old", None), ("new", None)]
    assert list(still_fresh(held, 1181.0, 180.0)) == [("new", None)]
    assert still_fresh({}, 0.0, 180.0) == {}


def test_a_partial_answer_is_marked() -> None:
    assert examine(200, body(ratio(0.5, UUID="G"), warnings=["store b: timeout"])) == [
        "store b: timeout"
    ]
    assert examine(200, b'{"warnings":["w"],' + body()[1:]) == ["w"]
    assert examine(200, body(ratio(0.5, UUID='"warnings":["x"]'))) == []


SOUND = body(ratio(0.5, UUID="G"), sampled(1, UUID="G"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param(b"", "not in the format of Prometheus", id="empty"),
        pytest.param(b"<html>502</html>", "not in the format of Prometheus", id="HTML"),
        pytest.param(SOUND[:-1], "not in the format of Prometheus", id="truncated at the end"),
        pytest.param(SOUND[: len(SOUND) // 2], "not in the format of Prometheus", id="cut in half"),
        pytest.param(SOUND + b"x", "not in the format of Prometheus", id="trailing content"),
        pytest.param(b"[" * 100_000, "not in the format of Prometheus", id="deep"),
        pytest.param(
            SOUND.replace(b"[", b"[" + b"[" * 100_000), "not in the format", id="deep inside"
        ),
        pytest.param(SOUND.replace(b"vector", b"matrix"), "not in the format", id="a matrix"),
        pytest.param(SOUND.replace(b"result", b"x", 1), "not in the format", id="no result type"),
        pytest.param(SOUND.replace(b'"result"', b'"x"'), "not in the format", id="no series"),
        pytest.param(
            b'{"status":"error","errorType":"timeout","error":"query timed out"}',
            "it answers with an error: timeout: query timed out",
            id="an error with status 200",
        ),
    ],
)
def test_an_invalid_answer_is_rejected_as_a_whole(text: bytes, says: str) -> None:
    with pytest.raises(PrometheusUnreadable, match=says):
        examine(200, text)


@pytest.mark.parametrize(
    "result",
    [
        pytest.param({}, id="not a list"),
        pytest.param([AT_S, "0.5"], id="a scalar"),
        pytest.param([{"metric": {}, "values": [[AT_S, "0.5"]]}], id="a matrix"),
        pytest.param([ratio(0.5) | {"value": [AT_S, 0.5]}], id="a number without a time"),
        pytest.param([ratio("a half", UUID="G")], id="not a number"),
        pytest.param([ratio(0.5) | {"metric": {"UUID": 1}}], id="a label that is not text"),
    ],
)
def test_series_of_another_form_are_rejected(result: object) -> None:
    with pytest.raises(PrometheusUnreadable, match="not in the format of Prometheus"):
        read(result)


def test_an_error_message_is_shortened() -> None:
    error = b'{"status":"error","errorType":"execution","error":"' + b"x" * 1000 + b'"}'
    for text, says in ((error, "it answers 503: execution: xxx"), (b"<html>", "it answers 503")):
        with pytest.raises(PrometheusUnreadable, match=says) as caught:
            examine(503, text)
        assert len(str(caught.value)) < 230


def test_only_sm_activity_is_queried() -> None:
    texts = EVERY_CLUSTER.sm_activity(0.99, 300)
    for metric in ("DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_SM_UTIL_RATIO"):
        past = [text for text in texts if f"quantile_over_time(0.99, {metric}{{" in text]
        assert len(past) == len(texts) / 2
        assert all(text.count("}[300s]") == 2 for text in past)
        assert all(f"timestamp({metric}{{" in text for text in texts if text not in past)
    assert "GPU_UTIL" not in str(texts)


def test_every_device_is_queried_once() -> None:
    queries = EVERY_CLUSTER.sm_activity(SPAN.quantile, SPAN.window_s)
    selected = [re.findall(r"SM_(?:ACTIVE|UTIL_RATIO)\{(.*?)\}", text) for text in queries]
    assert all(len(set(each)) == 1 for each in selected)
    parts = [each[0] for each in selected]
    for index in (0, 7, 8, 15, ""):
        for_it = [
            part
            for part in parts
            if part == f'gpu="{index}"'
            or (part.startswith("gpu!~") and not re.fullmatch(part[6:-1], str(index)))
        ]
        assert len(for_it) == 2, index
