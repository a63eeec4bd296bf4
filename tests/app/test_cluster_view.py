"""Tests the view of the cluster in a console without an extender."""

import asyncio
import time

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from headroom.console.console import Console
from headroom.contract.gpunode import EVICTED, GPUNode
from headroom.contract.reasons import Reason
from headroom.contract.watched import GPUNodeSeen, NodeSeen
from headroom.core.journal.decision_records import Bounds
from headroom.core.journal.journal import Journal
from headroom.core.whatif.pending_pods import Pending
from headroom.runtime.follow.cluster_view import ClusterView
from headroom.runtime.settings.settings import Settings
from headroom.runtime.telemetry import ViewTelemetry
from tests.builders import GIB, gpunode, kube_node, reservation, shared, use
from tests.waiting import until_then


def evicting() -> GPUNode:
    """Return a node on which one pod is marked for eviction and another pod exceeds its reservation
    by 1 GiB.
    """
    marked = msgspec.structs.replace(reservation({"GPU-0": GIB}), flags=[EVICTED])
    return gpunode(
        shared("GPU-0", used_bytes=5 * GIB),
        reservations={"u-marked": marked, "u-over": reservation({"GPU-0": 4 * GIB})},
        pods=[use("u-over", "GPU-0", 5 * GIB)],
    )


def test_a_console_without_an_extender_ends_back_offs_and_shows_overuse() -> None:
    """In its own process, the console relies on its own clock for this."""

    async def play() -> tuple[Reason | None, Reason | None, list[tuple[str, int]]]:
        telemetry = ViewTelemetry(CollectorRegistry(), "headroom_console_ready")
        settings = Settings(overuse_after_s=0.0)
        view = ClusterView(settings, lambda: "", telemetry)
        view.clock_every_s = 0.01
        # The first back-off takes 10 s.
        seen_at_s = time.monotonic() - 9.5
        view.enqueue([NodeSeen(kube_node("n")), GPUNodeSeen(evicting(), seen_at_s)])
        await view.event_queue.idle()
        (before,) = view.cluster.snapshot().nodes
        view.start()
        try:
            await until_then(lambda: not view.cluster.backs_off("n"), "the back-off ends")
            await until_then(lambda: view.cluster.overuses.lasting, "the overuse is shown")
            await view.event_queue.idle()
            (after,) = view.cluster.snapshot().nodes
        finally:
            view.loops.stop()
        overuse = [(each.uid, each.excess_bytes) for each in view.cluster.overuses.lasting]
        return before.reason, after.reason, overuse

    assert asyncio.run(play()) == (Reason.EVICTED_RECENTLY, None, [("u-over", GIB)])


@pytest.mark.parametrize("alone", [True, False])
def test_only_a_process_that_makes_decisions_builds_a_snapshot_after_each_turn(alone: bool) -> None:
    async def play() -> tuple[int, tuple[str, ...]]:
        telemetry = ViewTelemetry(CollectorRegistry(), "headroom_console_ready")
        view = ClusterView(Settings(), lambda: "", telemetry)
        Console(view, Pending, None if alone else Journal(Bounds()))
        for name in "abc":
            view.enqueue([NodeSeen(kube_node(name))])
            await view.event_queue.idle()
        return view.cluster.generation, view.cluster.snapshot().names

    generation, names = asyncio.run(play())
    assert names == ("a", "b", "c")
    # On a busy machine, one change can be applied in two turns.
    assert generation == 1 if alone else generation >= 3
