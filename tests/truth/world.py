"""Runs an extender and stand-in nodes in one process without a clock. Every step is a call.

The parts of the extender are combined as in a replica. Writes are visible immediately, and a report
is written when a test calls ``report``. The stand-in nodes show whether a device is overcommitted.
They do not use the extender's code. Their processes use the memory that is reserved for their pods.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from extender.ledger.bind_call import BindRequest, Bound
from extender.reconcile.queue import Orphan, orphans
from headroom.contract.annotations import DEVICE_CHOICE, VRAM
from headroom.contract.gpunode import Device, GPUNode, GPUNodeStatus, PodUse, Replicas, Source
from headroom.contract.gpunode import Plugin as PluginReport
from headroom.contract.kube import (
    Container,
    Node,
    NodeStatus,
    ObjectMeta,
    PodSpec,
    ResourceRequirements,
)
from headroom.contract.kube import Pod as KubePod
from headroom.contract.watched import NodeSeen, PodSeen
from headroom.core.cluster.trackers.prediction_tracker import Outcome
from headroom.core.placement.fit import fit
from headroom.core.placement.policy import Weights
from headroom.core.placement.prediction_outcome import Result
from headroom.core.placement.request import VramRequest
from headroom.core.placement.score import rank
from tests.driver import GIB, Gpu
from tests.judge import excess
from tests.standin import allocations as standin
from tests.standin.allocations import RESOURCE, Ids, Lots, Preferred
from tests.standin.lots import first
from tests.standin.node import StandIn
from tests.standin.plugin import Plugin, device_of
from tests.world import World

#: Reports never become stale, because agents report only when a test calls them.
NEVER_STALE_S = 1e12


def gpus(count: int, memory_gib: int = 24) -> list[Gpu]:
    return [Gpu(f"GPU-{n}", memory_gib * GIB, 0, "test") for n in range(count)]


@dataclass(frozen=True)
class Towards:
    """Choices that select this device if the model allows it."""

    device: str

    def preferred(self, plugin: Plugin, call: Preferred) -> Ids:
        options = plugin.options(call.available, call.must_include, call.size)
        best = max(sorted(options), key=lambda counts: dict(counts).get(self.device, 0))
        return call.must_include | first(call.available - call.must_include, best)

    def some(self, replicas: Ids, count: int) -> Ids:
        wished = sorted(replicas, key=lambda each: (device_of(each) != self.device, each))
        return frozenset(wished[:count])


class Predicted(World):
    """A cluster with one replica of the extender. ``choice`` is the device-choice annotation of the
    nodes.
    """

    def __init__(self, nodes: Mapping[str, StandIn], choice: str = "predicted") -> None:
        super().__init__(stale_after_s=NEVER_STALE_S, epoch_s=0.0)
        self.nodes = nodes
        #: The bytes that each pod allocates on each of its devices.
        self.sizes: dict[str, int] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.misses: list[Outcome] = []
        #: Pods whose predictions were lost because the GPUNode was deleted while they were
        #: unconfirmed.
        self.lost: set[str] = set()
        for name, node in nodes.items():
            annotations = {DEVICE_CHOICE: choice}
            self.state.apply([NodeSeen(kube_node(name, node, annotations))])
            self.store.create_gpunode(GPUNode(metadata=ObjectMeta(name=name)))
            self.report(name)
        self.ledger.initialise(self.state.cluster.nodes())

    def bind(self, uid: str, gib: int, containers: int = 1, node: str | None = None) -> str | None:
        """Place a pod on ``node``, by default on the best node. Return the node, or None if the pod
        fits on no node.
        """
        pod = self.store.admit(kube_pod(uid, gib, containers))
        self.sizes[uid] = gib * GIB
        node = node or self.best(pod)
        if node is not None:
            held = self.state.cluster.gpunode(node)
            ask = BindRequest("default", uid, uid, node, pod, held)
            if self.ledger.bind(ask) == Bound():
                return node
        self.store.delete_pod("default", uid)
        return None

    def best(self, pod: KubePod) -> str | None:
        snap = self.state.cluster.snapshot()
        request = self.state.cluster.understand(pod)
        assert isinstance(request, VramRequest)
        verdicts = fit(request, snap, np.arange(len(snap.nodes), dtype=np.int64), self.now_s)
        winner = rank(verdicts, Weights()).winner
        return None if winner is None else snap.nodes[winner].name

    def bypass(self, uid: str, gib: int, node: str, towards: str | None = None) -> None:
        """Bind a pod as another scheduler. The kubelet admits the pod before the watch
        delivers it.
        """
        self.sizes[uid] = gib * GIB
        self._admit(node, uid, 1, towards)

    def hear_of(self, uid: str, node: str) -> None:
        """Deliver through the watch a pod that another scheduler has bound."""
        pod = kube_pod(uid, self.sizes[uid] // GIB, 1, node)
        self.store.admit(pod)
        self.state.apply([PodSeen(pod)])

    def admit(self, uid: str, towards: str | None = None) -> bool:
        """Let the kubelet admit the pod. It gets the device ``towards`` if the model allows it.
        Return whether the pod was admitted.
        """
        pod = self.state.cluster.pod(uid)
        assert pod is not None
        assert pod.node
        return self._admit(pod.node, uid, len(pod.spec.containers or ()), towards)

    def _admit(self, node: str, uid: str, containers: int, towards: str | None) -> bool:
        size = self.sizes[uid]
        each = [standin.Container(f"c{n}", 1, takes_bytes=size) for n in range(containers)]
        lots: Lots | None = Towards(towards) if towards else None
        pod = standin.Pod(uid, tuple(each), name=uid)
        return self.nodes[node].admit(pod, lots).admitted

    def finish(self, uid: str, node: str) -> None:
        """End the pod's containers. Only the kubelet has noticed the end so far."""
        self.nodes[node].end(uid)

    def hear_of_end(self, uid: str) -> None:
        """Deliver through the watch that the pod has ended or was deleted before its admission."""
        self.store.delete_pod("default", uid)
        self.tidy()

    def tidy(self) -> None:
        for found in orphans(self.state.cluster, self.now_s, 60.0):
            if isinstance(found, Orphan):
                self.ledger.remove(found.node, found.uid, found.left)

    def report(self, name: str) -> dict[str, Outcome]:
        """Write a report of the node's agent. Return the outcomes of the pods that the report
        shows.
        """
        self.store.report([(name, report(self.nodes[name]))])
        return self.look()

    def make_anew(self, name: str) -> None:
        """Delete the GPUNode and create it again, so that the extender adopts the running pods."""
        held = self.state.cluster.gpunode(name)
        assert held is not None
        self.lost |= held.spec.reservations.keys() - {
            use.uid for use in report(self.nodes[name]).pods
        }
        self.store.delete_gpunode(name)
        self.store.create_gpunode(GPUNode(metadata=ObjectMeta(name=name)))
        self.report(name)
        self.ledger.initialise(self.state.cluster.nodes())

    def look(self) -> dict[str, Outcome]:
        fresh = {outcome.uid: outcome for outcome in self.state.take_outcomes()}
        self.outcomes |= fresh
        self.misses += [each for each in fresh.values() if each.result is Result.MISS]
        return fresh

    def excess_bytes(self, name: str) -> dict[str, int]:
        """Return how many bytes each overcommitted device lacks."""
        node = self.nodes[name]
        has = {gpu.uuid: gpu.memory_bytes - gpu.reserved_bytes for gpu in node.gpus}
        return excess(node.used_bytes().items(), has)


