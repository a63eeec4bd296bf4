"""The cluster that the model explores, and a check that is independent of the ledger's code.

Nodes have one shared device of 10 bytes, and pods request bytes in their annotation. The extender's
``ClusterWriter`` decides which pods fit. ``wrong_with`` reads only the server's state.
"""

import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import msgspec

from extender.ledger import bind, initialise, reservations
from extender.ledger import ledger as real_ledger
from extender.ledger.embedded_store import SyncStore
from headroom.contract.annotations import PLACEMENT, STARTUP, VRAM
from headroom.contract.gpunode import GPUNode, GPUNodeSpec, GPUNodeStatus
from headroom.contract.kube import (
    Container,
    Node,
    ObjectMeta,
    Pod,
    PodCondition,
    PodSpec,
    PodStatus,
    ResourceRequirements,
)
from headroom.contract.reasons import Reason
from headroom.contract.watched import GPUNodeSeen, NodeSeen
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.placement.placement_record import Placement
from headroom.core.placement.policy import Rules
from tests.blocking import Ledger
from tests.builders import shared
from tests.judge import excess
from tests.model.explorer import Deed, Program
from tests.model.world import World, WorldStore, changed

#: The modules of the protocol. Each module comes after the modules that it imports.
MODULES = (reservations, initialise, bind, real_ledger)
MEMORY_BYTES = 10
RESOURCE = "nvidia.com/gpu"
READY = PodCondition(type="Ready", status="True")
NODES = ("n1", "n2")


def pod(name: str, asked_bytes: int, uid: str = "", alone: bool = False) -> Pod:
    container = Container(name="main", resources=ResourceRequirements(limits={RESOURCE: 1}))
    annotations = {VRAM: str(asked_bytes)} | ({STARTUP: "alone"} if alone else {})
    metadata = ObjectMeta(namespace="a", name=name, uid=uid or name, annotations=annotations)
    return Pod(metadata=metadata, spec=PodSpec(containers=[container]))


def gpunode(name: str, initialised: bool = True) -> GPUNode:
    device = shared(f"GPU-{name}", memory_bytes=MEMORY_BYTES, resource=RESOURCE)
    return GPUNode(
        metadata=ObjectMeta(name=name, uid=name),
        spec=GPUNodeSpec(initialised=initialised),
        status=GPUNodeStatus(observed_at="1970-01-01T00:00:00Z", devices=[device]),
    )


def world(*pods: Pod) -> World:
    made = World()
    for name in NODES:
        made = made.with_gpunode(gpunode(name))
    for one in pods:
        made = made.with_pod(one)
    return made


def _cluster_state() -> ClusterWriter:
    state = ClusterWriter(Rules(), stale_after_s=90.0, epoch_s=0.0)
    for name in NODES:
        state.apply([NodeSeen(Node(metadata=ObjectMeta(name=name)))])
        state.apply([GPUNodeSeen(gpunode(name), 0.0)])
    return state


_STATE = _cluster_state()
_fitted: dict[bytes, Placement | Reason] = {}


def fitted(pod: Pod, node: GPUNode) -> Placement | Reason:
    """Return the result of ``ClusterWriter.judge``. It is cached, because it depends only on the
    arguments.
    """
    key = msgspec.json.encode((pod, node))
    if key not in _fitted:
        _fitted[key] = _STATE.cluster.judge(pod, node, 0.0)
    return _fitted[key]


# The functions below return actors. ``code`` is the module of the ledger or a mutated copy.


def ledger(store: SyncStore, name: str, code: ModuleType) -> Any:
    numbers = itertools.count(1)
    return Ledger(
        store,
        fitted,
        _STATE.cluster.adopt,
        written=lambda gpunode: None,
        wall_s=lambda: 0.0,
        new_id=lambda: f"{name}-{next(numbers)}",
        code=code,
    )


