"""Tests reading the ResourceQuotas of a namespace from an API server."""

import pytest

from headroom.console.quota_reader import PAGE_SIZE, KubeQuotas
from headroom.runtime.kube.api_errors import NoAnswer, Unreadable
from headroom.runtime.kube.client import KubeApi
from tests.scripted import Answer, Exchange, ScriptedServer, scripted_server


def page(*names: str, token: str = "") -> Answer:
    items = [{"metadata": {"name": name}, "status": {"hard": {"pods": "1"}}} for name in names]
    body = {"metadata": {"resourceVersion": "9", "continue": token}, "items": items}
    return lambda exchange: exchange.reply(200, body)


def names(server: ScriptedServer, namespace: str = "team") -> list[str]:
    api = KubeApi(server.configuration())
    try:
        return [quota.metadata.name for quota in KubeQuotas(api).of(namespace)]
    finally:
        api.close()


def test_quotas_are_read_from_all_pages() -> None:
    """If a quota were missing, a suggestion could ask to create a pod that the quota rejects."""
    first = [f"quota-{number}" for number in range(PAGE_SIZE)]
    with scripted_server(page(*first, token="more"), page("last")) as server:
        assert names(server) == [*first, "last"]
        assert [request.path for request in server.requests] == [
            "/api/v1/namespaces/team/resourcequotas"
        ] * 2
        assert [request.query for request in server.requests] == [
            {"limit": "100"},
            {"limit": "100", "continue": "more"},
        ]


def test_an_invalid_namespace_requests_no_other_path() -> None:
    with scripted_server(page()) as server:
        assert names(server, "../nodes?") == []
        (request,) = server.requests
        assert request.path == "/api/v1/namespaces/%2E%2E%2Fnodes%3F/resourcequotas"


def _breaks_off(exchange: Exchange) -> None:
    exchange.raw(b'HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"metadata": {}, "items": [')


@pytest.mark.parametrize(
    ("last", "error"),
    [
        pytest.param(_breaks_off, NoAnswer, id="no answer"),
        pytest.param(
            lambda exchange: exchange.reply(200, {"metadata": {}, "items": [{"metadata": 1}]}),
            Unreadable,
            id="invalid quota",
        ),
    ],
)
def test_an_incomplete_list_is_an_error(last: Answer, error: type[Exception]) -> None:
    with scripted_server(page("first", token="more"), last) as server, pytest.raises(error):
        names(server)
