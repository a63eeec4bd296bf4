"""A thread that repeats a step, and a function that finds the threads that a test has started."""

import abc
import threading
from collections.abc import Callable


class Repeated(threading.Thread, abc.ABC):
    """Calls ``step`` until ``stop`` is called. ``step`` returns the seconds until the next call."""

    def __init__(self, first_s: float = 0.0) -> None:
        """Wait ``first_s`` seconds before the first call."""
        super().__init__(daemon=True)
        self._first_s = first_s
        self._stopping = threading.Event()
        #: The exception that ended the thread, if a step raised an exception.
        self.failure: Exception | None = None

    @abc.abstractmethod
    def step(self) -> float: ...

    def run(self) -> None:
        wait_s = self._first_s
        try:
            while not self._stopping.wait(wait_s):
                wait_s = self.step()
        except Exception as err:  # noqa: BLE001 - for the thread of the test
            self.failure = err

    def stop(self) -> None:
        """Stop the thread and wait until its last step has ended."""
        self._stopping.set()
        if self.is_alive():
            self.join()


def begun_since(prefix: str) -> Callable[[], list[str]]:
    """Return a function that lists the threads started since this call, by names with this prefix.

    The prefix is needed because the test runner and servers also start threads at any time.
    """
    before = set(threading.enumerate())

    def begun() -> list[str]:
        since = set(threading.enumerate()) - before
        return sorted(each.name for each in since if each.name.startswith(prefix))

    return begun
