"""The start phase in the ledger: who ends it, once, and how a pod that waits for it goes on."""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from extender.event_recorder import EventRecorder
from extender.ledger.bind_call import BindRequest as Ask
from extender.ledger.bind_call import Bound, Declined, Outcome
from extender.ledger.ledger import Ledger
from extender.ledger.memory_store import AsyncStore, EmbeddedStore
from extender.metrics import Telemetry
from extender.starts import StartsController
from headroom.contract.annotations import STARTUP, STARTUP_TIMEOUT
from headroom.contract.gpunode import ADOPTED, GPUNode, GPUNodeSpec, GPUNodeStatus
from headroom.contract.kube import ObjectMeta, Pod, PodCondition, PodStatus, Present
from headroom.contract.reasons import Reason
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from headroom.core.cluster.notices import Notice
from headroom.core.placement.policy import Rules
from headroom.errors import StoreConflict, StoreTimeout
from tests.builders import GIB, container, kube_node, shared, status, use
from tests.builders import pod as plain_pod
from tests.recording import RecordingState

PROBED = msgspec.structs.replace(container(), readiness_probe=Present())
WAITS = Reason.OTHER_STARTING


def alone(uid: str, *, timeout: str = "10m", **of: Any) -> Pod:
    annotations = {STARTUP: "alone", STARTUP_TIMEOUT: timeout}
    return plain_pod("4Gi", PROBED, uid=uid, name=uid, annotations=annotations, version="", **of)


class World:
    """One GPU of 24 GiB and two replicas, with one clock that only the test moves."""

    def __init__(self) -> None:
        self.now_s = time.time()
        self.skew_s = 0.0
        self.state = RecordingState(Rules(), 90.0, time.time() - time.monotonic())
        self.state.apply([NodeSeen(kube_node())])
        self.store = EmbeddedStore(self.state.apply, time.monotonic)
        self.store.create_gpunode(
            GPUNode(metadata=ObjectMeta(name="n"), spec=GPUNodeSpec(initialised=True))
        )
        self.posted: list[Notice] = []
        self.telemetry = Telemetry(CollectorRegistry())
        self._ids = (f"attempt-{number}" for number in count(1))
        self._samples = count(1)
        self.ledger = Ledger(
            AsyncStore(self.store),
            lambda pod, gpunode: self.state.judge(pod, gpunode, time.monotonic()),
            self.state.adopt,
            lambda gpunode: self.state.apply([GPUNodeSeen(gpunode, time.monotonic())]),
            lambda: self.now_s + self.skew_s,
            lambda: next(self._ids),
        )
        self.controller, self.other = self._replica(), self._replica()
        self.report()

    def _replica(self) -> StartsController:
        recorder = EventRecorder(self._post, self.telemetry)
        return StartsController(self.state, self.ledger, self.telemetry, recorder)

    def _post(self, notice: Notice) -> bool:
        self.posted.append(notice)
        return True

    def report(self, **settled: bool) -> None:
        """The agent reports that these pods use 1 GiB each, and whether that has settled."""
        at = datetime.now(UTC) + timedelta(milliseconds=next(self._samples))
        stamp = at.isoformat()
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
        made: GPUNodeStatus = status(gpu, pods=rows, observed_at=stamp)
        self.store.report([("n", made)])

    def bind(self, pod: Pod) -> Outcome:
        self.store.admit(pod)
        held = self.store.read_pod("default", pod.metadata.name)
        ask = Ask("default", pod.metadata.name, pod.metadata.uid, "n", held, self.gpunode)
        return asyncio.run(self.ledger.binder.bind(ask))

    def becomes_ready(self, uid: str) -> None:
        pod = self.store.read_pod("default", uid)
        assert pod is not None
        ready = PodStatus(phase="Running", conditions=[PodCondition(type="Ready", status="True")])
        self.state.apply([PodSeen(msgspec.structs.replace(pod, status=ready))])

    def round(self, after_s: float = 0.0, *controllers: StartsController) -> None:
        self.now_s += after_s
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(time, "time", lambda: self.now_s)
            for each in controllers or (self.controller,):
                asyncio.run(each.once())

    @property
    def gpunode(self) -> GPUNode:
        found = self.store.read_gpunode("n")
        assert found is not None
        return found

    @property
    def phases(self) -> dict[str, str]:
        return {uid: each.phase for uid, each in self.gpunode.spec.reservations.items()}

    def counted(self, end: str) -> float:
        found = self.telemetry.registry.get_sample_value(
            "headroom_start_duration_seconds_count", {"end": end}
        )
        assert found is not None
        return found


@pytest.fixture
def world() -> World:
    return World()