def binds(
    name: str,
    pod: Pod,
    node: str,
    held: World | None = None,
    code: ModuleType = real_ledger,
) -> Program:
    """Bind a pod. The binder has the copies of the pod and the node in ``held``, or no copies if it
    is None.
    """
    metadata = pod.metadata

    shown = held.pods[metadata.name] if held else None
    known = held.gpunodes[node] if held else None

    def work(store: SyncStore) -> object:
        names = metadata.namespace, metadata.name, metadata.uid
        ask = bind.BindRequest(*names, node, shown, known)
        return ledger(store, name, code).bind(ask)

    return work


def removes(name: str, node: str, uid: str, code: ModuleType = real_ledger) -> Program:
    return lambda store: ledger(store, name, code).remove(node, uid)


def ends_start(name: str, node: str, pod: Pod, code: ModuleType = real_ledger) -> Program:
    """Record that the start of the pod has ended, if the pod has settled."""
    metadata = pod.metadata

    def work(store: SyncStore) -> object:
        seen = store.read_pod(metadata.namespace, metadata.name)
        if seen is None or seen.metadata.uid != metadata.uid or not _has_settled(seen):
            return None

        def ended(gpunode: GPUNode) -> list[str]:
            reservation = gpunode.spec.reservations.get(metadata.uid)
            return [metadata.uid] if reservation and reservation.is_starting else []

        return ledger(store, name, code).end_starts(node, ended)

    return work


def charges(name: str, node: str, pod: Pod, code: ModuleType = real_ledger) -> Program:
    return lambda store: ledger(store, name, code).charge(node, pod)


def initialises(name: str, node: str, code: ModuleType = real_ledger) -> Program:
    nodes = [Node(metadata=ObjectMeta(name=node, uid=node))]
    return lambda store: ledger(store, name, code).initialise(nodes)


# The functions below return actions of other clients.


def edits(name: str, asked_bytes: int) -> Deed:
    """The user changes the request of an unbound pod."""

    def deed(world: World) -> World | None:
        held = world.pods.get(name)
        if held is None or held.node:
            return None
        annotations = {**(held.metadata.annotations or {}), VRAM: str(asked_bytes)}
        return world.with_pod(
            changed(held, metadata=changed(held.metadata, annotations=annotations))
        )

    return deed


def recreates(name: str, asked_bytes: int) -> Deed:
    """The user deletes the pod and creates another with the same name."""
    return lambda world: world.with_pod(pod(name, asked_bytes, uid=f"{name}-heir"))


def deletes(name: str) -> Deed:
    return lambda world: world.without_pod(name)


def ends(name: str) -> Deed:
    """The containers of the bound pod end."""

    def deed(world: World) -> World | None:
        held = world.pods.get(name)
        if held is None or not held.node:
            return None
        return world.with_pod(changed(held, status=PodStatus(phase="Succeeded")))

    return deed


def settles(name: str) -> Deed:
    """The bound pod becomes ready."""

    def deed(world: World) -> World | None:
        held = world.pods.get(name)
        if held is None or not held.node:
            return None
        return world.with_pod(changed(held, status=PodStatus(conditions=[READY])))

    return deed


def bypasses_us(name: str, node: str) -> Deed:
    """Another scheduler binds the pod without checking memory."""

    def deed(world: World) -> World | None:
        held = world.pods.get(name)
        if held is None or held.node:
            return None
        return world.with_pod(changed(held, spec=changed(held.spec, node_name=node)))

    return deed


def loses_the_gpunode(node: str) -> Deed:
    """A user deletes the GPUNode by force. The GPUNode is created again, and the agent reports to
    it.
    """
    return lambda world: world.without_gpunode(node).with_gpunode(gpunode(node, initialised=False))


def deletes_the_gpunode(node: str) -> Deed:
    """A user deletes the GPUNode by force."""
    return lambda world: world.without_gpunode(node) if node in world.gpunodes else None


def creates_the_gpunode(node: str) -> Deed:
    """Another extender creates the missing GPUNode, and the agent reports to it."""
    successor = gpunode(node, initialised=False)
    return lambda world: None if node in world.gpunodes else world.with_gpunode(successor)


