"""Which of kube-scheduler's calls are under way, for whatever else the process does to give way to.

A call waits for the loop, and for the lock of the interpreter, which a thread that computes keeps
for as long as it may. So both look here between two pieces of what they do.
"""

import threading
import time

#: For so long at most: calls may never end, and a caller may send its body slowly.
GIVE_WAY_S = 0.005


class Calls:
    """Counted on the event loop; to be looked at from any thread."""

    def __init__(self) -> None:
        self.under_way = 0
        #: Since the start.
        self.begun = 0
        #: Of the threads that wait until no call is under way.
        self._over = threading.Condition()
        self._waiting = 0

    def begin(self) -> None:
        self.under_way += 1
        self.begun += 1

    def end(self) -> None:
        self.under_way -= 1
        if self._waiting and not self.under_way:
            with self._over:
                self._over.notify_all()

    def give_way(self) -> None:
        """On a thread, between two pieces: wait until no call is under way."""
        if not self.under_way:
            return
        until_s = time.monotonic() + GIVE_WAY_S
        with self._over:
            self._waiting += 1
            while self.under_way and (left_s := until_s - time.monotonic()) > 0:
                self._over.wait(left_s)
            self._waiting -= 1
