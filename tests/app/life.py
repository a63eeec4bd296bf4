"""The life of a small cluster on one replica: nodes and pods come and go, and the replica's loops
do their work. Steps that did not happen in the end are reported.
"""

import asyncio
import tempfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import msgspec
import structlog

from contract.annotations import OBSERVED_AT, ON_OVERUSE, RETRY, STARTUP
from contract.gpunode import GPUNode, Source
from contract.heartbeat import Confirmation, encode_confirmation
from contract.kube import Lease, ObjectMeta, OwnerReference, Pod, PodCondition, PodStatus, Present
from contract.reasons import Reason
from extender import periodic
from extender.app import cluster_view
from extender.app.console import Console
from extender.app.extender import Extender
from extender.config import reload
from extender.config.reload import Origin
from extender.config.settings import Settings
from extender.controllers import (
    extended_resource,
    overuse,
    pending_events,
    preemption,
    reconcile,
    requeue,
    starts,
)
from extender.controllers.eviction import DOES_NOT_FIT
from extender.controllers.extended_resource import ExtendedResourceController
from extender.controllers.preemption import PreemptionWriter
from extender.controllers.starts import StartsController
from extender.errors import StoreConflict, StoreRejected
from extender.kube.client import KubeApi
from extender.ledger.memory_store import AsyncStore, EmbeddedStore
from extender.observability import feed
from extender.observability.metrics import sample_lag
from extender.state import event_queue, eviction_candidates, nominations, overuse_decisions
from extender.state.changes import HeartbeatSeen, NodeSeen, PodGone
from extender.state.notices import Notice
from tests.builders import DISTRIBUTED, GIB, container, gate, gpunode, kube_node, pod, shared, use
from tests.waiting import until_then

NODES = ("a", "b")
SOURCES = [Source(name="checkpoint"), Source(name="proc")]
#: For each step; nothing here takes a second.
SAID = f"0/2 nodes are available: 2 {Reason.MEMORY_ON_ANY.sentence}."


def quicken() -> None:
    """Loops look often, so that a life takes part of a second."""
    event_queue.RETRY_S = periodic.AGAIN_AFTER_S = 0.01
    event_queue.TOGETHER_S = 0.002
    reconcile.EVERY_S, reconcile.READY_EVERY_S = 0.05, 0.01
    eviction_candidates.FIRST_S = 0.1
    starts.EVERY_S = 0.02
    overuse.EVERY_S, overuse_decisions.REJECTED_FOR_S = 0.02, 0.05
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
    #: The step that did not come about; empty when all did.
    missing: str = ""
    #: Exceptions that the replica logged and counted, or that a caller was answered with.
    failures: float = 0.0


class Store(EmbeddedStore):
    """With what kube-scheduler and an admin write."""

    def set_status(self, pod: Pod, status: PodStatus) -> None:
        def write() -> Pod:
            held = self._held_pod(pod.metadata.namespace, pod.metadata.name)
            changed = msgspec.structs.replace(held, status=status)
            return self._put_pod(changed, held.metadata.annotations, held.spec)

        self._do("set_status", write)

    #: Version of the Leases of all agents.
    lease_version = 100

    def read_heartbeat_version(self, node: str) -> str:
        return str(self.lease_version)

    def lose_pod(self, name: str) -> None:
        """Deleted by force: it is unknown whether its containers still run."""

        def delete() -> None:
            pod = self._held_pod("default", name)
            del self._pods["default", name]
            self._deliver([PodGone(pod.metadata.uid)])

        self._do("lose_pod", delete)

    def start_deleting(self, name: str) -> None:
        def write() -> GPUNode:
            held = self._held(name)
            metadata = msgspec.structs.replace(
                held.metadata,
                deletion_timestamp=datetime.now(UTC).isoformat(),
                finalizers=["headroom.gpu/ledger"],
            )
            return self._put_gpunode(msgspec.structs.replace(held, metadata=metadata))

        self._do("start_deleting", write)


