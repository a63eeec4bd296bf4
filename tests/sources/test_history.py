"""What an answer of Prometheus says of each device, and which answers say nothing."""

import json
import math
from itertools import pairwise
from typing import Any

import pytest

from extender.cluster.activity import Key
from extender.placement.activity import HISTORY, Activity
from extender.sources.history import (
    Answer,
    Span,
    Unreadable,
    fault,
    history,
    moved,
    question,
    read,
    still_fresh,
)

AT_S = 1_795_219_200.25
SPAN = Span(0.95, 900)
ASKED_S = 5000.0


def ratio(value: object, at_s: float = AT_S, **labels: str) -> dict[str, Any]:
    """A series of the first kind, with these labels."""
    return {"metric": {"told": "ratio", **labels}, "value": [at_s, str(value)]}


def sampled(age_s: float, **labels: str) -> dict[str, Any]:
    """A series of the second kind, of a sample so old."""
    return {"metric": {"told": "at", **labels}, "value": [AT_S, str(AT_S - age_s)]}


def body(*series: dict[str, Any], **other: Any) -> bytes:
    """As Prometheus writes it: without spaces, the labels of a series before its value."""
    answer = {
        "status": "success",
        "data": {"resultType": "vector", "result": list(series)},
        **other,
    }
    return json.dumps(answer, separators=(",", ":"), ensure_ascii=False).encode()


def whole(pieces: Any) -> Any:
    *_, last = pieces
    return last


def told(*series: dict[str, Any], wall_s: float = AT_S, **before: Activity) -> dict[Key, Activity]:
    answer = whole(read(body(*series)))
    had = {(uuid, None): activity for uuid, activity in before.items()}
    return dict(whole(history(answer, had, SPAN, ASKED_S, wall_s, 180.0)))