def test_the_second_pod_is_bound_when_the_first_is_ready(world: World) -> None:
    assert world.bind(alone("p")) == Bound()
    assert world.bind(alone("q")) == Declined(WAITS)
    world.report(p=False)
    world.round(after_s=30)
    assert world.phases == {"p": "starting"}
    world.becomes_ready("p")
    generation = world.state.snapshot().generation
    world.round(after_s=10)
    assert world.phases == {"p": "running"}
    assert world.state.latest_gain > generation  # pods that wait are requeued
    assert world.bind(alone("q")) == Bound()
    assert world.phases == {"p": "running", "q": "starting"}
    assert (world.counted("ready"), world.posted) == (1, [])
    total_s = world.telemetry.registry.get_sample_value(
        "headroom_start_duration_seconds_sum", {"end": "ready"}
    )
    assert total_s == pytest.approx(40, abs=0.01)


def test_ordinary_pods_are_bound_while_a_pod_starts_alone(world: World) -> None:
    assert world.bind(alone("p")) == Bound()
    assert world.bind(plain_pod("4Gi", uid="o", name="o", version="")) == Bound()
    assert world.phases == {"p": "starting", "o": ""}
    assert world.bind(alone("q")) == Declined(WAITS)


def test_a_start_ends_when_the_agent_reports_that_it_has_settled(world: World) -> None:
    world.bind(alone("p"))
    world.report(p=False)
    world.round()
    assert world.phases == {"p": "starting"}
    world.report(p=True)
    world.round()
    assert (world.phases, world.counted("settled")) == ({"p": "running"}, 1)


def test_a_container_that_restarts_does_not_start_alone_again(world: World) -> None:
    world.bind(alone("p"))
    world.report(p=True)
    world.round()
    world.report(p=False)  # a new life, which has not settled
    world.round(after_s=1)
    assert world.phases == {"p": "running"}
    assert world.bind(alone("q")) == Bound()


def test_a_start_times_out_with_an_event(world: World) -> None:
    world.bind(alone("p", timeout="90s"))
    world.round(after_s=89)
    assert world.phases == {"p": "starting"}
    world.round(after_s=1)
    assert (world.phases, world.counted("timed_out")) == ({"p": "running"}, 1)
    (notice,) = world.posted
    assert (notice.about.uid, notice.reason) == ("p", "StartTimedOut")
    assert "still starts 90 s after its bind" in notice.message
    assert "Example: headroom.gpu/startup-timeout: 20m" in notice.message
    assert world.bind(alone("q")) == Bound()


def test_two_replicas_end_a_start_once(world: World) -> None:
    world.bind(alone("p", timeout="90s"))
    world.round(90, world.controller, world.other)
    assert (world.counted("timed_out"), len(world.posted)) == (1, 1)


def test_a_lost_race_is_decided_again_on_the_newer_version(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another replica has ended the start in between: this one neither counts nor reports it."""
    world.bind(alone("p", timeout="90s"))
    write, calls = world.store.write_spec, count()

    def conflicting(before: GPUNode, spec: GPUNodeSpec) -> GPUNode:
        if next(calls) == 0:
            write(before, spec)
            raise StoreConflict("another client wrote it")
        return write(before, spec)

    monkeypatch.setattr(world.store, "write_spec", conflicting)
    world.round(after_s=90)
    assert (world.phases, world.counted("timed_out"), world.posted) == ({"p": "running"}, 0, [])


def test_a_store_that_does_not_answer_is_asked_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.bind(alone("p", timeout="90s"))
    with monkeypatch.context() as patched:

        def silent(before: GPUNode, spec: GPUNodeSpec) -> GPUNode:
            raise StoreTimeout("no answer")

        patched.setattr(world.store, "write_spec", silent)
        world.round(after_s=90)
    assert world.phases == {"p": "starting"}
    world.round(after_s=1)
    assert world.phases == {"p": "running"}


def test_an_adopted_pod_is_starting_until_its_own_timeout(world: World) -> None:
    """It was bound without Headroom, or the ledger of its node was lost and is set up again."""
    began = datetime.fromtimestamp(world.now_s - 500, UTC).isoformat()
    running = msgspec.structs.replace(
        alone("p", node="n"), status=PodStatus(phase="Running", start_time=began)
    )
    world.store.admit(running)
    assert asyncio.run(world.ledger.reservations.charge("n", running))
    assert ADOPTED in world.gpunode.spec.reservations["p"].flags
    assert world.bind(alone("q")) == Declined(WAITS)
    world.round(after_s=99)
    assert world.phases == {"p": "starting"}
    world.round(after_s=1.1)
    assert world.phases == {"p": "running"}


def test_pods_start_in_the_order_of_the_ledger_whatever_the_clocks_say(world: World) -> None:
    """The second write is by a replica whose clock is an hour behind."""
    for uid in "pq":
        world.store.admit(alone(uid, node="n"))
        pod = world.store.read_pod("default", uid)
        assert pod is not None
        assert asyncio.run(world.ledger.reservations.charge("n", pod))
        world.skew_s -= 3600
    since = {uid: each.since for uid, each in world.gpunode.spec.reservations.items()}
    assert datetime.fromisoformat(since["q"]) - datetime.fromisoformat(since["p"]) == (
        timedelta(milliseconds=1)
    )
