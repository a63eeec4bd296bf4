"""Checks that the journal limits the number, the age and the bytes of its decisions."""

import gc
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from headroom.contract.decision import decision_of
from headroom.contract.kept_fields import kept_pod
from headroom.contract.kube import Pod
from headroom.core.journal.decision_records import (
    DEFAULT_BOUNDS,
    TERMS,
    Asked,
    BindTried,
    Bounds,
    Candidates,
    Filtered,
    Preempted,
    Ranked,
    Records,
)
from headroom.core.journal.journal import Decision, Journal, pod_bytes
from tests.builders import NOW_S, pod
from tests.fuzz.world import NODES, Attacked
from tests.serving import binding, offer
from tests.serving import pod as sent
from tests.state.states import EPOCH_S

#: Time on the wall clock at which the test starts.
WALL_S = EPOCH_S + NOW_S
ASKED = (Asked("main", "nvidia.com/gpu", 1, "8Gi", "annotation"),)


def filtered(at_s: float, fits: int = 3200) -> Filtered:
    return Filtered(at_s, 412, 99, 5000, fits, {14: 1500, 15: 300}, ASKED)


def note(records: Records, number: int, at_s: float) -> None:
    """Record a usual attempt, with filter, prioritize with 50 candidates, and bind."""
    uid = f"3f2b7c1e-aaaa-4bbb-8ccc-{number:012d}"
    node = f"gpu-a100-{number % 5000:04d}"
    names = tuple(f"gpu-a100-{number % 4000 + place:04d}" for place in range(50))
    term = np.full(50, 0.812)
    best = Candidates.of(names, term, dict.fromkeys(TERMS, term))
    bound = BindTried(at_s, 15_000, node, "bound", 0, "")
    ranked = Ranked(at_s, 220, 99, 3200, node)
    for part in (filtered(at_s), ranked, best, bound):
        name = f"trainer-7d9f8c6b5-{number:05d}"
        records.note(f"{uid}.{100_000 + number}", "team-a", name, part, at_s, node)


def test_the_reported_size_is_the_memory_in_use() -> None:
    for most in (1, 4):  # Test decisions with only a filter call, and complete decisions.
        tracemalloc.start()
        records = Records(replace(DEFAULT_BOUNDS, size_bytes=1 << 40))
        for number in range(500):
            if most == 1:
                at_s = 1000.0 + number
                records.note(f"{number:036d}.{number}", "team-a", "p", filtered(at_s), at_s)
            else:
                note(records, number, 1000.0 + number)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert records.size_bytes == pytest.approx(taken, rel=0.25)
        assert taken / len(records) < 3500


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        pytest.param(Bounds(decisions=3), 3, id="number"),
        pytest.param(Bounds(size_bytes=6400), 2, id="bytes"),
        pytest.param(Bounds(age_s=4.5), 5, id="age"),
    ],
)
def test_the_oldest_decisions_are_removed(bounds: Bounds, kept: int) -> None:
    records = Records(bounds)
    for number in range(10):
        note(records, number, 1000.0 + number)
    assert [record.at_s for record in records.newest_first()] == [
        1009.0 - age for age in range(kept)
    ]
    assert records.size_bytes == sum(record.size_bytes for record in records.newest_first())


def test_many_retries_of_one_pod_are_one_decision_and_displace_no_other() -> None:
    records = Records(Bounds(decisions=2))
    records.note("other.1", "default", "other", filtered(1.0), 1.0)
    for turn in range(1000):
        records.note("same.7", "default", "same", filtered(2.0 + turn, fits=turn), 2.0 + turn)
    same, other = records.newest_first()
    assert (other.decision_id, other.times(Filtered)) == ("other.1", 1)
    assert (same.first_at_s, same.at_s, same.times(Filtered)) == (2.0, 1001.0, 1000)
    latest = same.part(Filtered)
    assert latest is not None
    assert latest.fits == 999
    assert (same.uid, same.part(Ranked)) == ("same", None)


def test_invalid_long_names_displace_no_other_decision() -> None:
    records = Records(Bounds(size_bytes=4000))
    records.note("u.1", "default", "p", filtered(1.0), 1.0)
    records.note("v.1", "default", "q" * 5000, filtered(2.0), 2.0)
    assert [record.name for record in records.newest_first()] == ["p"]


