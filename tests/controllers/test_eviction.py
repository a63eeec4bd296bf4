"""Tests the eviction of a pod. The pod is always marked before it is evicted."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from extender.event_recorder import EventRecorder
from extender.eviction.controller import EvictionController, Evictions
from extender.ledger.embedded_store import AsyncStore
from extender.metrics import Telemetry
from headroom.contract.gate import GATE
from headroom.contract.gpunode import EVICTED, GPUNode
from headroom.contract.kube import (
    Container,
    ContainerState,
    ContainerStatus,
    ObjectMeta,
    Pod,
    PodSpec,
    PodStatus,
    Terminated,
)
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.notices import Notice
from headroom.core.eviction.misplaced_pods import Misplaced
from headroom.errors import OutcomeUnknown, StoreConflict, StoreError
from tests.blocking import now
from tests.ledger.stage import DEVICES, Stage, once, raises

DOES_NOT_FIT = "InsufficientGPUMemory"
DOES_NOT_FIT_EVICTED = (
    "The GPU that this pod got does not have enough free memory, is unhealthy, or is cordoned: the"
    " device plugin chose another GPU than Headroom predicted, or another process took the memory."
    " The pod is evicted before it starts, so that its controller creates a new one. If it has no"
    " controller, create it again."
)
DOES_NOT_FIT_WAITS = (
    "The GPU that this pod got does not have enough free memory, is unhealthy, or is cordoned: the"
    " device plugin chose another GPU than Headroom predicted, or another process took the memory."
    " The pod waits at its gate. It is not evicted, because no controller would replace it. To"
    " place it on another GPU, delete it and create it again."
)

#: The UIDs of evicted pods, and the UID and reason of each rejected eviction.
Sent = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]
WENT: Sent = (("uid-p",), ())
NOBODY: Sent = ((), ())


@dataclass
class Evictor:
    stage: Stage
    evicted: list[str] = field(default_factory=list)
    #: For each eviction, whether the reservation had the mark.
    marked: list[bool] = field(default_factory=list)
    trouble: StoreError | None = None

    async def evict(self, pod: Pod, most_grace_s: int | None = None) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.evicted.append(pod.metadata.uid)
        self.marked.append(EVICTED in self.stage.node().spec.reservations["uid-p"].flags)

    async def may_evict(self, pod: Pod) -> None:
        """Allow every eviction."""


@dataclass
class MisplacedPods:
    stage: Stage
    evictor: Evictor
    #: UIDs of the pods that must be evicted.
    leave: set[str]

    def send_away(self, misplaced: Callable[[GPUNode], Misplaced] | None = None) -> Sent:
        evictions = self.evictions(misplaced or self.misplaced)
        sent = self.stage._watched(lambda: now(evictions.evict_misplaced("n")))
        return tuple(pod.metadata.uid for pod in sent.evicted), sent.rejected

    def told(self, misplaced: Misplaced) -> list[tuple[str, str, str]]:
        """Run two rounds. Return the subject, the reason and the message of each Event."""
        posted: list[Notice] = []

        def post(notice: Notice) -> bool:
            posted.append(notice)
            return True

        cluster = SimpleNamespace(
            crowded=["n"],
            gpunode=lambda name: self.stage.node(),
            misplaced=lambda gpunode, now_s: misplaced,
            pod=lambda uid: self.stage.pod(),
        )
        telemetry = Telemetry(CollectorRegistry())
        controller = EvictionController(
            cast(Cluster, cluster),
            self.evictions(lambda gpunode: misplaced),
            telemetry,
            EventRecorder(post, telemetry),
        )

        async def rounds() -> None:
            await controller.once()
            replaced_by(self.stage, gated(deletion_timestamp="2026-11-21T00:00:00Z"))()
            await controller.once()

        asyncio.run(rounds())
        return [(notice.about.uid, notice.reason, notice.message) for notice in posted]

    def evictions(self, misplaced: Callable[[GPUNode], Misplaced]) -> Evictions:
        store, ledger = AsyncStore(self.stage.store), self.stage.ledger.awaited
        return Evictions(store, ledger, self.evictor, misplaced)

    def misplaced(self, gpunode: GPUNode) -> Misplaced:
        return Misplaced(frozenset(self.leave & gpunode.spec.reservations.keys()))

    @property
    def flags(self) -> list[str]:
        return self.stage.node().spec.reservations["uid-p"].flags


def gated(state: ContainerState | None = None, node: str = "n", **of: str) -> Pod:
    """Return pod p, which waits at its gate."""
    statuses = [ContainerStatus(name=GATE, state=state)]
    return Pod(
        metadata=ObjectMeta(namespace="a", name="p", uid="uid-p", resource_version="7", **of),
        spec=PodSpec(node_name=node, init_containers=[Container(name=GATE)]),
        status=PodStatus(phase="Pending", init_container_statuses=statuses),
    )


def replaced_by(stage: Stage, pod: Pod) -> Callable[[], None]:
    def deed() -> None:
        stage.store.delete_pod("a", "p")
        stage.store.admit(pod)

    return deed


@pytest.fixture
def world() -> MisplacedPods:
    stage = Stage()
    stage.bind()
    replaced_by(stage, gated())()
    return MisplacedPods(stage, Evictor(stage), {"uid-p"})


def test_a_pod_is_marked_and_then_evicted(world: MisplacedPods) -> None:
    assert world.send_away() == WENT
    assert world.evictor.marked == [True]
    calls = ["read_gpunode", "write_spec", "read_gpunode", "read_pod"]
    assert world.stage.calls[: len(calls)] == calls
    assert world.stage.written[-1] == world.stage.node()
    # The reservation stays until the pod is deleted.
    assert world.stage.node().spec.reservations["uid-p"].charges


def test_eviction_is_requested_again_but_marked_once(world: MisplacedPods) -> None:
    assert world.send_away() == world.send_away() == WENT
    assert "write_spec" not in world.stage.calls
    assert world.flags == [EVICTED]


def test_the_mark_is_removed_if_the_pod_fits_again(world: MisplacedPods) -> None:
    world.send_away()
    world.leave.clear()
    assert world.send_away() == NOBODY
    assert world.flags == []


def test_after_a_conflict_the_decision_is_made_again(world: MisplacedPods) -> None:
    def others_make_room() -> None:
        world.stage.store.report([("n", DEVICES)])
        world.leave.clear()

    world.stage.fault = once("write_spec", "before", others_make_room)
    assert world.send_away() == NOBODY
    assert world.flags == []


def test_only_one_of_two_replicas_writes_the_mark(world: MisplacedPods) -> None:
    """The other replica reads the GPUNode again after its conflict and finds the mark."""
    seen: list[list[str]] = []

    def decide(gpunode: GPUNode) -> Misplaced:
        seen.append(gpunode.spec.reservations["uid-p"].flags)
        return Misplaced(frozenset({"uid-p"}))

    world.stage.fault = once("write_spec", "before", lambda: world.stage.ledger.mark(
        world.stage.node(), {"uid-p"}
    ))  # fmt: skip
    assert world.send_away(decide) == WENT
    assert seen == [[], [EVICTED], [EVICTED]]  # The third read is before the eviction.


@pytest.mark.parametrize(
    "deed",
    [
        pytest.param(lambda world: world.leave.clear(), id="another pod has freed memory"),
        pytest.param(
            lambda world: world.stage.ledger.mark(world.stage.node(), set()),
            id="another replica has removed the mark",
        ),
    ],
)
def test_the_mark_and_the_report_are_read_again_before_the_eviction(
    world: MisplacedPods, deed: Callable[[MisplacedPods], None]
) -> None:
    world.stage.fault = once("write_spec", "after", lambda: deed(world))
    assert world.send_away() == NOBODY


@pytest.mark.parametrize(
    "meanwhile",
    [
        pytest.param(gated(ContainerState(terminated=Terminated())), id="its gate has ended"),
        pytest.param(
            gated(deletion_timestamp="2026-11-21T00:00:00Z"), id="it is already being deleted"
        ),
        pytest.param(gated(node="m"), id="it is on another node"),
        pytest.param(
            msgspec.structs.replace(gated(), metadata=ObjectMeta(namespace="a", name="p", uid="h")),
            id="it is another pod",
        ),
        pytest.param(
            msgspec.structs.replace(gated(), status=PodStatus(phase="Failed")), id="it has ended"
        ),
    ],
)
def test_a_pod_that_changed_before_its_eviction_is_not_evicted(
    world: MisplacedPods, meanwhile: Pod
) -> None:
    world.stage.fault = once("write_spec", "after", replaced_by(world.stage, meanwhile))
    assert world.send_away() == NOBODY
    assert world.evictor.evicted == []


def test_a_pod_without_a_gate_can_be_evicted(world: MisplacedPods) -> None:
    plain = msgspec.structs.replace(gated(), spec=PodSpec(node_name="n"))
    replaced_by(world.stage, plain)()
    assert world.send_away() == WENT


def test_an_eviction_rejected_by_a_budget_is_reported_and_retried(world: MisplacedPods) -> None:
    world.evictor.trouble = OutcomeUnknown("429 too many disruptions")
    assert world.send_away() == ((), (("uid-p", "429 too many disruptions"),))
    world.evictor.trouble = None
    assert world.send_away() == WENT


def test_a_pod_that_changed_after_it_was_read_is_checked_later(world: MisplacedPods) -> None:
    world.evictor.trouble = StoreConflict("the version is another")
    assert world.send_away() == NOBODY


@pytest.mark.parametrize("operation", ["read_gpunode", "write_spec"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_without_a_written_mark_no_pod_is_evicted(
    world: MisplacedPods, operation: str, when: str
) -> None:
    world.stage.fault = once(operation, when, raises(OutcomeUnknown))
    with pytest.raises(OutcomeUnknown):
        world.send_away()
    assert world.evictor.evicted == []
    assert world.send_away() == WENT


def test_a_node_without_a_gpunode_evicts_no_pod(world: MisplacedPods) -> None:
    world.stage.store.delete_gpunode("n")
    assert world.send_away() == NOBODY


def test_an_evicted_pod_gets_an_event_with_the_reason(world: MisplacedPods) -> None:
    leaves = Misplaced(frozenset({"uid-p"}))
    assert world.told(leaves) == [("uid-p", DOES_NOT_FIT, DOES_NOT_FIT_EVICTED)]
    assert world.evictor.evicted == ["uid-p"]


def test_a_stuck_pod_gets_one_event_with_a_suggestion(world: MisplacedPods) -> None:
    stuck = Misplaced(frozenset(), frozenset({"uid-p"}))
    assert world.told(stuck) == [("uid-p", DOES_NOT_FIT, DOES_NOT_FIT_WAITS)]
    assert world.evictor.evicted == []
