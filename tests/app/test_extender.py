"""Checks that a replica applies the changes from its threads in the order in which they arrive."""

import asyncio
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, cast
from unittest.mock import patch

import msgspec
import pytest
from structlog.testing import capture_logs

from extender import extender
from extender.extender import Extender
from extender.ledger.embedded_store import AsyncStore, EmbeddedStore
from extender.ledger.ledger import Ledger
from extender.reconcile import controller as reconcile
from headroom.contract.annotations import FINALIZER
from headroom.contract.gpunode import GPUNode, GPUNodeSpec, Reservation
from headroom.contract.kube import Container, Node, ObjectMeta, Pod, PodSpec, ResourceRequirements
from headroom.contract.watched import GPUNodeSeen, NamespaceSeen, NodeSeen, PodGone, PodSeen
from headroom.core.cluster.changes import BindBegun, Event, GPUNodeWritten
from headroom.errors import StoreRejected
from headroom.runtime.follow.event_queue import EventQueue
from headroom.runtime.settings.settings import Mode, Settings
from tests.builders import gpunode, kube_node, namespace, shared
from tests.serving import binding, offer
from tests.serving import pod as sent
from tests.state.test_requeue_hints import rejected
from tests.waiting import until_then

WRITTEN_AT_ONCE = 8
TOUCHED_AT_ONCE = 24
REQUEUED_AT_ONCE = 8
CONNECTIONS = 32

GPU = ResourceRequirements(limits={"nvidia.com/gpu": "1"})


def bound_pod(uid: str) -> Pod:
    spec = PodSpec(containers=[Container(name="main", resources=GPU)], node_name="n")
    return Pod(metadata=ObjectMeta(name=uid, namespace="default", uid=uid), spec=spec)


def test_nothing_is_reconciled_before_the_cluster_was_listed() -> None:
    async def play(unready: str) -> list[str]:
        extender = Extender(Settings(), unready=lambda: unready)
        extender.reconciler.every_s, extender.reconciler.ready_every_s = 3600.0, 0.01
        looked_into: list[str] = []

        class Evictor:
            @property
            def reservations(self) -> "Evictor":
                return self

            async def departed_by(self, node: str, uid: str, reservation: Reservation) -> str:
                looked_into.append(uid)
                return ""

        old = Reservation(namespace="default", name="p", since="2020-01-01T00:00:00Z")
        spec = GPUNodeSpec(initialised=True, reservations={"u": old})
        node = GPUNode(metadata=ObjectMeta(name="n"), spec=spec)
        extender.deliver([GPUNodeSeen(node, 0.0)])
        await extender.reconciler.once(cast(Ledger, Evictor()))
        return looked_into

    assert asyncio.run(play("pods were not listed yet")) == []
    assert asyncio.run(play("")) == ["u"]


def test_a_finalizer_that_cannot_be_removed_blocks_no_other_node() -> None:
    async def play() -> list[str]:
        extender = Extender(Settings(), unready=lambda: "")
        initialised: list[str] = []

        class Evictor:
            @property
            def initialiser(self) -> "Evictor":
                return self

            async def remove_finalizer(self, names: Iterable[str]) -> None:
                raise StoreRejected(f"released {list(names)}")

            async def initialise(self, nodes: Iterable[Node]) -> list[str]:
                initialised.extend(node.metadata.name for node in nodes)
                return initialised

        held = ObjectMeta(name="old", finalizers=[FINALIZER], deletion_timestamp="now")
        old = GPUNode(metadata=held, spec=GPUNodeSpec())
        extender.deliver([NodeSeen(kube_node("n")), GPUNodeSeen(old, 0.0)])
        await extender.reconciler.once(cast(Ledger, Evictor()))
        return initialised

    assert asyncio.run(play()) == ["n"]


def test_nodes_are_initialised_before_the_next_round() -> None:
    """Test both a node from the first list and a new node."""

    async def play() -> None:
        unready = "nodes were not listed yet"
        extender = Extender(Settings(), unready=lambda: unready)
        extender.reconciler.every_s, extender.reconciler.ready_every_s = 3600.0, 0.01
        initialised: list[str] = []

        class Initialiser:
            async def initialise(self, nodes: Iterable[Node]) -> list[str]:
                for node in nodes:
                    name = node.metadata.name
                    initialised.append(name)
                    extender.deliver([GPUNodeSeen(gpunode(name=name), 0.0)])
                return initialised

        class Evictor:
            initialiser = Initialiser()

        extender.deliver([NodeSeen(kube_node("old"))])
        extender.reconciler.start(cast(Ledger, Evictor()))
        await asyncio.sleep(0.05)
        assert initialised == []
        unready = ""
        await until_then(lambda: initialised == ["old"], "the listed node is initialised")
        extender.deliver([NodeSeen(kube_node("new"))])
        await until_then(lambda: initialised == ["old", "new"], "the new node is initialised")
        extender.loops.stop()

    asyncio.run(play())


