"""Tests the reflector with a scripted server that sends exact bytes, without real delays."""

import threading
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from headroom.contract.kube import Node
from headroom.contract.watched import (
    ClaimGone,
    ClassGone,
    GPUNodeGone,
    GPUNodeSeen,
    HeartbeatSeen,
    NodeGone,
    NodeSeen,
    PodGone,
    PodSeen,
    Relisted,
    SliceGone,
    SliceSeen,
)
from headroom.core.cluster.changes import Event
from headroom.runtime.kube.resources import watched_kinds
from tests.kube.following import (
    HANG,
    KINDS,
    QUICK,
    Followed,
    change,
    following,
    obj,
    page,
    relisted,
    status,
    watch,
)
from tests.scripted import Exchange
from tests.waiting import PATIENCE_S

#: A kind whose watch is relevant only for some pods.
KINDS["our pods"] = next(
    kind
    for kind in watched_kinds("headroom-system", lambda pod: pod.metadata.name.startswith("ours"))
    if kind.name == "pods"
)


def test_a_paged_list_is_followed_by_every_change_in_order() -> None:
    with following(
        page(4, obj("a", 1), obj("b", 2), token="more"),
        page(5, obj("c", 3)),
        watch(
            change("ADDED", "d", 6),
            change("MODIFIED", "a", 7),
            change("DELETED", "b", 8),
            change("BOOKMARK", "", 20),
        ),
        HANG,
    ) as followed:
        first, *rest = followed.told(4)
        followed.seen.until(lambda _: len(followed.server.requests) == 4)
    assert relisted("a", "b", "c")(first)
    assert isinstance(first, Relisted)
    assert (first.kind, first.at_s) == (Node, 100.0)
    assert [type(event) for event in rest] == [NodeSeen, NodeSeen, NodeGone]
    assert [event.node.metadata.name for event in rest if isinstance(event, NodeSeen)] == ["d", "a"]
    assert rest[2] == NodeGone("b")
    assert followed.queries == ["list", "list", "watch 5", "watch 20"]
    assert followed.waits == []
    lists = [request.query for request in followed.server.requests[:2]]
    assert lists == [{"limit": "2"}, {"limit": "2", "continue": "more"}]
    assert followed.server.requests[2].query["allowWatchBookmarks"] == "true"


class TestOptionalKind:
    def paths(self, followed: Followed) -> list[str]:
        return [request.path for request in followed.server.requests]

    def test_an_older_api_version_is_found_and_watched(self) -> None:
        script = (status(404), status(404), page(5, obj("a", 1)), watch(change("ADDED", "b", 6)))
        with following(*script, HANG, kind="resourceslices") as followed:
            first, second = followed.told(2)
        assert relisted("a")(first)
        assert isinstance(second, SliceSeen)
        assert [path.split("/")[3] for path in self.paths(followed)[:4]] == [
            "v1",
            "v1beta2",
            "v1beta1",
            "v1beta1",
        ]
        assert followed.waits == []

    def test_a_missing_kind_is_empty_and_checked_again(self) -> None:
        script = (status(404),) * 3 + (page(5, obj("a", 1)), HANG)
        with following(*script, kind="resourceslices") as followed:
            first, second = followed.told(2)
            assert followed.reflector.health.synced
        assert relisted()(first)
        assert relisted("a")(second)
        assert followed.waits == [QUICK.absent_s]
        assert followed.reflector.health.reconnects == 0

    def test_other_errors_do_not_count_as_a_missing_kind(self) -> None:
        with following(status(403), page(5), HANG, kind="resourceslices") as followed:
            followed.told(1)
        assert [path.split("/")[3] for path in self.paths(followed)[:2]] == ["v1", "v1"]
        assert followed.waits == [1.0]

    def test_a_required_kind_must_be_listed_first(self) -> None:
        with following(status(404), page(5), HANG) as followed:
            followed.told(1)
        assert followed.waits == [1.0]


