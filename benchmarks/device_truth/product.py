"""Places pods with Headroom's own code: state, scoring, and ledger over the in-memory store.

An extender replica runs the same code from the pod to its Binding. The agent's own functions answer
requests to a node's agent. HTTP, watches, API server and drivers are left out.
"""

import itertools
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from benchmarks.device_truth.agents import GPU, Agent
from benchmarks.device_truth.arrivals import Job
from benchmarks.device_truth.rules import Report, Scheduler
from benchmarks.device_truth.world import MAIN, Sample, Shape, World
from extender.eviction.controller import Evictions
from extender.ledger.bind_call import BindRequest, Bound
from extender.ledger.embedded_store import AsyncStore, EmbeddedStore
from extender.reconcile.queue import Orphan, orphans
from headroom.contract.annotations import DEVICE_CHOICE, VRAM, DeviceChoice
from headroom.contract.gate import GATE, gate_container
from headroom.contract.gpunode import EVICTED, GPUNode, GPUNodeSpec, Plugin
from headroom.contract.kube import (
    Container,
    ContainerState,
    ContainerStatus,
    InitContainer,
    Node,
    NodeStatus,
    ObjectMeta,
    OwnerReference,
    Pod,
    PodSpec,
    PodStatus,
    ResourceRequirements,
    Terminated,
)
from headroom.contract.watched import NodeSeen
from headroom.core.cluster.changes import Event, TimePassed
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.placement.fit_cache import FitCache
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import VramRequest
from headroom.core.placement.score import best_for_non_gpu_pod
from tests.blocking import Ledger, now
from tests.standin.allocations import Lots

NEVER_S = 1e12
EPOCH_S = 1_800_000_000.0
_IMAGE = "headroom-agent"
_GATE = msgspec.convert(gate_container(_IMAGE), InitContainer)
RULES = Rules(gate_image=_IMAGE)
NAMESPACE = "default"


class Product(Scheduler):
    """Headroom on nodes where the plugin chooses. ``choice`` is the annotation of the nodes."""

    choice = DeviceChoice.PREDICTED

    def __init__(self, world: World, rules: Rules = RULES) -> None:
        self._world = world
        self._now_s = 0.0
        self._writer = ClusterWriter(rules, NEVER_S, EPOCH_S)
        self._cluster = self._writer.cluster
        self._weighings = FitCache(self._cluster.rules.weights)
        #: Changes of the store since the last decision. They are applied together.
        self._inbox: list[Event] = []
        #: Nodes that may have an orphaned reservation.
        self._unsettled: set[str] = set()
        self._store = _Store(self._inbox.extend, lambda: self._now_s)
        numbers = itertools.count()
        self._ledger = Ledger(
            self._store,
            lambda pod, gpunode: self._cluster.judge(pod, gpunode, self._now_s),
            self._cluster.adopt,
            # The store has already delivered the change.
            written=lambda gpunode: None,
            wall_s=lambda: EPOCH_S + self._now_s,
            new_id=lambda: str(next(numbers)),
        )
        self._agents = [self._join(node, shape) for node, shape in enumerate(world.shapes)]

    def choose(self, job: Job, nodes: Sequence[int], now_s: float) -> int | None:
        self._now_s = now_s
        self._catch_up()
        pod = self._store.admit(self._pod(job))
        request = self._cluster.understand(pod)
        assert isinstance(request, VramRequest)
        snap = self._cluster.snapshot()
        rows = snap.rows([name_of(node) for node in nodes])
        usual = self._writer.parts.calls.demand
        usual.prepare(request, snap)
        usual.see(request, pod, snap, rows)
        cached = self._weighings.weigh(request, snap)
        ranking = cached.rank(request, snap, rows, now_s, usual.market)
        if ranking.winner is None:
            self._store.delete_pod(NAMESPACE, job.name)
            return None
        node = nodes[ranking.winner]
        held = self._cluster.gpunode(name_of(node))
        outcome = self._ledger.bind(
            BindRequest(NAMESPACE, job.name, job.name, name_of(node), pod, held)
        )
        if not isinstance(outcome, Bound):
            raise AssertionError(f"no other client binds, but {job} was rejected: {outcome}")
        return node

    def aside(self, nodes: Sequence[int], now_s: float) -> list[int]:
        """Return the best nodes for a pod without a GPU. All of them are equally good."""
        self._now_s = now_s
        self._catch_up()
        snap = self._cluster.snapshot()
        best = best_for_non_gpu_pod(snap, snap.rows([name_of(node) for node in nodes]))
        return [node for node, is_best in zip(nodes, best.tolist(), strict=True) if is_best]

    def look(self, node: int, sample: Sample, now_s: float) -> Report:
        status = self._agents[node].look(sample, EPOCH_S + now_s)

        def arrives(then_s: float) -> None:
            self._now_s = then_s
            self._store.report([(name_of(node), status)])
            self._unsettled.add(name_of(node))

        return arrives

    def ended(self, job: Job, node: int, now_s: float) -> None:
        self._now_s = now_s
        self._store.delete_pod(NAMESPACE, job.name)
        self._unsettled.add(name_of(node))

    def _plugin(self) -> Plugin:
        """Return the report of the device plugin."""
        return Plugin(
            allocation_policy=self._world.shape.policy,
            device_list_strategy="envvar",
            topology_manager_policy="none",
        )

    def _pod(self, job: Job) -> Pod:
        return Pod(
            metadata=ObjectMeta(
                name=job.name,
                namespace=NAMESPACE,
                uid=job.name,
                annotations={VRAM: job.vram},
                owner_references=[OwnerReference(kind="ReplicaSet", name="r", controller=True)],
            ),
            spec=PodSpec(
                node_selector=job.selector,
                containers=[
                    Container(
                        name=MAIN, resources=ResourceRequirements(limits={GPU: str(job.count)})
                    )
                ],
            ),
            status=PodStatus(phase="Pending"),
        )

    def _annotations(self, shape: Shape) -> dict[str, str]:
        """Return the node's annotations. The plugin chooses among whole devices."""
        choice = self.choice if shape.replicas > 1 else DeviceChoice.PREDICTED
        return {DEVICE_CHOICE: choice.value}

    def _join(self, node: int, shape: Shape) -> Agent:
        name = name_of(node)
        amounts = {GPU: str(shape.gpus * shape.replicas)}
        metadata = ObjectMeta(name=name, uid=name, annotations=self._annotations(shape))
        self._inbox.append(
            NodeSeen(Node(metadata=metadata, status=NodeStatus(allocatable=amounts)))
        )
        self._store.create_gpunode(
            GPUNode(ObjectMeta(name=name, uid=name), spec=GPUNodeSpec(initialised=True))
        )
        agent = Agent(shape, self._plugin(), lambda: self._read(name))
        self._store.report([(name, agent.newest)])
        return agent

    def _read(self, name: str) -> GPUNode:
        gpunode = self._store.read_gpunode(name)
        assert gpunode is not None
        return gpunode

    def _catch_up(self) -> None:
        """Do what a replica does between two calls: apply changes, and remove orphaned
        reservations."""
        self._take_news()
        wall_s = EPOCH_S + self._now_s
        for found in orphans(self._cluster, wall_s, NEVER_S, sorted(self._unsettled)):
            assert isinstance(found, Orphan)
            self._ledger.remove(found.node, found.uid, found.left)
        self._unsettled.clear()
        self._take_news()

    def _take_news(self) -> None:
        news, self._inbox[:] = list(self._inbox), []
        self._writer.apply(news)


