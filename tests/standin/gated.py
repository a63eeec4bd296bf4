"""A state machine of a node on which every pod passes a gate, with steps for pods, the plugin, the
agent and the gate.
"""

import itertools
from datetime import UTC, datetime

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.strategies import DataObject
from msgspec.structs import replace

from agent.gate_decision import Limits, Verdict, judge
from extender.eviction.controller import Evictions
from extender.ledger.bind_call import BindRequest
from extender.ledger.embedded_store import AsyncStore
from extender.reconcile.queue import unreserved_pods
from headroom.contract.gate import GATE
from headroom.contract.gpunode import (
    GPUNode,
    GPUNodeSpec,
    GPUNodeStatus,
)
from headroom.contract.kube import (
    ContainerState,
    ContainerStatus,
    Node,
    NodeStatus,
    ObjectMeta,
    OwnerReference,
    Pod,
    PodStatus,
    Terminated,
)
from headroom.contract.watched import NodeSeen
from headroom.core.cluster.changes import TimePassed
from headroom.core.placement.policy import Rules
from headroom.errors import StoreConflict
from tests.blocking import now
from tests.builders import GATE_IMAGE, GPU, gate, pod
from tests.driver import GIB, Gpu
from tests.standin import allocations
from tests.standin.node import StandIn
from tests.standin.plugin import Plugin as StandInPlugin
from tests.standin.plugin import Settings, device_of
from tests.truth.world import report
from tests.world import World

MEMORY_BYTES = 12 * GIB
REPLICAS = 4
#: Seconds that are longer than the maximum back-off.
LONG_AFTER_S = 2000.0
NAME = "n"


class Given:
    """Choices with which the plugin selects this device."""

    def __init__(self, device: str) -> None:
        self._device = device

    def preferred(self, plugin: StandInPlugin, call: allocations.Preferred) -> allocations.Ids:
        return self.some(call.available, call.size)

    def some(self, replicas: allocations.Ids, count: int) -> allocations.Ids:
        here = sorted(each for each in replicas if device_of(each) == self._device)
        return frozenset(here[:count])


