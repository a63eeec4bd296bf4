"""Nodes as they really are: the stand-in's kubelet and plugin, which draw the device.

Those models are held against the real kubelet and the real plugin by ``tests/standin`` and
``tests/nvidia``.
"""

import random
from dataclasses import dataclass

from benchmarks.device_truth.arrivals import GIB, Job
from tests.driver import Gpu
from tests.standin.devices import Container, Ids, Lots, Pod, Preferred
from tests.standin.lots import Drawn
from tests.standin.node import StandIn
from tests.standin.plugin import Plugin, Policy, Settings, device_of

MAIN = "main"
RESERVED_BYTES = GIB


@dataclass(frozen=True, slots=True)
class Shape:
    """A fleet of equal nodes with time-sliced GPUs; 1 GiB of each is the driver's."""

    nodes: int
    gpus: int
    memory_bytes: int
    replicas: int
    policy: Policy

    @property
    def allocatable_bytes(self) -> int:
        return self.memory_bytes - RESERVED_BYTES

    @property
    def capacity_bytes(self) -> int:
        return self.nodes * self.gpus * self.allocatable_bytes


@dataclass(frozen=True, slots=True)
class Sample:
    """What an agent sees at one moment: (pod, device, replica) of each pod there."""

    pods: tuple[tuple[str, int, str], ...]


class World:
    """``taken`` of a node are the replicas of its bound pods, as kube-scheduler counts them."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        # "packed" came with v0.20; of the other both releases draw single replicas alike.
        settings = Settings(shape.replicas, shape.policy, 20 if shape.policy == "packed" else 19)
        self._lots = random.Random(seed)
        self._nodes = [
            StandIn([Gpu(uuid_of(device)) for device in range(shape.gpus)], settings)
            for _ in range(shape.nodes)
        ]
        self._jobs: dict[str, Job] = {}

    def admit(self, job: Job, node: int, wanted: int | None) -> int:
        """The kubelet admits the pod; returns the device of its replica. ``wanted`` is what the
        plugin is made to prefer, None where it prefers what it likes."""
        self._jobs[job.name] = job
        lots: Lots = Drawn(self._lots) if wanted is None else _Steered(uuid_of(wanted))
        pod = Pod(job.name, (Container(MAIN, 1),))
        verdict = self._nodes[node].admit(pod, lots)
        if not verdict.admitted:
            raise AssertionError(f"kube-scheduler saw to it that there is a replica: {verdict}")
        return self._place(node, job.name)[0]

    def end(self, job: str, node: int) -> None:
        self._nodes[node].end(job)
        self._nodes[node].delete(job)

    def sample(self, node: int) -> Sample:
        pods = [(pod.uid, *self._place(node, pod.uid)) for pod in self._pods(node)]
        return Sample(tuple(pods))

    def asked_bytes(self, node: int, device: int) -> int:
        """Of all pods on the device, as the agent there knows them."""
        here = [pod.uid for pod in self._pods(node) if self._place(node, pod.uid)[0] == device]
        return sum(self._jobs[uid].request_bytes for uid in here)

    def _pods(self, node: int) -> list[Pod]:
        return [held.pod for held in self._nodes[node].pods.values()]

    def _place(self, node: int, uid: str) -> tuple[int, str]:
        entry = self._nodes[node].devices.given(uid, MAIN)
        assert entry is not None
        (replica,) = entry.replicas
        return int(device_of(replica).removeprefix("GPU-")), replica


@dataclass(frozen=True, slots=True)
class _Steered:
    """The agent in the plugin's place: it prefers a replica of the device that was chosen."""

    device: str

    def preferred(self, plugin: Plugin, call: Preferred) -> Ids:
        return frozenset(sorted(r for r in call.available if device_of(r) == self.device)[:1])

    def some(self, replicas: Ids, count: int) -> Ids:
        raise AssertionError(f"{self.device} has no free replica")


def uuid_of(device: int) -> str:
    return f"GPU-{device}"
