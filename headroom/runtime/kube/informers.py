"""Runs one reflector for each kind against one API server."""

import random
import threading
import time
from collections.abc import Callable, Sequence

import structlog

from headroom.runtime.kube.client import KubeApi
from headroom.runtime.kube.reflector import DEFAULT_PACE, Deliver, Pace, Reflector
from headroom.runtime.kube.resources import Health, Kind

log = structlog.get_logger(__name__)


class KubernetesSources:
    """Watches ``kinds``, each on its own thread.

    The threads call ``deliver``, possibly at the same time, each with the events of one kind in
    order. ``deliver`` should queue the events and return.
    """

    def __init__(
        self,
        api: KubeApi,
        deliver: Deliver,
        kinds: Sequence[Kind],
        *,
        pace: Pace = DEFAULT_PACE,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._reflectors = {
            kind.name: Reflector(kind, api, deliver, pace=pace, clock=clock, jitter=jitter)
            for kind in kinds
        }
        self._threads = [
            threading.Thread(target=reflector.run, name=f"watch-{name}", daemon=True)
            for name, reflector in self._reflectors.items()
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop all watches and wait for the threads, at most ``timeout_s`` seconds in total.

        A thread that waits for a list may run longer and still deliver the list. It does not keep
        the process alive.
        """
        for reflector in self._reflectors.values():
            reflector.stop()
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline_s - time.monotonic()))
                if thread.is_alive():
                    log.warning("source_still_stopping", thread=thread.name)

    @property
    def health(self) -> list[Health]:
        return [reflector.health for reflector in self._reflectors.values()]
