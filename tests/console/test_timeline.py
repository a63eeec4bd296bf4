"""Tests /v1/timeline, which lists the events of a pod's life, oldest first."""

from typing import Any

import msgspec
import pytest

from headroom.console.feed.feed import Feed
from headroom.console.responses import stamp
from headroom.console.views.history import SeriesView
from headroom.console.views.timeline import growth
from headroom.contract.reasons import Reason
from headroom.contract.watched import GPUNodeSeen, PodSeen
from headroom.core.journal.decision_records import BindTried, Filtered
from headroom.core.placement.snapshot import CODE_OF
from tests.builders import GIB, gpunode, pod, reservation, shared
from tests.console.asking import WALL_S, Asked

CREATED = "2026-11-20T23:00:00Z"


def entries(asked: Asked, name: str = "p") -> list[tuple[str, str]]:
    answer = asked.get(f"/v1/timeline?pod=default/{name}")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    assert "4,096 changes" in body["kept"]
    assert [each["at"] for each in body["entries"]] == sorted(
        each["at"] for each in body["entries"]
    )
    return [(each["kind"], each["message"]) for each in body["entries"]]


def series(*gib: float | None, requested: int | None = 8) -> SeriesView:
    return SeriesView(
        kind="pod",
        unit="bytes",
        device="GPU-1",
        requested_bytes=None if requested is None else requested * GIB,
        values=[None if each is None else each * GIB for each in gib],
    )


def test_growth_has_an_entry_for_each_new_peak() -> None:
    at_s = [WALL_S + each for each in range(7)]
    found = growth(at_s, series(1, None, 1.4, 4, 2, 4.5, 9))
    assert [(each.at, each.kind, each.message) for each in found] == [
        (stamp(WALL_S + 3), "grew", "its use of device GPU-1 grew from 1.0 GiB to 4.0 GiB"),
        (
            stamp(WALL_S + 6),
            "grew",
            "its use of device GPU-1 grew from 4.0 GiB to 9.0 GiB, 1.0 GiB more than it reserved",
        ),
    ]


def test_growth_of_an_unreserved_pod_is_reported_in_steps_of_half_a_gib() -> None:
    found = growth([WALL_S, WALL_S + 1, WALL_S + 2], series(1, 1.4, 1.5, requested=None))
    assert [each.at for each in found] == [stamp(WALL_S + 2)]


@pytest.mark.parametrize("text", ["2026-1-21T00:40:41Z", "8", "0001-01-01T00:00:00+23:59"])
def test_an_invalid_time_is_omitted(text: str) -> None:
    asked = Asked()
    held = msgspec.structs.replace(reservation({"GPU-1": GIB}), since=text)
    asked.add_node("n")
    node = gpunode(shared("GPU-1"), reservations={"uid-p": held})
    waiting = pod(created=text, node="n", uid="uid-p", name="p")
    asked.writer.apply([PodSeen(waiting), GPUNodeSeen(node, 0.0)])
    assert entries(asked) == []


def test_a_pod_without_records_has_only_its_creation() -> None:
    asked = Asked()
    asked.writer.apply([PodSeen(pod(created=CREATED))])
    assert entries(asked) == [("created", "the pod was created")]
    assert asked.get("/v1/timeline?pod=default/none").status_code == 404


def test_attempts_binds_and_changes_are_sorted_by_time() -> None:
    feed = Feed(lambda: WALL_S + 40, lambda: 1)
    asked = Asked(feed=feed)
    asked.add_node("a")
    first, second = pod(created=CREATED), pod(created=CREATED, version="2")
    asked.writer.apply([PodSeen(second)])
    code = CODE_OF[Reason.NO_REPORT]
    asked.journal.note(first, Filtered(WALL_S + 10, 1, 1, 2, 0, {code: 2}, ()), WALL_S + 10)
    asked.journal.note(second, Filtered(WALL_S + 20, 1, 1, 1, 1, {}, ()), WALL_S + 20)
    bound = BindTried(WALL_S + 21, 1, "a", "bound", 0, "")
    asked.journal.note(second, bound, WALL_S + 21, "a")
    feed.publish("pod_observed", node="a", device="GPU-a-0", uid="uid-p")
    feed.publish("pod_observed", node="a", device="GPU-a-0", uid="other")
    feed.publish(
        "reservation_changed", node="a", uid="uid-p", cause="is_to_leave", message="overuse"
    )
    assert entries(asked) == [
        ("created", "the pod was created"),
        (
            "filtered",
            "kube-scheduler tried it: 2 nodes offered, none could take it; "
            f"2 nodes: {Reason.NO_REPORT.sentence}",
        ),
        ("requeued", "kube-scheduler tried it: 1 node offered, 1 could take it"),
        ("bound", "bind to node a: bound"),
        ("confirmed", "a report shows it on device GPU-a-0"),
        ("evicting", "it is marked for eviction: overuse"),
    ]
