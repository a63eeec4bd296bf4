"""Tests paged lists: prefetching of pages, and failures."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from headroom.runtime.kube.api_errors import NoAnswer
from headroom.runtime.kube.client import KubeApi
from tests.scripted import Answer, Exchange, ScriptedServer, scripted_server
from tests.waiting import PATIENCE_S


@contextmanager
def serving(*script: Answer) -> Iterator[tuple[KubeApi, ScriptedServer]]:
    with scripted_server(*script) as server:
        api = KubeApi(server.configuration(), read_timeout_s=PATIENCE_S)
        try:
            yield api, server
        finally:
            api.close()


def page(*names: str, token: str = "") -> Answer:
    body = {"metadata": {"resourceVersion": "9", "continue": token}, "items": [*names]}
    return lambda exchange: exchange.reply(200, body)


def breaks_off(exchange: Exchange) -> None:
    exchange.raw(b'HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"metadata": {}, "items": [')


def read(raw: msgspec.Raw) -> str:
    return msgspec.json.decode(raw, type=str)


def test_the_next_page_is_requested_while_the_last_is_processed() -> None:
    asked_for: list[int] = []

    def take(raw: msgspec.Raw) -> str:
        """Process a page. The first page waits for the request of the second one, which would not
        come if the list processed each page before it requests the next.
        """
        deadline_s = time.monotonic() + PATIENCE_S
        while read(raw) == "a" and len(server.requests) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        asked_for.append(len(server.requests))
        return read(raw)

    with serving(page("a", "b", token="more"), page("c", token="most"), page("d")) as (api, server):
        listing = api.list("/names", take, page_size=2)
    assert listing.items == ["a", "b", "c", "d"]
    assert listing.resource_version == "9"
    assert asked_for[0] == 2


def test_pages_are_not_requested_ahead_of_unread_ones() -> None:
    with serving(page("a", "b", token="more"), page("b", "c")) as (api, _):
        listing = api.list("/names", lambda raw: None if read(raw) == "b" else raw, page_size=2)
    assert [read(raw) for raw in listing.items] == ["a", "c"]


@pytest.mark.parametrize(
    "script",
    [
        pytest.param([page("a", token="more"), breaks_off], id="the second"),
        pytest.param([page("a", token="more"), page("b", token="most"), breaks_off], id="the last"),
    ],
)
def test_a_truncated_page_is_an_error(script: list[Answer]) -> None:
    with serving(*script) as (api, _), pytest.raises(NoAnswer, match="GET /names: 200, then"):
        api.list("/names", read, page_size=1)


@pytest.mark.parametrize("bad", ["a", "b"])
def test_an_error_in_the_receiver_is_raised(bad: str) -> None:
    """Tests a page with a successor, and the last page."""

    def take(raw: msgspec.Raw) -> str:
        if read(raw) == bad:
            raise LookupError(f"no {bad} today")
        return read(raw)

    script = page("a", token="more"), page("b")
    with serving(*script) as (api, _), pytest.raises(LookupError, match=f"no {bad} today"):
        api.list("/names", take, page_size=1)
