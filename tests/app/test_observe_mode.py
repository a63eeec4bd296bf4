"""Checks that in observe mode a replica evicts no pods and writes no Events, and requeues rejected
pods.
"""

import asyncio
from typing import cast

import pytest

from extender.eviction.controller import EvictionController
from extender.extender import Extender
from extender.ledger.ledger import Ledger
from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Pod
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodGone, PodSeen
from headroom.core.cluster.notices import Notice
from headroom.runtime.settings.settings import Mode, Settings
from tests.builders import gpunode, kube_node, pod, reservation, shared
from tests.state.test_requeue_hints import rejected

OBSERVE, ENFORCE = Settings(mode=Mode.OBSERVE), Settings()


class Looks:
    """An eviction controller that counts its searches for pods to evict."""

    def __init__(self) -> None:
        self.times = 0

    async def once(self) -> None:
        self.times += 1


def overcommitted() -> GPUNode:
    """Return a node whose device of 24 GiB is overcommitted by two unreserved pods."""
    reservations = {uid: reservation({"GPU-0": 20 << 30}) for uid in ("uid-a", "uid-b")}
    return gpunode(shared("GPU-0"), reservations=reservations)


@pytest.mark.parametrize(
    ("settings", "readings", "shown"),
    [pytest.param(OBSERVE, 0, 0, id="observe"), pytest.param(ENFORCE, 1, 1, id="enforce")],
)
def test_in_mode_observe_no_pod_is_evicted_and_no_event_is_written(
    settings: Settings, readings: int, shown: int
) -> None:
    async def play() -> tuple[int, int]:
        notices: list[Notice] = []

        def post(notice: Notice) -> bool:
            notices.append(notice)
            return True

        extender = Extender(settings, unready=lambda: "", post=post)
        looks = Looks()
        extender.reconciler.eviction_controller = cast(EvictionController, looks)
        sitting = [pod("20Gi", uid=f"uid-{name}", name=name, node="n") for name in "ab"]
        extender.deliver(
            [NodeSeen(kube_node("n")), GPUNodeSeen(overcommitted(), 0.0), *map(PodSeen, sitting)]
        )
        await extender.event_queue.idle()
        await extender.reconciler.once(cast(Ledger, None))
        return looks.times, len(notices) > 0

    assert asyncio.run(play()) == (readings, shown)


def once_woken(message: list[list[str]]) -> set[str]:
    return {uid for uids in message for uid in uids}


def test_a_rejected_pod_is_retried_once_when_mode_observe_begins() -> None:
    async def play() -> list[list[str]]:
        extender = Extender(ENFORCE, unready=lambda: "")
        requeued: list[str] = []

        class Wakes:
            async def requeue(self, which: Pod) -> str:
                requeued.append(which.metadata.uid)
                return "retry"

        extender.deliver([PodSeen(rejected("waits")), PodSeen(pod(uid="uid-new", name="new"))])
        await extender.event_queue.idle()
        message: list[list[str]] = []
        for settings in (ENFORCE, OBSERVE, OBSERVE, ENFORCE, OBSERVE):
            extender.take(settings)
            requeued.clear()
            await extender.requeue_controller.once(cast(Ledger, Wakes()))
            message.append(list(requeued))
        # Deleted pods are forgotten, however long the replica is in observe mode.
        extender.deliver([PodGone(uid) for uid in sorted(once_woken(message))])
        await extender.requeue_controller.once(cast(Ledger, Wakes()))
        assert not extender.requeue_controller._released
        return message

    first, once, again, enforcing, anew = asyncio.run(play())
    assert (first, again, enforcing) == ([], [], [])
    assert len(once) == 1
    assert anew == once
