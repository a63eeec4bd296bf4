"""Nodes as they really are: the stand-in's kubelet and plugin, which draw the device.

Those models are held against the real kubelet and the real plugin by ``tests/standin`` and
``tests/nvidia``.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.device_truth.arrivals import GIB, Job
from tests.driver import Gpu
from tests.standin.devices import Container, Ids, Lots, Pod
from tests.standin.lots import Drawn
from tests.standin.node import StandIn
from tests.standin.plugin import Policy, Settings, device_of

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
class Held:
    """A pod's replica, as the kubelet's checkpoint has it."""

    name: str
    device: int
    replica: str


@dataclass(frozen=True, slots=True)
class Sample:
    """What an agent sees at one moment."""

    pods: tuple[Held, ...]
    #: Pod -> the device that it uses, and the bytes.
    used: Mapping[str, tuple[int, int]]


class World:
    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        # "packed" came with v0.20; of the other both releases draw single replicas alike.
        settings = Settings(shape.replicas, shape.policy, 20 if shape.policy == "packed" else 19)
        self._plugin = Drawn(random.Random(seed))
        self._nodes = [
            StandIn([Gpu(uuid_of(device)) for device in range(shape.gpus)], settings)
            for _ in range(shape.nodes)
        ]
        #: By node, pod -> the device that it uses, and the bytes.
        self._used: list[dict[str, tuple[int, int]]] = [{} for _ in range(shape.nodes)]

    def admit(self, job: Job, node: int, who: Callable[[Lots], Lots]) -> int | None:
        """The kubelet admits the pod; returns the device of its replica, None where it does not.

        ``who`` answers it when it asks what to prefer, the plugin or somebody in its place.
        """
        pod = Pod(job.name, (Container(MAIN, 1),))
        if not self._nodes[node].admit(pod, who(self._plugin)).admitted:
            return None
        return self._held(node, job.name).device

    def start(self, job: Job, node: int, device: int) -> None:
        """Its process takes what it asked for, or nothing where that is not there."""
        free_bytes = self.shape.allocatable_bytes - sum(
            size for there, size in self._used[node].values() if there == device
        )
        if job.request_bytes <= free_bytes:
            self._used[node][job.name] = device, job.request_bytes

    def end(self, job: str, node: int) -> None:
        self._used[node].pop(job, None)
        self._nodes[node].end(job)
        self._nodes[node].delete(job)

    def checkpoint(self, node: int) -> list[tuple[str, Ids]]:
        """(pod, replicas) as of the kubelet's last write."""
        written = self._nodes[node].devices.written
        return [(entry.uid, entry.replicas) for entry in written.entries] if written else []

    def sample(self, node: int) -> Sample:
        pods = [
            self._held(node, uid) for uid, held in self._nodes[node].pods.items() if held.counts
        ]
        return Sample(tuple(pods), dict(self._used[node]))

    def _held(self, node: int, uid: str) -> Held:
        entry = self._nodes[node].devices.given(uid, MAIN)
        assert entry is not None
        (replica,) = entry.replicas
        return Held(uid, index_of(device_of(replica)), replica)


def uuid_of(device: int) -> str:
    return f"GPU-{device}"


def index_of(uuid: str) -> int:
    return int(uuid.removeprefix("GPU-"))