def test_all_verbs_of_an_attempt_are_one_record_whose_name_is_on_the_pod() -> None:
    world = Attacked()
    shown = sent("half", "12Gi", version="1")
    shown["spec"]["priority"] = 5
    world.call("filter", json.dumps(offer(shown, *NODES)).encode())
    ranked = json.loads(
        world.call("prioritize", json.dumps(offer(shown, *NODES[:4])).encode()).body
    )
    victims = {NODES[0]: {"Pods": [{"UID": "uid-sits"}]}}
    world.call("preempt", json.dumps({"Pod": shown, "NodeNameToMetaVictims": victims}).encode())
    record = world.journal.records.of_id("uid-half.1")
    assert record is not None
    filter_, rank, rest = record.part(Filtered), record.part(Ranked), record.part(Preempted)
    assert filter_ is not None
    assert (filter_.offered, filter_.asked[0].amount) == (5, "12Gi")
    assert filter_.fits + sum(filter_.rejected.values()) == 5
    assert rank is not None
    assert [rank.winner] == [each["Host"] for each in ranked] == [record.node]
    assert (rest and rest.offered, rest and rest.kept) == (1, 1)
    kept = record.part(Candidates)
    assert kept is not None
    found = kept.first()
    first = found[0]
    assert first.node == rank.winner
    assert first.score_ratio == max(each.score_ratio for each in found)
    assert set(first.score_terms) == {
        "packing",
        "prediction",
        "sm_activity",
        "slack",
        "smallest_device",
        "report",
    }

    body = json.dumps(binding(shown, rank.winner)).encode()
    assert json.loads(world.call("bind", body).body)["Error"] == ""
    bound = world.store.read_pod("default", "half")
    assert bound is not None
    assert decision_of(bound) == record.decision_id
    assert WALL_S < record.first_at_s < record.at_s < WALL_S + 60


@pytest.mark.parametrize("text", [None, "no json", "[]", '{"decision": 5}', "{}"])
def test_a_placement_annotation_of_another_author_refers_to_no_decision(text: str | None) -> None:
    annotations = {} if text is None else {"headroom.gpu/placement": text}
    shown: Pod = pod(annotations=annotations)
    assert decision_of(shown) == ""


def decision(uid: str, name: str = "p", annotation: str = "") -> Decision:
    shown = pod(uid=uid, name=name, annotations={"headroom.gpu/note": annotation})
    return Decision(shown, f"{uid}.1", WALL_S, 7, 5, 2, {})


def test_copies_of_pods_are_limited_in_bytes() -> None:
    journal = Journal(max_shown_bytes=100_000)
    for number in range(50):
        journal.record(decision(f"u{number}", f"p{number}", "x" * 10_000))
        assert journal.shown_bytes <= 100_000
    assert journal.of_pod("default", "p0") is journal.of_uid("u0") is None
    assert journal.of_pod("default", "p49") is journal.of_uid("u49") is not None


def test_a_pod_with_many_names_is_kept_once() -> None:
    """A UID can occur with several names, because the port accepts any body."""
    journal = Journal()
    for number in range(100):
        journal.record(decision("u", f"p{number}"))
    assert journal.of_pod("default", "p98") is None
    assert journal.of_pod("default", "p99") is not None
    assert journal.shown_bytes == pod_bytes(decision("u", "p99").pod)


def plain_pod(number: int) -> dict[str, Any]:
    return sent(f"p{number}", "1Gi")


def annotated_pod(number: int) -> dict[str, Any]:
    shown = sent(f"p{number}", "1Gi")
    shown["metadata"]["annotations"]["headroom.gpu/note"] = f"{number:06}" + "x" * 30_000
    return shown


def pod_of_many_containers(number: int) -> dict[str, Any]:
    shown = sent(f"p{number}", "1Gi")
    limits = {"nvidia.com/gpu": "1", "cpu": "2"}
    many = [{"name": f"{number}-{n}", "resources": {"limits": limits}} for n in range(300)]
    return {**shown, "spec": {**shown["spec"], "initContainers": many}}


def pod_of_many_tolerations(number: int) -> dict[str, Any]:
    shown = sent(f"p{number}", "1Gi")
    many = [{"key": f"{number}-{n}"} for n in range(900)]
    return {**shown, "spec": {**shown["spec"], "tolerations": many}}


@pytest.mark.parametrize(
    "manifest", [plain_pod, annotated_pod, pod_of_many_containers, pod_of_many_tolerations]
)
def test_no_pod_takes_more_memory_than_estimated(manifest: Callable[[int], dict[str, Any]]) -> None:
    bodies = [json.dumps(manifest(number)).encode() for number in range(10)]
    decode = msgspec.json.Decoder(Pod).decode
    tracemalloc.start()
    pods = [kept_pod(decode(body)) for body in bodies]
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken <= sum(map(pod_bytes, pods))


def test_filter_keeps_only_annotations_that_are_read() -> None:
    world = Attacked()
    shown = sent("noted", "1Gi")
    shown["metadata"]["annotations"]["example.com/manifest"] = "x" * 200_000
    world.call("filter", json.dumps(offer(shown, *NODES)).encode())
    kept = world.journal.of_pod("default", "noted")
    assert kept is not None
    assert set(kept.pod.metadata.annotations or {}) == {"headroom.gpu/vram"}
    assert kept.pod.metadata.foreign_annotation_bytes == 200_000 + len("example.com/manifest")
    assert world.journal.shown_bytes < 20_000
