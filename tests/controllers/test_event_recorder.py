"""Checks that each replica records an Event once, and that all replicas together write it once."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from extender.event_recorder import EventRecorder, KubeEvents, event_name
from extender.metrics import Telemetry
from headroom.core.cluster.notices import Notice, pod_subject
from headroom.runtime.kube.api_errors import ApiError, ApiStatus, NoAnswer
from headroom.runtime.kube.client import KubeApi
from tests.builders import pod

AT_ONCE = 64


def notice(uid: str = "uid-p", key: str = "n", name: str = "p") -> Notice:
    return Notice(pod_subject(pod(uid=uid, name=name, node="n")), "Overcommitted", "too much", key)


def tell(post: Callable[[Notice], bool], *rounds: Sequence[Notice]) -> None:
    async def play() -> None:
        event_recorder = EventRecorder(post, Telemetry(CollectorRegistry()))
        with event_recorder.pool:
            for each in rounds:
                await event_recorder.record(each)

    asyncio.run(play())


def test_a_recorded_event_is_not_recorded_again() -> None:
    posted: list[Notice] = []

    def post(one: Notice) -> bool:
        posted.append(one)
        return True

    other = notice(key="another occurrence")
    with capture_logs() as logs:
        tell(post, [notice()], [notice(), other], [notice(), other])
    assert posted == [notice(), other]
    assert [entry["event"] for entry in logs] == ["event_written"] * 2


def test_a_failed_event_is_retried() -> None:
    answers = iter([False, True])
    tell(lambda one: next(answers), [notice()], [notice()], [notice()])
    assert list(answers) == []


def test_many_events_are_recorded_in_batches() -> None:
    posted: list[Notice] = []

    def post(one: Notice) -> bool:
        posted.append(one)
        return True

    many = [notice(uid=f"u{i}") for i in range(AT_ONCE + 1)]
    tell(post, many)
    assert len(posted) == AT_ONCE
    posted.clear()
    tell(post, many, many)
    assert len({one.about.uid for one in posted}) == len(posted) == AT_ONCE + 1


class Server:
    """A fake API server for Events that enforces unique names."""

    def __init__(self, answers: Sequence[ApiError] = ()) -> None:
        self.events: dict[str, dict[str, Any]] = {}
        self.answers = list(answers)

    def call(self, method: str, path: str, *, body: bytes) -> bytes:
        if self.answers:
            raise self.answers.pop(0)
        event = msgspec.json.decode(body)
        assert (method, path) == ("POST", "/api/v1/namespaces/default/events")
        if event["metadata"]["name"] in self.events:
            raise ApiStatus("POST", 409, "exists")
        self.events[event["metadata"]["name"]] = event
        return b"{}"


def test_two_replicas_write_one_event() -> None:
    server = Server()
    replicas = [KubeEvents(cast(KubeApi, server), lambda at=at: at) for at in (1e9, 2e9)]  # type: ignore[misc]
    with capture_logs() as logs:
        for _ in range(2):
            assert all(replica.post(notice()) for replica in replicas)
    assert logs == []
    (event,) = server.events.values()
    assert event["involvedObject"]["uid"] == "uid-p"
    assert (event["type"], event["reason"]) == ("Warning", "Overcommitted")
    assert event["firstTimestamp"] == "2001-09-09T01:46:40Z"


def test_the_message_of_an_event_has_no_control_character() -> None:
    server = Server()
    hostile = replace(notice(), message="image \x1b[2J\u202e\nx: 8 GiB")
    assert KubeEvents(cast(KubeApi, server), lambda: 1e9).post(hostile)
    (event,) = server.events.values()
    assert event["message"] == "image ?[2J??x: 8 GiB"


@pytest.mark.parametrize(
    ("answer", "done"),
    [
        pytest.param(NoAnswer("lost"), False, id="no answer"),
        pytest.param(ApiStatus("POST", 429, "later"), False, id="retry later"),
        pytest.param(ApiStatus("POST", 500, "broken"), False, id="server error"),
        pytest.param(ApiStatus("POST", 403, "the namespace is ending"), True, id="rejected"),
    ],
)
def test_the_status_decides_whether_an_event_is_retried(answer: ApiError, done: bool) -> None:
    assert KubeEvents(cast(KubeApi, Server([answer])), lambda: 0.0).post(notice()) is done


def test_event_names_are_valid() -> None:
    long = notice(name="a" * 199 + "-" + "b" * 50)
    name = event_name(long)
    assert name.startswith("a" * 199 + ".")
    assert len({event_name(n) for n in (long, notice(), notice(key="m"), notice(uid="v"))}) == 4
