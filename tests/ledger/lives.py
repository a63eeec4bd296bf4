"""Simulates replicas on one store that holds all objects of a small cluster.

Each reconciliation has two steps: finding the work, and doing the work. The second step can happen
later, twice, or never. The state, the controllers, the ledger and the placement are the product's.
The tests act as users, kubelets, agents and administrators.
"""

import itertools
from collections.abc import Iterator, Sequence

from extender.ledger.bind_call import BindRequest, Outcome
from extender.reconcile.queue import (
    Orphan,
    Unmarked,
    UnreservedPod,
    being_deleted,
    orphans,
    uninitialised,
    unreserved_pods,
)
from headroom.contract.annotations import OBSERVED_AT
from headroom.contract.gpunode import Device, GPUNode, GPUNodeStatus, PodUse, Source
from headroom.contract.heartbeat import Confirmation, encode_confirmation
from headroom.contract.kube import Lease, Node, NodeStatus, ObjectMeta, Pod, PodStatus
from headroom.contract.reasons import Reason
from headroom.contract.watched import GPUNodeSeen, HeartbeatSeen, NodeGone, NodeSeen
from headroom.core.cluster.changes import DepartureMarked, Event
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.placement.fit import fit
from headroom.core.placement.placement_record import Placement
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import VramRequest
from tests.blocking import Ledger, ledger_over
from tests.builders import GPU, pod, shared
from tests.store import PlayedStore

WALL_S = 1_795_219_200.0  # 2026-11-21T00:00:00Z
ORPHAN_AFTER_S = 60.0


class Replica:
    def __init__(self, name: str) -> None:
        self.state = ClusterWriter(Rules(), stale_after_s=90.0, epoch_s=WALL_S)
        self.name = name
        self.ledger: Ledger
        #: While this list exists, it collects changes instead of delivering them to the replica.
        self.paused: list[Event] | None = None

    def over(self, server: PlayedStore, clock: "Clock") -> None:
        self.ledger = ledger_over(
            self.state,
            server,
            lambda: clock.passed_s,
            epoch_s=WALL_S,
            written=lambda gpunode: self.hear([GPUNodeSeen(gpunode, clock.passed_s)]),
            ids=self.name,
        )

    def hear(self, events: Sequence[Event]) -> None:
        if self.paused is None:
            self.state.apply(events)
        else:
            self.paused += events

    def resume(self) -> None:
        received, self.paused = self.paused or [], None
        self.state.apply(received)


class Clock:
    passed_s = 0.0


Chore = UnreservedPod | Orphan | Unmarked | Node | str


class Cluster:
    def __init__(self, *devices: Device, replicas: int = 2) -> None:
        self.replicas = [Replica("ab"[i]) for i in range(replicas)]
        self.clock = Clock()
        self.server = PlayedStore(self.tell, lambda: 0.0)
        for replica in self.replicas:
            replica.over(self.server, self.clock)
        self._stamps = itertools.count(1)
        self._devices = devices or (shared("a"),)
        self.add_node()
        self.tidy()
        self.report()
        self.tidy()
        assert self.node.spec.initialised

    def tell(self, events: Sequence[Event]) -> None:
        for replica in self.replicas:
            replica.hear(events)

    @property
    def node(self) -> GPUNode:
        found = self.server.read_gpunode("n")
        assert found is not None
        return found

    @property
    def reserved(self) -> set[str]:
        return set(self.node.spec.reservations)

    def add_node(self) -> None:
        node = Node(
            metadata=ObjectMeta(name="n", uid="node-n"),
            status=NodeStatus(allocatable={GPU: "8"}),
        )
        self.tell([NodeSeen(node)])

    def remove_node(self) -> None:
        """Delete the Node, and delete its GPUNode as the garbage collector does."""
        self.tell([NodeGone("n")])
        self.server.start_deleting("n")

    def report(self, *devices: Device, pods: Sequence[PodUse] = ()) -> None:
        """Write a report and a heartbeat of the agent."""
        known = self.server.leases.get("n", 0)
        stamp = f"2026-11-21T00:00:{next(self._stamps) % 60:02}Z"
        self._devices = devices or self._devices
        status = GPUNodeStatus(
            observed_at=stamp,
            devices=list(self._devices),
            pods=list(pods),
            sources=[Source(name="checkpoint"), Source(name="proc")],
        )
        self.server.report([("n", status)])
        self.server.leases["n"] = known + 1
        vouch = Confirmation(stamp, self.node.metadata.uid, stamp, str(known))
        metadata = ObjectMeta(name="n", annotations={OBSERVED_AT: encode_confirmation(vouch)})
        lease = HeartbeatSeen(Lease(metadata=metadata), self.clock.passed_s)
        self.tell([lease])

    def create(self, name: str, vram: str = "16Gi", uid: str = "", node: str | None = None) -> Pod:
        return self.server.admit(pod(vram, name=name, uid=uid or name, node=node, version=""))

    def bind(self, name: str, by: int = 0) -> Outcome:
        held = self.server.read_pod("default", name)
        assert held is not None
        ask = BindRequest("default", name, held.metadata.uid, "n", held, self.node)
        return self.replicas[by].ledger.bind(ask)

    def ends(self, name: str, phase: str = "Succeeded") -> None:
        held = self.server.read_pod("default", name)
        assert held is not None
        self.server.set_status(held, PodStatus(phase=phase))

    def fits(self, vram: str) -> Reason | None:
        """Return why the last replica rejects a new pod, or None if the pod fits."""
        state, snap = self.replicas[-1].state, self.replicas[-1].state.cluster.snapshot()
        request = state.cluster.understand(pod(vram, uid="newcomer", name="newcomer"))
        assert isinstance(request, VramRequest)
        found = fit(request, snap, snap.rows(["n"]), self.clock.passed_s).reason(0)
        judged = state.cluster.judge(
            pod(vram, uid="newcomer", name="newcomer"), self.node, self.clock.passed_s
        )
        assert isinstance(judged, Placement) == (found is None)
        return found

    def found_by(self, i: int) -> list[Chore]:
        state = self.replicas[i].state
        return [
            *unreserved_pods(state.cluster),
            *orphans(state.cluster, WALL_S + self.clock.passed_s, ORPHAN_AFTER_S),
            *being_deleted(state.cluster.gpunodes()),
            *uninitialised(state.cluster),
        ]

    def done_by(self, i: int, tasks: Sequence[Chore]) -> None:
        ledger = self.replicas[i].ledger
        for task in tasks:
            match task:
                case UnreservedPod(node, who):
                    ledger.charge(node, who)
                case Orphan(node, uid, left):
                    ledger.remove(node, uid, left)
                case Unmarked(node, uid, reservation):
                    if version := ledger.departed_by(node, uid, reservation):
                        self.replicas[i].hear([DepartureMarked(node, uid, version)])
                case str(name):
                    ledger.remove_finalizer([name])
                case node:
                    ledger.initialise([node])

    def tidy(self) -> None:
        """Reconcile everything on every replica."""
        for i in range(len(self.replicas)):
            self.done_by(i, self.found_by(i))

    def content(self) -> Iterator[object]:
        """Yield the content of the store without versions and attempt IDs."""
        for held in sorted(self.server.list_pods(), key=lambda pod: pod.metadata.uid):
            yield held.metadata.uid, held.node, held.ended
        gpunode = self.server.read_gpunode("n")
        if gpunode is not None:
            yield gpunode.spec.initialised, gpunode.metadata.deletion_timestamp
            for uid, reservation in sorted(gpunode.spec.reservations.items()):
                yield uid, reservation.charges, reservation.flags
