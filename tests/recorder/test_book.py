"""Tests profiles in memory: when they are written, conflicts, and limits."""

import json
from dataclasses import replace

import msgspec
import pytest

from headroom.contract.kube import ObjectMeta, OwnerReference
from headroom.contract.vramprofile import ProfileOwner, VRAMProfile, decode_profile
from headroom.core.recommend.histogram import upper_end
from headroom.core.recommend.lives import Ending, Life
from headroom.core.recommend.profile_status import restored
from headroom.core.recommend.programs import Family, Program
from headroom.recorder.life_tracker import TrackedLife
from headroom.recorder.profile_book import Owned, ProfileBook, Write
from tests.recorder.facts import GIB, HOUR_S, NOW_S, facts

ENDED_EVERY_S = 30.0
RUNNING_EVERY_S = 600.0
FORGOTTEN_AFTER_S = 100 * 86400.0
MAX_PENDING = 1000

OWNER = ProfileOwner(kind="Deployment", name="llm", api_version="apps/v1")
TO = OwnerReference(api_version="apps/v1", kind="Deployment", name="llm", uid="d-1")
KEY = ("team", "deployment-llm")


def owned(peak_gib: float = 8, hours: float = 1, ending: Ending | None = Ending.COMPLETED) -> Owned:
    life = Life(int(peak_gib * GIB), NOW_S - hours * HOUR_S, NOW_S, ending)
    program = Program("p1", Family.VLLM)
    return Owned(TrackedLife(facts(), "main", "L4", program, life), OWNER, TO)


def due(book: ProfileBook, now_s: float, at_most: int) -> list[Write]:
    return [book.write(key, now_s) for key in book.due(now_s, at_most)]


def answered(write: Write, version: str = "1") -> VRAMProfile:
    """Return the object that the API server would return for a write."""
    metadata = msgspec.structs.replace(write.profile.metadata, resource_version=version, uid="vp-1")
    stored = msgspec.structs.replace(write.profile, metadata=metadata)
    return decode_profile(msgspec.json.encode(stored))


def test_ended_runs_are_written_once() -> None:
    book = ProfileBook()
    book.take([owned(8), owned(9)], [])
    (write,) = due(book, NOW_S, 10)
    assert (write.key, write.taken, book.waiting) == (KEY, 2, 2)
    assert write.profile.metadata == ObjectMeta(
        namespace="team", name="deployment-llm", owner_references=[TO]
    )
    body = json.loads(msgspec.json.encode(write.profile))
    assert (body["apiVersion"], body["kind"]) == ("headroom.gpu/v1alpha1", "VRAMProfile")
    assert body["status"]["owner"] == {
        "kind": "Deployment",
        "name": "llm",
        "apiVersion": "apps/v1",
    }
    assert body["status"]["controllers"] == [{"kind": "ReplicaSet", "name": "llm"}]
    assert body["status"]["lives"] == 2
    (container,) = body["status"]["containers"]
    assert (container["container"], container["model"], container["family"]) == (
        *("main", "L4"),
        "vLLM",
    )
    (track,) = container["tracks"]
    assert track["program"] == "p1"
    assert track["ended"] == 2
    assert [upper_end(int(b)) >= 8 * GIB for b in track["complete"]] == [True, True]
    assert list(track["complete"].values()) == [1000, 1000]
    book.written(write, answered(write), NOW_S)
    assert (book.waiting, due(book, NOW_S + 10 * RUNNING_EVERY_S, 10)) == (0, [])


def test_the_next_write_adds_to_the_version_of_the_api_server() -> None:
    book = ProfileBook()
    book.take([owned(8)], [])
    (first,) = due(book, NOW_S, 10)
    book.written(first, answered(first, "5"), NOW_S)
    book.take([owned(8), owned(8)], [])
    assert due(book, NOW_S + ENDED_EVERY_S - 1, 10) == []
    (second,) = due(book, NOW_S + ENDED_EVERY_S, 10)
    assert second.profile.metadata.resource_version == "5"
    track = restored(second.profile.status).container("main", "L4").tracks["p1"]
    assert (track.ended, track.lives) == (3, 3)


def test_a_run_that_ends_during_a_write_is_in_the_next_one() -> None:
    book = ProfileBook()
    book.take([owned()], [])
    (write,) = due(book, NOW_S, 10)
    book.take([owned()], [])
    book.written(write, answered(write), NOW_S)
    assert book.waiting == 1


def test_after_a_conflict_runs_are_added_to_the_other_version() -> None:
    book, other = ProfileBook(), ProfileBook()
    for each in (book, other):
        each.take([owned()], [])
    (theirs,) = due(other, NOW_S, 10)
    book.stored(KEY, answered(theirs, "9"))
    (mine,) = due(book, NOW_S, 10)
    assert mine.profile.metadata.resource_version == "9"
    assert mine.profile.status.lives == 2


