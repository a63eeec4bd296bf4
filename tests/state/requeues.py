"""Simulates a replica that requeues pods while memory on the nodes is taken and freed."""

from typing import Literal

import msgspec

from extender.requeue.hints import RequeueHints
from headroom.contract.gpunode import SmActivity
from headroom.contract.kube import ObjectMeta, Pod, PodCondition, PodStatus
from headroom.contract.reasons import Reason
from headroom.contract.watched import GPUNodeSeen, NodeSeen
from headroom.core.journal.journal import Decision
from tests.builders import GIB, STAMP, gpunode, kube_node, pod, reservation, shared
from tests.world import World

AT_ONCE = 64
CLAIM_S = 2.0
MAX_BACK_OFF_S = 10.0
MOST_WEIGHED = 256

SAID = f"0/2 nodes are available: 2 {Reason.MEMORY_ON_ANY.sentence}. preemption: none."


def rejected(
    uid: str, vram: str = "20Gi", *, message: str = SAID, minute: int = 0, priority: int = 0
) -> Pod:
    """Return a pod with the status that kube-scheduler writes if the pod fits on no node."""
    created = f"2026-11-20T10:{minute:02}:00Z"
    made = pod(vram, uid=uid, name=uid, created=created, priority=priority)
    return saying(made, "PodScheduled", "False", "Unschedulable", message)


def saying(waiting: Pod, kind: str, status: str, reason: str, message: str) -> Pod:
    condition = PodCondition(type=kind, status=status, reason=reason, message=message)
    status_of = PodStatus(phase="Pending", conditions=[condition])
    return msgspec.structs.replace(waiting, status=status_of)


class Requeues(World):
    """A replica that follows nodes with one shared 24 GiB GPU each."""

    def __init__(self, *nodes: str, labels: dict[str, str] | None = None) -> None:
        super().__init__()
        self.hints, self.version = RequeueHints(), 0
        for name in nodes:
            metadata = ObjectMeta(name=name, labels=labels)
            self.state.apply(
                [NodeSeen(msgspec.structs.replace(kube_node(name), metadata=metadata))]
            )
            self.holds(name, 24)

    def holds(self, name: str, gib: int, replicas: int = 4, sm: float | None = None) -> None:
        """Write a report of the node's agent with this unattributed use, number of free replicas
        and SM activity.
        """
        self.version += 1
        sm_activity = None if sm is None else SmActivity(sm, "gpm")
        gpu = shared(
            name,
            free=replicas,
            used_bytes=gib * GIB,
            unattributed_bytes=gib * GIB,
            sm_activity=sm_activity,
        )
        stamp = STAMP.replace("00:00:00", f"00:00:{self.version % 60:02}")
        node = gpunode(gpu, name=name, version=str(self.version), observed_at=stamp)
        self.state.apply([GPUNodeSeen(node, self.now_s)])

    def starts(self, phase: Literal["starting", "running"]) -> None:
        """Write a reservation of a pod that starts alone on node n, in this phase."""
        self.version += 1
        held = msgspec.structs.replace(
            reservation({"n": 4 * GIB}), phase=phase, start_timeout_s=600
        )
        node = gpunode(shared("n"), reservations={"s": held}, version=str(self.version))
        self.state.apply([GPUNodeSeen(node, self.now_s)])

    def decides(self, who: Pod, fits: int, sure: bool = True) -> None:
        """Record a filter call for this pod in the journal."""
        generation = self.state.cluster.snapshot().generation
        self.journal.record(
            Decision(who, "d", self.wall_s(), generation, 1, fits, {}, sure),
        )

    def requeued(self, after_s: float = 0.01) -> list[str]:
        """Advance the clock by ``after_s``, and return the names of the pods that the replica
        requeues.
        """
        self.now_s += after_s
        steps = self.hints.due(self.state.cluster, self.journal, self.now_s, self.wall_s())
        due = [who for who in steps if who is not None]
        for who in due:
            self.hints.requeued(who.metadata.uid, f"{who.metadata.uid}@{self.now_s}")
        return [who.metadata.uid for who in due]