@dataclass
class World:
    """Hands, agents and kube-scheduler of the replica, which do their part without a mistake."""

    extender: Extender
    store: Store
    #: Settings of the world.
    file: Path
    console: Console
    #: Those of the replica, once they are made.
    verbs: Any = None
    #: Exceptions that kube-scheduler was answered with.
    errors: int = 0
    mirrored: set[str] = field(default_factory=set)
    #: Name of a pod -> what it uses, if not 1 GiB; pods with an Event that they are stuck.
    used_bytes: dict[str, int] = field(default_factory=dict)
    stuck: list[str] = field(default_factory=list)
    #: Operations that another replica is faster at.
    contested: list[str] = field(
        default_factory=lambda: ["write_spec", "bind", "evict", "touch_pod", "touch_pod"]
    )
    #: Operations that the API server rejects, once each: the second while a pod is bound in mode
    #: observe, the last in that mode.
    rejected: set[str] = field(default_factory=lambda: {"bind", "write_spec", "touch_pod"})
    binds: bool = False
    #: Pods whose eviction the API server rejects once.
    budgets: set[str] = field(default_factory=lambda: {"leaks"})
    #: That were posted.
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
            raise StoreRejected("a webhook rejects it")

    async def evict(self, pod: Pod) -> None:
        self.fault("evict", "before")
        if pod.metadata.name in self.budgets:
            self.budgets.remove(pod.metadata.name)
            raise StoreRejected("a disruption budget forbids it")
        self.store.delete_pod(pod.metadata.namespace, pod.metadata.name)
        self.report()

    def post(self, notice: Notice) -> bool:
        self.events.append(notice)
        if notice.reason == DOES_NOT_FIT:
            self.stuck.append(notice.about.name)
        return True

    def call(self, method: str, path: str, **request: Any) -> bytes:
        """Takes the patches of Nodes, as the API server does."""
        self.mirrored.add(path.split("/")[-2])
        return b"{}"

    def report(self) -> None:
        """As the agents do, of the pods that are bound."""
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
        self.store.lease_version += 1

    def beat(self, node: str, uid: str, stamp: str) -> None:
        vouch = Confirmation(stamp, uid, stamp, after=str(self.store.lease_version))
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
        """As kube-scheduler does: after an error it tries again; a pod that no node takes it tries
        again when the pod is changed."""
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
            except Exception:  # noqa: BLE001 - answered with 500, or with an Error
                self.binds, self.errors = False, self.errors + 1
                await asyncio.sleep(0.01)
                continue
            await self.changed(name, self.reject(name))
        self.report()

    async def changed(self, name: str, before: str | None) -> None:
        await until_then(lambda: self.pod(name).annotation(RETRY) != before, f"{name} is woken")

    def reject(self, name: str) -> str | None:
        """Writes why the pod waits; returns its annotation of wakes."""
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


