"""kube-scheduler's calls come first, then what we did ourselves, then what the cluster tells."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from unittest.mock import patch

import pytest

from contract.gpunode import GPUNode
from contract.kube import Lease, Namespace, Node, Pod, ResourceSlice
from extender.cluster.events import BindBegun, BindEnded, Event, GPUNodeSeen, NodeSeen, Relisted
from extender.cluster.state import ClusterState
from extender.settings import Settings
from extender.web.calls import GIVE_WAY_S, Calls
from extender.wiring.clusterview import NOT_TAKEN_IN
from extender.wiring.intake import Intake
from extender.wiring.lag import sample_lag
from extender.wiring.replica import Extender
from tests.builders import gpunode, kube_node, pod, shared
from tests.waiting import until_then

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


def play(script: Callable[[Extender], Awaitable[None]], awaited: tuple[type, ...] = ()) -> None:
    async def played() -> None:
        await asyncio.wait_for(script(Extender(Settings(), lambda: "", awaited=awaited)), 60)

    asyncio.run(played())


def known(extender: Extender) -> int:
    return len(extender.cluster.snapshot().nodes)


def test_a_burst_is_applied_between_the_turns_of_others() -> None:
    async def script(extender: Extender) -> None:
        extender.tell(reports())
        seen: list[int] = []
        idle = asyncio.create_task(extender.intake.idle())
        await asyncio.sleep(0)
        while not idle.done():
            seen.append(known(extender))
            await asyncio.sleep(0)
        assert known(extender) == len(NAMES)
        # Whoever called meanwhile found some of it done, and never had to wait for all of it.
        assert len([count for count in set(seen) if 0 < count < len(NAMES)]) > 3

    play(script)


def test_nothing_is_applied_while_a_call_is_under_way_but_calls_cannot_hold_it_up_for_ever() -> (
    None
):
    async def script(extender: Extender) -> None:
        extender.calls.under_way = 1
        extender.tell(reports(names=NAMES[:3]))
        until_s = time.monotonic() + GIVE_WAY_S / 2
        while time.monotonic() < until_s:
            await asyncio.sleep(0)
            assert known(extender) == 0
        await extender.intake.idle()
        assert known(extender) == 3

    play(script)


def test_who_reads_a_watch_gives_way_to_calls_and_the_loop_does_not() -> None:
    async def script(extender: Extender) -> None:
        with patch.object(Calls, "give_way") as waits:
            extender.tell(reports(names=NAMES[:1]))
            waits.assert_not_called()
            await asyncio.to_thread(extender.tell, reports(names=NAMES[1:2]))
            waits.assert_called_once()
        await extender.intake.idle()
        assert known(extender) == 2

    play(script)


def test_the_loop_is_woken_once_for_all_that_is_told_before_it_is_done() -> None:
    async def script(extender: Extender) -> None:
        loop = asyncio.get_running_loop()
        for first in range(0, 100, 50):  # and again after it was done
            with patch.object(
                loop, "call_soon_threadsafe", wraps=loop.call_soon_threadsafe
            ) as wakes:
                for name in NAMES[first : first + 50]:
                    extender.tell(reports(names=[name]))
                assert wakes.call_count == 1
            await extender.intake.idle()
            assert known(extender) == first + 50

    play(script)


def test_what_threads_tell_at_any_moment_is_taken() -> None:
    """Also at the very moment at which the loop is done with all that it knew of."""

    async def script(extender: Extender) -> None:
        for name in NAMES[:100]:
            await asyncio.to_thread(extender.tell, reports(names=[name]))
            await until_then(lambda: not extender.intake.is_behind, "all is taken in")
        work = Intake._work

        def told_at_last(intake: Intake) -> bool:
            more = work(intake)
            if not more and NAMES[100] not in extender.cluster.snapshot().row_of:
                intake._told.append(reports(names=[NAMES[100]]))  # its thread is about to wake us
            return more

        with patch.object(Intake, "_work", told_at_last):
            extender.tell(reports(names=NAMES[101:102]))
            await until_then(lambda: known(extender) == 102, "all nodes are known")

    play(script)


def test_what_we_did_ourselves_waits_for_nothing_that_was_told() -> None:
    async def script(extender: Extender) -> None:
        extender.deliver([NodeSeen(kube_node("n000")), *reports(names=["n000"])])
        free = extender.cluster.snapshot().nodes[0].devices[0].headroom_bytes
        extender.tell(reports(version=2))
        await until_then(lambda: known(extender) >= 10, "the first nodes are known")
        promised = pod("1Gi")
        extender.deliver([BindBegun(promised, "n000")])
        assert known(extender) < len(NAMES)
        (first, *_) = extender.cluster.snapshot().nodes
        assert first.devices[0].headroom_bytes == free - (1 << 30)
        extender.deliver([BindEnded(promised.metadata.uid, "n000")])
        (first, *_) = extender.cluster.snapshot().nodes
        assert first.devices[0].headroom_bytes == free
        await extender.intake.idle()
        assert known(extender) == len(NAMES)

    play(script)


def test_a_node_that_was_told_of_several_times_is_weighed_once() -> None:
    async def script(extender: Extender) -> None:
        weighed: list[str] = []

        def weigh(state: ClusterState, name: str) -> None:
            weighed.append(name)

        with patch.object(ClusterState, "_weigh_again", weigh):
            for version in range(1, 6):
                extender.tell(reports(version, NAMES[:4]))
            await extender.intake.idle()
        assert sorted(weighed) == NAMES[:4]

    play(script)


def test_a_replica_is_not_ready_before_it_has_taken_in_what_was_listed() -> None:
    async def script(extender: Extender) -> None:
        lists = {Node: tuple(map(kube_node, NAMES)), GPUNode: ()}
        for kind in KINDS:
            extender.tell([Relisted(kind, lists.get(kind, ()), 0.0)])
        assert extender.unready() == NOT_TAKEN_IN
        while known(extender) < len(NAMES):
            assert extender.unready() == NOT_TAKEN_IN
            await asyncio.sleep(0)
        await extender.intake.idle()
        assert extender.unready() == ""

    play(script, KINDS)


def test_a_list_that_comes_later_makes_no_replica_unready() -> None:
    async def script(extender: Extender) -> None:
        extender.tell([Relisted(Node, tuple(map(kube_node, NAMES)), 0.0)])
        while known(extender) < len(NAMES):
            assert extender.unready() == ""
            await asyncio.sleep(0)

    play(script)


def test_a_thread_that_computes_gives_way_to_calls_for_a_moment() -> None:
    calls, done = Calls(), threading.Event()

    def compute() -> None:
        calls.give_way()
        done.set()

    compute()
    assert done.is_set()
    done.clear()
    with patch("extender.web.calls.GIVE_WAY_S", 3600.0):
        calls.begin()
        thread = threading.Thread(target=compute, daemon=True)
        thread.start()
        assert not done.wait(0.05)
        calls.end()
        assert done.wait(30)
        thread.join(30)


def test_a_thread_that_computes_sleeps_now_and_then_though_nobody_calls() -> None:
    """Whatever lets go of the interpreter only for a moment lets nobody else have it."""
    calls, now_s, slept = Calls(), [100.0], list[float]()
    with (
        patch("extender.web.calls.time.monotonic", lambda: now_s[0]),
        patch("extender.web.calls.time.sleep", slept.append),
    ):
        calls.give_way()
        assert len(slept) == 1
        for _ in range(20):
            now_s[0] += 0.0001
            calls.give_way()
        assert len(slept) in (4, 5)


def test_a_call_that_does_not_end_is_given_way_to_once() -> None:
    """A client may send its body slowly, and what the cluster tells is many objects."""
    calls, slept = Calls(), list[float]()
    with (
        patch("extender.web.calls.time.monotonic", lambda: 100.0 + sum(slept)),
        patch("extender.web.calls.time.sleep", slept.append),
    ):
        calls.begin()
        for _ in range(3):
            calls.give_way()
        assert sum(slept) == pytest.approx(GIVE_WAY_S, abs=0.001)
        calls.begin()  # another one meanwhile is no reason either
        calls.give_way()
        assert sum(slept) == pytest.approx(GIVE_WAY_S, abs=0.001)
        calls.end()
        calls.end()
        calls.begin()
        calls.give_way()
        assert sum(slept) == pytest.approx(2 * GIVE_WAY_S, abs=0.002)


def test_what_keeps_the_loop_is_seen_as_its_lag() -> None:
    async def script(extender: Extender) -> None:
        seen: list[float] = []
        probe = asyncio.create_task(sample_lag(seen.append, every_s=0.01))
        await asyncio.sleep(0)
        time.sleep(0.2)  # noqa: ASYNC251 - what must never happen
        await until_then(lambda: seen, "it is seen")
        probe.cancel()
        assert seen[0] > 0.15

    play(script)


def test_a_watch_that_outruns_the_loop_waits() -> None:
    async def script(extender: Extender) -> None:
        many = [[event] for event in reports()]
        teller = threading.Thread(target=lambda: [extender.tell(each) for each in many])
        teller.start()
        teller.join(0.2)  # the loop takes nothing meanwhile
        assert (teller.is_alive(), len(extender.intake._told)) == (True, 3)
        await until_then(lambda: not teller.is_alive(), "the thread ends")
        await extender.intake.idle()
        assert known(extender) == len(NAMES)

    with patch("extender.wiring.intake.MAX_TOLD", 3):
        play(script)
