"""Checks that a broken watch resumes or lists again, with increasing pauses."""

import json
import threading

import pytest
from structlog.testing import capture_logs

from headroom.contract.gpunode import GPUNode, GPUNodeSpec
from headroom.contract.kube import Pod
from headroom.contract.watched import GPUNodeSeen, NodeSeen, Relisted
from headroom.runtime.kube.reflector import Pace
from tests.kube.following import (
    HANG,
    IMPATIENT,
    QUICK,
    breaks_off,
    change,
    error,
    following,
    last_relisted,
    obj,
    page,
    relisted,
    status,
    watch,
)
from tests.scripted import Answer, Exchange
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize(
    ("ending", "pace"),
    [
        pytest.param(
            watch(change("ADDED", "a", 7), b'{"type": "DELETED", "object": {"metad'),
            QUICK,
            id="truncated line at the end of the stream",
        ),
        pytest.param(
            watch(change("ADDED", "a", 7), then=breaks_off), QUICK, id="the connection breaks"
        ),
        pytest.param(watch(change("ADDED", "a", 7), then=Exchange.hang), IMPATIENT, id="silence"),
        pytest.param(
            watch(change("ADDED", "a", 7), then=lambda exchange: None),
            QUICK,
            id="no end of the stream",
        ),
    ],
)
def test_a_broken_watch_resumes_at_its_version(ending: Answer, pace: Pace) -> None:
    more = watch(change("ADDED", "b", 8), then=Exchange.hang)
    with following(page(5), ending, more, pace=pace) as followed:
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
        pytest.param(
            watch(b'{"type": "ADDED", "object": {"metadata": 5}}\n'), id="object without a name"
        ),
        pytest.param(watch(b'{"type": "ADDED", "object": "\xff"}\n'), id="not UTF-8"),
        pytest.param(status(204), id="not a stream"),
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
        down, nonsense, Exchange.hang, page(5), received, down, page(6), HANG, pace=IMPATIENT
    ) as followed:
        followed.seen.until(lambda _: len(followed.server.requests) == 8)
    assert followed.waits[:5] == [1.0, 2.0, 4.0, 1.0, 2.0]


def test_a_long_watch_without_events_resets_the_backoff() -> None:
    """If a kind is idle, a new failure is unrelated to the previous failure."""
    now_s = 0.0
    readings = threading.Event()

    def clock() -> float:
        readings.set()
        return now_s

    def goes_on(exchange: Exchange) -> None:
        nonlocal now_s
        readings.wait(PATIENCE_S)  # until its start was set back
        now_s += 30.0
        breaks_off(exchange)

    def begins(exchange: Exchange) -> None:
        readings.clear()
        watch(then=goes_on)(exchange)

    script = [page(5), watch(then=breaks_off), watch(then=breaks_off), begins]
    with following(*script, watch(then=breaks_off), HANG, clock=clock) as followed:
        followed.seen.until(lambda _: len(followed.waits) >= 4)
    assert followed.waits[:4] == [1.0, 2.0, 1.0, 2.0]


@pytest.mark.parametrize(
    "nothing",
    [
        pytest.param(watch(), id="empty stream"),
        pytest.param(watch(b"<html>"), id="incomplete line"),
    ],
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


class TestUnreadable:
    def test_objects_after_an_invalid_one_are_delivered_and_it_is_logged_once(self) -> None:
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
