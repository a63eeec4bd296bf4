"""Checks that the history of past days is read without impossible values."""

from collections.abc import Mapping, Sequence

import pytest

from headroom.runtime.metric_history import (
    MAX_REPEATED,
    Answers,
    Asked,
    Sample,
    answered,
    read_days,
)
from headroom.runtime.promql import MIB, Measured

GPU = {"UUID": "GPU-a", "pod": "p"}
TOTAL = {"fb_total": "total"}
USED = {"used": Measured("max", "USED", "USED", 1e7, MIB)}
SM = {"sm": Measured("avg", "SM{x}", "SM", 1.01)}
USED_AGAIN = 'max_over_time(((USED{UUID="GPU-a",pod="p"} >= 0) <= 1010)[1d:15s])'
SM_AGAIN = 'avg_over_time(((SM{UUID="GPU-a",pod="p"} >= 0) <= 1.01)[1d:15s])'
SM_SUSPECTS = "(max_over_time(SM{x}[1d]) > 1.01) or (min_over_time(SM{x}[1d]) < 0)"


def read(
    measured: Mapping[str, Measured],
    values: Mapping[str, float],
    labels: Sequence[Mapping[str, str]] = (GPU,),
) -> tuple[Answers, list[str]]:
    """Read one day of the devices' history. Return the results and the queries. ``values`` maps
    queries to their values.
    """
    asked: list[str] = []

    def ask(query: Asked) -> list[Sample]:
        asked.append(query.promql)
        value = values.get(query.promql)
        of = [{"__name__": "USED", **each} for each in labels]
        return [] if value is None else [Sample(each, value) for each in of]

    return answered(read_days(TOTAL, {}, measured, 1, 1e9), ask), asked


def found(answers: Answers, name: str) -> list[float]:
    return [sample.value for sample in answers[name]]


def test_possible_values_are_not_queried_again() -> None:
    answers, asked = read(
        USED | SM, {"total": 1000.0, USED["used"].promql: 1000.0, SM["sm"].promql: 0.5}
    )
    assert (found(answers, "used"), found(answers, "sm")) == ([1000.0], [0.5])
    assert asked == ["total", USED["used"].promql, SM["sm"].promql, SM_SUSPECTS]


@pytest.mark.parametrize("value", [1011.0, 1e12, float("inf"), float("nan"), -1.0])
def test_a_maximum_is_queried_again_if_it_is_impossible(value: float) -> None:
    answers, asked = read(USED, {"total": 1000.0, USED["used"].promql: value, USED_AGAIN: 700.0})
    assert (found(answers, "used"), asked[-1]) == ([700.0], USED_AGAIN)
    answers, _ = read(USED, {"total": 1000.0, USED["used"].promql: value})
    assert found(answers, "used") == []


@pytest.mark.parametrize(
    ("mean", "is_suspect"), [(0.4, True), (float("nan"), False), (2.0, True), (-0.1, True)]
)
def test_a_mean_of_impossible_values_is_queried_again(mean: float, is_suspect: bool) -> None:
    values = {SM["sm"].promql: mean, SM_AGAIN: 0.01} | ({SM_SUSPECTS: 1372.0} if is_suspect else {})
    answers, asked = read(SM, values)
    assert (found(answers, "sm"), asked[-1]) == ([0.01], SM_AGAIN)


def test_a_device_of_unknown_size_has_the_limit_of_the_metric() -> None:
    answers, _ = read(USED, {USED["used"].promql: 2e6})
    assert found(answers, "used") == [2e6]
    answers, _ = read(USED, {USED["used"].promql: 2e7})
    assert found(answers, "used") == []


def test_label_names_that_are_invalid_in_a_selector_are_skipped() -> None:
    values = {USED["used"].promql: -1.0, USED_AGAIN.replace("1010", "10000000"): 5.0}
    answers, _ = read(USED, values, [{**GPU, "k8s.node": "n"}])
    assert found(answers, "used") == [5.0]


def test_the_number_of_repeated_queries_is_limited() -> None:
    labels = [{"UUID": f"GPU-{number}"} for number in range(MAX_REPEATED + 50)]
    _, asked = read(USED, {USED["used"].promql: -1.0}, labels)
    assert len(asked) == 2 + MAX_REPEATED
