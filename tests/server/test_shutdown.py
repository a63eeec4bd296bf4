"""Checks that requests do not fail if their client has not noticed the shutdown of the server."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path

import pytest
from fastapi import FastAPI

from headroom.runtime.server.http_limits import LimitedProtocol
from headroom.runtime.server.tls import ServerTls, TlsFiles
from tests.certificates import Authority
from tests.listening import listening
from tests.waiting import PATIENCE_S, until

Served = tuple[HTTPConnection, Callable[[], None]]


class QuickToClose(LimitedProtocol):
    close_s = 0.05


@pytest.fixture(params=["HTTP", "HTTPS"])
def served(request: pytest.FixtureRequest, tmp_path: Path, drain_s: float) -> Iterator[Served]:
    """Return a client of a server, and a function that shuts the server down and waits for
    its end.
    """
    app, tls, context = FastAPI(), None, None

    @app.get("/p")
    async def get() -> str:
        return "here"

    if request.param == "HTTPS":
        authority = Authority(tmp_path, "ca")
        signed = authority.sign("server")
        tls = ServerTls(TlsFiles(signed.cert, signed.key))
        context = ssl.create_default_context(cafile=str(authority.cert))
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(listening(app, tls, QuickToClose, drain_s=drain_s))
        client = (
            HTTPSConnection("127.0.0.1", port, context=context, timeout=PATIENCE_S)
            if context
            else HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        )
        with contextlib.closing(client):
            yield client, stack.close


def connection_header(client: HTTPConnection) -> str | None:
    """Send a request over the client's connection. Return the header Connection of the response."""
    client.request("GET", "/p")
    answer = client.getresponse()
    assert (answer.status, answer.read()) == (200, b'"here"')
    return answer.getheader("connection")


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.parametrize("drain_s", [PATIENCE_S])
def test_a_request_during_shutdown_is_answered_with_connection_close(served: Served) -> None:
    """An example is a call of the API server to a webhook that is being upgraded."""
    client, end = served
    assert connection_header(client) is None
    ending = threading.Thread(target=end)
    ending.start()
    until(lambda: refuses(client.port), "the port is closed")
    assert connection_header(client) == "close"
    ending.join(PATIENCE_S)
    assert not ending.is_alive()


@pytest.mark.parametrize("drain_s", [0.1])
def test_an_idle_client_does_not_block_shutdown(served: Served) -> None:
    client, end = served
    assert connection_header(client) is None
    idle = client.sock
    end()
    assert idle.recv(1) == b""
