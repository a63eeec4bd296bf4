"""Simulates the nodes' agents: their reports, gate decisions and preferred allocations.

Measurements are generated from samples, and the agent's own code decides.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from agent.gate_decision import Limits, judge
from agent.probes.checkpoint import Entry
from agent.steering.choice import NoRoom, choose
from agent.steering.messages import ContainerRequest
from benchmarks.device_truth.world import MAIN, RESERVED_BYTES, Sample, Shape, uuid_of
from headroom.contract.gpunode import (
    UNATTRIBUTED_TOLERANCE_BYTES,
    Device,
    GPUNode,
    GPUNodeStatus,
    Plugin,
    PodUse,
    Replicas,
    Source,
)
from tests.standin.allocations import Ids, Lots, Preferred
from tests.standin.plugin import Plugin as StandInPlugin
from tests.standin.plugin import PluginRefused

GPU = "nvidia.com/gpu"
#: In this benchmark, no node keeps memory free.
LIMITS = Limits(reserve_bytes=0, tolerance_bytes=UNATTRIBUTED_TOLERANCE_BYTES)
#: Returns the GPUNode of the agent's own node, not from a cache.
Read = Callable[[], GPUNode]


class Agent:
    def __init__(self, shape: Shape, plugin: Plugin, read: Read) -> None:
        self._shape, self._plugin, self._read = shape, plugin, read
        self.newest = self.look(Sample((), {}), 0.0)

    def look(self, sample: Sample, unix_s: float) -> GPUNodeStatus:
        """Take a sample. Return the report about it."""
        held = Counter(each.device for each in sample.pods)
        used: Counter[int] = Counter()
        for device, size in sample.used.values():
            used[device] += size
        devices = [
            Device(
                uuid=uuid_of(device),
                index=device,
                memory_bytes=self._shape.memory_bytes,
                reserved_bytes=RESERVED_BYTES,
                used_bytes=used[device],
                unattributed_bytes=0,
                sharing="time-slicing" if self._shape.replicas > 1 else "none",
                resource=GPU,
                replicas=Replicas(free=self._shape.replicas - held[device], allocated=held[device]),
            )
            for device in range(self._shape.gpus)
        ]
        self.newest = GPUNodeStatus(
            observed_at=datetime.fromtimestamp(unix_s, UTC).isoformat(),
            devices=devices,
            pods=_rows(sample),
            plugin=self._plugin,
            sources=[Source(name="checkpoint"), Source(name="proc")],
        )
        return self.newest

    def lets(self, pod: str) -> bool:
        """Return whether the pod's gate may let it start."""
        return judge(self._read(), self.newest, pod, LIMITS).answer == "yes"

    def steers(self, plugin: Lots, checkpoint: Callable[[], Sequence[tuple[str, Ids]]]) -> Lots:
        return _Steered(self, plugin, checkpoint)

    def choice(
        self, call: Preferred, checkpoint: Sequence[tuple[str, Ids]]
    ) -> tuple[str, ...] | NoRoom:
        request = ContainerRequest(
            tuple(sorted(call.available)), tuple(sorted(call.must_include)), call.size
        )
        entries = [Entry(uid, MAIN, GPU, tuple(sorted(ids))) for uid, ids in checkpoint]
        found = choose(request, GPU, self._read().spec, self.newest, entries, LIMITS)
        return found if isinstance(found, NoRoom) else found.replicas


class _Steered:
    """The agent in place of the plugin."""

    def __init__(
        self, agent: Agent, plugin: Lots, checkpoint: Callable[[], Sequence[tuple[str, Ids]]]
    ) -> None:
        self._agent, self._plugin, self._checkpoint = agent, plugin, checkpoint

    def preferred(self, plugin: StandInPlugin, call: Preferred) -> Ids:
        found = self._agent.choice(call, self._checkpoint())
        if isinstance(found, NoRoom):
            raise PluginRefused(
                "no GPU of this node has enough free memory for a pod bound to the node"
            )
        return frozenset(found) or self._plugin.preferred(plugin, call)

    def some(self, replicas: Ids, count: int) -> Ids:
        return self._plugin.some(replicas, count)


def _rows(sample: Sample) -> list[PodUse]:
    """Return the rows of a report. If a pod uses a device without having a replica of it, its row
    has an empty replica."""
    rows: list[PodUse] = []
    for held in sample.pods:
        there, size = sample.used.get(held.name, (held.device, 0))
        places = [(held.device, held.replica, size if there == held.device else 0)]
        if there != held.device:
            places.append((there, "", size))
        rows += [
            PodUse(
                uid=held.name,
                device=uuid_of(device),
                namespace="default",
                name=held.name,
                container=MAIN,
                replica=replica,
                used_bytes=used_bytes,
            )
            for device, replica, used_bytes in places
        ]
    return rows