def test_active_runs_are_replaced_and_written_when_they_change() -> None:
    book = ProfileBook()
    book.take([], [owned(8, 25, None), owned(8, 1, None)])
    (write,) = due(book, NOW_S, 10)
    track = restored(write.profile.status).container("main", "L4").tracks["p1"]
    assert (track.running.total, track.running_censored.total, track.lives) == (1.0, 1.0, 1)
    book.written(write, answered(write), NOW_S)
    book.take([], [owned(8, 25, None), owned(8, 1, None)])
    assert due(book, NOW_S + RUNNING_EVERY_S, 10) == []
    book.take([], [owned(8.5, 25, None), owned(8, 1, None)])
    assert due(book, NOW_S + RUNNING_EVERY_S - 1, 10) == []
    (again,) = due(book, NOW_S + RUNNING_EVERY_S, 10)
    book.written(again, answered(again), NOW_S + RUNNING_EVERY_S)
    book.take([], [])
    (empty,) = due(book, NOW_S + 2 * RUNNING_EVERY_S, 10)
    assert empty.profile.status.lives == 0


def test_runs_that_outgrow_all_earlier_runs_are_kept_in_the_profile() -> None:
    def late(ending: Ending | None) -> Owned:
        each = owned(9.5, 120, ending)
        life = replace(each.tracked.life, first_day_bytes=8 * GIB)
        return replace(each, tracked=replace(each.tracked, life=life))

    book, now_s = ProfileBook(), NOW_S
    for ended, running in (
        ([owned() for _ in range(4)], late(None)),
        ([late(Ending.EVICTED)], None),
    ):
        book.take(ended, [running] if running else [])
        (write,) = due(book, now_s, 10)
        track = restored(answered(write).status).container("main", "L4").tracks["p1"]
        assert (track.running_outgrown, track.outgrown) == ((1, 0) if running else (0, 1))
        assert track.is_unsettled
        book.written(write, answered(write), now_s)
        now_s += RUNNING_EVERY_S


def test_the_longest_waiting_profile_is_written_first_and_failures_come_last() -> None:
    book = ProfileBook()
    names = ["a", "b", "c"]
    owners = [ProfileOwner(kind="Deployment", name=n, api_version="apps/v1") for n in names]
    book.take([Owned(owned().tracked, owner) for owner in owners], [])
    assert [write.key[1] for write in due(book, NOW_S, 2)] == ["deployment-a", "deployment-b"]
    book.delayed(("team", "deployment-a"), NOW_S)
    assert [write.key[1] for write in due(book, NOW_S, 5)] == ["deployment-b", "deployment-c"]
    later = NOW_S + ENDED_EVERY_S
    assert [write.key[1] for write in due(book, later, 5)][-1] == "deployment-a"


def test_the_number_of_pending_runs_is_limited_and_they_survive_a_reload() -> None:
    book = ProfileBook()
    book.take([owned() for _ in range(MAX_PENDING + 5)], [])
    assert book.waiting == MAX_PENDING
    book.load([])
    assert book.waiting == MAX_PENDING


def test_a_profile_without_runs_for_a_long_time_is_dropped() -> None:
    book = ProfileBook()
    book.take([owned()], [])
    (write,) = due(book, NOW_S, 1)
    book.written(write, answered(write), NOW_S)
    assert book.forgotten(NOW_S + FORGOTTEN_AFTER_S - 1) == []
    ((key, stored),) = book.forgotten(NOW_S + FORGOTTEN_AFTER_S + 1)
    assert (key, stored.metadata.uid) == (KEY, "vp-1")
    book.take([], [owned(8, 1, None)])
    assert book.forgotten(NOW_S + FORGOTTEN_AFTER_S + 1) == []
    book.drop(KEY)
    assert len(book) == 0


@pytest.mark.slow
def test_the_size_of_a_status_is_limited() -> None:
    book = ProfileBook()
    program = [Program(f"program-{n:04}", Family.UNKNOWN) for n in range(12)]
    lives = []
    for container in range(20):
        for n in range(12):
            for k in range(100):
                life = Life((1 << 30) + (k << 28), NOW_S - 60, NOW_S, Ending.COMPLETED)
                tracked = TrackedLife(facts(), f"c{container}", "L4", program[n], life)
                lives.append(Owned(tracked, OWNER, TO))
    for start in range(0, len(lives), MAX_PENDING):
        book.take(lives[start : start + MAX_PENDING], [])
        (write,) = due(book, NOW_S, 1)
        book.written(write, answered(write), 0.0)
    status = write.profile.status
    assert len(status.containers) == 16
    assert max(len(each.tracks) for each in status.containers) <= 8
    assert len(msgspec.json.encode(write.profile)) < 256 << 10


def test_a_device_size_without_an_active_run_is_not_kept() -> None:
    """Otherwise, an agent that reports a false size would raise the limit of recommendations
    permanently.
    """

    def size(gib: int) -> int:
        each = owned(ending=None)
        tracked = replace(each.tracked, memory_bytes=gib * GIB)
        book.take([], [replace(each, tracked=tracked)])
        (write,) = due(book, NOW_S + RUNNING_EVERY_S, 10)
        book.stored(write.key, answered(write))
        return write.profile.status.containers[0].memory_bytes

    book = ProfileBook()
    assert [size(24), size(16384), size(24)] == [24 * GIB, 16384 * GIB, 24 * GIB]
