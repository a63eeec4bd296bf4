"""Simulates the nodes with the kubelet and plugin models of ``tests/standin``.

``tests/standin`` and ``tests/nvidia`` compare these models with the real kubelet and plugin.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.device_truth.arrivals import GIB, Job
from tests.driver import Gpu
from tests.standin.allocations import Container, Ids, Lots, Pod
from tests.standin.lots import Drawn
from tests.standin.node import StandIn
from tests.standin.plugin import Policy, Settings, device_of

MAIN = "main"
RESERVED_BYTES = GIB


@dataclass(frozen=True, slots=True)
class Shape:
    """A fleet of equal nodes with time-sliced GPUs, or unshared GPUs if there is one replica. The
    driver keeps 1 GiB of each GPU."""

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
    """A replica of a pod, as in the kubelet's checkpoint."""

    name: str
    device: int
    replica: str


@dataclass(frozen=True, slots=True)
class Sample:
    """The pods and their use, as an agent sees them at one time."""

    pods: tuple[Held, ...]
    #: Pod -> the device that it uses, and the bytes.
    used: Mapping[str, tuple[int, int]]


class World:
    """The nodes. ``shapes`` has the shape of each node if they are not all equal."""

    def __init__(self, shape: Shape, seed: int, shapes: Sequence[Shape] = ()) -> None:
        self.shape = shape
        self.shapes = list(shapes) or [shape] * shape.nodes
        # "packed" came with v0.20. With the other policy, both releases draw single replicas alike.
        release = 20 if shape.policy == "packed" else 19
        self._plugin = Drawn(random.Random(seed))
        self._nodes = [
            StandIn(
                [Gpu(uuid_of(device)) for device in range(each.gpus)],
                Settings(each.replicas, each.policy, release),
            )
            for each in self.shapes
        ]
        #: For each node, pod -> the device that it uses, and the bytes.
        self._used: list[dict[str, tuple[int, int]]] = [{} for _ in self.shapes]

    def admit(self, job: Job, node: int, who: Callable[[Lots], Lots]) -> int | None:
        """Admit the pod. Return the device of its first replica, or None if the kubelet rejects it.

        ``who`` chooses the replicas. It is the plugin, or a component in place of the plugin.
        """
        pod = Pod(job.name, (Container(MAIN, job.count),))
        if not self._nodes[node].admit(pod, who(self._plugin)).admitted:
            return None
        return self.given(node, job.name)[0].device

    def start(self, job: Job, node: int, device: int) -> None:
        """Let its process take the memory that it requested, or nothing if the memory is not
        free."""
        free_bytes = self.shapes[node].allocatable_bytes - sum(
            size for there, size in self._used[node].values() if there == device
        )
        if job.request_bytes <= free_bytes:
            self._used[node][job.name] = device, job.request_bytes

    def end(self, job: str, node: int) -> None:
        self._used[node].pop(job, None)
        self._nodes[node].end(job)
        self._nodes[node].delete(job)

    def checkpoint(self, node: int) -> list[tuple[str, Ids]]:
        """Return (pod, replicas) as of the kubelet's last write."""
        written = self._nodes[node].devices.written
        return [(entry.uid, entry.replicas) for entry in written.entries] if written else []

    def sample(self, node: int) -> Sample:
        pods = [
            each
            for uid, held in self._nodes[node].pods.items()
            if held.counts
            for each in self.given(node, uid)
        ]
        return Sample(tuple(pods), dict(self._used[node]))

    def given(self, node: int, uid: str) -> list[Held]:
        """Return the replicas that the kubelet gave to a pod."""
        entry = self._nodes[node].devices.given(uid, MAIN)
        assert entry is not None
        return [Held(uid, index_of(device_of(each)), each) for each in sorted(entry.replicas)]


def uuid_of(device: int) -> str:
    return f"GPU-{device}"


def index_of(uuid: str) -> int:
    return int(uuid.removeprefix("GPU-"))
