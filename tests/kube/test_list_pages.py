"""Tests paged lists."""

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


def test_a_list_has_the_objects_of_all_pages_in_order_except_skipped_objects() -> None:
    script = page("a", "b", token="more"), page("b", "c", token="most"), page("d")
    with serving(*script) as (api, _):
        listing = api.list("/names", lambda raw: None if read(raw) == "b" else raw, page_size=2)
    assert [read(raw) for raw in listing.items] == ["a", "c", "d"]
    assert listing.resource_version == "9"


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
    """Test a page that another page follows, and the last page."""

    def take(raw: msgspec.Raw) -> str:
        if read(raw) == bad:
            raise LookupError(f"no {bad} today")
        return read(raw)

    script = page("a", token="more"), page("b")
    with serving(*script) as (api, _), pytest.raises(LookupError, match=f"no {bad} today"):
        api.list("/names", take, page_size=1)
