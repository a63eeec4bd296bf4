"""Checks that readers of the same view share one answer for 0.25 s if they may see the same
data.
"""

import contextlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from threading import Barrier, BrokenBarrierError, Thread
from typing import Any

import pytest
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from headroom.console.app import _VIEWS
from headroom.console.shared_answers import MOST_ANSWERS, MOST_BYTES, SharedAnswers
from headroom.runtime.server.auth import GetPod, ReadPath
from tests.console.asking import Asked
from tests.console.test_visible_pods import OWN, VIEWS, world
from tests.controlplane import ROOT
from tests.server.test_auth import GuardedApi

SHARED_S = 0.25

SHARED = (
    *("/v1/fleet", "/v1/map", "/v1/nodes?limit=50", "/v1/overview", "/v1/pods"),
    "/v1/teams",
)


class Counted:
    """Computes numbered answers. The body of an answer is its number."""

    def __init__(self, size: int = 0) -> None:
        self.calls, self._size = 0, size

    def __call__(self) -> Response:
        self.calls += 1
        return Response(f"{self.calls}".encode().ljust(self._size))


def request(query: str = "") -> Request:
    parts = {"path": "/v1/teams", "query_string": query.encode(), "headers": []}
    return Request({"type": "http", "method": "GET", "server": ("debug", 80), **parts})


def body_of(answers: SharedAnswers, compute: Callable[[], Response], **wanted: Any) -> bytes:
    now_s = wanted.pop("now_s", 0.0)
    return bytes(answers.of(request(**wanted), now_s, compute).body).rstrip()


@pytest.mark.parametrize("path", SHARED)
def test_readers_within_a_quarter_second_get_one_answer_and_later_readers_get_the_change(
    path: str,
) -> None:
    asked = Asked(answers=SharedAnswers())
    asked.add_node("a")
    first = asked.get(path)
    asked.add_node("b")
    asked.now_s = SHARED_S - 0.01
    second = asked.get(path)
    assert (second.content, second.status_code) == (first.content, 200)
    assert second.headers == first.headers
    asked.now_s = 1.0 + SHARED_S
    later = asked.get(path).json()
    assert later["snapshot_generation"] > first.json()["snapshot_generation"]
    assert later["generated_at"] == "2026-11-21T00:00:01Z"


def test_an_etag_of_a_shared_answer_belongs_to_the_state_that_the_answer_shows() -> None:
    asked = Asked(answers=SharedAnswers())
    asked.add_node("a")
    asked.get("/v1/fleet")
    asked.add_node("b")
    shared = asked.get("/v1/fleet")
    assert shared.json()["nodes"] == 1
    asked.now_s = 1.0 + SHARED_S
    later = asked.get("/v1/fleet", {"If-None-Match": shared.headers["ETag"]})
    assert (later.status_code, later.json()["nodes"]) == (200, 2)


def test_a_reader_waits_for_the_answer_that_another_reader_computes() -> None:
    answers, both = SharedAnswers(), Barrier(2)
    bodies: list[bytes] = []
    counted = Counted()

    def compute() -> Response:
        with contextlib.suppress(BrokenBarrierError):
            both.wait(0.2)  # Both threads pass only if both compute.
        return counted()

    threads = [Thread(target=lambda: bodies.append(body_of(answers, compute))) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert bodies == [b"1", b"1"]


def test_other_queries_have_separate_answers() -> None:
    answers, counted = SharedAnswers(), Counted()
    wanted = [{}, {"query": "namespace=ml"}]
    assert [body_of(answers, counted, **each) for each in wanted * 2] == [b"1", b"2"] * 2


def test_at_most_eight_answers_are_stored_and_none_above_one_mib() -> None:
    answers, counted = SharedAnswers(), Counted()
    for number in range(MOST_ANSWERS + 1):
        body_of(answers, counted, query=f"limit={number + 1}")
    assert counted.calls == 9
    assert body_of(answers, counted, query="limit=9") == b"9"
    assert body_of(answers, counted, query="limit=1") == b"10"
    large = Counted(MOST_BYTES + 1)
    assert [body_of(answers, large, query="large") for _ in range(2)] == [b"1", b"2"]


def test_an_error_is_not_shared() -> None:
    answers = SharedAnswers()

    def fails() -> Response:
        raise ValueError("unreadable")

    with pytest.raises(ValueError, match="unreadable"):
        body_of(answers, fails)
    assert body_of(answers, Counted()) == b"1"


def test_a_header_for_one_reader_is_not_sent_to_the_next() -> None:
    answers, counted = SharedAnswers(), Counted()
    answers.of(request(), 0.0, counted).headers["X-Own"] = "1"
    assert "X-Own" not in answers.of(request(), 0.0, counted).headers


@pytest.mark.parametrize("path", SHARED)
def test_a_reader_without_permission_does_not_get_the_answer_of_another_reader(path: str) -> None:
    may_read = ReadPath("get", path.partition("?")[0])
    made = GuardedApi(answers=SharedAnswers(), viewer=may_read, owner=GetPod("ml", "p"))
    assert made.get(path, "viewer").status_code == 200
    assert made.get(path, "owner").status_code == 403
    assert made.get(path, None).status_code == 401


@pytest.mark.parametrize("path", VIEWS)
def test_a_reader_of_one_pod_sees_no_other_after_a_reader_of_all(path: str) -> None:
    made = world(OWN, answers=SharedAnswers())
    made.reviews.rights["viewer"] = {ReadPath("get", path.partition("?")[0])}
    assert "secret" in made.get(path, "viewer").text
    assert "secret" not in made.get(path, "reader").text


def test_views_that_depend_on_the_reader_share_no_answer() -> None:
    views = [route for module in _VIEWS for route in module.routes.routes]
    routes = [each for each in views if isinstance(each, APIRoute)]
    handlers = {each.path: each.endpoint for each in routes}
    by_reader = {
        path for path, each in handlers.items() if "sees" in inspect.signature(each).parameters
    }
    shared = {path for path, each in handlers.items() if ".answers.of(" in inspect.getsource(each)}
    assert {"/v1/decisions", "/v1/score"} < by_reader
    assert shared == {path.partition("?")[0] for path in SHARED}
    assert not shared & by_reader


def test_after_an_event_the_page_waits_until_earlier_shared_answers_have_expired() -> None:
    script = Path(ROOT, "headroom/console/page/app.js").read_text()
    found = re.search(r"BURST_MS = (\d+)", script)
    assert found is not None
    assert int(found[1]) / 1000 > SHARED_S
