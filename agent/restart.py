"""Decides when the process replaces itself, and when it gives up and ends.

A driver that was replaced under us can only be reached by a new process: NVML's library is loaded
once and never again. So the process executes itself anew: its id, its container and its place in
the node stay. Where that does not help, because the container holds the old library for itself, the
kubelet has to make a new one: after some tries in a row the process ends with ``GIVEN_UP_STATUS``.
"""

import os
import sys
from collections.abc import Callable, MutableMapping, Sequence
from typing import NoReturn

GIVEN_UP_STATUS = 3

#: Where the tries in a row are handed on: "<tries> <time of the last, monotonic>".
VARIABLE = "HEADROOM_AGENT_RESTARTS"
MOST_TRIES = 5
_FIRST_WAIT_S = 1.0


class GivenUp(Exception):
    """Restarting did not help."""


class Restarts:
    def __init__(
        self, environment: MutableMapping[str, str], monotonic: Callable[[], float]
    ) -> None:
        self._environment = environment
        self._monotonic = monotonic
        tries, _, last_s = environment.get(VARIABLE, "").partition(" ")
        try:
            self._tries, self._last_s = int(tries), float(last_s)
        except ValueError:
            self._tries, self._last_s = 0, 0.0

    def well(self) -> None:
        """The driver answers: the next trouble is another one."""
        self._tries = 0
        self._environment.pop(VARIABLE, None)

    def due(self) -> bool:
        """Whether to restart now; each try of a row waits twice as long. Raises ``GivenUp``."""
        if self._tries >= MOST_TRIES:
            raise GivenUp(f"{self._tries} restarts in a row did not help")
        wait_s = _FIRST_WAIT_S * 2.0 ** (self._tries - 1) if self._tries else 0.0
        return self._monotonic() - self._last_s >= wait_s

    def restart(self, executable: str, argv: Sequence[str]) -> NoReturn:
        """Become a new process of the same id; ``argv`` is sys.orig_argv."""
        self._environment[VARIABLE] = f"{self._tries + 1} {self._monotonic()}"
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(executable, [executable, *argv[1:]], dict(self._environment))
