"""Checks that an exception in the state, in a callback or in a loop stops nothing permanently."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, cast

import httpx
import pytest

from extender.extender import Extender
from extender.ledger.ledger import Ledger
from extender.reconcile.controller import ReconcileController
from extender.requeue.controller import RequeueController
from headroom.contract.gpunode import GPUNode, GPUNodeSpec, Reservation
from headroom.contract.kube import Node, ObjectMeta
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodGone
from headroom.core.cluster.changes import Event
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.cluster.node_weigher import NodeWeigher
from headroom.core.cluster.trackers.deleted_pods import DeletedPods
from headroom.core.cluster.trackers.sm_activity import Activities
from headroom.core.eviction.back_offs import BackOffs
from headroom.runtime.loops import Loops, progressed
from headroom.runtime.settings.settings import Settings
from tests.builders import kube_node
from tests.waiting import PATIENCE_S, until_then

STUCK_AFTER_S = 30.0


class Bug(Exception):
    pass


def raises_at(monkeypatch: pytest.MonkeyPatch, where: type, name: str, nth: int) -> list[int]:
    """Make the n-th call of this method raise an exception. Return a list with the number
    of calls.
    """
    works, calls = getattr(where, name), [0]

    def once(*args: Any, **how: Any) -> Any:
        calls[0] += 1
        if calls[0] == nth:
            raise Bug(name)
        return works(*args, **how)

    monkeypatch.setattr(where, name, once)
    return calls


def seen(name: str) -> list[Event]:
    gpunode = GPUNode(metadata=ObjectMeta(name=name, uid=name, resource_version="1"))
    return [NodeSeen(kube_node(name)), GPUNodeSeen(gpunode, 0.0)]


def failures(extender: Extender, loop: str) -> float:
    value = extender.telemetry.registry.get_sample_value(
        "headroom_loop_failures_total", {"loop": loop}
    )
    return value or 0.0


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize(
    ("where", "method"),
    [
        (ClusterWriter, "settle"),
        (NodeWeigher, "terms_of"),
        (DeletedPods, "node_seen"),
        (BackOffs, "gpunode_seen"),
        (Activities, "node_weighed"),
        (RequeueController, "react"),
        (ReconcileController, "react"),
    ],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_all_changes_of_the_cluster_arrive(
    monkeypatch: pytest.MonkeyPatch, where: type, method: str, nth: int
) -> None:
    calls = raises_at(monkeypatch, where, method, nth)

    async def play() -> None:
        extender = Extender(Settings(), lambda: "")
        extender.event_queue.retry_s, extender.event_queue.together_s = 0.01, 0.001
        names = [f"n{number}" for number in range(4)]
        for name in names:
            extender.enqueue(seen(name))
            extender.deliver(seen(f"ours-{name}"))
            await asyncio.sleep(0)
        await until_then(lambda: calls[0] >= nth, "the call that fails")
        everywhere = {*names, *(f"ours-{name}" for name in names)}
        await until_then(
            lambda: {n.name for n in extender.cluster.settled().nodes} == everywhere,
            "all nodes are known",
        )
        await asyncio.wait_for(extender.event_queue.idle(), PATIENCE_S)
        assert failures(extender, "event_queue") == 1
        assert extender.stuck() == {}

    asyncio.run(play())


class Deaf:
    """A ledger in which each method raises an exception once. It records all calls."""

    def __init__(self) -> None:
        self.raised: set[str] = set()
        self.called: set[str] = set()
        self.reservations = self.initialiser = self

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any) -> Any:
            if name not in self.raised:
                self.raised.add(name)
                raise Bug(name)
            self.called.add(name)
            return []

        return call


def test_reconciling_continues_whatever_the_ledger_raises() -> None:
    async def play() -> None:
        extender, ledger = Extender(Settings(), lambda: ""), Deaf()
        extender.reconciler.every_s = 0.02
        extender.reconciler.start(cast(Ledger, ledger))
        extender.deliver([NodeSeen(kube_node("n"))])
        gone = ObjectMeta(name="old", finalizers=["headroom.gpu/ledger"], deletion_timestamp="now")
        extender.deliver([GPUNodeSeen(GPUNode(metadata=gone), 0.0)])
        await until_then(
            lambda: {"initialise", "remove_finalizer"} <= ledger.called, "both are called"
        )
        assert failures(extender, "nodes") == len(ledger.raised)
        extender.loops.stop()

    asyncio.run(play())


def test_a_loop_continues_after_an_exception_and_counts_it() -> None:
    async def play() -> tuple[int, list[str]]:
        failed: list[str] = []
        loops, rounds, wanted = (
            Loops(lambda name: partial(failed.append, name)),
            [0],
            asyncio.Event(),
        )

        async def once() -> None:
            rounds[0] += 1
            if rounds[0] < 3:
                raise Bug

        loops.start("x", once, 0.01, wanted)
        await until_then(lambda: rounds[0] >= 4, "four rounds")
        loops.stop()
        return rounds[0], failed

    rounds, failed = asyncio.run(play())
    assert rounds >= 4
    assert failed == ["x", "x"]


def test_a_task_that_ends_is_restarted() -> None:
    async def play() -> list[str]:
        failed: list[str] = []
        loops = Loops(lambda name: partial(failed.append, name))

        async def work() -> None:
            if len(failed) < 2:
                raise Bug
            await asyncio.Event().wait()

        loops.again_after_s = 0.0
        loops.keep("y", work)
        await until_then(lambda: len(failed) == 2, "both fail")
        loops.stop()
        return failed

    assert asyncio.run(play()) == ["y", "y"]


def test_a_round_without_progress_is_stuck_and_health_shows_it() -> None:
    async def play() -> None:
        clock, going = [0.0], asyncio.Event()
        extender = Extender(Settings(), lambda: "")
        extender.loops = loops = Loops(lambda name: lambda: None, lambda: clock[0])

        async def once() -> None:
            await going.wait()
            progressed()
            going.clear()
            await going.wait()

        loops.start("x", once, 60.0)
        await asyncio.sleep(0)
        transport = httpx.ASGITransport(extender.app())

        async def health() -> tuple[int, str]:
            async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
                answer = await client.get("/healthz")
                return answer.status_code, answer.text

        assert await health() == (200, "ok\n")
        clock[0] = STUCK_AFTER_S + 1.0
        assert await health() == (503, "x has made no progress for 31 s\n")
        going.set()
        await until_then(lambda: not going.is_set(), "the round begins")
        assert await health() == (200, "ok\n")
        clock[0] += STUCK_AFTER_S + 1.0
        assert (await health())[0] == 503
        going.set()  # The round ends, and the loop waits for the next round.
        await until_then(lambda: not loops.stuck(), "no loop is stuck")
        clock[0] += 2 * STUCK_AFTER_S
        assert await health() == (200, "ok\n")
        loops.stop()

    asyncio.run(play())


class Slow:
    """A ledger whose calls for one node never return."""

    def __init__(self) -> None:
        self.done: set[str] = set()
        self.reservations = self.initialiser = self

    async def departed_by(self, node: str, uid: str, reservation: object) -> str:
        if node == "slow":
            await asyncio.Event().wait()
        self.done.add(node)
        return ""

    async def initialise(self, nodes: Iterable[Node]) -> list[str]:
        self.done.update(node.metadata.name for node in nodes)
        return []


def test_a_node_that_cannot_be_checked_delays_no_other_node() -> None:
    async def play() -> None:
        extender, ledger = Extender(Settings(), lambda: ""), Slow()
        extender.reconciler.waited_s = extender.reconciler.ready_every_s = 0.01
        extender.reconciler.start(cast(Ledger, ledger))
        extender.deliver(promised("slow"))
        await asyncio.sleep(0.05)
        extender.deliver(promised("quick"))
        extender.deliver([NodeSeen(kube_node("new"))])
        extender.deliver(seen("new-too")[1:])
        await until_then(lambda: {"quick", "new"} <= ledger.done, "the others are done")
        extender.loops.stop()

    asyncio.run(play())


def promised(node: str) -> list[Event]:
    """Return the events of a node with a reservation of a deleted pod."""
    return [
        NodeSeen(kube_node(node)),
        GPUNodeSeen(reserved(node), 0.0),
        PodGone(f"uid-{node}"),
    ]


def reserved(node: str) -> GPUNode:
    reservations = {f"uid-{node}": Reservation(namespace="default", name=node)}
    spec = GPUNodeSpec(initialised=True, reservations=reservations)
    return GPUNode(metadata=ObjectMeta(name=node), spec=spec)


def test_the_failures_of_a_loop_are_counted_from_its_start() -> None:
    names: list[str] = []

    def failures_of(name: str) -> Callable[[], None]:
        names.append(name)
        return lambda: None

    async def work() -> None:
        await asyncio.sleep(60)

    async def play() -> None:
        loops = Loops(failures_of)
        loops.start("rounds", work, 60.0)
        loops.keep("endless", work)
        loops.stop()

    asyncio.run(play())
    assert names == ["rounds", "endless"]
