"""The API server is spoken to over connections that stay open."""

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from kubernetes.client import Configuration

from extender.errors import BadSettings
from extender.kubeapi import KubeApi, NoAnswer
from extender.loopapi import CONNECTIONS, LoopApi


def test_as_many_as_were_made_at_once_are_kept_for_the_next() -> None:
    opened: list[object] = []
    all_here = threading.Barrier(CONNECTIONS)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            opened.append(self)
            super().setup()

        def do_GET(self) -> None:
            all_here.wait(60)
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    configuration = Configuration()
    configuration.host = f"http://127.0.0.1:{server.server_port}"

    async def play() -> None:
        api = LoopApi(configuration)
        for _ in range(3):
            await asyncio.gather(*(api.call("GET", "/") for _ in range(CONNECTIONS)))
        await api.close()

    try:
        asyncio.run(play())
        assert len(opened) == CONNECTIONS
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_no_call_begins_once_it_was_closed() -> None:
    """A chore that goes through thousands of nodes is to end with the process."""
    configuration = Configuration()
    configuration.host = "http://127.0.0.1:1"  # where nobody listens
    api = KubeApi(configuration)
    with pytest.raises(NoAnswer, match="refused"):
        api.call("GET", "/a")
    api.close()
    with pytest.raises(NoAnswer, match="GET /a: not sent, as this process ends"):
        api.call("GET", "/a")


def test_no_call_of_the_loop_begins_once_it_was_closed() -> None:
    configuration = Configuration()
    configuration.host = "http://127.0.0.1:1"

    async def play() -> None:
        api = LoopApi(configuration)
        with pytest.raises(NoAnswer, match="GET /a: ClientConnectorError"):
            await api.call("GET", "/a")
        await api.close()
        with pytest.raises(NoAnswer, match="GET /a: not sent, as this process ends"):
            await api.call("GET", "/a")

    asyncio.run(play())


@pytest.mark.parametrize(
    ("proxy", "no_proxy", "said"),
    [
        pytest.param("http://127.0.0.1:1", "", "127.0.0.1:1", id="through it"),
        pytest.param("http://127.0.0.1:1", "example.com", "example.com", id="around it"),
    ],
)
def test_the_loop_goes_through_the_proxy_that_is_configured(
    proxy: str, no_proxy: str, said: str
) -> None:
    configuration = Configuration()
    configuration.host = "http://example.com:2"
    configuration.proxy, configuration.no_proxy = proxy, no_proxy

    async def play() -> None:
        api = LoopApi(configuration, connect_timeout_s=0.5)
        try:
            with pytest.raises(NoAnswer, match=said):
                await api.call("GET", "/a")
        finally:
            await api.close()

    asyncio.run(play())


def test_a_proxy_that_is_none_of_http_is_refused() -> None:
    configuration = Configuration()
    configuration.host, configuration.proxy = "http://example.com", "socks5://127.0.0.1:1"

    async def play() -> None:
        LoopApi(configuration)

    with pytest.raises(BadSettings, match=r"proxy-url is socks5://127.0.0.1:1: an HTTP proxy is"):
        asyncio.run(play())