class Gated(RuleBasedStateMachine):
    """Steps on a gated node. Sizes are in GiB. Every pod has one container, which requests one
    replica.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)
        self.ids = itertools.count(1)
        self.world = World(Rules(gate_image=GATE_IMAGE))
        self.state, self.store, self.ledger = self.world.state, self.world.store, self.world.ledger
        self.evictions = Evictions(
            AsyncStore(self.store),
            self.ledger.awaited,
            self,
            lambda gpunode: self.state.cluster.misplaced(gpunode, self.world.now_s),
        )
        #: Bound pods that the kubelet has not received yet.
        self.coming: dict[str, allocations.Pod] = {}
        self.sizes: dict[str, int] = {}
        self.begun: set[str] = set()
        #: Whether a pod without a gate has ever been admitted.
        self.lawless = False
        self.evicted = 0
        #: Pods that a test requires to end.
        self.extra: list[str] = []

    @initialize(gpus=st.integers(2, 3), policy=st.sampled_from(["distributed", "packed"]))
    def start(self, gpus: int, policy: str) -> None:
        self.policy = policy
        cards = [Gpu(f"GPU-{i}", MEMORY_BYTES, reserved_bytes=0) for i in range(gpus)]
        self.node = StandIn(cards, self.settings(), seed=gpus)
        offered = NodeStatus(allocatable={GPU: str(gpus * REPLICAS)})
        self.state.apply([NodeSeen(Node(metadata=ObjectMeta(name=NAME), status=offered))])
        spec = GPUNodeSpec(initialised=True)
        self.store.create_gpunode(GPUNode(metadata=ObjectMeta(name=NAME), spec=spec))
        self.report()
        self.read = self.gpunode()

    def settings(self) -> Settings:
        return Settings(REPLICAS, self.policy, release=20)  # type: ignore[arg-type]

    @rule(size=st.integers(1, 10))
    def we_bind_a_pod(self, size: int) -> None:
        made = self.create(size, gated=True)
        (namespace, name), uid = (made.metadata.namespace, made.metadata.name), made.metadata.uid
        self.ledger.bind(BindRequest(namespace, name, uid, NAME, None, None))
        bound = self.store.read_pod(namespace, name)
        assert bound is not None
        if bound.node:
            self.comes(bound, gated=True)
        else:
            self.store.delete_pod(namespace, name)

    @rule(size=st.integers(1, 10), gated=st.booleans())
    def another_scheduler_binds_a_pod(self, size: int, gated: bool) -> None:
        self.comes(self.create(size, gated, node=NAME), gated)

    @precondition(lambda self: self.coming)
    @rule(data=st.data())
    def one_is_admitted(self, data: DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.coming)))
        self.admit(uid)

    @precondition(lambda self: self.coming)
    @rule(data=st.data())
    def a_pod_is_deleted_before_admission(self, data: DataObject) -> None:
        self.one_deleted(data.draw(st.sampled_from(sorted(self.coming))))

    @precondition(lambda self: self.node.pods)
    @rule(data=st.data())
    def one_ends(self, data: DataObject) -> None:
        self.one_goes(data.draw(st.sampled_from(sorted(self.node.pods))))

    @rule(data=st.data())
    def a_replica_turns_unhealthy(self, data: DataObject) -> None:
        replicas = [each.id for each in self.node.devices.allocatable]
        if replicas:
            self.node.fail(data.draw(st.sampled_from(sorted(replicas))))

    @rule(policy=st.sampled_from(["distributed", "packed"]))
    def the_plugin_restarts(self, policy: str) -> None:
        self.policy = policy
        self.node.stop_plugin()
        self.node.start_plugin(self.settings())

    @rule()
    def the_agent_reports(self) -> None:
        self.report()

    @rule()
    def the_agent_reads_the_ledger(self) -> None:
        self.read = self.gpunode()

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def a_gate_asks(self, data: DataObject) -> None:
        self.ask(data.draw(st.sampled_from(sorted(self.waiting()))))

    @rule(twice=st.booleans())
    def housekeeping(self, twice: bool) -> None:
        for _ in range(1 + twice):
            for found in unreserved_pods(self.state.cluster):
                self.ledger.charge(found.node, found.pod)
            now(self.evictions.evict_misplaced(NAME))

    @rule()
    def a_back_off_ends(self) -> None:
        self.state.apply([TimePassed(LONG_AFTER_S)])

    @invariant()
    def no_device_is_overcommitted_by_gated_pods(self) -> None:
        if not self.lawless:
            used = self.node.used_bytes() if hasattr(self, "node") else {}
            assert all(size <= MEMORY_BYTES for size in used.values()), used

    def teardown(self) -> None:
        """Check that every pod has started at the end, except pods that were placed on another
        node.
        """
        if not hasattr(self, "node"):
            return
        for _ in range(4 * len(self.sizes) + 2):
            for uid in sorted(self.coming):
                self.admit(uid)
            self.report()
            self.housekeeping(twice=False)
            self.report()
            self.read = self.gpunode()
            for uid in sorted(self.waiting()):
                self.ask(uid)
            self.a_back_off_ends()
        assert not self.waiting(), {uid: self.verdict(uid) for uid in self.waiting()}

    def create(self, size: int, gated: bool, node: str = "") -> Pod:
        uid = f"u{next(self.numbers):03}"
        made = pod(f"{size}Gi", uid=uid, name=uid, version="", node=node or None)
        owner = OwnerReference(kind="ReplicaSet", name="r", controller=True)
        metadata = replace(made.metadata, owner_references=[owner])
        if gated:
            spec = replace(made.spec, init_containers=[gate()])
            made = replace(made, spec=spec)
        self.sizes[uid] = size
        return self.store.admit(replace(made, metadata=metadata))

    def sit(self, size: int, device: str) -> str:
        """Add a running pod without a gate."""
        made = self.create(size, gated=False, node=NAME)
        uid = made.metadata.uid
        self.comes(made, gated=False)
        self.node.admit(self.coming.pop(uid), Given(device))
        self.begun.add(uid)
        self.report()
        self.housekeeping(twice=False)
        return uid

    def one_deleted(self, uid: str) -> None:
        del self.coming[uid]
        self.forget(uid)

    def one_goes(self, uid: str) -> None:
        self.node.delete(uid)
        self.forget(uid)

    def comes(self, bound: Pod, gated: bool) -> None:
        uid = bound.metadata.uid
        takes_bytes = self.sizes[uid] * GIB
        main = allocations.Container("main", 1, takes_bytes=takes_bytes)
        self.coming[uid] = allocations.Pod(uid, (main,), uid, gated=gated)
        self.lawless = self.lawless or not gated

    def admit(self, uid: str) -> None:
        if not self.node.admit(self.coming.pop(uid)).admitted:
            del self.node.pods[uid]
            self.forget(uid)

    def waiting(self) -> set[str]:
        return {uid for uid, held in self.node.pods.items() if held.pod.gated} - self.begun

    def verdict(self, uid: str) -> Verdict:
        return judge(self.read, self.sample(), uid, Limits(0, 0))

    def ask(self, uid: str) -> None:
        if self.verdict(uid).answer != "yes":
            return
        self.node.let_through(uid)
        self.begun.add(uid)
        taken = self.running_bytes(self.device(uid))
        assert taken <= MEMORY_BYTES, f"{uid} starts where {taken} bytes are taken with it"
        ended = ContainerStatus(name=GATE, state=ContainerState(terminated=Terminated()))
        status = PodStatus(phase="Running", init_container_statuses=[ended])
        self.store.set_status(self.world.pod(uid), status)

    def device(self, uid: str) -> str:
        entry = self.node.devices.given(uid, "main")
        assert entry is not None
        (replica,) = entry.replicas
        return device_of(replica)

    def running_bytes(self, device: str) -> int:
        """Return the bytes that the running pods on the device request and may use."""
        running = (uid for uid, _ in self.node.processes)
        return sum(self.sizes[uid] * GIB for uid in running if self.device(uid) == device)

    def forget(self, uid: str) -> None:
        self.store.delete_pod("default", uid)
        self.begun.discard(uid)
        self.ledger.remove(NAME, uid, left=True)

    async def evict(self, pod: Pod, most_grace_s: int | None = None) -> None:
        uid = pod.metadata.uid
        if uid in self.begun:
            raise StoreConflict("it has begun")
        self.evicted += 1
        self.coming.pop(uid, None)
        if uid in self.node.pods:
            self.node.delete(uid)
        self.forget(uid)

    async def may_evict(self, pod: Pod) -> None:
        """Allow every eviction."""

    def gpunode(self) -> GPUNode:
        return self.world.gpunode(NAME)

    def report(self) -> None:
        self.store.report([(NAME, self.sample())])
        # Remove the reservations of pods that have left the node.
        for uid in self.gpunode().spec.reservations.keys() - self.coming.keys():
            if uid not in self.node.pods:
                self.ledger.remove(NAME, uid, left=True)

    def sample(self) -> GPUNodeStatus:
        """Return the agent's current report, in which pods without a gate have not allocated all
        memory yet.
        """
        stamp = datetime.fromtimestamp(self.world.wall_s() + next(self.ids) / 1000, UTC)
        status = report(self.node, stamp.isoformat())
        rows = [row if row.uid in self.begun else replace(row, used_bytes=0) for row in status.pods]
        return replace(status, pods=rows)