class Open:
    """A slow ledger that counts concurrent callers."""

    def __init__(self) -> None:
        self.now = self.most = self.done = 0
        self.reservations = self

    async def departed_by(self, node: str, uid: str, reservation: Reservation) -> str:
        await self._wait()
        return ""

    async def requeue(self, pod: Pod) -> str:
        await self._wait()
        return "retry"

    async def _wait(self) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        self.done += 1


def test_reconciling_leaves_connections_for_binds() -> None:
    async def play() -> tuple[int, int]:
        extender, ledger = Extender(Settings(), unready=lambda: ""), Open()
        for name in (f"n{number}" for number in range(3 * WRITTEN_AT_ONCE)):
            # The reservation belongs to a deleted pod.
            reservations = {f"uid-{name}": Reservation(namespace="default", name=name)}
            spec = GPUNodeSpec(initialised=True, reservations=reservations)
            node = GPUNode(metadata=ObjectMeta(name=name), spec=spec)
            extender.deliver([NodeSeen(kube_node(name)), GPUNodeSeen(node, 0.0)])
            extender.deliver([PodGone(f"uid-{name}")])
        await extender.reconciler.once(cast(Ledger, ledger))
        return ledger.done, ledger.most

    most = WRITTEN_AT_ONCE
    assert asyncio.run(play()) == (3 * most, most)


def test_touches_leave_connections_for_binds() -> None:
    async def play() -> tuple[int, int]:
        ledger = Open()
        await extender.gathered(ledger._wait() for _ in range(3 * TOUCHED_AT_ONCE))
        return ledger.done, ledger.most

    most = TOUCHED_AT_ONCE
    assert asyncio.run(play()) == (3 * most, most)
    assert most <= CONNECTIONS - 8


def test_requeues_leave_connections_for_binds() -> None:
    async def play() -> tuple[int, int]:
        extender, ledger = Extender(Settings(mode=Mode.OBSERVE), unready=lambda: ""), Open()
        waiting = [rejected(f"p{number}") for number in range(3 * REQUEUED_AT_ONCE)]
        extender.deliver([PodSeen(pod) for pod in waiting])
        await extender.requeue_controller.once(cast(Ledger, ledger))
        return ledger.done, ledger.most

    most = REQUEUED_AT_ONCE
    assert asyncio.run(play()) == (3 * most, most)


