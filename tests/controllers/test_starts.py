"""Tests how the start phase in a reservation ends exactly once, and how a waiting pod then
continues.
"""

import asyncio
from datetime import datetime, timedelta
from itertools import count
from typing import Any

import msgspec
import pytest

from extender.ledger.bind_call import Bound, Declined
from extender.starting_alone.controller import StartsController
from headroom.contract.annotations import STARTUP, STARTUP_TIMEOUT
from headroom.contract.gpunode import ADOPTED, GPUNode, GPUNodeSpec
from headroom.contract.kube import ObjectMeta, Pod, PodCondition, PodStatus, Present
from headroom.contract.reasons import Reason
from headroom.contract.watched import NodeSeen
from headroom.errors import StoreConflict, StoreTimeout
from tests.builders import GIB, container, kube_node, shared, status, use
from tests.builders import pod as plain_pod
from tests.ledger.stage import once, raises
from tests.world import World

PROBED = msgspec.structs.replace(container(), readiness_probe=Present())
WAITS = Reason.OTHER_STARTING


def alone(uid: str, *, timeout: str = "10m", **of: Any) -> Pod:
    annotations = {STARTUP: "alone", STARTUP_TIMEOUT: timeout}
    return plain_pod("4Gi", PROBED, uid=uid, name=uid, annotations=annotations, version="", **of)


class Starts(World):
    """A cluster with one 24 GiB GPU that has four replicas. Two replicas of the extender follow its
    pods.
    """

    def __init__(self) -> None:
        super().__init__(stale_after_s=1e9)
        self.state.apply([NodeSeen(kube_node())])
        spec = GPUNodeSpec(initialised=True)
        self.store.create_gpunode(GPUNode(metadata=ObjectMeta(name="n"), spec=spec))
        self._samples = count()
        self.controller, self.other = self._replica(), self._replica()
        self.report()

    def _replica(self) -> StartsController:
        ledger = self.ledger.awaited
        return StartsController(
            self.state.cluster, ledger, self.telemetry, self.event_recorder, self.wall_s
        )

    def report(self, **settled: bool) -> None:
        """Report that these pods use 1 GiB each. ``settled`` is whether the use of each pod has
        settled.
        """
        stamp = self.stamp(ago_s=-0.001 * next(self._samples))
        rows = [
            use(
                *(uid, "a", GIB),
                replica=f"a::{uid}",
                started_at=stamp,
                settled_at=stamp if flat else "",
            )
            for uid, flat in settled.items()
        ]
        used = len(rows)
        gpu = shared("a", free=4 - used, allocated=used, used_bytes=used * GIB)
        self.store.report([("n", status(gpu, pods=rows, observed_at=stamp))])

    def becomes_ready(self, uid: str) -> None:
        ready = PodStatus(phase="Running", conditions=[PodCondition(type="Ready", status="True")])
        self.see(msgspec.structs.replace(self.pod(uid), status=ready))

    def round(self, after_s: float = 0.0, *controllers: StartsController) -> None:
        self.now_s += after_s
        for each in controllers or (self.controller,):
            asyncio.run(each.once())

    @property
    def phases(self) -> dict[str, str]:
        return {uid: each.phase for uid, each in self.gpunode().spec.reservations.items()}

    def counted(self, end: str) -> float:
        return self.sample("headroom_start_duration_seconds_count", end=end)


@pytest.fixture
def world() -> Starts:
    return Starts()


def test_the_second_pod_is_bound_when_the_first_is_ready(world: Starts) -> None:
    assert world.bind(alone("p")) == Bound()
    assert world.bind(alone("q")) == Declined(WAITS)
    world.report(p=False)
    world.round(after_s=30)
    assert world.phases == {"p": "starting"}
    world.becomes_ready("p")
    generation = world.state.cluster.snapshot().generation
    world.round(after_s=10)
    assert world.phases == {"p": "running"}
    assert world.state.cluster.latest_gain > generation  # Pending pods are requeued.
    assert world.bind(alone("q")) == Bound()
    assert world.phases == {"p": "running", "q": "starting"}
    assert (world.counted("ready"), world.posted) == (1, [])
    assert world.sample("headroom_start_duration_seconds_sum", end="ready") == pytest.approx(40)


