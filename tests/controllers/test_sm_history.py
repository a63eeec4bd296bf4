"""Checks that SM activity history is enqueued node by node, and only after changes."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

from extender.extender import Extender
from headroom.contract.watched import GPUNodeSeen, NodeSeen
from headroom.core.cluster.changes import ActivitySeen, Event
from headroom.runtime.follow.sm_history import sm_history
from headroom.runtime.settings.settings import Settings
from tests.agent.exporter import StandIn
from tests.builders import gpunode, kube_node, shared
from tests.controllers.test_promql import body
from tests.waiting import until_then

HISTORY = "dcgm-history"

NODES = 100


class Watched(Extender):
    """An extender that records the queued changes."""

    parts: list[ActivitySeen]

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.enqueue = self._keep

    def _keep(self, events: Sequence[Event]) -> None:
        self.parts += [event for event in events if isinstance(event, ActivitySeen)]
        self.event_queue.enqueue(events)


def history_of(
    settings: Settings, extender: Extender
) -> contextlib.AbstractAsyncContextManager[None]:
    return sm_history(settings, extender.telemetry, extender.cluster.activities, extender.enqueue)


def answer(ratios: dict[int, float]) -> str:
    """Return a query result that was evaluated now, according to this machine's clock."""
    now_s = time.time()
    shown = (
        (kind, f"GPU-{i}", value)
        for i, ratio in ratios.items()
        for kind, value in (("ratio", ratio), ("at", now_s))
    )
    return body(
        *({"metric": {"figure": kind, "UUID": uuid}, "value": [now_s, str(value)]}
          for kind, uuid, value in shown)
    ).decode()  # fmt: skip


def test_only_changes_are_enqueued_in_small_batches() -> None:
    async def play() -> None:
        with StandIn().serving() as server:
            server.text = answer({i: 0.5 for i in range(NODES)})
            settings = Settings(prometheus_url=server.url)
            # Refresh more often than a settings file may request.
            settings = settings.model_copy(update={"prometheus_refresh_s": 0.05})
            Watched.parts = []
            extender = Watched(settings, unready=lambda: "")
            for i in range(NODES):
                node = gpunode(shared(f"GPU-{i}"), name=f"n{i}", uid=f"g{i}")
                extender.deliver([NodeSeen(kube_node(f"n{i}")), GPUNodeSeen(node, 0.0)])

            def activities() -> dict[str, float]:
                return {
                    node.name: terms.activity.ratio
                    for node in extender.cluster.snapshot().nodes
                    for terms in node.devices
                    if terms.activity is not None and terms.activity.source == HISTORY
                }

            async with sm_history(
                settings, extender.telemetry, extender.cluster.activities, extender.enqueue
            ):
                await until_then(lambda: len(activities()) == NODES, "all are known")
                named = [len(part.nodes) for part in extender.parts if part.nodes]
                assert named == [1] * NODES
                server.text = answer({i: 0.9 if i == 7 else 0.51 for i in range(NODES)})
                await until_then(lambda: activities()["n7"] == 0.9, "the change is known")
                assert activities()["n8"] == 0.5
                since = [part.nodes for part in extender.parts if part.nodes][len(named) :]
                assert since == [("n7",)]
                server.status = 500
                metrics = extender.telemetry.registry
                failed = {"outcome": "failed"}
                await until_then(
                    lambda: metrics.get_sample_value("headroom_history_queries_total", failed),
                    "a query fails",
                )
                assert metrics.get_sample_value("headroom_history_devices") == NODES
            parts = len(extender.parts)
            asked = server.asked
            await asyncio.sleep(0.2)
            assert (len(extender.parts), server.asked) == (parts, asked)

    asyncio.run(play())


def test_without_a_prometheus_there_are_no_queries() -> None:
    async def play() -> None:
        extender = Extender(Settings(), unready=lambda: "")
        async with sm_history(
            extender.settings, extender.telemetry, extender.cluster.activities, extender.enqueue
        ):
            assert "prometheus" not in {thread.name for thread in threading.enumerate()}

    asyncio.run(play())