def live() -> Told:
    """Plays it once."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "headroom.yaml")
        file.write_text("mode: enforce\n")
        return asyncio.run(_live(file))


async def _live(file: Path) -> Told:
    world: World | None = None
    # Shorter than a settings file allows.
    settings = Settings(evict_for_memory=True).model_copy(update={"nomination_hold_s": 0.3})
    extender = Extender(
        settings, lambda: "", lambda notice: _of(world).post(notice), (), Origin(file)
    )
    store = Store(
        extender.deliver,
        time.monotonic,
        lambda operation, when: world.fault(operation, when) if world else None,
        extender.enqueue,
    )
    console = Console(
        extender, lambda: extender.pending_events_controller.pending, extender.journal
    )
    world = World(extender, store, file, console)
    ledger = extender.open_ledger(AsyncStore(store))
    extender.enable_evictions(AsyncStore(store), ledger, world)
    extender.enable_preemption(
        PreemptionWriter(AsyncStore(store), world, time.time, extender.new_id)
    )
    world.verbs = extender.verbs(ledger)
    start(world, ledger)
    try:
        await steps(world)
    except (TimeoutError, AssertionError) as err:
        return Told(str(err), failures(world))
    finally:
        extender.loops.stop()
        await asyncio.sleep(0)
    return Told("", failures(world))


def _of(world: World | None) -> World:
    assert world is not None
    return world


def start(world: World, ledger: Any) -> None:
    """All loops that a replica of a cluster runs, but for those of its servers."""
    extender, each = world.extender, world.extender.loops
    extender.requeue_controller.start(each, ledger)
    extender.reconciler.start(ledger)
    extender.pending_events_controller.start(each, extender.unready)
    assert extender.preemption_controller is not None
    extender.preemption_controller.start(each, extender.idle)
    extender.reloading.start(each)
    assert extender.overuse_controller is not None
    extender.overuse_controller.start(
        each, extender.unready, lambda: extender.observes, lambda: 0.0
    )
    StartsController(extender.cluster, ledger, extender.telemetry, extender.event_recorder).start(
        each, extender.unready
    )
    api = cast(KubeApi, world)
    ExtendedResourceController(extender.cluster, True, api).start(each, extender.unready)
    world.console.changes.start(each, extender.begun)
    each.keep("lag", lambda: sample_lag(extender.note_lag))
    each.start("clock", extender.report_time, cluster_view.CLOCK_EVERY_S)


def failures(world: World) -> float:
    counted = world.extender.telemetry.registry.get_sample_value
    names = ("event_queue", "requeues", "reservations", "nodes", "notices", "waiting", "preemption")
    names += ("overuse", "starts", "mirror", "feed", "lag", "settings", "clock")
    of_loops = (counted("headroom_loop_failures_total", {"loop": name}) for name in names)
    return world.errors + sum(filter(None, of_loops))


async def steps(world: World) -> None:
    extender, store = world.extender, world.store
    world.create("s0", 10)  # it waits for the first node
    for node in NODES:
        extender.enqueue([NodeSeen(kube_node(node))])

    def initialised() -> bool:
        world.report()
        held = map(store.read_gpunode, NODES)
        return all(node is not None and node.spec.initialised for node in held)

    await until_then(initialised, "the nodes are initialised")
    for name in ("s0", "s1", "s2", "s3"):
        if name != "s0":
            world.create(name, 10)
        await world.schedule(name)

    # Requeued when others have ended.
    world.create("big", 20)
    waits = asyncio.create_task(world.schedule("big"))
    await until_then(lambda: rejected(world.pod("big")), "the big pod is rejected")
    await until_then(lambda: world.events, "the rejected pod has an Event")
    for name in ("s0", "s1", "s2", "s3"):
        world.delete(name)
    await waits

    # Others leave for it.
    world.create("other", 20)
    await world.schedule("other")
    world.create("vip", 20, priority=1000)
    await world.schedule("vip")

    # Bound by another client, and charged all the same.
    # One of the two as a rule; both where an exception ended the first attempt.
    for name in {"big", "other"} & {each.metadata.name for each in store.list_pods()}:
        world.delete(name)
    free = next(node for node in NODES if node != world.pod("vip").node)
    store.admit(pod("4Gi", uid="uid-stray", name="stray", node=free, phase="Running"))
    world.report()
    await until_then(lambda: "uid-stray" in world.reserved(), "the unreserved pod is charged")

    # A GPUNode that is deleted is created again.
    store.start_deleting(free)

    def made_anew() -> bool:
        world.report()
        now = store.read_gpunode(free)
        return now is not None and now.spec.initialised and not now.metadata.deletion_timestamp

    await until_then(made_anew, "a deleted GPUNode is finalised, and created again")

    # The use of another process leaves not enough memory for pods at their gates.
    world.delete("stray")
    world.create_gated("stays", 10, controlled=False)
    world.create_gated("leaves", 5, controlled=True)
    for name in ("stays", "leaves"):
        await world.schedule(name)
    (where,) = {world.pod(name).node for name in ("stays", "leaves")}
    world.used_bytes["taker"] = 20 * GIB
    taker = pod("1Gi", uid="uid-taker", name="taker", node=where, phase="Running")
    store.admit(taker)
    world.report()
    await until_then(
        lambda: store.read_pod("default", "leaves") is None, "the gated pod is evicted"
    )
    await until_then(lambda: "stays" in world.stuck, "the pod that stays has an Event")
    about = lambda name: any(each.about.name == name for each in world.events)  # noqa: E731
    await until_then(lambda: about("taker"), "the pod of another scheduler has an Event")

    # In mode observe rejected pods are tried again, and nothing is reserved.
    world.create("waits", 24)
    observed = asyncio.create_task(world.schedule("waits"))
    await until_then(lambda: rejected(world.pod("waits")), "the last pod is rejected")
    world.set_mode("observe")
    await until_then(lambda: extender.observes, "the file of settings is read")
    await observed
    world.set_mode("enforce")
    await until_then(lambda: not extender.observes, "the file of settings is read again")

    for name in ("vip", "stays", "taker", "waits"):
        world.delete(name)
    await until_then(lambda: not world.reserved(), "no reservation is left")

    # Of a pod that was deleted by force, the report of the agent shows that it has left.
    world.create("lost", 1)
    await world.schedule("lost")
    store.lose_pod("lost")

    def has_left() -> bool:
        world.report()
        return "uid-lost" not in world.reserved()

    await until_then(has_left, "the reservation of a lost pod is given back")

    # A pod that uses more than it reserved is evicted, as others lack memory.
    leaks = pod(
        "8Gi",
        uid="uid-leaks",
        name="leaks",
        version="",
        annotations={ON_OVERUSE: "evict"},
    )
    store.admit(leaks)
    await world.schedule("leaks")
    where = world.pod("leaks").node
    store.admit(pod("12Gi", uid="uid-beside", name="beside", node=where, phase="Running"))
    world.set_mode("observe")
    await until_then(lambda: extender.observes, "the mode is observe again")
    world.used_bytes["leaks"] = 14 * GIB

    def is_counted() -> bool:
        world.report()
        counted = extender.telemetry.registry.get_sample_value
        name, outcome = "headroom_overuse_evictions_total", {"outcome": "would_evict"}
        return bool(counted(name, outcome))

    await until_then(is_counted, "in mode observe the pod would be evicted")
    world.set_mode("enforce")
    await until_then(lambda: not extender.observes, "the mode is enforce again")

    def is_evicted() -> bool:
        world.report()
        return store.read_pod("default", "leaks") is None

    await until_then(is_evicted, "the pod that uses more than it reserved is evicted")
    world.delete("beside")

    # A pod that starts alone is starting until it is ready.
    engine = msgspec.structs.replace(container(), readiness_probe=Present())
    store.admit(pod("1Gi", engine, uid="uid-engine", name="engine", annotations={STARTUP: "alone"}))
    await world.schedule("engine")
    where = world.pod("engine").node
    ready = PodStatus(phase="Running", conditions=[PodCondition("Ready", "True")])
    store.set_status(world.pod("engine"), ready)

    def has_started() -> bool:
        held = store.read_gpunode(where)
        return held is not None and not held.spec.reservations["uid-engine"].is_starting

    await until_then(has_started, "the start of a ready pod has ended")
    world.delete("engine")

    world.create("last", 20)
    await world.schedule("last")
    await until_then(lambda: world.mirrored == {*NODES}, "both nodes show their memory")
    await until_then(lambda: not extender.event_queue.is_behind, "all changes are applied")
    assert extender.stuck() == "", extender.stuck()
    ended = [task.get_name() for task in extender.loops._tasks if task.done()]
    assert not ended, f"these loops have ended: {ended}"