class Gated(Product):
    """Headroom on gated nodes: a pod on a device without enough memory waits until it is
    evicted."""

    choice = DeviceChoice.GATED

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._evicted: list[str] = []
        self._evictions = Evictions(
            AsyncStore(self._store),
            self._ledger.awaited,
            self,
            lambda gpunode: self._cluster.misplaced(gpunode, self._now_s),
        )

    def may_start(self, job: Job, node: int, now_s: float) -> bool:
        return self._agents[node].lets(job.name)

    def started(self, job: Job, now_s: float) -> None:
        self._store.let_through(job.name)

    def tend(self, now_s: float) -> Sequence[str]:
        """Evict pods as ``extender.eviction.controller`` does."""
        self._now_s = now_s
        self._catch_up()
        self._writer.apply([TimePassed(now_s)])
        for name in self._cluster.crowded:
            gpunode = self._read(name)
            marked = any(EVICTED in each.flags for each in gpunode.spec.reservations.values())
            if marked or self._cluster.misplaced(gpunode, now_s).leave:
                now(self._evictions.evict_misplaced(name))
                self._take_news()
        evicted, self._evicted = self._evicted, []
        return evicted

    async def evict(self, pod: Pod, most_grace_s: int | None = None) -> None:
        if self._store.begin_deletion(pod, EPOCH_S + self._now_s):
            self._evicted.append(pod.metadata.name)

    async def may_evict(self, pod: Pod) -> None:
        """Allow the eviction, because nothing forbids it in this benchmark."""

    def _pod(self, job: Job) -> Pod:
        pod = super()._pod(job)
        spec = msgspec.structs.replace(pod.spec, init_containers=[_GATE])
        return msgspec.structs.replace(pod, spec=spec)


class Steered(Product):
    """Headroom on steered nodes: the agent answers for the plugin."""

    choice = DeviceChoice.STEERED

    def lots(self, node: int, plugin: Lots) -> Lots:
        return self._agents[node].steers(plugin, lambda: self._world.checkpoint(node))

    def _plugin(self) -> Plugin:
        return msgspec.structs.replace(super()._plugin(), steered=[GPU], steers_several=True)


class _Store(EmbeddedStore):
    """A store to which kubelets and the API server also report changes of pods."""

    def let_through(self, name: str) -> None:
        """Report that the pod's gate has ended successfully."""
        ended = ContainerStatus(name=GATE, state=ContainerState(terminated=Terminated()))
        status = PodStatus(phase="Running", init_container_statuses=[ended])
        with self._lock:
            held = self._pods.get((NAMESPACE, name))
            if held is not None:
                shown = msgspec.structs.replace(held, status=status)
                self._put_pod(shown, held.metadata.annotations, held.spec)

    def begin_deletion(self, pod: Pod, unix_s: float) -> bool:
        """Evict a pod. Its kubelet sees that later. Return False if it is already terminating."""
        with self._lock:
            held = self._held_pod(NAMESPACE, pod.metadata.name)
            if held.metadata.deletion_timestamp:
                return False
            stamp = datetime.fromtimestamp(unix_s, UTC).isoformat()
            metadata = msgspec.structs.replace(held.metadata, deletion_timestamp=stamp)
            ending = msgspec.structs.replace(held, metadata=metadata)
            self._put_pod(ending, metadata.annotations, held.spec)
            return True


def name_of(node: int) -> str:
    return f"node-{node:04d}"