@pytest.mark.parametrize(
    ("kind", "seen", "gone"),
    [
        pytest.param("pods", "PodSeen", PodGone("uid-a"), id="pods"),
        pytest.param("nodes", "NodeSeen", NodeGone("a"), id="nodes"),
        pytest.param("gpunodes", "GPUNodeSeen", GPUNodeGone("a"), id="gpunodes"),
        pytest.param("namespaces", "NamespaceSeen", None, id="namespaces"),
        pytest.param("leases", "HeartbeatSeen", None, id="leases"),
        pytest.param("resourceslices", "SliceSeen", SliceGone("a"), id="resourceslices"),
        pytest.param("deviceclasses", "ClassSeen", ClassGone("a"), id="deviceclasses"),
        pytest.param("resourceclaims", "ClaimSeen", ClaimGone("", "a"), id="resourceclaims"),
    ],
)
def test_every_kind_has_its_events(kind: str, seen: str, gone: Event | None) -> None:
    script = watch(change("ADDED", "a", 2), change("DELETED", "a", 3), then=Exchange.hang)
    with following(page(1), script, kind=kind) as followed:
        events = followed.told(3)
    assert type(events[1]).__name__ == seen
    assert gone is None or events[2] == gone
    if isinstance(events[1], GPUNodeSeen | HeartbeatSeen):
        assert events[1].at_s == 100.0


def test_a_line_in_several_chunks_is_one_event() -> None:
    line = b'{"type": "ADDED", "object": {"metadata": {"name": "a", "resourceVersion": "2"}}}\n'
    pieces = [line[start : start + 7] for start in range(0, len(line), 7)]
    with following(page(1), watch(*pieces, then=Exchange.hang)) as followed:
        _, event = followed.told(2)
    assert isinstance(event, NodeSeen)


def test_irrelevant_objects_are_not_listed_but_their_changes_are_delivered() -> None:
    """Without this, a list would hold a hundred thousand pods in memory. A changed pod can become
    relevant.
    """
    with following(
        page(5, obj("ours-1", 1), obj("x", 2), obj("ours-2", 3)),
        watch(change("MODIFIED", "x", 7), then=Exchange.hang),
        kind="our pods",
    ) as followed:
        first, second = followed.told(2)
    assert relisted("ours-1", "ours-2")(first)
    assert isinstance(second, PodSeen)


def test_a_reflector_is_synced_only_after_its_first_list_is_delivered() -> None:
    synced: list[bool] = []

    def deliver(events: Sequence[Event]) -> None:
        synced.append(followed.reflector.health.synced)
        delivered.set()

    delivered, listed = threading.Event(), threading.Event()

    def late(exchange: Exchange) -> None:
        listed.wait(PATIENCE_S)
        page(5)(exchange)

    with following(late, HANG, deliver=deliver) as followed:
        health = followed.reflector.health
        assert (health.synced, health.contact_age_s, health.lists) == (False, None, 0)
        listed.set()
        assert delivered.wait(PATIENCE_S)
        followed.seen.until(lambda _: len(followed.server.requests) == 2)
        health = followed.reflector.health
    assert synced == [False]
    assert (health.synced, health.contact_age_s, health.lists) == (True, 0.0, 1)


def test_after_an_error_of_the_receiver_everything_is_listed_again() -> None:
    calls: list[Sequence[Event]] = []

    def deliver(events: Sequence[Event]) -> None:
        calls.append(events)
        if len(calls) == 2:
            raise RuntimeError("the writer's fault")

    script = watch(change("ADDED", "a", 6), then=Exchange.hang)
    with capture_logs() as logs, following(page(5), script, page(9), HANG, deliver=deliver) as it:
        it.seen.until(lambda _: len(it.server.requests) == 4)
    assert [type(call[0]) for call in calls] == [Relisted, NodeSeen, Relisted]
    assert "source_broken" in {entry["event"] for entry in logs}