def test_what_is_told_of_a_device() -> None:
    assert told(ratio(0.42, UUID="GPU-a"), sampled(12.5, UUID="GPU-a")) == {
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
def test_whose_it_is(labels: dict[str, str], key: Key | None) -> None:
    assert list(told(ratio(0.5, **labels), sampled(1, **labels))) == ([] if key is None else [key])


@pytest.mark.parametrize(
    ("value", "is_told"),
    [
        ("0", 0.0), ("1", 1.0), ("1.004", 1.0), ("1e-3", 0.001),
        ("NaN", None), ("+Inf", None), ("-Inf", None), ("-0.1", None), ("1.02", None), ("87", None),
        ("140737488355330", None),
    ],
)  # fmt: skip
def test_only_a_ratio_is_one(value: str, is_told: float | None) -> None:
    found = told(ratio(value, UUID="G"), sampled(1, UUID="G"))
    assert [a.ratio for a in found.values()] == ([] if is_told is None else [is_told])


def test_of_two_that_tell_of_a_device_the_higher_counts_and_the_newer_sample() -> None:
    one, other = {"UUID": "G"}, {"uuid": "G"}
    found = told(ratio(0.6, **one), ratio(0.3, **other), sampled(15, **one), sampled(90, **other))
    assert [(a.ratio, ASKED_S - a.sampled_at_s) for a in found.values()] == [(0.6, 15.0)]


@pytest.mark.parametrize(
    ("age_s", "counts_as_s"),
    [
        pytest.param(180, 180.0, id="as old as may be"),
        pytest.param(181, None, id="too old"),
        pytest.param(-20, 0.0, id="a little ahead: now"),
        pytest.param(-40, None, id="from the future"),
        pytest.param(math.nan, None, id="no time"),
    ],
)
def test_a_figure_is_as_old_as_its_newest_sample(age_s: float, counts_as_s: float | None) -> None:
    found = told(ratio(0.5, UUID="G"), sampled(age_s, UUID="G"))
    ages = [ASKED_S - a.sampled_at_s for a in found.values()]
    assert ages == ([] if counts_as_s is None else [counts_as_s])


def test_without_a_sample_in_sight_there_is_no_figure() -> None:
    assert told(ratio(0.5, UUID="G"), sampled(1, UUID="other")) == {}


def test_a_clock_that_differs_little_changes_nothing_and_one_that_differs_much_is_no_source() -> (
    None
):
    series = ratio(0.5, UUID="G"), sampled(10, UUID="G")
    assert told(*series, wall_s=AT_S + 179) == told(*series, wall_s=AT_S - 179) == told(*series)
    for wrong_s in (AT_S + 181, AT_S - 181, math.nan):
        with pytest.raises(Unreadable, match="its clock differs from ours"):
            told(*series, wall_s=wrong_s)
    assert told(wall_s=0.0) == {}  # nothing was told, so no time either


def test_a_figure_that_hardly_moved_stays_as_it_was_and_is_as_new_as_it_is() -> None:
    had = Activity(0.5, HISTORY, 0.95, 900, ASKED_S - 30)
    series = sampled(5, UUID="G")
    (kept,) = told(ratio(0.549, UUID="G"), series, G=had).values()
    assert (kept.ratio, ASKED_S - kept.sampled_at_s) == (0.5, 5.0)
    (new,) = told(ratio(0.551, UUID="G"), series, G=had).values()
    assert new.ratio == 0.551


def test_it_moved_where_it_came_went_or_changed() -> None:
    def activities(**ratios: float) -> dict[Key, Activity]:
        return {(uuid, None): Activity(ratio, HISTORY) for uuid, ratio in ratios.items()}

    before, after = activities(same=0.1, gone=0.2, other=0.3), activities(same=0.1, other=0.4, n=0)
    assert sorted(whole(moved(before, after))) == [("gone", None), ("n", None), ("other", None)]
    assert whole(moved({}, {})) == []
    assert whole(moved(after, after)) == []


def test_without_an_answer_figures_stay_until_they_are_too_old() -> None:
    held: dict[Key, Activity] = {
        (name, None): Activity(0.5, HISTORY, sampled_at_s=at_s)
        for name, at_s in (("old", 1000.0), ("new", 1001.0))
    }
    assert list(whole(still_fresh(held, 1180.0, 180.0))) == [("old", None), ("new", None)]
    assert list(whole(still_fresh(held, 1181.0, 180.0))) == [("new", None)]
    assert whole(still_fresh({}, 0.0, 180.0)) == {}


def test_a_large_answer_is_read_in_pieces_and_none_is_lost() -> None:
    many = [
        each
        for i in range(5000)
        for each in (ratio(i % 100 / 100, UUID=f"G{i}"), sampled(i % 100, UUID=f"G{i}"))
    ]
    pieces = [len(answer.ratios) for answer in read(body(*many))]
    assert len(pieces) > 40
    assert max(b - a for a, b in pairwise(pieces)) < 300
    found = told(*many)
    assert len(found) == 5000
    assert found["G1234", None].ratio == 0.34
    assert found["G1234", None].sampled_at_s == ASKED_S - 34


def test_what_stands_in_labels_is_not_taken_for_the_answer() -> None:
    hostile = '"result":[{"metric":{"UUID":"X"},"value":[0,"1"]}],{"metric"'
    series = ratio(0.5, UUID=hostile), sampled(1, UUID=hostile)
    last = ratio(0.25, UUID="üÜ😀"), sampled(1, UUID="üÜ😀")
    assert [(k[0], a.ratio) for k, a in told(*series, *last).items()] == [
        (hostile, 0.5), ("üÜ😀", 0.25)]  # fmt: skip
    ends = body(*last, warnings=['],"result":[', ',{"metric"'])
    assert len(whole(read(ends)).ratios) == 1


def test_part_of_an_answer_says_so() -> None:
    answer: Answer = whole(read(body(ratio(0.5, UUID="G"), warnings=["store b: timeout"])))
    assert (answer.warnings, answer.ratios) == (["store b: timeout"], {("G", None): 0.5})
    before = b'{"warnings":["w"],' + body()[1:]
    assert whole(read(before)).warnings == ["w"]


SOUND = body(ratio(0.5, UUID="G"), sampled(1, UUID="G"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param(b"", "not as Prometheus writes it", id="nothing"),
        pytest.param(b"<html>502</html>", "not as Prometheus writes it", id="HTML"),
        pytest.param(SOUND[:-1], "not as Prometheus writes it", id="cut off at the end"),
        pytest.param(SOUND[: len(SOUND) // 2], "not as Prometheus writes it", id="cut in half"),
        pytest.param(SOUND + b"x", "not as Prometheus writes it", id="more after it"),
        pytest.param(b"[" * 100_000, "not as Prometheus writes it", id="deep"),
        pytest.param(
            SOUND.replace(b"[", b"[" + b"[" * 100_000), "not as Prometheus", id="deep within"
        ),
        pytest.param(SOUND.replace(b'"0.5"', b"0.5"), "not as Prometheus", id="a bare figure"),
        pytest.param(SOUND.replace(b"0.5", b"a half"), "not as Prometheus", id="no figure"),
        pytest.param(SOUND.replace(b"vector", b"matrix"), "not as Prometheus", id="a matrix"),
        pytest.param(SOUND.replace(b'"G"', b'"\xff"'), "not as Prometheus", id="not UTF-8"),
        pytest.param(
            b'{"status":"error","errorType":"timeout","error":"query timed out"}',
            "it answers with an error: timeout: query timed out",
            id="an error with status 200",
        ),
        pytest.param(
            body(ratio(0.5, UUID="G" * 200_000), ratio(0.5, UUID="H")),
            "not as Prometheus writes it",
            id="an enormous label",
        ),
    ],
)
def test_what_is_no_answer_is_refused_whole(text: bytes, says: str) -> None:
    with pytest.raises(Unreadable, match=says):
        whole(read(text))


def test_an_error_is_quoted_in_short() -> None:
    said = fault(b'{"status":"error","errorType":"execution","error":"' + b"x" * 1000 + b'"}')
    assert said.startswith(": execution: xxx")
    assert len(said) < 210
    assert fault(b"<html>") == fault(b'{"status":"error"}') == ""


def test_the_question_asks_for_sm_activity_and_for_no_other_figure() -> None:
    text = question(Span(0.99, 300))
    assert "quantile_over_time(0.99, " in text
    assert "DCGM_FI_PROF_SM_ACTIVE[300s]" in text
    assert "UTIL" not in text
