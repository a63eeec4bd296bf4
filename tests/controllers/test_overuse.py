"""Tests the decision, the warning and the eviction for pods that use more than they reserved."""

import asyncio
from itertools import count
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from extender.overuse.controller import OveruseController
from headroom.contract.gpunode import GPUNode, GPUNodeSpec, OveruseEviction
from headroom.contract.heartbeat import Confirmation, encode_confirmation
from headroom.contract.kube import Lease, ObjectMeta, Pod
from headroom.contract.watched import HeartbeatSeen, NodeSeen
from headroom.core.placement.policy import Rules
from headroom.errors import StoreConflict, StoreError, StoreRejected, StoreTimeout
from tests.builders import GIB, kube_node, pod, reservation, shared, status, use
from tests.world import World

REJECTED_FOR_S = 30.0
NEVER_S, AT_ONCE_S = 1e9, 0.0


class Overuse(World):
    """A cluster with two 24 GiB GPUs. On a, p and r have reserved 5 GiB each, and q has reserved 12
    GiB. On b, s has reserved 5 GiB, and t has reserved 12 GiB.
    """

    def __init__(self, rules: Rules | None = None) -> None:
        super().__init__(rules or Rules(evict_overuse=True))
        self.state.apply([NodeSeen(kube_node())])
        self._samples = count(1)
        self.pods = {uid: pod(uid=uid, name=uid, node="n", phase="Running") for uid in "pqrst"}
        reserved = {
            uid: msgspec.structs.replace(reservation({on: size * GIB}), name=uid)
            for uid, on, size in (
                ("p", "a", 5),
                ("q", "a", 12),
                ("r", "a", 5),
                ("s", "b", 5),
                ("t", "b", 12),
            )
        }
        spec = GPUNodeSpec(initialised=True, reservations=reserved)
        self.store.create_gpunode(GPUNode(metadata=ObjectMeta(name="n"), spec=spec))
        for each in self.pods.values():
            self.store.admit(each)
        self.evictor.meanwhile = self._check_decided
        #: Seconds by which the agent's clock is ahead of the extender's clock.
        self.ahead_s = 0.0
        self.controller = self.replica()

    def replica(self, **options: Any) -> OveruseController:
        return OveruseController(
            self.state.cluster,
            self.async_store,
            self.ledger.awaited,
            self.evictor,
            self.telemetry.overuse,
            self.event_recorder,
            self.monotonic_s,
            **options,
        )

    def _check_decided(self, pod: Pod) -> None:
        assert self.gpunode().spec.reservations[pod.metadata.uid].overuse
        assert self.evictor.grace_s[-1] == 120

    def report(self, p: float = 9, q: float = 2, r: float = 5, s: float = 5) -> None:
        """Report a new sample in which the pods use this many GiB."""
        used_gib = {"a": {"p": p, "q": q, "r": r}, "b": {"s": s, "t": 2}}
        at = self.stamp(ago_s=-self.ahead_s - 0.001 * next(self._samples))
        devices, rows = [], []
        for on, pods in used_gib.items():
            used = {uid: int(figure * GIB) for uid, figure in pods.items()}
            used_bytes = sum(used.values())
            devices.append(shared(on, free=1, allocated=len(used), used_bytes=used_bytes))
            rows += [use(uid, on, figure) for uid, figure in used.items()]
        self.store.report([("n", status(*devices, pods=rows, observed_at=at))])

    def round(self, grace_s: float = AT_ONCE_S, observes: bool = False) -> list[str]:
        """Run one round. Return the UIDs of the evicted pods."""
        already = len(self.evictor.evicted)
        asyncio.run(self.controller.once(observes, grace_s))
        return self.evictor.evicted[already:]

    @property
    def decided(self) -> dict[str, OveruseEviction]:
        found = {u: r.overuse for u, r in self.gpunode().spec.reservations.items() if r.overuse}
        return {uid: decision for uid, decision in found.items() if not decision.rejected_at}

    def counted(self, outcome: str) -> float:
        return self.sample("headroom_overuse_evictions_total", outcome=outcome)

    @property
    def unresolved(self) -> float:
        return self.sample("headroom_overuse_unresolved_devices")


@pytest.fixture
def world() -> Overuse:
    return Overuse()


def test_a_pod_is_warned_and_then_evicted_on_a_newer_sample(world: Overuse) -> None:
    world.report()
    assert world.round() == []  # The sample that led to the decision does not evict the pod.
    assert {uid: decision.device for uid, decision in world.decided.items()} == {"p": "a"}
    assert world.events == [("p", "GPUMemoryOveruseEviction")]
    assert "uses 9.0 GiB of device a, and has reserved 5.0 GiB" in world.posted[0].message
    assert "Only 8.0 GiB are free there, and 10.0 GiB are needed" in world.posted[0].message
    assert world.round() == []
    world.report()
    assert world.round(NEVER_S) == []  # The grace period is not over.
    assert world.round() == ["p"]
    assert world.events[1:] == [("p", "EvictedForGPUMemoryOveruse")]
    assert (world.counted("decided"), world.counted("evicted")) == (1, 1)


