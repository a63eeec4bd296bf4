"""A ledger on a store with a node and a pod. Tests inject faults between the ledger and the
store.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from extender.ledger.bind_call import BindRequest, Outcome
from extender.ledger.embedded_store import Fault, no_fault
from headroom.contract.annotations import PLACEMENT, VRAM
from headroom.contract.gpunode import Charge, GPUNode, GPUNodeSpec, GPUNodeStatus, Reservation
from headroom.contract.kube import Node, ObjectMeta, Pod, PodSpec, PodStatus
from headroom.contract.reasons import Reason
from headroom.core.placement.placement_record import Placement
from headroom.errors import StoreError
from tests.blocking import Ledger
from tests.store import PlayedStore

RESOURCE = "nvidia.com/gpu"
WALL_S = 1_000_000.0
T = TypeVar("T")


def pod(
    name: str = "p", uid: str = "", asked: int = 6, version: str = "100", node: str = ""
) -> Pod:
    metadata = ObjectMeta(
        namespace="a",
        name=name,
        uid=uid or f"uid-{name}",
        resource_version=version,
        annotations={VRAM: str(asked)} if asked else {},
    )
    return Pod(metadata=metadata, spec=PodSpec(node_name=node or None))


def judge(pod: Pod, gpunode: GPUNode) -> Placement | Reason:
    """Place a pod on the single 10-byte device of a node, if the node is initialised."""
    asked = int(pod.annotation(VRAM) or 0)
    if asked < 0:
        return Reason.BAD_VRAM
    if not asked:
        return Placement((), {})
    if not gpunode.spec.initialised:
        return Reason.NO_REPORT if gpunode.status is None else Reason.NOT_INITIALISED
    others = sum(
        max(charge.candidates.values())
        for uid, reservation in gpunode.spec.reservations.items()
        if uid != pod.metadata.uid
        for charge in reservation.charges
    )
    if others + asked > 10:
        return Reason.MEMORY_ON_ANY
    charge = Charge(resource=RESOURCE, count=1, candidates={"GPU-0": asked})
    return Placement((charge,), {PLACEMENT: f"{asked} on {gpunode.name}"})


def adopt(pod: Pod, gpunode: GPUNode) -> Reservation | None:
    asked = int(pod.annotation(VRAM) or 0)
    charge = Charge(resource=RESOURCE, count=1, candidates={"GPU-0": asked})
    return Reservation(namespace="a", name=pod.metadata.name, charges=[charge]) if asked else None


DEVICES = msgspec.convert({"devices": [{"uuid": "GPU-0"}]}, GPUNodeStatus)


def pending_binds(ledger: Any, node: str = "n") -> int:
    """Return the number of queued and running binds of the node."""
    queue = ledger.binder._batcher._queues.get(node)
    return queue.requests if queue else 0


class Stage:
    """A store with the node ``n`` and the pod ``p``, a ledger on it, and a hook between the two.

    ``fault`` is called before and after each store operation of the ledger. It can act as another
    client, or raise an error to lose a message.
    """

    def __init__(self) -> None:
        self.fault: Fault = no_fault
        self.calls: list[str] = []
        self.written: list[GPUNode] = []
        self._armed = False
        self.store = PlayedStore(lambda events: None, lambda: 0.0, self._on_the_way)
        self.store.leases["n"] = 41
        self.ledger = self.new_ledger("L")
        self.new_node("n", initialised=True)
        self.store.admit(pod())

    def _on_the_way(self, operation: str, when: str) -> None:
        if self._armed:
            if when == "before":
                self.calls.append(operation)
            self._armed = False
            try:
                self.fault(operation, when)
            finally:
                self._armed = True

    def new_ledger(self, name: str) -> Ledger:
        ids = (f"{name}-{number}" for number in itertools.count(1))
        return Ledger(
            self.store, judge, adopt, self.written.append, lambda: WALL_S, lambda: next(ids)
        )

    def new_node(self, name: str, initialised: bool = False, devices: bool = True) -> None:
        spec = GPUNodeSpec(initialised=initialised)
        self.store.create_gpunode(GPUNode(metadata=ObjectMeta(name=name), spec=spec))
        self.store.report([(name, DEVICES if devices else GPUNodeStatus())])

    def node(self, name: str = "n") -> GPUNode:
        node = self.store.read_gpunode(name)
        assert node is not None
        return node

    def pod(self, name: str = "p") -> Pod:
        found = self.store.read_pod("a", name)
        assert found is not None
        return found

    @property
    def reserved(self) -> set[str]:
        return set(self.node().spec.reservations)

    def ask(self, shown: Pod, node: str = "n", held: bool = True) -> BindRequest:
        metadata = shown.metadata
        return BindRequest(
            metadata.namespace,
            metadata.name,
            metadata.uid,
            node,
            shown if held else None,
            self.store.read_gpunode(node) if held else None,
        )

    def bind(self, ask: BindRequest | None = None) -> Outcome:
        asked = ask or self.ask(pod())
        return self._watched(lambda: self.ledger.bind(asked))

    def remove(self, node: str = "n", uid: str = "uid-p", left: bool = False) -> bool:
        return self._watched(lambda: self.ledger.remove(node, uid, left))

    def departed_by(self, uid: str = "uid-p") -> str | None:
        reservation = self.node().spec.reservations[uid]
        return self._watched(lambda: self.ledger.departed_by("n", uid, reservation))

    def copy_choice(self, choice: str, node: str = "n", cordoned: Sequence[str] = ()) -> bool:
        return self._watched(lambda: self.ledger.copy_settings(node, choice, cordoned))

    def initialise(self, *names: str) -> list[str]:
        nodes = [Node(metadata=ObjectMeta(name=name, uid=f"node-{name}")) for name in names]
        return self._watched(lambda: self.ledger.initialise(nodes))

    def remove_finalizer(self, *names: str) -> None:
        self._watched(lambda: self.ledger.remove_finalizer(names))

    def _watched(self, work: Callable[[], T]) -> T:
        self.calls.clear()
        self._armed = True
        try:
            return work()
        finally:
            self._armed = False

    def rival_binds(self, node: str = "n") -> None:
        self.new_ledger("rival").bind(self.ask(self.pod(), node, held=False))

    def replace_pod(self, **changes: Any) -> None:
        self.store.admit(pod(**({"version": "101"} | changes)))

    def end_pod(self) -> None:
        """Replace the pod with an ended pod. This bypasses the store's interface, which accepts a
        newer version only of an unbound pod.
        """
        held = self.pod()
        self.store.delete_pod("a", "p")
        self.store.admit(msgspec.structs.replace(held, status=PodStatus(phase="Succeeded")))


def once(operation: str, when: str, deed: Callable[[], object]) -> Fault:
    """Return a fault that calls ``deed`` at the first matching operation."""
    left = [deed]

    def fault(*at: str) -> None:
        if at == (operation, when) and left:
            left.pop()()

    return fault


def raises(kind: type[StoreError]) -> Callable[[], None]:
    def deed() -> None:
        raise kind(f"a {kind.__name__} for the tests")

    return deed
