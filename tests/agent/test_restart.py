"""Tests when the agent restarts itself. test_on_driver_library tests the restart itself."""

import pytest

from agent.__main__ import VARIABLE, GivenUp, Restarts

MOST_TRIES = 5


def in_a_row(tries: int, last_s: float) -> dict[str, str]:
    return {VARIABLE: f"{tries} {last_s}"}


def test_the_first_restart_is_due_at_once() -> None:
    assert Restarts({}, lambda: 0.0).due()


@pytest.mark.parametrize(("tries", "wait_s"), [(1, 1), (2, 2), (3, 4), (4, 8)])
def test_each_further_restart_waits_twice_as_long(tries: int, wait_s: float) -> None:
    assert not Restarts(in_a_row(tries, 100.0), lambda: 100.0 + wait_s - 0.1).due()
    assert Restarts(in_a_row(tries, 100.0), lambda: 100.0 + wait_s).due()


def test_the_number_of_consecutive_restarts_is_limited() -> None:
    with pytest.raises(GivenUp, match="5 restarts in a row"):
        Restarts(in_a_row(MOST_TRIES, 0.0), lambda: 1e6).due()


def test_an_answer_of_the_driver_resets_the_count() -> None:
    environment = in_a_row(MOST_TRIES, 100.0)
    restarts = Restarts(environment, lambda: 100.0)
    restarts.well()
    assert restarts.due()
    assert environment == {}


def test_a_variable_of_another_process_does_not_count() -> None:
    assert Restarts({VARIABLE: "many times"}, lambda: 0.0).due()
