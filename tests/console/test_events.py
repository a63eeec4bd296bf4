"""Checks that /v1/events streams changes to its clients, and that a slow client does not delay
other clients.
"""

import asyncio
import contextlib
import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from headroom.console.feed.feed import Feed, TooManyFollowers
from headroom.runtime.server import streams
from tests.console.asking import Asked
from tests.serving import Server, binding, offer, pod, serving
from tests.waiting import PATIENCE_S

KEPT = 4096
MOST_FOLLOWERS = 32
MOST_WAITING = 1024

FLEET = """
nodes:
  - {name: a, gpus: 1, memory: 24Gi, sharing: time-slicing, replicas: 4}
"""


def open_feed() -> Feed:
    return Feed(lambda: 1_795_219_200.0, lambda: 7)


def test_past_changes_are_limited_and_can_be_read_from_a_number_or_a_time_on() -> None:
    moments = iter(range(10_000))
    feed = Feed(lambda: float(next(moments)), lambda: 7)
    for number in range(5000):
        feed.publish("device_healthy", device=str(number))
    past = feed.past()
    assert (len(past), past[-1].device) == (KEPT, "4999")
    assert [each.number for each in feed.past(after=4998)] == [4999, 5000]
    assert [each.at_s for each in feed.past(since_s=4998.0)] == [4998.0, 4999.0]


def test_only_a_client_that_reads_nothing_is_disconnected() -> None:
    async def play() -> None:
        feed = open_feed()
        slow, quick = feed.join(), feed.join()
        for _ in range(MOST_WAITING + 1):
            feed.publish("device_healthy")
            quick.queue.get_nowait()
        assert (slow.dropped, quick.dropped) == (True, False)

    asyncio.run(play())


def test_followers_are_limited_and_free_their_slot_when_they_disconnect() -> None:
    async def play() -> None:
        feed = open_feed()
        followers = [feed.join() for _ in range(MOST_FOLLOWERS)]
        with pytest.raises(TooManyFollowers):
            feed.join()
        feed.leave(followers[0])
        feed.join()

    asyncio.run(play())


def test_a_client_beyond_the_limit_is_rejected_with_an_alternative() -> None:
    async def full() -> Feed:
        feed = open_feed()
        for _ in range(MOST_FOLLOWERS):
            feed.join()
        return feed

    asked = Asked(feed=asyncio.run(full()))
    answer = asked.get("/v1/events")
    assert (answer.status_code, "follow=false" in answer.json()["detail"]) == (503, True)


def test_a_client_that_reads_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "SEND_S", 0.01)

    async def play() -> None:
        feed = open_feed()
        asked = Asked(feed=feed)
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)
            if len(sent) > 2:
                await asyncio.Event().wait()  # The client's buffers are full.

        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": "GET",
            "path": "/v1/events", "raw_path": b"/v1/events", "query_string": b"", "headers": [],
            "http_version": "1.1", "scheme": "http", "root_path": "", "server": ("d", 1),
        }  # fmt: skip
        feed.publish("device_healthy", node="a")
        await asyncio.wait_for(asked.app(scope, receive, send), PATIENCE_S)
        assert (sent[0]["status"], len(sent)) == (200, 3)
        assert feed._followers == []

    asyncio.run(play())


def test_the_latest_changes_are_listed() -> None:
    feed = open_feed()
    feed.publish("report_lost", node="a")
    feed.publish("device_unhealthy", node="a", device="GPU-1", message="Xid 79")
    asked = Asked(feed=feed)
    first, second = asked.get("/v1/events?follow=false").json()["events"]
    assert (first["kind"], first["device"], second["message"]) == ("report_lost", None, "Xid 79")
    assert second["snapshot_generation"] == 7
    after = asked.get("/v1/events?follow=false", {"Last-Event-ID": first["id"]}).json()["events"]
    assert after == [second]
    # Event IDs of another replica are ignored, because the numbers are not comparable.
    others = {"Last-Event-ID": "another.1"}
    assert len(asked.get("/v1/events?follow=false", others).json()["events"]) == 2
    assert asked.get("/v1/events?follow=false&since=2026-11-22T00:00:00Z").json()["events"] == []


def test_the_stream_of_a_node_has_only_its_changes_and_ignores_since_after_an_id() -> None:
    feed = open_feed()
    for node in "abab":
        feed.publish("report_lost", node=node)
    feed.close()
    asked = Asked(feed=feed)
    first, third = (f"{asked.context.replica}.{number}" for number in (1, 3))
    path = "/v1/events?node=a&since=2027-01-01T00:00:00Z"
    streamed = asked.get(path, {"Last-Event-ID": first}).text.splitlines()
    data = [line for line in streamed if line.startswith("data: ")]
    assert [json.loads(line[6:])["id"] for line in data] == [third]


class Stream:
    """A client that reads events one after another."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.answer = answer

    def next(self, kind: str) -> dict[str, Any]:
        """Skip other events, and return the next event of this kind."""
        fields: dict[str, str] = {}
        while True:
            line = self.answer.readline().decode()
            assert line, "the stream has ended"
            name, _, value = line.rstrip("\n").partition(": ")
            fields[name] = value
            if not line.strip():
                if fields.get("event") == kind:
                    reported: dict[str, Any] = json.loads(fields["data"])
                    assert reported["id"] == fields["id"]
                    return reported
                fields = {}


@contextlib.contextmanager
def following(server: Server, **headers: str) -> Iterator[Stream]:
    url = urlsplit(server.debug)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request("GET", "/v1/events", headers=headers)
        with connection.getresponse() as answer:
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            yield Stream(answer)


@pytest.mark.slow
def test_a_pod_is_followed_until_it_is_bound_and_an_open_stream_does_not_block_shutdown() -> None:
    shown = pod("p", "12Gi")
    with contextlib.ExitStack() as after, serving(FLEET) as server:
        stream = after.enter_context(following(server))
        server.post("/filter", offer(pod("large", "30Gi"), "a"))
        rejected = stream.next("decision")
        assert (rejected["cause"], rejected["decision_id"]) == ("rejected", "uid-large.1")
        assert "insufficient GPU memory" in rejected["message"]

        server.post("/filter", offer(shown, "a"))
        assert server.post("/bind", binding(shown, "a")).json()["Error"] == ""
        made = stream.next("reservation_made")
        assert (made["cause"], made["node"], made["name"]) == ("bind", "a", "p")
        assert made["message"] == "12.0 GiB on GPU-a-0"
        bound = stream.next("decision")
        assert (bound["cause"], bound["node"], bound["uid"]) == ("bound", "a", "uid-p")

        with following(server, **{"Last-Event-ID": made["id"]}) as again:
            assert again.next("decision") == bound
        assert server.delete("/embedded/v1/pods/default/p").status == 204
        gone = stream.next("reservation_removed")
        assert (gone["uid"], gone["cause"] in ("pod_gone", "pod_ended")) == ("uid-p", True)