def report(node: StandIn, observed_at: str = "1970-01-01T00:00:00Z") -> GPUNodeStatus:
    """Return the report that an agent would make of the node. It includes processes of deleted
    pods.
    """
    listed = node.pod_resources()
    held = [replica for _, given in listed for each in given.values() for replica in each]
    rows = [
        PodUse(
            uid=pod.uid,
            namespace=pod.namespace,
            name=pod.name,
            container=container,
            device=replica.device,
            replica=replica.id,
            used_bytes=_used(node, pod.uid, container, replica.device),
        )
        for pod, given in listed
        for container, replicas in given.items()
        for replica in replicas
    ]
    known = {pod.uid for pod, _ in listed}
    rows += [
        PodUse(uid=uid, container=container, device=device, used_bytes=used, source="nvml")
        for (uid, container), process in node.processes.items()
        if uid not in known
        for device, used in process.used_bytes.items()
    ]
    settings = node.plugin.settings if node.plugin else None
    healthy = {replica.id for replica in node.devices.allocatable}
    taken = {replica.id for replica in held} & healthy
    used = node.used_bytes()
    devices: list[Device] = []
    for index, gpu in enumerate(node.gpus):
        mine = [each for each in healthy if device_of(each) == gpu.uuid]
        allocated = sum(each in taken for each in mine)
        total = settings.replicas if settings else len(mine)
        devices.append(
            Device(
                uuid=gpu.uuid,
                index=index,
                numa_node=gpu.numa,
                memory_bytes=gpu.memory_bytes,
                reserved_bytes=gpu.reserved_bytes,
                used_bytes=min(used[gpu.uuid], gpu.memory_bytes - gpu.reserved_bytes),
                unattributed_bytes=0,
                sharing="time-slicing" if total > 1 else "none",
                resource=RESOURCE,
                replicas=Replicas(len(mine) - allocated, allocated, max(0, total - len(mine))),
            )
        )
    return GPUNodeStatus(
        observed_at=observed_at,
        devices=devices,
        pods=rows,
        plugin=PluginReport(
            allocation_policy=settings.policy if settings else "unknown",
            topology_manager_policy=node.devices.policy,
            ignores_visible_devices=True,
        ),
        sources=[Source(name="checkpoint"), Source(name="proc")],
    )


def _used(node: StandIn, uid: str, container: str, device: str) -> int:
    process = node.processes.get((uid, container))
    return process.used_bytes.get(device, 0) if process else 0


def kube_node(name: str, node: StandIn, annotations: Mapping[str, str]) -> Node:
    count = len(node.devices.allocatable)
    metadata = ObjectMeta(name=name, uid=name, annotations=annotations)
    return Node(metadata=metadata, status=NodeStatus(allocatable={RESOURCE: count}))


def kube_pod(uid: str, gib: int, containers: int, node: str | None = None) -> KubePod:
    limits = ResourceRequirements(limits={RESOURCE: 1})
    each: Sequence[Container] = [
        Container(name=f"c{n}", resources=limits) for n in range(containers)
    ]
    return KubePod(
        metadata=ObjectMeta(
            namespace="default",
            name=uid,
            uid=uid,
            resource_version=f"u-{uid}",
            annotations={VRAM: f"{gib}Gi"},
        ),
        spec=PodSpec(containers=list(each), node_name=node),
    )
