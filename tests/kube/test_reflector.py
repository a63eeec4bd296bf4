"""The reflector against a scripted server, byte by byte and without delays."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from structlog.testing import capture_logs

from contract.gpunode import GPUNode, GPUNodeSpec
from contract.kube import Node, Pod
from extender.kube.client import KubeApi
from extender.kube.reflector import Pace, Reflector
from extender.kube.resources import watched_kinds
from extender.state.changes import (
    Event,
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
from tests.kube.recorder import Recorder
from tests.scripted import Answer, Exchange, ScriptedServer, scripted_server

KINDS = {kind.name: kind for kind in watched_kinds("headroom-system")}
#: A watch that concerns only some pods.
KINDS["our pods"] = next(
    kind
    for kind in watched_kinds("headroom-system", lambda pod: pod.metadata.name.startswith("ours"))
    if kind.name == "pods"
)
#: So long may an answer, and a watch, be silent here. A machine that is busy takes a part of it.
SILENT_S = 1.5
QUICK = Pace(page_size=2, watch_s=0, grace_s=SILENT_S, backoff_base_s=1.0, backoff_cap_s=8.0)


def obj(name: str, version: int, **rest: Any) -> dict[str, Any]:
    metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": metadata, **rest}


def change(kind: str, name: str = "", version: int = 0, **rest: Any) -> dict[str, Any]:
    return {"type": kind, "object": obj(name, version, **rest)}


def error(code: int) -> dict[str, Any]:
    return {"type": "ERROR", "object": {"kind": "Status", "code": code, "message": "words"}}


def page(version: int, *items: dict[str, Any], token: str = "") -> Answer:
    metadata = {"resourceVersion": str(version), "continue": token}
    return lambda exchange: exchange.reply(200, {"metadata": metadata, "items": list(items)})


def status(code: int, **headers: str) -> Answer:
    return lambda exchange: exchange.reply(code, {"message": "words", "code": code}, **headers)


def watch(*chunks: Any, then: Callable[[Exchange], None] = Exchange.end_stream) -> Answer:
    def answer(exchange: Exchange) -> None:
        exchange.begin_stream()
        for chunk in chunks:
            exchange.chunk(chunk)
        then(exchange)

    return answer


def breaks_off(exchange: Exchange) -> None:
    """The connection closes inside a chunk."""
    exchange.raw(b"ff\r\n{")


@dataclass
class Followed:
    reflector: Reflector
    server: ScriptedServer
    seen: Recorder
    #: Every pause that was taken, in seconds; none is slept.
    waits: list[float] = field(default_factory=list)

    @property
    def queries(self) -> list[str]:
        """The requests: ``list``, or ``watch`` with its version."""
        return [
            f"watch {request.query['resourceVersion']}" if "watch" in request.query else "list"
            for request in self.server.requests
        ]

    def told(self, count: int) -> list[Event]:
        return self.seen.until(lambda events: len(events) >= count)


@contextmanager
def following(
    *script: Answer,
    kind: str = "nodes",
    pace: Pace = QUICK,
    deliver: Callable[[Sequence[Event]], None] | None = None,
    clock: Callable[[], float] = lambda: 100.0,
) -> Iterator[Followed]:
    seen = Recorder()
    waits: list[float] = []
    with scripted_server(*script) as server:
        api = KubeApi(server.configuration(), read_timeout_s=SILENT_S)
        reflector = Reflector(
            KINDS[kind],
            api,
            deliver or seen,
            pace=pace,
            jitter=lambda: 1.0,
            wait=waits.append,
            clock=clock,
        )
        thread = threading.Thread(target=reflector.run)
        thread.start()
        try:
            yield Followed(reflector, server, seen, waits)
        finally:
            reflector.stop()
            thread.join(3.0)
            api.close()
        assert not thread.is_alive()


def relisted(*names: str) -> Callable[[Event], bool]:
    return lambda event: (
        isinstance(event, Relisted) and [each.metadata.name for each in event.objects] == [*names]
    )


def last_relisted(*names: str) -> Callable[[list[Event]], bool]:
    return lambda events: any(map(relisted(*names), events))


HANG = watch(then=Exchange.hang)


def test_a_list_in_pages_then_every_change_in_order() -> None:
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

    def test_other_errors_do_not_mean_a_missing_kind(self) -> None:
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
        pytest.param("pods", "PodSeen", PodGone("uid-a"), id="pods go by their uid"),
        pytest.param("nodes", "NodeSeen", NodeGone("a"), id="nodes"),
        pytest.param("gpunodes", "GPUNodeSeen", GPUNodeGone("a"), id="gpunodes"),
        pytest.param("namespaces", "NamespaceSeen", None, id="namespaces"),
        pytest.param("leases", "HeartbeatSeen", None, id="leases"),
        pytest.param("resourceslices", "SliceSeen", SliceGone("a"), id="resourceslices"),
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


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param(
            watch(change("ADDED", "a", 7), b'{"type": "DELETED", "object": {"metad'),
            id="a line is cut off and the stream ends",
        ),
        pytest.param(watch(change("ADDED", "a", 7), then=breaks_off), id="the connection breaks"),
        pytest.param(watch(change("ADDED", "a", 7), then=Exchange.hang), id="silence"),
        pytest.param(
            watch(change("ADDED", "a", 7), then=lambda exchange: None), id="no end of the stream"
        ),
    ],
)
def test_a_broken_watch_resumes_at_its_version(ending: Answer) -> None:
    more = watch(change("ADDED", "b", 8), then=Exchange.hang)
    with following(page(5), ending, more) as followed:
        events = followed.told(3)
    assert [type(event) for event in events] == [Relisted, NodeSeen, NodeSeen]
    assert followed.queries[:3] == ["list", "watch 5", "watch 7"]
    assert followed.waits[:1] == [1.0]


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param(status(410), id="answered 410"),
        pytest.param(watch(error(410)), id="410 in the stream"),
        pytest.param(watch(error(500)), id="another error in the stream"),
        pytest.param(status(500), id="answered 500"),
        pytest.param(status(403), id="answered 403"),
        pytest.param(watch(b"garbage\n"), id="garbage"),
        pytest.param(watch(b'{"type": "ADDED", "object": {"metadata": 5}}\n'), id="nameless"),
        pytest.param(watch(b'{"type": "ADDED", "object": "\xff"}\n'), id="not UTF-8"),
        pytest.param(status(204), id="no stream"),
    ],
)
def test_an_uncertain_version_causes_a_list(ending: Answer) -> None:
    with following(page(5, obj("a", 1)), ending, page(9, obj("b", 2)), HANG) as followed:
        followed.seen.until(last_relisted("b"))
        followed.seen.until(lambda _: len(followed.server.requests) == 4)
    assert followed.queries == ["list", "watch 5", "list", "watch 9"]
    assert followed.waits == [1.0]
    assert followed.reflector.health.lists == 2


def test_events_before_an_error_are_delivered() -> None:
    both = [json.dumps(line).encode() + b"\n" for line in (change("ADDED", "a", 6), error(410))]
    with following(page(5), watch(b"".join(both)), page(9), HANG) as followed:
        events = followed.told(3)
    assert [type(event) for event in events] == [Relisted, NodeSeen, Relisted]


def test_retry_after_is_respected_and_the_watch_resumes() -> None:
    busy = status(429, Retry_After="3")
    with following(page(5), busy, busy, HANG) as followed:
        followed.seen.until(lambda _: len(followed.server.requests) == 4)
    assert followed.queries == ["list", "watch 5", "watch 5", "watch 5"]
    assert followed.waits[:2] == [4.0, 5.0]


def test_backoff_grows_until_an_event_arrives() -> None:
    down = status(503)
    nonsense: Answer = lambda exchange: exchange.reply(200, b"{")  # noqa: E731 -- typed in place
    received = watch(change("ADDED", "a", 6), then=breaks_off)
    with following(
        down, nonsense, Exchange.hang, page(5), received, down, page(6), HANG
    ) as followed:
        followed.seen.until(lambda _: len(followed.server.requests) == 8)
    assert followed.waits[:5] == [1.0, 2.0, 4.0, 1.0, 2.0]


def test_a_long_watch_without_events_resets_the_backoff() -> None:
    """For an idle kind: the new failure is unrelated to the old one."""
    now_s = 0.0
    readings = threading.Event()

    def clock() -> float:
        readings.set()
        return now_s

    def goes_on(exchange: Exchange) -> None:
        nonlocal now_s
        readings.wait(5.0)  # until its beginning was dated
        now_s += 30.0
        breaks_off(exchange)

    def begins(exchange: Exchange) -> None:
        readings.clear()
        watch(then=goes_on)(exchange)

    script = [page(5), watch(then=breaks_off), watch(then=breaks_off), begins]
    with following(*script, watch(then=breaks_off), clock=clock) as followed:
        followed.seen.until(lambda _: len(followed.waits) >= 4)
    assert followed.waits[:4] == [1.0, 2.0, 1.0, 2.0]


@pytest.mark.parametrize(
    "nothing",
    [pytest.param(watch(), id="nothing"), pytest.param(watch(b"<html>"), id="no line")],
)
def test_a_watch_that_ends_immediately_is_retried_with_backoff(nothing: Answer) -> None:
    with following(page(5), nothing, nothing, HANG) as followed:
        followed.seen.until(lambda _: len(followed.server.requests) == 4)
    assert followed.waits[:2] == [1.0, 2.0]
    assert followed.queries == ["list", "watch 5", "watch 5", "watch 5"]


def test_an_expired_continue_token_restarts_the_paged_list() -> None:
    old = page(5, obj("old", 1), token="more")
    with following(old, status(410), page(9, obj("new", 2)), HANG) as followed:
        followed.seen.until(last_relisted("new"))
    assert len(followed.seen.events) == 1
    assert followed.waits == []


def test_irrelevant_objects_are_not_listed_but_their_changes_are_delivered() -> None:
    """A list would hold a hundred thousand pods at once; a changed pod can become relevant."""
    with following(
        page(5, obj("ours-1", 1), obj("x", 2), obj("ours-2", 3)),
        watch(change("MODIFIED", "x", 7), then=Exchange.hang),
        kind="our pods",
    ) as followed:
        first, second = followed.told(2)
    assert relisted("ours-1", "ours-2")(first)
    assert isinstance(second, PodSeen)


def test_it_is_synced_only_after_its_first_list_is_delivered() -> None:
    synced: list[bool] = []

    def deliver(events: Sequence[Event]) -> None:
        synced.append(followed.reflector.health.synced)
        delivered.set()

    delivered, listed = threading.Event(), threading.Event()

    def late(exchange: Exchange) -> None:
        listed.wait(5.0)
        page(5)(exchange)

    with following(late, HANG, deliver=deliver) as followed:
        health = followed.reflector.health
        assert (health.synced, health.contact_age_s, health.lists) == (False, None, 0)
        listed.set()
        assert delivered.wait(5.0)
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


class TestUnreadable:
    def test_other_objects_are_delivered_and_it_is_logged_once(self) -> None:
        bad = {"spec": {"nodeName": 5}}
        script = watch(
            change("MODIFIED", "b", 6, **bad),
            change("ADDED", "c", 7),
            change("DELETED", "b", 8, **bad),
            then=Exchange.hang,
        )
        with (
            capture_logs() as logs,
            following(page(5, obj("a", 1), obj("b", 2, **bad)), script, kind="pods") as followed,
        ):
            events = followed.told(3)
        assert relisted("a")(events[0])
        assert [type(event).__name__ for event in events[1:]] == ["PodSeen", "PodGone"]
        errors = [entry for entry in logs if entry["event"] == "object_unreadable"]
        assert [(entry["kind"], entry["name"]) for entry in errors] == [("pods", "b")]
        assert followed.reflector.health.unreadable == 0

    def test_an_object_without_a_name_does_not_stop_the_list(self) -> None:
        nameless = {"metadata": {"name": 5}}
        with following(page(5, nameless, obj("a", 1)), HANG, kind="pods") as followed:
            events = followed.told(1)
        assert relisted("a")(events[0])
        assert isinstance(events[0], Relisted)
        assert events[0].kind is Pod

    def test_an_invalid_report_is_dropped_and_reservations_are_kept(self) -> None:
        good = obj("n", 1, status={"agentVersion": "1"})
        bad = obj("n", 6, spec={"initialised": True}, status={"devices": "none"})
        script = watch({"type": "MODIFIED", "object": bad}, then=Exchange.hang)
        with following(page(5, good), script, kind="gpunodes") as followed:
            first, second = followed.told(2)
            unreadable = followed.reflector.health.unreadable
        assert isinstance(first, Relisted)
        assert isinstance(first.objects[0], GPUNode)
        assert first.objects[0].status is not None
        assert isinstance(second, GPUNodeSeen)
        assert (second.gpunode.name, second.gpunode.status) == ("n", None)
        assert second.gpunode.spec == GPUNodeSpec(initialised=True)
        assert unreadable == 1

    def test_a_node_with_invalid_reservations_is_not_initialised(self) -> None:
        bad = obj("n", 1, spec={"initialised": True, "reservations": 5}, status={})
        with following(page(5, bad), HANG, kind="gpunodes") as followed:
            (event,) = followed.told(1)
        assert isinstance(event, Relisted)
        (gpunode,) = event.objects
        assert isinstance(gpunode, GPUNode)
        assert (gpunode.name, gpunode.spec, gpunode.status) == ("n", GPUNodeSpec(), None)
        assert gpunode.metadata.resource_version == "1"
