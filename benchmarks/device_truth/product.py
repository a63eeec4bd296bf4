"""Headroom's own code: its state, its scoring and its ledger over the store in memory.

Everything between a pod and its Binding is what an extender replica runs; left out are HTTP, the
watch and the API server, and what the agent would measure is made up from the sample.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from benchmarks.device_truth.arrivals import Job
from benchmarks.device_truth.rules import Choice
from benchmarks.device_truth.world import MAIN, RESERVED_BYTES, Sample, Shape, uuid_of
from contract.annotations import DEVICE_CHOICE, VRAM, DeviceChoice
from contract.gpunode import (
    Device,
    GPUNode,
    GPUNodeSpec,
    GPUNodeStatus,
    Plugin,
    PodUse,
    Replicas,
)
from contract.kube import (
    Container,
    Node,
    NodeStatus,
    ObjectMeta,
    Pod,
    PodSpec,
    PodStatus,
    ResourceRequirements,
)
from extender.cluster.chores import Leftover, leftovers
from extender.cluster.events import Event, NodeSeen
from extender.cluster.state import ClusterState
from extender.ledger.embedded import EmbeddedStore
from extender.ledger.protocol import BindAsk, Bound, Ledger
from extender.placement.request import VramRequest
from extender.placement.rules import Rules
from extender.placement.weighing import Weighings

GPU = "nvidia.com/gpu"
NEVER_S = 1e12
EPOCH_S = 1_800_000_000.0


class Product:
    """``choice`` is what the nodes are annotated with."""

    def __init__(self, shape: Shape, choice: DeviceChoice = DeviceChoice.PREDICTED) -> None:
        self._shape = shape
        self._now_s = 0.0
        self._cluster = ClusterState(Rules(), NEVER_S, EPOCH_S)
        self._weighings = Weighings()
        #: What the store told since the last decision: taken in one go, which decides the same.
        self._inbox: list[Event] = []
        #: Nodes that may hold a promise that is left over.
        self._unsettled: set[str] = set()
        self._store = EmbeddedStore(self._inbox.extend, lambda: self._now_s)
        numbers = itertools.count()
        self._ledger = Ledger(
            self._store,
            lambda pod, gpunode: self._cluster.judge(pod, gpunode, self._now_s),
            self._cluster.adopt,
            # The store has told of it already.
            written=lambda gpunode: None,
            wall_s=lambda: EPOCH_S + self._now_s,
            new_id=lambda: str(next(numbers)),
        )
        self._requests: dict[str, int] = {}
        for node in range(shape.nodes):
            self._join(node, {DEVICE_CHOICE: choice.value})

    def choose(self, job: Job, nodes: Sequence[int], now_s: float) -> Choice | None:
        self._now_s = now_s
        self._catch_up()
        pod = self._store.admit(_pod(job))
        request = self._cluster.understand(pod)
        assert isinstance(request, VramRequest)
        snap = self._cluster.snapshot()
        rows = snap.rows([name_of(node) for node in nodes])
        ranking = self._weighings.weigh(request, snap, now_s).rank(
            request.policy, snap, rows, now_s
        )
        if ranking.winner is None:
            self._store.delete_pod(pod.metadata.namespace, job.name)
            return None
        node = nodes[ranking.winner]
        held = self._cluster.gpunode(name_of(node))
        outcome = self._ledger.bind(
            BindAsk(pod.metadata.namespace, job.name, job.name, name_of(node), pod, held)
        )
        if not isinstance(outcome, Bound):
            raise AssertionError(f"nobody else binds, but {job} was refused: {outcome}")
        self._requests[job.name] = job.request_bytes
        return Choice(node)

    def report(self, node: int, sample: Sample, now_s: float) -> None:
        self._now_s = now_s
        self._store.report([(name_of(node), self._status(sample))])
        self._unsettled.add(name_of(node))

    def ended(self, job: Job, node: int, now_s: float) -> None:
        self._now_s = now_s
        self._store.delete_pod("default", job.name)
        self._unsettled.add(name_of(node))

    def _join(self, node: int, annotations: dict[str, str]) -> None:
        name = name_of(node)
        amounts = {GPU: str(self._shape.gpus * self._shape.replicas)}
        metadata = ObjectMeta(name=name, uid=name, annotations=annotations)
        status = NodeStatus(allocatable=amounts)
        self._inbox.append(NodeSeen(Node(metadata=metadata, status=status)))
        self._store.create_gpunode(
            GPUNode(ObjectMeta(name=name, uid=name), spec=GPUNodeSpec(initialised=True))
        )
        self._store.report([(name, self._status(Sample(())))])

    def _catch_up(self) -> None:
        """What a replica does by itself between two calls: it takes the news, and promises that
        are left over are taken back."""
        self._take_news()
        wall_s = EPOCH_S + self._now_s
        for found in leftovers(self._cluster, wall_s, NEVER_S, sorted(self._unsettled)):
            assert isinstance(found, Leftover)
            self._ledger.remove(found.node, found.uid, found.left)
        self._unsettled.clear()
        self._take_news()

    def _take_news(self) -> None:
        news, self._inbox[:] = list(self._inbox), []
        self._cluster.apply(news)

    def _status(self, sample: Sample) -> GPUNodeStatus:
        """Every pod uses just what it asked for, or what is left where that is less."""
        held = Counter(device for _, device, _ in sample.pods)
        used: Counter[int] = Counter()
        pods = []
        for name, device, replica in sample.pods:
            left_bytes = self._shape.allocatable_bytes - used[device]
            own_bytes = self._requests[name] if self._requests[name] <= left_bytes else 0
            used[device] += own_bytes
            pods.append(
                PodUse(
                    uid=name,
                    device=uuid_of(device),
                    namespace="default",
                    name=name,
                    container=MAIN,
                    replica=replica,
                    used_bytes=own_bytes,
                )
            )
        devices = [
            Device(
                uuid=uuid_of(device),
                index=device,
                memory_bytes=self._shape.memory_bytes,
                reserved_bytes=RESERVED_BYTES,
                used_bytes=used[device],
                unowned_bytes=0,
                sharing="time-slicing",
                resource=GPU,
                replicas=Replicas(free=self._shape.replicas - held[device], allocated=held[device]),
            )
            for device in range(self._shape.gpus)
        ]
        plugin = Plugin(
            allocation_policy=self._shape.policy,
            device_list_strategy="envvar",
            topology_manager_policy="none",
        )
        stamp = datetime.fromtimestamp(EPOCH_S + self._now_s, UTC).isoformat()
        return GPUNodeStatus(observed_at=stamp, devices=devices, pods=pods, plugin=plugin)


def name_of(node: int) -> str:
    return f"node-{node:04d}"


def _pod(job: Job) -> Pod:
    return Pod(
        metadata=ObjectMeta(
            name=job.name,
            namespace="default",
            uid=job.name,
            annotations={VRAM: str(job.request_bytes)},
        ),
        spec=PodSpec(
            containers=[Container(name=MAIN, resources=ResourceRequirements(limits={GPU: "1"}))]
        ),
        status=PodStatus(phase="Pending"),
    )