def test_ordinary_pods_are_bound_while_a_pod_starts_alone(world: Starts) -> None:
    assert world.bind(alone("p")) == Bound()
    assert world.bind(plain_pod("4Gi", uid="o", name="o", version="")) == Bound()
    assert world.phases == {"p": "starting", "o": ""}
    assert world.bind(alone("q")) == Declined(WAITS)


def test_a_start_ends_when_the_agent_reports_that_it_has_settled(world: Starts) -> None:
    world.bind(alone("p"))
    world.report(p=False)
    world.round()
    assert world.phases == {"p": "starting"}
    world.report(p=True)
    world.round()
    assert (world.phases, world.counted("settled")) == ({"p": "running"}, 1)


def test_a_container_that_restarts_does_not_start_alone_again(world: Starts) -> None:
    world.bind(alone("p"))
    world.report(p=True)
    world.round()
    world.report(p=False)  # The pod has a new run, which has not settled.
    world.round(after_s=1)
    assert world.phases == {"p": "running"}
    assert world.bind(alone("q")) == Bound()


def test_a_start_times_out_with_an_event(world: Starts) -> None:
    world.bind(alone("p", timeout="90s"))
    world.round(after_s=89)
    assert world.phases == {"p": "starting"}
    world.round(after_s=1)
    assert (world.phases, world.counted("timed_out")) == ({"p": "running"}, 1)
    (notice,) = world.posted
    assert (notice.about.uid, notice.reason) == ("p", "StartTimedOut")
    assert "still starting 90 s after its bind" in notice.message
    assert "Example: headroom.gpu/startup-timeout: 20m" in notice.message
    assert world.bind(alone("q")) == Bound()


def test_two_replicas_end_a_start_once(world: Starts) -> None:
    world.bind(alone("p", timeout="90s"))
    world.round(90, world.controller, world.other)
    assert (world.counted("timed_out"), len(world.posted)) == (1, 1)


def test_after_a_lost_race_the_decision_is_made_again_on_the_newer_version(world: Starts) -> None:
    """Another replica has already ended the start, so this replica neither counts nor
    reports it.
    """
    world.bind(alone("p", timeout="90s"))
    world.fault = once("write_spec", "after", raises(StoreConflict))
    world.round(after_s=90)
    assert (world.phases, world.counted("timed_out"), world.posted) == ({"p": "running"}, 0, [])


def test_a_store_that_does_not_answer_is_called_again(world: Starts) -> None:
    world.bind(alone("p", timeout="90s"))
    world.fault = once("write_spec", "before", raises(StoreTimeout))
    world.round(after_s=90)
    assert world.phases == {"p": "starting"}
    world.round(after_s=1)
    assert world.phases == {"p": "running"}


def test_an_adopted_pod_is_starting_until_its_own_timeout(world: Starts) -> None:
    """The pod was bound without Headroom, or the reservations of its node were lost and initialised
    again.
    """
    status = PodStatus(phase="Running", start_time=world.stamp(ago_s=500))
    running = msgspec.structs.replace(alone("p", node="n"), status=status)
    world.store.admit(running)
    assert world.ledger.charge("n", running)
    assert ADOPTED in world.gpunode().spec.reservations["p"].flags
    assert world.bind(alone("q")) == Declined(WAITS)
    world.round(after_s=99)
    assert world.phases == {"p": "starting"}
    world.round(after_s=1.1)
    assert world.phases == {"p": "running"}


def test_pods_start_in_the_order_of_the_ledger_whatever_the_clocks_show(world: Starts) -> None:
    """The clock of the replica that makes the second write is an hour behind."""
    for uid in "pq":
        world.store.admit(alone(uid, node="n"))
        assert world.ledger.charge("n", world.pod(uid))
        world.epoch_s -= 3600
    since = {uid: each.since for uid, each in world.gpunode().spec.reservations.items()}
    assert datetime.fromisoformat(since["q"]) - datetime.fromisoformat(since["p"]) == (
        timedelta(milliseconds=1)
    )
