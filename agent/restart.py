"""Decides when the process restarts itself, and when it gives up and exits.

Only a new process can use a driver that was replaced, because NVML's library is loaded once. So the
process restarts with execve, and keeps its pid and container. That does not help if the container
has its own copy of the old library, so that the kubelet has to create a new container. After
``MOST_TRIES`` restarts in a row the process exits with ``GIVEN_UP_STATUS``.
"""

import os
import sys
from collections.abc import Callable, MutableMapping, Sequence
from typing import NoReturn

GIVEN_UP_STATUS = 3

#: Variable that passes on the restarts in a row: "<number> <monotonic time of the last>".
VARIABLE = "HEADROOM_AGENT_RESTARTS"
MOST_TRIES = 5
_FIRST_WAIT_S = 1.0


class GivenUp(Exception):
    """Several restarts in a row did not help."""


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
        """Reset the count, because the driver answers."""
        self._tries = 0
        self._environment.pop(VARIABLE, None)

    def due(self) -> bool:
        """Return whether to restart now. The wait doubles with each try. Raises ``GivenUp``."""
        if self._tries >= MOST_TRIES:
            raise GivenUp(f"{self._tries} restarts in a row did not help")
        wait_s = _FIRST_WAIT_S * 2.0 ** (self._tries - 1) if self._tries else 0.0
        return self._monotonic() - self._last_s >= wait_s

    def restart(self, executable: str, argv: Sequence[str]) -> NoReturn:
        """Replace this process by a new one with the same pid; ``argv`` is sys.orig_argv."""
        self._environment[VARIABLE] = f"{self._tries + 1} {self._monotonic()}"
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(executable, [executable, *argv[1:]], dict(self._environment))
