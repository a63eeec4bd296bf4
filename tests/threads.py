"""Threads of tests: a thread that repeats a step, and threads started since a point in time."""

import abc
import threading
from collections.abc import Callable


class Repeated(threading.Thread, abc.ABC):
    """Calls ``step`` until ``stop``. Each call returns the seconds until the next one."""

    def __init__(self, first_s: float = 0.0) -> None:
        """``first_s`` are the seconds until the first call."""
        super().__init__(daemon=True)
        self._first_s = first_s
        self._stopping = threading.Event()
        #: The exception of a step, after which no other step follows.
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
        """Return when the last step has ended."""
        self._stopping.set()
        if self.is_alive():
            self.join()


def begun_since(prefix: str) -> Callable[[], list[str]]:
    """Return a function that returns the sorted names of running threads with this prefix.

    Threads that run now are not included. The total number of threads is not reliable, because the
    test runner and servers start threads at any time.
    """
    before = set(threading.enumerate())

    def begun() -> list[str]:
        since = set(threading.enumerate()) - before
        return sorted(each.name for each in since if each.name.startswith(prefix))

    return begun
