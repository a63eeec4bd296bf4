"""The agents of all nodes: the real agent's status writer, with samples of the simulated nodes."""

import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import msgspec
from kubernetes.client import ApiClient

from agent.api_server import of_client
from agent.kube_publisher import KubernetesPublisher
from agent.status_writer import StatusWriter
from contract.gpunode import GPUNodeStatus, PodUse
from tests.controlplane import ControlPlane
from tests.standin.node import StandIn
from tests.truth.world import report


@dataclass
class Mood:
    """The faults of an agent at the moment."""

    silent: bool = False
    clock_s: float = 0.0


class Agents:
    def __init__(
        self,
        plane: ControlPlane,
        nodes: Mapping[str, StandIn],
        namespace: str,
        interval_s: float,
        heartbeat_s: float,
        seed: int,
    ) -> None:
        self.moods = {name: Mood() for name in nodes}
        self._namespace, self._heartbeat_s = namespace, heartbeat_s
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._client = ApiClient(plane.configuration("agent-of-the-tests"))
        self._threads = [
            threading.Thread(target=self._run, args=(*item, random.Random(f"{seed} {item[0]}")))
            for item in nodes.items()
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(30.0)
        self._client.close()

    def _run(self, name: str, node: StandIn, lots: random.Random) -> None:
        mood, beat_s = self.moods[name], self._heartbeat_s

        def now() -> datetime:
            return datetime.now(UTC) + timedelta(seconds=mood.clock_s)

        client = of_client(self._client)
        publisher = KubernetesPublisher(client, name, self._namespace, beat_s)
        writer = StatusWriter(publisher, beat_s, time.monotonic, now, lots)
        wait_s = lots.uniform(0, self._interval_s)
        while not self._stopping.wait(wait_s):
            wait_s = self._interval_s
            if not mood.silent:
                began_s, observed_at = time.monotonic(), now().isoformat()
                with node.lock:
                    status = msgspec.structs.replace(sample(node), observed_at=observed_at)
                wait_s = max(0.1, min(writer.deliver(status, began_s), wait_s))


def sample(node: StandIn) -> GPUNodeStatus:
    """Return what an agent sees: also processes of pods that the kubelet has forgotten."""
    seen = report(node)
    shown = {use.uid for use in seen.pods}
    left = [
        PodUse(uid=uid, container=container, device=device, used_bytes=used, source="nvml")
        for (uid, container), process in node.processes.items()
        if uid not in shown
        for device, used in process.used_bytes.items()
    ]
    return msgspec.structs.replace(seen, pods=[*seen.pods, *left])
