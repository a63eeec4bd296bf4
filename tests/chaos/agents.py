"""The agent of a node: the real agent's status writer, with samples of the simulated node."""

import random
import threading
import time
from datetime import UTC, datetime, timedelta

from agent.kube_publisher import KubernetesPublisher
from agent.status_writer import StatusWriter
from tests.standin.node import StandIn
from tests.truth.world import report


class Agent(threading.Thread):
    def __init__(
        self,
        publisher: KubernetesPublisher,
        node: StandIn,
        interval_s: float,
        heartbeat_s: float,
        lots: random.Random,
    ) -> None:
        super().__init__(daemon=True)
        self._node, self._interval_s, self._lots = node, interval_s, lots
        self._writer = StatusWriter(publisher, heartbeat_s, time.monotonic, self._now, lots)
        self._stopping = threading.Event()
        #: Its faults at the moment.
        self.silent, self.clock_s = False, 0.0

    def stop(self) -> None:
        self._stopping.set()
        if self.is_alive():
            self.join(30.0)

    def run(self) -> None:
        wait_s = self._lots.uniform(0, self._interval_s)
        while not self._stopping.wait(wait_s):
            wait_s = self._interval_s
            if not self.silent:
                began_s = time.monotonic()
                with self._node.lock:
                    status = report(self._node, self._now().isoformat())
                wait_s = max(0.1, min(self._writer.deliver(status, began_s), wait_s))

    def _now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self.clock_s)
