"""Checks that SIGTERM and SIGINT end an agent wherever they interrupt its main thread."""

import signal
import threading

import pytest

from agent.__main__ import after_signals
from tests.waiting import PATIENCE_S, until


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_agent_ends_if_a_signal_interrupts_a_call_that_holds_a_lock(
    number: signal.Signals,
) -> None:
    """``threading.Event`` has such a lock, and its method ``set`` acquires the lock too."""
    lock = threading.Lock()
    taken: list[bool] = []
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    after_signals(lambda: taken.append(lock.acquire(timeout=PATIENCE_S)))
    try:
        with lock:
            signal.raise_signal(number)
        until(lambda: taken, "the agent was asked to end")
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert taken == [True]
