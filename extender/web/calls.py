"""Which of kube-scheduler's calls are under way, for whatever else the process does to give way to.

A call waits for the loop, and for the lock of the interpreter, which a thread that computes keeps
for as long as it may. So both look here between two pieces of what they do.

Who waits for that lock asks for it only after it was held by one thread for a while without a
break. A thread that lets go of it again and again for a moment, as reading and hashing do, takes it
back before anybody is awake, and the loop has waited for tens of milliseconds: so threads sleep
now and then for long enough.
"""

import time

#: For so long at most: calls may never end, and a caller may send its body slowly.
GIVE_WAY_S = 0.005
_LOOK_AGAIN_S = 0.0003
#: A thread computes for so long before it sleeps, and sleeps for so long that the loop is awake.
_COMPUTE_S, _SLEEP_S = 0.0005, 0.00005


class Calls:
    """Counted on the event loop; to be looked at from any thread."""

    def __init__(self) -> None:
        self.under_way = 0
        #: Since the start.
        self.begun = 0
        #: Until when others give way; moves when a call begins and no other is under way.
        self._until_s = 0.0
        #: When a thread slept last.
        self._slept_s = 0.0

    def begin(self) -> None:
        if not self.under_way:
            self._until_s = time.monotonic() + GIVE_WAY_S
        self.under_way += 1
        self.begun += 1

    def end(self) -> None:
        self.under_way -= 1

    def give_way(self) -> None:
        """On a thread, between two pieces: let the loop have its turn, and wait until no call is
        under way."""
        if time.monotonic() - self._slept_s > _COMPUTE_S:
            time.sleep(_SLEEP_S)
            self._slept_s = time.monotonic()
        while self.under_way and time.monotonic() < self._until_s:
            time.sleep(_LOOK_AGAIN_S)