def test_a_pod_that_reduces_its_use_in_time_stays(world: Overuse) -> None:
    world.report()
    world.round()
    world.report(p=5)
    assert world.round() == []
    assert world.decided == {}
    assert world.counted("withdrawn") == 1
    world.report()
    assert world.round() == []  # The grace period begins again.
    assert world.counted("decided") == 2


def test_without_pressure_no_decision_is_written(world: Overuse) -> None:
    world.report(p=6.9)
    world.round()
    assert (world.decided, world.events) == ({}, [])


def test_a_decision_about_another_gpu_does_not_delay_the_first(world: Overuse) -> None:
    world.report()
    world.round()
    first = world.decided["p"]
    world.report(s=13)
    assert world.round() == ["p"]
    assert world.decided["p"] == first
    assert world.decided["s"].device == "b"


def test_two_replicas_evict_one_pod(world: Overuse) -> None:
    second = world.replica()

    def rounds() -> None:
        world.round()
        asyncio.run(second.once(False, AT_ONCE_S))

    world.report(p=9, r=9)
    rounds()
    assert list(world.decided) == ["p"]
    assert world.events == [("p", "GPUMemoryOveruseEviction")]
    world.report(p=9, r=9)
    going = msgspec.structs.replace(
        world.pods["p"].metadata, deletion_timestamp="2026-11-21T00:00:00Z"
    )

    world.round()
    world.store.delete_pod("default", "p")
    world.store.admit(msgspec.structs.replace(world.pods["p"], metadata=going))
    asyncio.run(second.once(False, AT_ONCE_S))
    assert world.evictor.evicted == ["p"]
    # The memory of p counts as free, but the memory of the other pod is needed too.
    world.report(p=9, q=2, r=9)
    rounds()
    assert world.decided.keys() == {"p"}
    world.report(p=9, q=1, r=13)
    rounds()
    assert world.decided.keys() == {"p", "r"}


def test_a_restarted_replica_continues_the_decision(world: Overuse) -> None:
    world.report()
    world.round()
    world.controller = world.replica()
    world.report()
    assert world.round(NEVER_S) == []
    assert world.round() == []  # The sample may be older than this replica's decision.
    world.report()
    assert world.round() == ["p"]
    assert world.counted("decided") == 1


def test_after_a_rejected_eviction_the_next_pod_is_selected(world: Overuse) -> None:
    world.evictor.forbidden["p"] = StoreRejected("would violate the pod's disruption budget")
    world.report(p=9, r=7)
    world.round()
    world.report(p=9, r=7)
    assert world.round() == []
    assert world.counted("rejected") == 1
    world.round()
    assert world.decided.keys() == {"r"}
    world.report(p=9, r=7)
    assert world.round() == ["r"]


def test_all_replicas_skip_a_pod_whose_eviction_was_rejected(world: Overuse) -> None:
    world.evictor.forbidden["p"] = StoreRejected("would violate the pod's disruption budget")
    second = world.replica()
    for _ in range(4):
        world.report()
        assert world.round() == []
        asyncio.run(second.once(False, AT_ONCE_S))
    assert [world.counted(each) for each in ("decided", "rejected", "withdrawn")] == [1, 1, 0]
    assert world.evictor.evicted == []


def test_a_device_on_which_no_pod_may_be_evicted_is_counted(world: Overuse) -> None:
    world.evictor.forbidden["p"] = StoreRejected("would violate the pod's disruption budget")
    world.report()
    world.round()
    world.report()
    world.round()
    world.round()
    assert world.unresolved == 1
    world.report(p=5)
    world.round()
    assert world.unresolved == 0


@pytest.mark.parametrize("error", [StoreConflict("changed"), StoreTimeout("no answer")])
def test_a_pod_that_changed_before_its_eviction_is_read_again(
    world: Overuse, error: StoreError
) -> None:
    world.evictor.forbidden["p"] = error
    world.report()
    world.round()
    world.report()
    assert world.round() == []
    world.evictor.forbidden.clear()
    assert world.round() == ["p"]


def test_a_pod_of_the_same_name_is_not_evicted(world: Overuse) -> None:
    world.report()
    world.round()
    world.report()
    metadata = msgspec.structs.replace(world.pods["p"].metadata, uid="other")
    with world.late_watch():
        world.store.delete_pod("default", "p")
        world.store.admit(msgspec.structs.replace(world.pods["p"], metadata=metadata))
    assert world.round() == []


def test_in_mode_observe_nothing_is_written(world: Overuse) -> None:
    world.report()
    for _ in range(3):
        assert world.round(observes=True) == []
        world.report()
    assert (world.decided, world.events, world.evictor.evicted) == ({}, [], [])
    assert world.counted("would_evict") == 1


