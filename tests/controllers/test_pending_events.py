"""Tests that Events about pending pods are written for a few pods at a time, for all pods in turn,
and are repeated only after a change.
"""

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from extender.event_recorder import EventRecorder
from extender.pending_events import PendingEventsController
from headroom.contract.kube import Pod
from headroom.contract.reasons import Reason
from headroom.contract.watched import PodGone, PodSeen
from headroom.core.journal.journal import Decision
from tests.builders import GIB, NOW_S, gpunode, kube_node, pod, reservation, shared
from tests.state.states import seen
from tests.state.test_requeue_hints import rejected
from tests.world import World

AGAIN_AFTER_S = 60.0
SPENT_S = 0.1


class Pending(World):
    """A cluster with a nearly full node and pods that were rejected on it."""

    def __init__(self, per_round: int = 2) -> None:
        super().__init__(stale_after_s=1e6)
        self.state.apply(seen(kube_node()))
        #: The times that the controller's clock returns, in order.
        self.seconds: Iterator[float] = itertools.repeat(0.0)
        self.controller = PendingEventsController(
            self.state.cluster,
            self.journal,
            self.event_recorder,
            per_round,
            lambda: next(self.seconds),
        )
        self.holds(20)

    def holds(self, gib: int) -> None:
        version = str(len(self.posted) + gib + 1)
        reservations = {"u": reservation({"a": gib * GIB})}
        self.state.apply(
            seen(gpunode(shared("a"), reservations=reservations, version=version), at_s=NOW_S)
        )

    def reject(self, uid: str, fits: int = 0) -> Pod:
        waiting = pod("20Gi", uid=uid, name=uid, created="2026-11-21T00:00:00Z")
        self.state.apply([PodSeen(waiting)])
        counts = {} if fits else {Reason.MEMORY_ON_ANY: 1}
        self.journal.record(Decision(waiting, uid, 0.0, 1, 1, fits, counts))
        return waiting

    def told(self, now_s: float) -> list[str]:
        """Run one round. Return the names of the pods that got an Event."""
        before = len(self.posted)
        asyncio.run(self.controller.once(NOW_S + now_s))
        return [notice.about.name for notice in self.posted[before:]]


def test_each_pod_has_one_turn() -> None:
    world = Pending(per_round=2)
    for uid in "abcde":
        world.reject(uid)
    rounds = [world.told(float(second)) for second in range(4)]
    assert [len(told) for told in rounds] == [2, 2, 1, 0]
    assert sorted(name for told in rounds for name in told) == list("abcde")


def test_only_a_changed_explanation_is_recorded_after_a_minimum_interval() -> None:
    world = Pending()
    world.reject("a")
    assert world.told(0.0) == ["a"]
    assert world.told(AGAIN_AFTER_S) == []  # Nothing has changed.
    world.holds(21)
    assert world.told(2 * AGAIN_AFTER_S - 1) == []
    assert world.told(2 * AGAIN_AFTER_S) == ["a"]
    first, second = (notice.message for notice in world.posted)
    assert "short by 16.0 GiB" in first
    assert "short by 17.0 GiB" in second
    assert all(notice.follows and notice.key == "" for notice in world.posted)


def test_pods_being_bound_deleted_or_not_rejected_here_get_no_event() -> None:
    world = Pending()
    world.reject("fits", fits=1)
    world.reject("gone")
    world.state.apply([PodGone("gone"), PodSeen(rejected("elsewhere"))])
    assert world.told(0.0) == []
    assert world.controller.pending.pods == {"memory_on_any": 1}  # counted by the pod's condition


def test_a_failed_event_ends_the_round_and_is_retried() -> None:
    world = Pending(per_round=3)
    world.takes_events = False
    for uid in "abc":
        world.reject(uid)
    assert world.told(0.0) == []
    assert world.attempts == 1
    world.takes_events = True
    assert sorted(world.told(1.0)) == list("abc")


@pytest.mark.parametrize("per_round", [0, 9])
def test_nothing_is_computed_if_no_event_is_due(per_round: int) -> None:
    world = Pending()
    recorder = EventRecorder(None, world.telemetry) if per_round else world.event_recorder
    controller = PendingEventsController(world.state.cluster, world.journal, recorder, per_round)
    world.reject("a")
    asyncio.run(controller.once(0.0))
    assert controller.pending.pods == {"memory_on_any": 1}
    assert world.attempts == 0


def test_the_duration_of_a_round_is_limited() -> None:
    world = Pending(per_round=9)
    for uid in "abcde":
        world.reject(uid)
    world.seconds = itertools.count(0.0, SPENT_S)
    assert len(world.told(0.0)) == 1
    world.seconds = itertools.count(0.0, SPENT_S / 2)
    assert len(world.told(1.0)) == 2
    world.seconds = itertools.repeat(0.0)
    assert len(world.told(2.0)) == 2
