"""Checks that callers do not wait for a hanging call, and that a hanging call does not cause
another thread.
"""

import threading
import time
from collections.abc import Iterator

import pytest

from agent import deadline
from agent.deadline import Hanging, Worker
from tests.waiting import PATIENCE_S, until


@pytest.fixture
def worker() -> Iterator[Worker[int]]:
    made: Worker[int] = Worker("under-test")
    yield made
    made.close()
    for thread in threads():  # Otherwise, the next test would count this thread.
        thread.join(PATIENCE_S)


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """An event on which calls hang until the test ends."""
    event = threading.Event()
    yield event
    event.set()


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "under-test"]


def test_the_result_or_exception_of_a_job_is_passed_on(worker: Worker[int]) -> None:
    assert worker.give(lambda: 7)
    assert worker.result(soon()) == 7
    worker.give(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        worker.result(soon())
    worker.give(lambda: 8)
    assert worker.result(soon()) == 8


def test_a_hanging_job_is_abandoned_and_no_job_is_queued_behind_it(
    worker: Worker[int], stuck: threading.Event
) -> None:
    def wait() -> int:
        stuck.wait()
        return 1

    assert worker.give(wait)
    with pytest.raises(Hanging):
        worker.result(time.monotonic())
    for _ in range(10):
        assert not worker.give(lambda: 2)
        with pytest.raises(Hanging):
            worker.result(time.monotonic())
    assert len(threads()) == 1
    # When the hanging call returns, its result is dropped, and its thread runs the next job.
    stuck.set()
    until(lambda: worker.give(lambda: 3), "the thread takes a job")
    assert worker.result(soon()) == 3
    assert len(threads()) == 1


def test_a_thread_ends_when_it_is_closed_and_its_call_has_returned(stuck: threading.Event) -> None:
    worker: Worker[bool] = Worker("under-test")
    worker.give(stuck.wait)
    worker.close()
    stuck.set()
    for thread in threads():
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_a_process_that_ends_waits_for_calls_only_briefly(
    worker: Worker[int], stuck: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadline, "_ends_at_s", float("inf"))
    monkeypatch.setattr(deadline, "ENDING_S", 0.1)

    def wait() -> int:
        stuck.wait()
        return 1

    worker.give(wait)
    began_s = time.monotonic()
    ends = threading.Timer(0.1, deadline.hurry)
    ends.start()
    with pytest.raises(Hanging):
        worker.result(began_s + 3600)
    stuck.set()
    ends.join()
    until(lambda: not worker.busy, "the call to return")
    assert worker.give(lambda: 3)
    assert worker.result(began_s + 3600) == 3
