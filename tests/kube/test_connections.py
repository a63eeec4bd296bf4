"""Checks that connections to the API server are reused, and follow the configuration."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client import Configuration

from headroom.errors import BadSettings
from headroom.runtime.kube import client as kube_client
from headroom.runtime.kube.api_errors import NoAnswer
from headroom.runtime.kube.async_client import AsyncKubeApi
from headroom.runtime.kube.client import KubeApi
from tests.answering import Answer, Request, answering
from tests.certificates import Authority, Certificate
from tests.scripted import Exchange, scripted_server
from tests.waiting import PATIENCE_S

CONNECTIONS = 32


def get(configuration: Configuration, times: int = 1, rounds: int = 1, **how: float) -> list[bytes]:
    """Make ``rounds`` rounds of ``times`` concurrent calls. Return the responses of the
    last round.
    """

    async def play() -> list[bytes]:
        api = AsyncKubeApi(configuration, **how)
        try:
            for _ in range(rounds):
                answers = await asyncio.gather(*(api.call("GET", "/a") for _ in range(times)))
        finally:
            await api.close()
        return answers

    return asyncio.run(play())


def at(host: str, **settings: Any) -> Configuration:
    configuration = Configuration()
    configuration.host = host
    for name, value in settings.items():
        setattr(configuration, name, value)
    return configuration


def test_connections_of_concurrent_calls_are_reused() -> None:
    opened: list[object] = []
    all_here = threading.Barrier(CONNECTIONS)

    def answer(request: Request) -> Answer:
        all_here.wait(PATIENCE_S)
        return 200, {}

    with answering(answer, opened=lambda: opened.append(1)) as url:
        get(at(url), CONNECTIONS, rounds=3)
    assert len(opened) == CONNECTIONS


def _trickle(exchange: Exchange) -> None:
    """Send single bytes endlessly, faster than the read timeout."""
    exchange.begin_stream()
    with contextlib.suppress(OSError):  # The caller has disconnected.
        while not exchange.released.wait(0.05):
            exchange.chunk(b" ")


def test_a_slow_response_ends_at_the_total_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_server(_trickle) as server, pytest.raises(NoAnswer, match="GET /a: Timeout"):
        get(server.configuration(), read_timeout_s=10.0, total_timeout_s=0.1)
    monkeypatch.setattr(kube_client, "BODY_S", 0.1)
    with scripted_server(_trickle) as server:
        api = KubeApi(server.configuration())
        with pytest.raises(NoAnswer, match=r"GET /a: 200, then TimeoutError: .* longer than"):
            api.call("GET", "/a")
        api.close()


def test_no_call_starts_after_close() -> None:
    """Otherwise, work on thousands of nodes would delay the end of the process."""
    configuration = at("http://127.0.0.1:1")  # No server listens there.
    api = KubeApi(configuration)
    with pytest.raises(NoAnswer, match="refused"):
        api.call("GET", "/a")
    api.close()
    with pytest.raises(NoAnswer, match="GET /a: not sent, because this process is stopping"):
        api.call("GET", "/a")

    async def play() -> None:
        api = AsyncKubeApi(configuration)
        with pytest.raises(NoAnswer, match="GET /a: ClientConnectorError"):
            await api.call("GET", "/a")
        await api.close()
        with pytest.raises(NoAnswer, match="GET /a: not sent, because this process is stopping"):
            await api.call("GET", "/a")

    asyncio.run(play())


@pytest.mark.parametrize(
    ("no_proxy", "message"),
    [
        pytest.param("", r"127\.0\.0\.1:1", id="through the proxy"),
        pytest.param("localhost", r"localhost:2", id="NO_PROXY"),
    ],
)
def test_the_loop_uses_the_configured_proxy(no_proxy: str, message: str) -> None:
    configuration = at("http://localhost:2", proxy="http://127.0.0.1:1", no_proxy=no_proxy)
    with pytest.raises(NoAnswer, match=message):
        get(configuration)


def test_a_proxy_other_than_http_is_rejected() -> None:
    with pytest.raises(BadSettings, match=r"proxy-url is socks5://127\.0\.0\.1:1"):
        get(at("http://localhost:2", proxy="socks5://127.0.0.1:1"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder, "ca")


@pytest.fixture(scope="module")
def client(authority: Authority) -> Certificate:
    return authority.sign("client")


@pytest.fixture(scope="module")
def url(authority: Authority) -> Iterator[str]:
    """The URL of a server that requests a client certificate."""
    with answering(lambda _: (200, {}), authority.sign("server"), authority) as url:
        yield url


def test_tls_uses_server_and_client_certificates(
    url: str, folder: Path, authority: Authority, client: Certificate
) -> None:
    def called(**settings: Any) -> list[bytes]:
        mine = {"ssl_ca_cert": authority.cert, "cert_file": client.cert, "key_file": client.key}
        return get(at(url, **(mine | settings)))

    outsider = Authority(folder, "outsider").cert
    assert called() == [b"{}"]
    # In TLS 1.3, the server rejects the client after the handshake. The client then receives an
    # alert, or its write fails.
    with pytest.raises(NoAnswer, match=r"^GET /a: \w"):
        called(cert_file=None)
    with pytest.raises(NoAnswer, match="certificate verify failed"):
        called(ssl_ca_cert=outsider)
    with pytest.raises(NoAnswer, match=r"not valid for 'elsewhere\.example'"):
        called(tls_server_name="elsewhere.example")
    assert called(tls_server_name="elsewhere.example", assert_hostname=False) == [b"{}"]
    assert called(ssl_ca_cert=outsider, verify_ssl=False) == [b"{}"]
