"""Sends reports at a constant rate while a benchmark measures something else."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager


class PacedReporter(ABC):
    """Reports for nodes in turn, for ``rate`` nodes per second, in batches of 50 ms.

    A batch has at most ``batch_limit`` nodes. ``late`` is the largest number of overdue reports.
    Subclasses define ``report``.
    """

    def __init__(self, nodes: int, rate: float, batch_limit: int) -> None:
        self._nodes, self._rate, self._batch_limit = nodes, rate, batch_limit
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.late = 0

    @abstractmethod
    def report(self, numbers: list[int]) -> None:
        """Report new figures for the nodes with these numbers."""

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._ended.set()
            self._thread.join()

    def _run(self) -> None:
        began_s, sent = time.monotonic(), 0
        while not self._ended.wait(0.05):
            due = int((time.monotonic() - began_s) * self._rate)
            batch = min(due - sent, self._batch_limit)
            self.late = max(self.late, due - sent - batch)
            self.report([number % self._nodes for number in range(sent, sent + batch)])
            sent += batch
