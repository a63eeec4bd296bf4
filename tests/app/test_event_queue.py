"""Checks that a replica applies its own changes immediately, and watch events in turns of the event
loop.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from unittest.mock import patch

from extender.extender import Extender
from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Lease, Namespace, Node, Pod, ResourceSlice
from headroom.contract.watched import GPUNodeSeen, NodeSeen, Relisted
from headroom.core.cluster.changes import BindBegun, BindEnded, Event
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.runtime.follow.event_queue import EventQueue
from headroom.runtime.settings.settings import Settings
from headroom.runtime.telemetry import sample_lag
from tests.builders import gpunode, kube_node, pod, shared
from tests.state.states import state_of
from tests.state.validation import violations
from tests.waiting import PATIENCE_S, until, until_then

NOT_PROCESSED = "Headroom has not yet processed the listed objects"

KINDS = (Node, Namespace, GPUNode, Lease, ResourceSlice, Pod)
NAMES = [f"n{i:03d}" for i in range(300)]


def reports(version: int = 1, names: list[str] = NAMES) -> list[Event]:
    stamp, now_s = datetime.now(UTC).isoformat(), time.monotonic()
    return [
        GPUNodeSeen(
            gpunode(shared(f"GPU-{name}"), name=name, observed_at=stamp, version=str(version)),
            now_s,
        )
        for name in names
    ]


def play(script: Callable[[Extender], Awaitable[None]], unlisted: tuple[type, ...] = ()) -> None:
    async def played() -> None:
        await asyncio.wait_for(
            script(Extender(Settings(), lambda: "", unlisted=unlisted)), PATIENCE_S
        )

    asyncio.run(played())


def known(extender: Extender) -> int:
    return len(extender.cluster.snapshot().nodes)


def test_a_burst_of_events_is_applied_in_parts_between_other_tasks() -> None:
    async def script(extender: Extender) -> None:
        extender.enqueue(reports())
        seen: list[int] = []
        idle = asyncio.create_task(extender.event_queue.idle())
        await asyncio.sleep(0)
        while not idle.done():
            seen.append(known(extender))
            await asyncio.sleep(0)
        assert known(extender) == len(NAMES)
        # Calls in between see a part of the events, and never wait until all events are applied.
        assert len([count for count in set(seen) if 0 < count < len(NAMES)]) > 3

    play(script)


def test_the_loop_is_scheduled_once_for_all_queued_changes() -> None:
    async def script(extender: Extender) -> None:
        loop = asyncio.get_running_loop()
        for first in range(0, 100, 50):  # The queue also works after it was empty.
            with patch.object(
                loop, "call_soon_threadsafe", wraps=loop.call_soon_threadsafe
            ) as requeues:
                for name in NAMES[first : first + 50]:
                    extender.enqueue(reports(names=[name]))
                assert requeues.call_count == 1
            await extender.event_queue.idle()
            assert known(extender) == first + 50

    play(script)


def test_changes_of_threads_are_accepted_at_any_time() -> None:
    """This also holds at the moment when the loop has just finished."""

    async def script(extender: Extender) -> None:
        for name in NAMES[:100]:
            await asyncio.to_thread(extender.enqueue, reports(names=[name]))
            await until_then(lambda: not extender.event_queue.is_behind, "all is taken in")
        work = EventQueue._work

        def told_at_last(intake: EventQueue) -> bool:
            more = work(intake)
            if not more and NAMES[100] not in extender.cluster.snapshot().row_of:
                intake._watched.append(
                    reports(names=[NAMES[100]])
                )  # The thread is about to notify the loop.
            return more

        with patch.object(EventQueue, "_work", told_at_last):
            extender.enqueue(reports(names=NAMES[101:102]))
            await until_then(lambda: known(extender) == 102, "all nodes are known")

    with patch("headroom.runtime.follow.event_queue.TOGETHER_S", 0.001):
        play(script)


def test_own_changes_do_not_wait_for_watch_events() -> None:
    async def script(extender: Extender) -> None:
        extender.deliver([NodeSeen(kube_node("n000")), *reports(names=["n000"])])
        free = extender.cluster.snapshot().nodes[0].devices[0].headroom_bytes
        extender.enqueue(reports(version=2))
        await until_then(lambda: known(extender) >= 10, "the first nodes are known")
        reserved = pod("1Gi")
        extender.deliver([BindBegun(reserved, "n000")])
        assert known(extender) < len(NAMES)
        (first, *_) = extender.cluster.snapshot().nodes
        assert first.devices[0].headroom_bytes == free - (1 << 30)
        extender.deliver([BindEnded(reserved.metadata.uid, "n000")])
        (first, *_) = extender.cluster.snapshot().nodes
        assert first.devices[0].headroom_bytes == free
        await extender.event_queue.idle()
        assert known(extender) == len(NAMES)

    play(script)


def test_watch_events_within_50_ms_of_a_snapshot_wait_for_the_same_turn() -> None:
    turn, turns = EventQueue._turn, list[float]()

    def counted(queue: EventQueue) -> None:
        turns.append(time.monotonic())
        turn(queue)

    async def script(extender: Extender) -> None:
        for version in itertools.count(1):
            extender.enqueue(reports(version, NAMES[:1]))
            await extender.event_queue.idle()
            snapshot_s = extender.event_queue._snapshot_at_s
            turns.clear()
            for name in NAMES[1:60]:
                extender.enqueue(reports(version, [name]))
                await asyncio.sleep(0)
            if time.monotonic() - snapshot_s < 0.05:
                break  # A busy machine may need several attempts.
            await extender.event_queue.idle()
        assert turns == []
        await extender.event_queue.idle()
        assert turns
        assert known(extender) == 60

    with patch.object(EventQueue, "_turn", counted):
        play(script)


def test_a_node_with_several_changes_is_weighed_once() -> None:
    async def script(extender: Extender) -> None:
        weighed: list[str] = []

        def weigh(state: ClusterWriter, name: str) -> None:
            weighed.append(name)

        with patch.object(ClusterWriter, "_weigh_again", weigh):
            for version in range(1, 6):
                extender.enqueue(reports(version, NAMES[:4]))
            await extender.event_queue.idle()
        assert sorted(weighed) == NAMES[:4]
        violations()  # Ignore violations, because the nodes were not really weighed.

    play(script)


def test_a_replicas_own_change_causes_no_second_weighing_of_its_node() -> None:
    state = state_of()
    assert list(state.steps([NodeSeen(kube_node("n000")), *reports(names=["n000"])]))
    assert state.parts.queue.is_due
    state.apply([BindBegun(pod("1Gi"), "n000")])
    assert not state.parts.queue.is_due


def test_a_replica_is_not_ready_before_it_has_processed_the_lists() -> None:
    async def script(extender: Extender) -> None:
        lists = {Node: tuple(map(kube_node, NAMES)), GPUNode: ()}
        for kind in KINDS:
            extender.enqueue([Relisted(kind, lists.get(kind, ()), 0.0)])
        assert extender.unready() == NOT_PROCESSED
        while known(extender) < len(NAMES):
            assert extender.unready() == NOT_PROCESSED
            await asyncio.sleep(0)
        await extender.event_queue.idle()
        assert extender.unready() == ""

    play(script, KINDS)


def test_a_later_list_does_not_make_a_replica_unready() -> None:
    async def script(extender: Extender) -> None:
        extender.enqueue([Relisted(Node, tuple(map(kube_node, NAMES)), 0.0)])
        while known(extender) < len(NAMES):
            assert extender.unready() == ""
            await asyncio.sleep(0)

    play(script)


def test_blocking_of_the_loop_is_measured_as_its_lag() -> None:
    async def script(extender: Extender) -> None:
        seen: list[float] = []
        probe = asyncio.create_task(sample_lag(seen.append, every_s=0.01))
        await asyncio.sleep(0)
        time.sleep(0.2)  # noqa: ASYNC251 - what must never happen
        await until_then(lambda: seen, "it is seen")
        probe.cancel()
        assert seen[0] > 0.15

    play(script)


def test_a_watch_that_is_faster_than_the_loop_waits() -> None:
    async def script(extender: Extender) -> None:
        many = [[event] for event in reports()]
        teller = threading.Thread(target=lambda: [extender.enqueue(each) for each in many])
        teller.start()
        until(lambda: len(extender.event_queue._watched) >= 3, "the queue is full")
        teller.join(0.05)  # The loop accepts no events during this time.
        assert (teller.is_alive(), len(extender.event_queue._watched)) == (True, 3)
        await until_then(lambda: not teller.is_alive(), "the thread ends")
        await extender.event_queue.idle()
        assert known(extender) == len(NAMES)

    with (
        patch("headroom.runtime.follow.event_queue.MAX_QUEUED", 3),
        patch("headroom.runtime.follow.event_queue.TOGETHER_S", 0.001),
    ):
        play(script)