# The functions below check the model's state.


def asked_bytes(pod: Pod) -> int:
    return int((pod.metadata.annotations or {})[VRAM])


def wrong_with(world: World, code: ModuleType = real_ledger) -> str:
    """Return the errors of a world in its current state. If there are none, return the errors after
    ``code`` has reconciled it.
    """
    return _wrong(world) or _wrong(tidied := _tidy(world, code), settled=True) or _left_over(tidied)


def _wrong(world: World, settled: bool = False) -> str:
    """Return the errors. If ``settled`` is true, pods that other clients bound have been
    adopted.
    """
    for name, node in world.gpunodes.items():
        there = [*world.pods.values(), *world.ghosts.values()]
        sitting = [p for p in there if p.node == name and not p.ended]
        # Count only our pods, because unreserved pods may overcommit the device.
        ours = ((name, asked_bytes(p)) for p in sitting if _bound_by_us(p))
        if over := excess(ours, {name: MEMORY_BYTES}):
            return f"{name} is overcommitted: by {over[name]} bytes"
        at_once = [p.metadata.uid for p in sitting if p.annotation(STARTUP) and not _has_settled(p)]
        if len(at_once) > 1:
            return f"on {name} these pods start at the same time: {at_once}"
        if not node.spec.initialised:
            continue
        for one in sitting:
            reservation = node.spec.reservations.get(one.metadata.uid)
            if reservation is None and not _bound_by_us(one) and not settled:
                continue
            if reservation is None:
                return f"{one.metadata.uid} is bound to {name} without a reservation"
            reserved = sum(sum(charge.candidates.values()) for charge in reservation.charges)
            if reserved < asked_bytes(one):
                return f"{one.metadata.uid}: {reserved} of {asked_bytes(one)} bytes are reserved"
            if not _bound_by_us(one):
                assert "adopted" in reservation.flags
    return ""


def _has_settled(pod: Pod) -> bool:
    return READY in ((pod.status and pod.status.conditions) or ())


def _bound_by_us(pod: Pod) -> bool:
    return PLACEMENT in (pod.metadata.annotations or {})


def _tidy(world: World, code: ModuleType) -> World:
    """Reconcile every reservation and every unreserved pod. All actors have crashed, all messages
    are lost, all containers of deleted pods have ended, and samples prove that they have ended.
    """
    store = WorldStore(replace(world, ghosts={}))
    housekeeper = ledger(store, "housekeeper", code)
    for pod in world.pods.values():
        if pod.node and not pod.ended:
            housekeeper.charge(pod.node, pod)
    for node, uid in _reservations(store.world):
        housekeeper.remove(node, uid, left=True)
    return store.world


def _left_over(world: World) -> str:
    uids_on = {(p.node, p.metadata.uid) for p in world.pods.values() if p.node and not p.ended}
    leaked = [reservation for reservation in _reservations(world) if reservation not in uids_on]
    return f"orphaned reservations are never removed: {leaked}" if leaked else ""


def _reservations(world: World) -> Iterator[tuple[str, str]]:
    for name, node in world.gpunodes.items():
        for uid in node.spec.reservations:
            yield name, uid


def protocol_with(changes: Mapping[str, str]) -> ModuleType:
    """Return the module of the ledger with changed source code. Each key of ``changes`` must occur
    exactly once in ``MODULES`` and is replaced by its value.
    """
    sources = {module.__name__: Path(str(module.__file__)).read_text() for module in MODULES}
    for before, after in changes.items():
        found = [name for name, source in sources.items() for _ in range(source.count(before))]
        assert len(found) == 1, f"the protocol does not contain this once:\n{before}"
        sources[found[0]] = sources[found[0]].replace(before, after)
    rewritten = {name: ModuleType(name) for name in sources}
    with patch.dict(sys.modules, rewritten):  # The modules import each other.
        for name, source in sources.items():
            exec(compile(source, f"rewritten {name}", "exec"), rewritten[name].__dict__)
    return rewritten[real_ledger.__name__]
