"""Runs the life of a small cluster with one replica. Nodes and pods are created and deleted while
the replica's loops run. Reports the steps that did not happen.
"""

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import msgspec

from extender.extended_resource import ExtendedResourceController
from extender.extender import Extender
from extender.ledger.embedded_store import AsyncStore
from extender.preemption.writer import PreemptionWriter
from extender.starting_alone.controller import StartsController
from headroom.contract.annotations import ON_OVERUSE, STARTUP
from headroom.contract.kube import PodCondition, PodStatus, Present
from headroom.contract.watched import NodeSeen
from headroom.runtime.follow import cluster_view
from headroom.runtime.kube.client import KubeApi
from headroom.runtime.settings.reload import Origin
from headroom.runtime.settings.settings import Settings
from headroom.runtime.telemetry import sample_lag
from headroom.serve.shared_process import console_beside
from tests.app.life_world import NODES, LifeWorld, Told, rejected
from tests.builders import GIB, container, kube_node, pod
from tests.store import PlayedStore
from tests.waiting import until_then


def live() -> Told:
    """Run one life and return its result."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "headroom.yaml")
        file.write_text("mode: enforce\n")
        return asyncio.run(_live(file))


async def _live(file: Path) -> Told:
    world: LifeWorld | None = None
    # The hold is shorter than a settings file allows.
    settings = Settings(evict_for_memory=True).model_copy(update={"nomination_hold_s": 0.3})
    extender = Extender(
        settings, lambda: "", lambda notice: _of(world).post(notice), (), Origin(file)
    )
    store = PlayedStore(
        extender.deliver,
        time.monotonic,
        lambda operation, when: world.fault(operation, when) if world else None,
        extender.enqueue,
    )
    store.leases = dict.fromkeys(NODES, 100)
    console = console_beside(extender)
    world = LifeWorld(extender, store, file, console)
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


def _of(world: LifeWorld | None) -> LifeWorld:
    assert world is not None
    return world


def start(world: LifeWorld, ledger: Any) -> None:
    """Start all loops that a replica runs in a cluster, except its servers."""
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


def failures(world: LifeWorld) -> float:
    counted = world.extender.telemetry.registry.get_sample_value
    names = ("event_queue", "requeues", "reservations", "nodes", "notices", "waiting", "preemption")
    names += ("overuse", "starts", "mirror", "feed", "lag", "settings", "clock")
    of_loops = (counted("headroom_loop_failures_total", {"loop": name}) for name in names)
    return world.errors + sum(filter(None, of_loops))


async def steps(world: LifeWorld) -> None:
    extender, store = world.extender, world.store
    world.create("s0", 10)  # The pod waits for the first node.
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

    # This pod is requeued when other pods have ended.
    world.create("big", 20)
    waits = asyncio.create_task(world.schedule("big"))
    await until_then(lambda: rejected(world.pod("big")), "the big pod is rejected")
    await until_then(lambda: world.events, "the rejected pod has an Event")
    for name in ("s0", "s1", "s2", "s3"):
        world.delete(name)
    await waits

    # Headroom evicts other pods for this pod.
    world.create("other", 20)
    await world.schedule("other")
    world.create("vip", 20, priority=1000)
    await world.schedule("vip")

    # Another client binds a pod to a free node, and Headroom reserves memory for the pod. First
    # delete the pods that were not evicted, to free the node. Usually only "big" or "other" is
    # left, but both are left if an exception ended the first attempt.
    for name in {"big", "other"} & {each.metadata.name for each in store.list_pods()}:
        world.delete(name)
    free = next(node for node in NODES if node != world.pod("vip").node)
    store.admit(pod("4Gi", uid="uid-stray", name="stray", node=free, phase="Running"))
    world.report()
    await until_then(lambda: "uid-stray" in world.reserved(), "the unreserved pod is charged")

    # Headroom creates a deleted GPUNode again.
    store.start_deleting(free)

    def made_anew() -> bool:
        world.report()
        now = store.read_gpunode(free)
        return now is not None and now.spec.initialised and not now.metadata.deletion_timestamp

    await until_then(made_anew, "a deleted GPUNode is finalised, and created again")

    # An unknown process uses so much memory that the pods that wait at their gates no longer fit.
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

    # In observe mode, Headroom requeues rejected pods and reserves nothing.
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

    # The reservation of a force-deleted pod ends when the agent's report shows that the pod has
    # ended.
    world.create("lost", 1)
    await world.schedule("lost")
    store.lose_pod("lost")

    def has_left() -> bool:
        world.report()
        return "uid-lost" not in world.reserved()

    await until_then(has_left, "the reservation of a lost pod is given back")

    # Headroom evicts a pod that uses more than it reserved, because other pods need the memory.
    leaks = pod(
        "8Gi",
        uid="uid-leaks",
        name="leaks",
        version="",
        annotations={ON_OVERUSE: "evict"},
    )
    store.admit(leaks)
    await world.schedule("leaks")
    # The pod gets the fuller node, because Headroom prefers full nodes.
    world.create("beside", 12)
    await world.schedule("beside")
    assert world.pod("beside").node == world.pod("leaks").node
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

    # A pod that starts alone counts as starting until it is ready.
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
    assert extender.stuck() == {}, extender.stuck()
    ended = [task.get_name() for task in extender.loops._tasks if task.done()]
    assert not ended, f"these loops have ended: {ended}"
