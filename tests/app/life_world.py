"""Runs an extender on an in-memory store, and acts as kube-scheduler, agents and users."""

import asyncio
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import structlog

from extender import extended_resource, pending_events
from extender.extender import Extender
from extender.overuse import controller as overuse
from extender.preemption import controller as preemption
from extender.reconcile import controller as reconcile
from extender.requeue import controller as requeue
from extender.starting_alone import controller as starts
from headroom.console.console import Console
from headroom.console.feed import feed
from headroom.contract.annotations import OBSERVED_AT, RETRY
from headroom.contract.event_reasons import EventReason
from headroom.contract.gpunode import Source
from headroom.contract.heartbeat import Confirmation, encode_confirmation
from headroom.contract.kube import Lease, ObjectMeta, OwnerReference, Pod, PodCondition, PodStatus
from headroom.contract.reasons import Reason
from headroom.contract.watched import HeartbeatSeen
from headroom.core.cluster.notices import Notice
from headroom.core.cluster.trackers import nominations
from headroom.core.eviction import back_offs
from headroom.core.overuse import tracker as overuse_tracker
from headroom.errors import StoreConflict, StoreRejected
from headroom.runtime import loops as periodic
from headroom.runtime.follow import cluster_view, event_queue
from headroom.runtime.settings import reload
from tests.builders import DISTRIBUTED, GIB, gate, gpunode, pod, shared, use
from tests.store import PlayedStore
from tests.waiting import until_then

NODES = ("a", "b")
SOURCES = [Source(name="checkpoint"), Source(name="proc")]
#: The message of the errors with which the simulated API server rejects operations.
REJECTED = "a webhook rejects it"
#: The message that kube-scheduler writes into the condition of an unschedulable pod.
SAID = f"0/2 nodes are available: 2 {Reason.MEMORY_ON_ANY.sentence}."


def quicken() -> None:
    """Make loops run often, so that a life takes less than a second."""
    event_queue.RETRY_S = periodic.AGAIN_AFTER_S = 0.01
    event_queue.TOGETHER_S = 0.002
    reconcile.EVERY_S, reconcile.READY_EVERY_S = 0.05, 0.01
    back_offs.FIRST_S = 0.1
    starts.EVERY_S = 0.02
    overuse.EVERY_S, overuse_tracker.REJECTED_FOR_S = 0.02, 0.05
    reconcile.AT_ONCE = feed.AT_ONCE = 1
    requeue.EVERY_S, requeue.IDLE_S = 0.01, 0.05
    pending_events.EVERY_S, pending_events.AGAIN_AFTER_S = 0.02, 0.05
    requeue.SLICE_S = -1.0
    preemption.EVERY_S, preemption.SETTLED_S, preemption.AGAIN_AFTER_S = 0.02, 0.0, 0.05
    feed.CHECK_EVERY_S = reload.EVERY_S = extended_resource.EVERY_S = 0.02
    cluster_view.CLOCK_EVERY_S = 0.05
    nominations.EXPECTED_S, nominations.CLEARED_S = 0.2, 0.3
    structlog.configure(processors=[lambda logger, name, event: _drop()])


def _drop() -> None:
    raise structlog.DropEvent


@dataclass
class Told:
    #: The step that did not happen, or an empty string if all steps happened.
    missing: str = ""
    #: Number of exceptions that the replica logged and counted, or that a caller got as a response.
    failures: float = 0.0


