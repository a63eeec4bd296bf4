"""The agents of all nodes: the real agent's deliveries, of what the stand-ins show; silent, lying.

The samples of a stand-in are built here; the agent's own status writer decides when they are
written, confirmed and retried.
"""

import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Literal

import msgspec
from kubernetes.client import ApiClient

from agent.api_server import of_client
from agent.kube_publisher import KubernetesPublisher
from agent.status_writer import StatusWriter
from contract.gpunode import GPUNodeStatus, PodUse
from tests.controlplane import ControlPlane
from tests.standin.node import StandIn
from tests.truth.world import report

#: ``overstate``: its devices have twice the memory; ``forget``: no pods are on them; ``freeze``:
#: nothing has changed since the lie began.
Lie = Literal["overstate", "forget", "freeze"]
LIES: tuple[Lie, ...] = ("overstate", "forget", "freeze")


@dataclass
class Mood:
    """How an agent is at the moment; the storm changes it."""

    silent: bool = False
    lie: Lie | None = None
    clock_s: float = 0.0
    frozen: GPUNodeStatus | None = field(default=None, repr=False)


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
        self._nodes = nodes
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._client = ApiClient(plane.configuration("agent-of-the-tests"))
        self._threads = [
            threading.Thread(
                target=self._run,
                args=(name, namespace, heartbeat_s, random.Random(f"{seed} {name}")),
                name=f"agent {name}",
                daemon=True,
            )
            for name in nodes
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(30.0)
        self._client.close()

    def _run(self, name: str, namespace: str, heartbeat_s: float, chance: random.Random) -> None:
        mood, node = self.moods[name], self._nodes[name]

        def now() -> datetime:
            return datetime.now(UTC) + timedelta(seconds=mood.clock_s)

        courier = StatusWriter(
            KubernetesPublisher(of_client(self._client), name, namespace, heartbeat_s),
            heartbeat_s,
            time.monotonic,
            now,
            chance,
        )
        self._stopping.wait(chance.uniform(0, self._interval_s))
        while not self._stopping.is_set():
            wanted_s = self._interval_s
            if not mood.silent:
                began_s, observed_at = time.monotonic(), now().isoformat()
                status = msgspec.structs.replace(self._says(node, mood), observed_at=observed_at)
                wanted_s = courier.deliver(status, began_s)
            self._stopping.wait(max(0.1, min(wanted_s, self._interval_s)))

    def _says(self, node: StandIn, mood: Mood) -> GPUNodeStatus:
        with node.lock:
            seen = sample(node)
        if mood.lie != "freeze":
            mood.frozen = None
        match mood.lie:
            case "overstate":
                devices = [
                    msgspec.structs.replace(each, memory_bytes=2 * each.memory_bytes)
                    for each in seen.devices
                ]
                return msgspec.structs.replace(seen, devices=devices)
            case "forget":
                devices = [
                    msgspec.structs.replace(
                        each,
                        used_bytes=0,
                        replicas=msgspec.structs.replace(
                            each.replicas, free=each.replicas.total, allocated=0
                        ),
                    )
                    for each in seen.devices
                ]
                return msgspec.structs.replace(seen, devices=devices, pods=[])
            case "freeze":
                mood.frozen = mood.frozen or seen
                return mood.frozen
        return seen


def sample(node: StandIn) -> GPUNodeStatus:
    """The sample of an agent: pods that the kubelet has forgotten, and their processes."""
    seen = report(node)
    shown = {use.uid for use in seen.pods}
    left = [
        PodUse(uid=uid, container=container, device=device, used_bytes=used, source="nvml")
        for (uid, container), process in node.processes.items()
        if uid not in shown
        for device, used in process.used_bytes.items()
    ]
    return msgspec.structs.replace(seen, pods=[*seen.pods, *left])
