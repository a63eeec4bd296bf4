"""Runs the real agent's status writer with samples of a simulated node."""

import random
import time
from datetime import UTC, datetime, timedelta

from kubernetes.client import ApiClient
from msgspec.structs import replace

from agent.kube_client import of_client
from agent.kube_publisher import KubernetesPublisher
from agent.status_writer import StatusWriter
from tests.e2e.nodes import SYSTEM_NAMESPACE
from tests.standin.node import StandIn
from tests.threads import Repeated
from tests.truth.world import report


class Agent(Repeated):
    def __init__(
        self,
        api: ApiClient,
        name: str,
        node: StandIn,
        interval_s: float,
        heartbeat_s: float,
        rng: random.Random,
    ) -> None:
        super().__init__(first_s=rng.uniform(0, interval_s))
        self._node, self._interval_s = node, interval_s
        publisher = KubernetesPublisher(of_client(api), name, SYSTEM_NAMESPACE, heartbeat_s)
        self._writer = StatusWriter(publisher, heartbeat_s, time.monotonic, self._now, rng)
        #: The agent's current faults: whether it sends nothing, and the error of its clock.
        self.silent, self.clock_s = False, 0.0

    def step(self) -> float:
        if self.silent:
            return self._interval_s
        began_s = time.monotonic()
        with self._node.lock:
            status = report(self._node, self._now().isoformat())
        if len(self._node.gpus) > 1:
            unknown = replace(status.plugin, allocation_policy="unknown")
            status = replace(status, plugin=unknown)
        return max(0.1, min(self._writer.deliver(status, began_s), self._interval_s))

    def _now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self.clock_s)