@dataclass
class LifeWorld:
    """Acts as the users, agents and kube-scheduler of the replica, without any faults."""

    extender: Extender
    store: PlayedStore
    #: The settings file of the replica, which ``set_mode`` changes.
    file: Path
    console: Console
    #: The handlers of kube-scheduler's calls, after ``start``.
    verbs: Any = None
    #: Number of error responses that kube-scheduler received, except errors with ``REJECTED``.
    errors: int = 0
    mirrored: set[str] = field(default_factory=set)
    #: Maps pods to the bytes that they use. Other pods use 1 GiB.
    used_bytes: dict[str, int] = field(default_factory=dict)
    #: Pods for which Headroom posted an Event because they are stuck.
    stuck: list[str] = field(default_factory=list)
    #: Operations that fail once because another replica was first.
    contested: list[str] = field(
        default_factory=lambda: ["write_spec", "bind", "evict", "touch_pod", "touch_pod"]
    )
    #: Operations that the API server rejects once each.
    rejected: set[str] = field(default_factory=lambda: {"bind", "write_spec", "touch_pod"})
    binds: bool = False
    #: Pods whose eviction the API server rejects once because of a disruption budget.
    budgets: set[str] = field(default_factory=lambda: {"leaks"})
    #: Events that Headroom posted.
    events: list[Notice] = field(default_factory=list)

    async def may_evict(self, pod: Pod) -> None:
        return None

    def fault(self, operation: str, when: str) -> None:
        if when != "before":
            return
        if operation in self.contested:
            self.contested.remove(operation)
            raise StoreConflict("another replica was faster")
        observes = self.extender.observes
        now = {"bind": True, "write_spec": observes and self.binds, "touch_pod": observes}
        if operation in self.rejected and now[operation]:
            self.rejected.remove(operation)
            raise StoreRejected(REJECTED)

    async def evict(self, pod: Pod, most_grace_s: int | None = None) -> None:
        self.fault("evict", "before")
        if pod.metadata.name in self.budgets:
            self.budgets.remove(pod.metadata.name)
            raise StoreRejected("a disruption budget forbids it")
        self.store.delete_pod(pod.metadata.namespace, pod.metadata.name)
        self.report()

    def post(self, notice: Notice) -> bool:
        self.events.append(notice)
        if notice.reason is EventReason.INSUFFICIENT_GPU_MEMORY:
            self.stuck.append(notice.about.name)
        return True

    def call(self, method: str, path: str, **request: Any) -> bytes:
        """Accept a patch of a Node and record the node's name."""
        self.mirrored.add(path.split("/")[-2])
        return b"{}"

    def report(self) -> None:
        """Report the bound pods of each node as its agent would."""
        for node in NODES:
            held = self.store.read_gpunode(node)
            if held is None:
                continue
            uuid = f"GPU-{node}"
            there = [each for each in self.store.list_pods(node)]
            used = [self.used_bytes.get(each.metadata.name, GIB) for each in there]
            rows = [use(each.metadata.uid, uuid, n) for each, n in zip(there, used, strict=True)]
            free = shared(uuid, free=4 - len(rows), allocated=len(rows), used_bytes=sum(used))
            stamp = datetime.now(UTC).isoformat()
            made = gpunode(free, name=node, pods=rows, observed_at=stamp, plugin=DISTRIBUTED)
            status = msgspec.structs.replace(made.status, sources=SOURCES)
            self.store.report([(node, status)])
            self.beat(node, held.metadata.uid, stamp)
        for node in NODES:
            self.store.leases[node] += 1

    def beat(self, node: str, uid: str, stamp: str) -> None:
        vouch = Confirmation(stamp, uid, stamp, after=str(self.store.leases[node]))
        annotations = {OBSERVED_AT: encode_confirmation(vouch)}
        lease = Lease(metadata=ObjectMeta(name=node, annotations=annotations))
        self.extender.enqueue([HeartbeatSeen(lease, time.monotonic())])

    def pod(self, name: str) -> Pod:
        found = self.store.read_pod("default", name)
        assert found is not None, f"{name} is lost"
        return found

    def create(self, name: str, gib: int, priority: int = 0) -> None:
        made = pod(f"{gib}Gi", uid=f"uid-{name}", name=name, priority=priority, version="")
        self.store.admit(made)

    def create_gated(self, name: str, gib: int, controlled: bool) -> None:
        made = pod(f"{gib}Gi", init=[gate()], uid=f"uid-{name}", name=name, version="")
        owners = [OwnerReference(kind="ReplicaSet", controller=True)] if controlled else None
        metadata = msgspec.structs.replace(made.metadata, owner_references=owners)
        self.used_bytes[name] = 0
        self.store.admit(msgspec.structs.replace(made, metadata=metadata))

    async def schedule(self, name: str) -> None:
        """Schedule a pending pod as kube-scheduler does. Retry after an error, and retry an
        unschedulable pod when it changes.
        """
        verbs = self.verbs
        while not (held := self.pod(name)).node:
            wire = msgspec.to_builtins(held)
            body = msgspec.json.encode({"Pod": wire, "Nodes": None, "NodeNames": list(NODES)})
            try:
                answer = msgspec.json.decode(verbs.filter(body))
                if answer.get("Error"):
                    raise RuntimeError(answer["Error"])
                if names := answer["NodeNames"]:
                    wanted = {
                        "PodName": name,
                        "PodNamespace": "default",
                        "PodUID": held.metadata.uid,
                        "Node": names[0],
                    }
                    self.binds = True
                    bound = msgspec.json.decode(await verbs.bind(msgspec.json.encode(wanted)))
                    if bound["Error"]:
                        raise RuntimeError(bound["Error"])
                    self.binds = False
                    self.report()
                    return
            except Exception as err:  # noqa: BLE001 - answered with 500, or with an Error
                self.binds = False
                self.errors += REJECTED not in str(err)
                await asyncio.sleep(0.01)
                continue
            await self.changed(name, self.reject(name))
        self.report()

    async def changed(self, name: str, before: str | None) -> None:
        await until_then(lambda: self.pod(name).annotation(RETRY) != before, f"{name} is woken")

    def reject(self, name: str) -> str | None:
        """Write the condition that the pod is unschedulable. Return the pod's annotation that
        counts requeues.
        """
        held = self.pod(name)
        condition = PodCondition(
            type="PodScheduled", status="False", reason="Unschedulable", message=SAID
        )
        status = PodStatus(phase="Pending", conditions=[condition])
        self.store.set_status(held, status)
        return held.annotation(RETRY)

    def set_mode(self, mode: str) -> None:
        self.file.write_text(f"mode: {mode}\n")

    def delete(self, name: str) -> None:
        self.store.delete_pod("default", name)
        self.report()

    def reserved(self) -> set[str]:
        nodes = filter(None, map(self.store.read_gpunode, NODES))
        return {uid for node in nodes for uid in node.spec.reservations}


def rejected(pod: Pod) -> bool:
    return bool(pod.status and pod.status.conditions)