def test_other_tasks_run_between_any_two_parts_of_the_fleet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call of kube-scheduler waits for at most one part of the work of any reconciler."""
    names = [f"n{number}" for number in range(7)]
    tasks = ("unreserved_pods", "being_deleted", "orphans", "uninitialised")
    looked_at: dict[int, set[str]] = {}
    done: set[str] = set()
    turn = 0

    def noting(task: str) -> None:
        does = getattr(reconcile, task)

        def look(*shown: Any) -> Any:
            of = {each if isinstance(each, str) else each.metadata.name for each in shown[-1]}
            looked_at.setdefault(turn, set()).update(of)
            done.update(f"{task} {name}" for name in of)
            return does(*shown)

        monkeypatch.setattr(reconcile, task, look)

    async def play() -> None:
        nonlocal turn
        extender = Extender(Settings(), unready=lambda: "")
        extender.reconciler.at_once = 3
        for name in names:
            node = GPUNode(metadata=ObjectMeta(name=name), spec=GPUNodeSpec(initialised=True))
            extender.deliver([NodeSeen(kube_node(name)), GPUNodeSeen(node, 0.0)])
        for task in tasks:
            noting(task)
        everything = asyncio.create_task(extender.reconciler.once(cast(Ledger, None)))
        while not everything.done():
            turn += 1
            await asyncio.sleep(0)
        await everything

    asyncio.run(play())
    assert done == {f"{task} {name}" for task in tasks for name in names}
    assert max(map(len, looked_at.values())) == 3
    # No turn has two parts, even if different reconcilers check the same nodes.
    assert len(looked_at) == 3 * 3


def test_a_wall_clock_that_is_set_after_the_start_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play() -> float:
        extender = Extender(Settings(), unready=lambda: "")
        right_s = time.time() + 3600.0
        monkeypatch.setattr(time, "time", lambda: right_s)
        stamp = datetime.fromtimestamp(right_s, UTC).isoformat()
        now_s = time.monotonic()
        extender.deliver(
            [NodeSeen(kube_node("n")), GPUNodeSeen(gpunode(shared(), observed_at=stamp), now_s)]
        )
        (node,) = extender.cluster.snapshot().nodes
        return node.fresh_until_s - now_s

    assert asyncio.run(play()) > 0


def test_changes_of_another_thread_are_applied_in_order() -> None:
    async def play() -> Pod | None:
        extender = Extender(Settings(), unready=lambda: "")
        # A bind thread delivers that the pod is bound. The loop delivers that the pod was deleted
        # later.
        received = threading.Thread(target=extender.deliver, args=([PodSeen(bound_pod("u"))],))
        received.start()
        received.join()
        extender.deliver([PodGone("u")])
        await asyncio.sleep(0)
        return extender.cluster.pod("u")

    assert asyncio.run(play()) is None


def test_kube_schedulers_calls_do_not_wait_for_a_check_of_all_pending_pods() -> None:
    async def play() -> int:
        extender = Extender(Settings(), unready=lambda: "")
        stamp = datetime.now(UTC).isoformat()
        node = gpunode(shared("a"), observed_at=stamp)
        extender.deliver([NodeSeen(kube_node()), GPUNodeSeen(node, time.monotonic())])
        # No pod fits, and each pod is checked separately because all requests differ.
        waiting = [rejected(f"p{i}", f"{30_000 + i}Mi") for i in range(400)]
        extender.deliver([PodSeen(pod) for pod in waiting])
        turns = 0

        async def calls() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        others = asyncio.create_task(calls())
        await extender.requeue_controller.once(cast(Ledger, None))
        others.cancel()
        return turns

    # The check takes at least a tenth of a second, but in steps of a few milliseconds.
    assert asyncio.run(play()) > 10


def test_a_bind_enters_the_event_queue_twice() -> None:
    """The bind enters the queue once before it writes the reservation, and once with the written
    reservation.
    """
    own: list[list[type]] = []
    deliver = EventQueue.deliver

    def counted(queue: EventQueue, events: Sequence[Event]) -> None:
        own.append([type(event) for event in events])
        deliver(queue, events)

    async def play() -> None:
        extender = Extender(Settings(mode=Mode.ENFORCE), unready=lambda: "")
        store = EmbeddedStore(extender.enqueue, time.monotonic)
        verbs = extender.verbs(extender.open_ledger(AsyncStore(store)))
        node = gpunode(shared("a"), observed_at=datetime.now(UTC).isoformat())
        store.create_gpunode(node)
        assert node.status is not None
        store.report([("n", node.status)])
        extender.enqueue([NodeSeen(kube_node())])
        single = sent("p", "1Gi")
        store.admit(msgspec.convert(single, Pod))
        await extender.event_queue.idle()
        answer = await verbs.bind(msgspec.json.encode(binding(single, "n")))
        assert msgspec.json.decode(answer) == {"Error": ""}
        assert extender.cluster.holds.all_binding() == {}

    with capture_logs(), patch.object(EventQueue, "deliver", counted):
        asyncio.run(play())
    assert own == [[BindBegun], [GPUNodeWritten]]


def test_a_request_is_parsed_again_when_the_default_of_its_namespace_changes() -> None:
    async def play() -> list[list[int]]:
        extender = Extender(Settings(), unready=lambda: "")
        ledger = extender.open_ledger(AsyncStore(EmbeddedStore(extender.deliver, time.monotonic)))
        verbs = extender.verbs(ledger)
        node = gpunode(shared("a"), observed_at=datetime.now(UTC).isoformat())
        extender.deliver([NodeSeen(kube_node()), GPUNodeSeen(node, time.monotonic())])
        body = msgspec.json.encode(offer(sent("p", None), "n"))
        message = []
        for default in ("1Gi", "500Gi"):
            annotated = namespace("default", {"headroom.gpu/default-vram": default})
            extender.deliver([NamespaceSeen(annotated)])
            message.append([each["Score"] for each in msgspec.json.decode(verbs.prioritize(body))])
        return message

    with capture_logs():
        assert asyncio.run(play()) == [[10], []]