def test_in_mode_observe_a_pod_is_logged_when_it_would_be_evicted(world: Overuse) -> None:
    def logged(grace_s: float = AT_ONCE_S) -> list[Any]:
        with capture_logs() as logs:
            world.round(grace_s, observes=True)
        return [each for each in logs if each["event"] == "pod_would_be_evicted"]

    world.report()
    assert logged() == []
    assert logged() == []  # There is no newer sample.
    world.report(p=5)
    assert logged() == []
    world.report()
    assert logged() == []  # The pressure has begun again.
    world.report()
    assert logged(NEVER_S) == []  # The grace period is not over.
    (entry,) = logged()
    assert (entry["node"], entry["pod"], entry["used_bytes"]) == ("n", "default/p", 9 * GIB)
    world.report()
    assert logged() == []  # Each pod is logged once.


def test_in_mode_observe_a_pod_with_a_disruption_budget_is_not_logged(world: Overuse) -> None:
    world.evictor.forbidden["p"] = StoreRejected("would violate the pod's disruption budget")
    for _ in range(3):
        world.report()
        world.round(observes=True)
    assert world.counted("would_evict") == 0
    world.evictor.forbidden.clear()
    world.report()
    world.round(observes=True)
    assert world.counted("would_evict") == 0
    world.now_s += REJECTED_FOR_S
    world.report()
    world.round(observes=True)
    assert world.counted("would_evict") == 1
    assert world.evictor.evicted == []


def test_nodes_with_overuse_are_checked_in_turns_if_they_are_too_many(
    world: Overuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.controller = world.replica(most_nodes=2)
    monkeypatch.setattr(world.state.cluster.overuses, "nodes", lambda: ([], ["a", "b", "c", "n"]))
    world.report()
    world.round()
    assert world.decided == {}
    world.round()
    assert set(world.decided) == {"p"}


def test_with_the_setting_report_no_pod_is_evicted() -> None:
    world = Overuse(Rules())
    for _ in range(3):
        world.report()
        assert world.round() == []
    assert world.decided == {}


def test_a_heartbeat_counts_as_a_newer_sample(world: Overuse) -> None:
    world.report()
    world.round()
    held = world.gpunode()
    assert held.status is not None
    text = encode_confirmation(
        Confirmation(
            sampled_at=world.stamp(ago_s=-1),
            gpunode=held.metadata.uid,
            observed_at=held.status.observed_at,
        )
    )
    metadata = ObjectMeta(name="n", annotations={"headroom.gpu/observed-at": text})
    world.state.apply([HeartbeatSeen(Lease(metadata=metadata), world.now_s)])
    assert world.round() == ["p"]


def test_a_replica_with_a_late_watch_does_not_carry_out_a_withdrawn_decision(
    world: Overuse,
) -> None:
    world.report()
    world.round()
    world.report()
    assert world.round(NEVER_S) == []
    withdrawn = world.gpunode()
    spec = msgspec.structs.replace(
        withdrawn.spec,
        reservations={
            uid: msgspec.structs.replace(each, overuse=msgspec.UNSET)
            for uid, each in withdrawn.spec.reservations.items()
        },
    )
    with world.late_watch():
        world.store.write_spec(withdrawn, spec)
    assert world.round() == []
    assert world.evictor.evicted == []


def test_the_newest_report_must_show_the_pressure_even_if_the_watch_is_late(
    world: Overuse,
) -> None:
    world.report()
    world.round()
    world.report()
    assert world.round(NEVER_S) == []
    with world.late_watch():
        world.report(p=5)
    assert world.round() == []
    assert world.evictor.evicted == []


def test_a_clock_that_is_set_back_delays_no_eviction(world: Overuse) -> None:
    world.report(p=5)
    world.ahead_s = 3600.0
    world.report()
    assert world.round() == []
    assert world.decided.keys() == {"p"}
    world.ahead_s = 0.0
    world.report()
    assert world.round() == ["p"]


def test_a_pod_that_becomes_the_largest_is_warned_before_its_eviction_and_the_first_stays_warned(
    world: Overuse,
) -> None:
    world.report(p=9, r=7)
    world.round()
    assert world.decided.keys() == {"p"}
    first = world.decided["p"]
    world.report(p=9, r=12)
    assert world.round(NEVER_S) == []
    assert world.decided.keys() == {"p", "r"}
    world.report(p=12, r=9)
    assert world.round() == ["p"]  # The pod was warned long ago.
    assert world.decided["p"] == first


class TestRejectedEvictionOfAnotherNamespace:
    """Tests that no pod of another namespace is evicted instead, because authors write the
    disruption budgets of their own pods.
    """

    def test_the_next_pod_is_not_selected(self, world: Overuse) -> None:
        world.evictor.forbidden["p"] = StoreRejected("would violate the pod's disruption budget")
        held = world.gpunode()
        reservations = dict(held.spec.reservations)
        reservations["r"] = msgspec.structs.replace(reservations["r"], namespace="other")
        world.store.write_spec(held, msgspec.structs.replace(held.spec, reservations=reservations))
        for _ in range(4):
            world.report(p=9, r=7)
            assert world.round() == []
        assert world.decided == {}
        assert world.unresolved == 1
