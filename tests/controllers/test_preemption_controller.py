"""Tests for which pending pods other pods are evicted, when they are evicted, and the Events."""

import asyncio
import time
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
import pytest

from extender.extender import Extender
from extender.ledger.bind_call import BindRequest, Bound, Declined, Outcome
from extender.ledger.embedded_store import AsyncStore, EmbeddedStore
from extender.preemption.controller import PreemptionController
from extender.preemption.writer import PreemptionWriter
from headroom.contract.kube import Pod, PodCondition, PodStatus
from headroom.contract.reasons import Reason
from headroom.contract.watched import BudgetSeen, GPUNodeSeen, PodSeen
from headroom.core.journal.journal import Decision
from headroom.core.placement.policy import Rules
from headroom.core.preemption.report import recorded
from headroom.core.preemption.victim_search import preemption
from headroom.runtime.settings.settings import Settings
from tests.state.evictions import On, full_node, newcomer, running
from tests.state.test_victim_search import budget
from tests.world import World

NEWCOMER = "OthersLeaveGPU"
VICTIM = "LeavesForGPUMemory"

SAID = f"0/1 nodes are available: 1 {Reason.MEMORY_ON_ANY.sentence}. preemption: none."


def waiting(of: Pod, message: str = SAID, nominated: str | None = None) -> Pod:
    condition = PodCondition(
        type="PodScheduled", status="False", reason="Unschedulable", message=message
    )
    status = PodStatus(phase="Pending", conditions=[condition], nominated_node_name=nominated)
    return msgspec.structs.replace(of, status=status)


class Preemption(World):
    """A cluster with a full node and a pod that was rejected on it some time ago."""

    def __init__(self, newcomer_: Pod, evicts: bool = True) -> None:
        super().__init__(Rules(evict_for_memory=evicts), stale_after_s=1e9)
        victim = On("a", 20, labels={"app": "web"})
        self.state.apply([*full_node("n", [victim]), PodSeen(newcomer_)])
        with self.late_watch():
            self.store.admit(newcomer_)
            self.store.admit(running(victim, "n"))
        self.rejected: Sequence[str] = ["n"]
        maker = PreemptionWriter(self.async_store, self.evictor, self.wall_s, lambda: "attempt")
        self.controller = PreemptionController(
            self.state.cluster,
            self.journal,
            self.telemetry,
            lambda uid: self.rejected,
            maker if evicts else None,
            self.event_recorder,
            self.monotonic_s,
            self.wall_s,
        )
        self.decides(newcomer_, ago_s=2.0)

    def decides(self, pod: Pod, ago_s: float, fits: int = 0) -> None:
        self.journal.record(Decision(pod, "d", self.wall_s() - ago_s, 1, 1, fits, {}))

    def once(self) -> list[str]:
        asyncio.run(self.controller.once())
        return self.evictor.evicted


def test_pods_are_evicted_for_a_pod_blocked_only_by_memory_with_events_for_all() -> None:
    world = Preemption(waiting(newcomer(20)))
    assert world.once() == ["a"]
    new, victim = world.posted
    assert (new.about.name, new.reason) == ("new", NEWCOMER)
    assert new.message.startswith("1 pod leaves node n for this pod: kube")
    assert (victim.about.name, victim.reason) == ("a", VICTIM)
    assert victim.message == (
        "Preempted on node n by pod new, which has a higher priority and needs the memory of this "
        "pod's GPU."
    )
    assert new.decision_id == victim.decision_id == "new.1"
    # The pod is evicted for only once, because a pending pod is checked again only after some time.
    assert world.once() == ["a"]
    assert len(world.posted) == 2


@pytest.mark.parametrize(
    "of",
    [
        pytest.param(newcomer(20), id="kube-scheduler has not written the condition"),
        pytest.param(
            waiting(newcomer(20), "0/1 nodes are available: 1 Insufficient cpu."),
            id="rejected for CPU",
        ),
        pytest.param(waiting(newcomer(20, preemption_policy="Never")), id="it never preempts"),
        pytest.param(waiting(newcomer(20), nominated="n"), id="already nominated"),
        pytest.param(waiting(newcomer(20, priority=0)), id="equal priority"),
        pytest.param(waiting(newcomer(25)), id="evictions would not help"),
    ],
)
def test_no_pod_is_evicted_under_other_conditions(of: Pod) -> None:
    assert Preemption(of).once() == []


def test_no_pod_is_evicted_during_an_attempt_or_without_a_rejection_for_memory() -> None:
    of = waiting(newcomer(20))
    world = Preemption(of)
    world.decides(of, ago_s=0.0)
    assert world.once() == []
    world.decides(of, ago_s=2.0, fits=1)
    assert world.once() == []
    world.decides(of, ago_s=2.0)
    world.rejected = []
    assert world.once() == []


def test_no_budget_is_violated_and_the_setting_is_required() -> None:
    world = Preemption(waiting(newcomer(20)))
    world.state.apply([BudgetSeen(budget(0))])
    assert world.once() == []
    assert Preemption(waiting(newcomer(20)), evicts=False).once() == []


def test_preemption_by_kube_scheduler_is_recorded_once() -> None:
    of = waiting(newcomer(20), nominated="n")
    world = Preemption(of, evicts=False)
    found = preemption(world.state.cluster, of, {}, ["n"], world.now_s)
    assert world.once() == []
    assert world.posted == []  # No Event is posted, because this replica made no attempt.
    part = recorded(found, world.wall_s(), 1, 1, 1)
    world.journal.note(of, part, part.at_s)
    world.once()
    world.once()
    assert [notice.reason for notice in world.posted] == [NEWCOMER, VICTIM]


def test_a_bind_does_not_take_the_memory_of_a_nominated_pod() -> None:
    async def play(priority: int) -> Outcome:
        extender = Extender(Settings(), unready=lambda: "")
        store = EmbeddedStore(extender.deliver, time.monotonic)
        ledger = extender.open_ledger(AsyncStore(store))
        node, held, victim = full_node("n", [On("a", 20, 1)])
        assert isinstance(held, GPUNodeSeen)
        assert held.gpunode.status is not None
        now = datetime.now(UTC).isoformat()
        status = msgspec.structs.replace(held.gpunode.status, observed_at=now)
        made = store.create_gpunode(held.gpunode)
        store.write_spec(made, held.gpunode.spec)
        store.report([("n", status)])
        thief = newcomer(3, priority, "thief", version="1")
        store.admit(thief)
        extender.deliver([node, victim, PodSeen(newcomer(12, 50, nominated="n"))])
        ask = BindRequest("default", "thief", "thief", "n", thief, store.read_gpunode("n"))
        return await ledger.binder.bind(ask)

    declined = asyncio.run(play(50))
    assert isinstance(declined, Declined)
    assert declined.reason is Reason.HELD
    assert isinstance(asyncio.run(play(51)), Bound)
