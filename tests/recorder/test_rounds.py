"""Tests the calls, writes and counters of the recorder's rounds, and the effect of failures."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import ObjectMeta, OwnerReference
from headroom.contract.vramprofile import ProfileOwner, VRAMProfile, decode_profile, stamp
from headroom.contract.watched import GPUNodeGone, GPUNodeSeen, PodGone, PodSeen, Relisted
from headroom.core.recommend.lives import DAY_S, Ending, Life
from headroom.core.recommend.profile_status import restored
from headroom.recorder.metrics import RecorderTelemetry
from headroom.recorder.past_lives import Owner, PastLife, PastLives
from headroom.recorder.pod_facts import ObservedPod, PodFacts
from headroom.recorder.profile_book import FORGOTTEN_AFTER_S, ProfileBook, Write
from headroom.recorder.rounds import Observed, Recorder
from headroom.runtime.debug_port import probes_app
from headroom.runtime.kube.api_errors import ApiStatus, NoAnswer, Unreadable
from tests.monitoring.documented import documented
from tests.promtool import complaints
from tests.recorder.facts import GIB, NODE, NOW_S, REPLICA_SET, ended, facts, report, use

OWNER = ProfileOwner(kind="Deployment", name="llm", api_version="apps/v1")
KEY = ("team", "deployment-llm")


@dataclass
class Api:
    """A fake API server with owners and profiles."""

    profiles: dict[tuple[str, str], VRAMProfile] = field(default_factory=dict)
    writes: list[VRAMProfile] = field(default_factory=list)
    #: For each call, the exceptions that its next calls raise, in order.
    failures: dict[str, list[Exception]] = field(default_factory=dict)
    version: int = 0
    #: Maps pods to their owners. The owner of all other pods is ``OWNER``.
    owners: dict[str, ProfileOwner] = field(default_factory=dict)

    def _fail(self, call: str) -> None:
        if waiting := self.failures.get(call):
            raise waiting.pop(0)

    def owner(self, pod: PodFacts) -> tuple[ProfileOwner, OwnerReference | None]:
        self._fail("owner")
        return self.owners.get(pod.name, OWNER), None

    def list(self) -> list[VRAMProfile]:
        self._fail("list")
        return list(self.profiles.values())

    def read(self, namespace: str, name: str) -> VRAMProfile | None:
        self._fail("read")
        return self.profiles.get((namespace, name))

    def write(self, profile: VRAMProfile) -> VRAMProfile:
        self._fail("write")
        before = self.profiles.get((profile.metadata.namespace, profile.metadata.name))
        version = before.metadata.resource_version if before else ""
        if profile.metadata.resource_version != version:
            raise ApiStatus("PUT", 409, "Conflict")
        self.version += 1
        metadata = msgspec.structs.replace(profile.metadata, resource_version=str(self.version))
        stored = decode_profile(
            msgspec.json.encode(msgspec.structs.replace(profile, metadata=metadata))
        )
        self.profiles[profile.metadata.namespace, profile.metadata.name] = stored
        self.writes.append(stored)
        self._fail("answer")
        return stored

    def delete(self, profile: VRAMProfile) -> None:
        self._fail("delete")
        self.profiles.pop((profile.metadata.namespace, profile.metadata.name), None)


class RecorderRounds:
    def __init__(self) -> None:
        self.api, self.observed = Api(), Observed()
        self.telemetry = RecorderTelemetry(CollectorRegistry())
        self.now_s, self.leads, self.past = NOW_S, True, PastLives()
        self.recorder = Recorder(
            self.observed,
            self.api,  # type: ignore[arg-type]
            self.api,  # type: ignore[arg-type]
            lambda: self.leads,
            self.telemetry,
            lambda: self.now_s,
            self.past,
        )

    def see(self, pod: PodFacts, *uses: Any, uid: str = "u1", node_name: str = NODE) -> None:
        metadata = ObjectMeta(name=pod.name, namespace=pod.namespace, uid=uid)
        node = GPUNode(metadata=ObjectMeta(name=node_name), status=report(*uses))
        self.observed.apply(
            [PodSeen(ObservedPod(metadata=metadata, facts=pod)), GPUNodeSeen(node, 0.0)]
        )

    def round(self, later_s: float = 60.0) -> None:
        self.now_s += later_s
        asyncio.run(self.recorder.round())

    def counted(self, name: str, **labels: str) -> float:
        return self.telemetry.registry.get_sample_value(name, labels) or 0.0

    @property
    def track(self) -> Any:
        return self.api.profiles[KEY].status.containers[0].tracks[0]


@pytest.fixture
def world() -> RecorderRounds:
    return RecorderRounds()


def past_days(count: int) -> list[PastLife]:
    """Return a run of the ReplicaSet in ``facts`` for each of the last days, oldest first."""
    owner, hour_s = Owner("team", "ReplicaSet", "llm-5d4f"), 3600.0
    ends = [NOW_S - day * DAY_S for day in range(count, 0, -1)]
    lives = [Life(8 * GIB, end_s - hour_s, end_s, Ending.COMPLETED) for end_s in ends]
    return [PastLife(owner, "main", "", "L4", life) for life in lives]


def test_past_runs_give_a_new_owner_a_recommendation_at_once(world: RecorderRounds) -> None:
    world.past.load(past_days(5))
    world.see(facts(), use(4))
    world.round()
    assert (world.track.ended, world.track.first) == (5, stamp(NOW_S - 5 * DAY_S - 3600))
    lives = restored(world.api.profiles[KEY].status).container("main", "L4")
    request_bytes = lives.recommendation("p1", world.now_s).request_bytes
    assert request_bytes is not None
    assert 8 * GIB < request_bytes < 11 * GIB
    assert world.counted("headroom_recorder_past_lives") == 0


@pytest.mark.parametrize(
    "failures",
    [
        pytest.param({"answer": [NoAnswer("reset")]}, id="no answer"),
        pytest.param({"answer": [ApiStatus("PUT", 504, "timeout")]}, id="a timeout of the server"),
        pytest.param({"answer": [Unreadable("cut off")]}, id="truncated response"),
        pytest.param({"answer": [NoAnswer("reset")], "write": [NoAnswer("")] * 3}, id="an outage"),
        pytest.param(
            {"answer": [NoAnswer("reset")], "read": [NoAnswer("")]}, id="both responses lost"
        ),
        pytest.param({"write": [NoAnswer("refused")]}, id="not sent"),
        pytest.param({"write": [ApiStatus("PUT", 429, "later")]}, id="rejected"),
    ],
)
def test_each_run_is_counted_once_whichever_response_is_lost(
    world: RecorderRounds, failures: dict[str, list[Exception]]
) -> None:
    for _ in range(2):
        world.see(facts(), use(8, started_s=world.now_s))
        world.round()
        world.see(facts(ends=ended(0, finished_s=world.now_s)))
        world.api.failures = {call: [*raised] for call, raised in failures.items()}
        world.round()
        # Another run starts while the result of the write is unknown.
        world.see(facts(), use(9, started_s=world.now_s + 30))
        for _ in range(6):
            world.round()
        world.see(facts(ends=ended(0, finished_s=world.now_s)))
        world.round()
        assert not any(world.api.failures.values())
    assert world.track.ended == 4
    assert sum(world.track.complete.values()) == pytest.approx(4000, rel=0.01)


def test_an_owner_whose_profile_cannot_be_created_delays_no_other(
    world: RecorderRounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(book: ProfileBook, key: tuple[str, str], now_s: float) -> Write:
        if key[1] == "a-broken":
            raise ValueError("year 0 is out of range")
        return made(book, key, now_s)

    made = ProfileBook.write
    monkeypatch.setattr(ProfileBook, "write", fails)
    first = ProfileOwner(kind="A", name="broken")
    world.api.owners = {"a": first}
    world.see(facts(name="a", controller=None), use(8))
    world.see(facts(node="n2"), use(8, uid="u2"), uid="u2", node_name="n2")
    world.round()
    assert [*world.api.profiles] == [KEY]
    assert world.counted("headroom_recorder_writes_total", outcome="failed") == 1


def test_past_runs_are_not_added_to_recorded_ones(world: RecorderRounds) -> None:
    world.see(facts(), use(8))
    world.round()
    world.see(facts(ends=ended(0)))
    world.round()
    assert world.track.ended == 1
    world.past.load(past_days(5))
    world.see(facts(), use(8, started_s=NOW_S + 60))
    world.round(10_000)
    assert world.track.ended == 1
    assert len(world.past) == 0


def test_a_run_is_written_while_it_is_active_and_when_it_has_ended(world: RecorderRounds) -> None:
    world.see(facts(), use(8))
    world.round()
    assert (world.track.ended, len(world.track.running_censored)) == (0, 1)
    (container,) = world.api.profiles[KEY].status.containers
    assert container.memory_bytes == 23 * GIB
    world.see(facts(ends=ended(0)))
    world.round()
    assert (world.track.ended, world.track.running_censored) == (1, {})
    world.round(10_000)
    assert len(world.api.writes) == 2
    assert world.counted("headroom_recorder_lives_total", ending="completed") == 1
    assert world.counted("headroom_recorder_writes_total", outcome="written") == 2
    assert world.counted("headroom_recorder_profiles") == 1
    assert world.counted("headroom_recorder_lives_waiting") == 0


def test_a_pod_that_is_deleted_between_two_rounds_is_recorded(world: RecorderRounds) -> None:
    world.see(facts(), use(8))
    world.round()
    world.observed.apply([PodGone("u1"), GPUNodeGone(NODE)])
    world.round()
    assert world.track.ended == 1


def test_a_relist_without_the_pod_ends_its_run(world: RecorderRounds) -> None:
    world.see(facts(), use(8))
    world.round()
    world.observed.apply([Relisted(ObservedPod, (), 0.0), Relisted(GPUNode, (), 0.0)])
    world.round()
    assert world.track.ended == 1


def test_without_the_lease_no_call_is_made(world: RecorderRounds) -> None:
    world.leads = False
    world.api.failures["list"] = [AssertionError("asked")]
    world.see(facts(), use(8))
    world.round()
    assert (world.api.writes, world.counted("headroom_recorder_leads")) == ([], 0)


def test_a_recorder_that_leads_again_starts_from_the_stored_profiles(world: RecorderRounds) -> None:
    world.see(facts(), use(8))
    world.round()
    world.see(facts(ends=ended(0)))
    world.round()
    world.leads = False
    world.round()
    world.leads = True
    world.see(facts(), use(9, NOW_S))
    world.round()
    world.see(facts(ends=ended(0, finished_s=NOW_S + 900)))
    world.round()
    assert world.track.ended == 2


def test_a_conflict_is_resolved_with_the_other_version(world: RecorderRounds) -> None:
    world.see(facts(ends={}), use(8))
    world.round()
    # Another recorder has written a run in the meantime.
    other = msgspec.structs.replace(world.track, ended=5)
    status = world.api.profiles[KEY].status
    container = msgspec.structs.replace(status.containers[0], tracks=[other])
    status = msgspec.structs.replace(status, containers=[container])
    world.api.profiles[KEY] = msgspec.structs.replace(world.api.profiles[KEY], status=status)
    world.api.failures["write"] = [ApiStatus("PUT", 409, "")]
    world.see(facts(ends=ended(0)))
    world.round()
    assert world.counted("headroom_recorder_writes_total", outcome="conflict") == 1
    world.round()
    assert world.track.ended == 6


@pytest.mark.parametrize("failure", [NoAnswer("timeout"), ApiStatus("PUT", 500, "")])
def test_a_failed_write_is_repeated(world: RecorderRounds, failure: Exception) -> None:
    world.api.failures["write"] = [failure]
    world.see(facts(), use(8))
    world.round()
    assert world.counted("headroom_recorder_writes_total", outcome="failed") == 1
    world.see(facts(ends=ended(0)))
    world.round()
    assert world.track.ended == 0
    world.round()
    assert world.track.ended == 1


def test_a_profile_in_a_deleted_namespace_is_dropped(world: RecorderRounds) -> None:
    world.api.failures["write"] = [ApiStatus("POST", 404, "")]
    world.see(facts(), use(8))
    world.round()
    assert world.counted("headroom_recorder_profiles") == 0


def test_a_dropped_profile_that_was_replaced_is_read_again(world: RecorderRounds) -> None:
    world.see(facts(), use(8))
    world.round()
    world.see(facts(ends=ended(0)))
    world.round()
    world.observed.apply([PodGone("u1"), GPUNodeGone("n")])
    world.round()
    world.api.failures["delete"] = [ApiStatus("DELETE", 409, "")]
    world.round(FORGOTTEN_AFTER_S + 86_400.0)
    assert (world.api.profiles.keys(), world.counted("headroom_recorder_profiles")) == ({KEY}, 1)
    world.round()
    assert (world.api.profiles, world.counted("headroom_recorder_profiles")) == ({}, 0)


def test_a_run_waits_while_its_owner_cannot_be_read(world: RecorderRounds) -> None:
    # The owner cannot be read while the run is active, and cannot be read after it has ended.
    world.api.failures["owner"] = [NoAnswer("timeout"), NoAnswer("timeout")]
    world.see(facts(), use(8))
    world.round()
    assert world.api.profiles == {}
    world.see(facts(ends=ended(0)))
    world.round()
    assert world.api.profiles == {}
    assert world.counted("headroom_recorder_lives_waiting") == 1
    world.round()
    assert world.track.ended == 1


def test_the_owner_of_a_controller_is_read_once_while_its_pods_run(world: RecorderRounds) -> None:
    world.see(facts(), use(8))
    world.round()
    # The error does not occur, because no call is made.
    world.api.failures["owner"] = [NoAnswer("timeout")]
    world.see(facts(), use(9))
    world.round()
    world.see(facts(ends=ended(0)))
    world.round()
    assert world.track.ended == 1
    assert world.api.failures["owner"]
    other = facts(controller=msgspec.structs.replace(REPLICA_SET, uid="rs-2"))
    world.see(other, use(8, started_s=NOW_S + 600))
    world.round()
    assert not world.api.failures["owner"]


def test_a_pod_that_refers_to_a_controller_in_another_namespace_gets_its_own_owner(
    world: RecorderRounds,
) -> None:
    """The author of the pod wrote the UID in the owner reference."""
    world.see(facts(), use(8))
    world.round()
    world.api.failures["owner"] = [NoAnswer("asked again")]
    world.see(facts(namespace="evil"), use(9, started_s=NOW_S + 600))
    world.round()
    assert not world.api.failures["owner"]


def test_old_profiles_are_deleted(world: RecorderRounds) -> None:
    world.see(facts(), use(8))
    world.round()
    world.see(facts(ends=ended(0)))
    world.round()
    world.round(101 * 86400)
    assert world.api.profiles == {}


def test_probes_and_metrics_match_their_documentation(world: RecorderRounds) -> None:
    reasons = [""]
    app = probes_app("Recorder", lambda: reasons[0], dict, world.telemetry.exposition)

    async def get(path: str) -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://recorder") as client:
            return await client.get(path)

    assert asyncio.run(get("/healthz")).status_code == 200
    assert asyncio.run(get("/readyz")).status_code == 200
    text = asyncio.run(get("/metrics")).text
    assert complaints(text) == []
    families = {
        each.name + {"counter": "_total", "info": "_info"}.get(each.type, ""): each
        for each in text_string_to_metric_families(text)
    }
    own = documented("The recorder")
    assert own.keys() == {name for name in families if name.startswith("headroom_recorder_")}
    for name, row in own.items():
        labels = {label for sample in families[name].samples for label in sample.labels}
        assert (families[name].type, labels) == (row.type, set(row.labels)), name
    reasons[0] = "Headroom has not yet listed: pods"
    assert asyncio.run(get("/readyz")).status_code == 503
    assert "headroom_recorder_ready 0.0" in asyncio.run(get("/metrics")).text
