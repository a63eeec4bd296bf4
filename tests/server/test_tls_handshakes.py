"""Checks that TLS handshakes are limited in time and number, and do not delay other clients."""

import asyncio
import contextlib
import http.client
import select
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI

from headroom.runtime.server.tls import Handshakes, ServerTls, TlsFiles
from tests.certificates import Authority
from tests.listening import listening
from tests.waiting import PATIENCE_S, until


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("handshakes"), "ca")


@pytest.fixture(scope="module")
def files(authority: Authority) -> TlsFiles:
    signed = authority.sign("server")
    return TlsFiles(signed.cert, signed.key)


@contextlib.contextmanager
def served(tls: ServerTls) -> Iterator[int]:
    app = FastAPI()

    @app.get("/p")
    async def get() -> str:
        return "here"

    with listening(app, tls) as port:
        yield port


def ask(port: int, authority: Authority) -> int:
    context = ssl.create_default_context(cafile=str(authority.cert))
    with contextlib.closing(
        http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=PATIENCE_S)
    ) as client:
        client.request("GET", "/p")
        return client.getresponse().status


@contextlib.contextmanager
def silent(port: int, count: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(count)
        ]


def dropped(clients: list[socket.socket]) -> list[int]:
    """Return the indices of the clients that the server has disconnected."""
    ready, _, _ = select.select(clients, [], [], 0)
    return [number for number, client in enumerate(clients) if client in ready]


def test_with_too_many_handshakes_the_earliest_are_dropped_and_others_are_served(
    files: TlsFiles, authority: Authority
) -> None:
    tls = ServerTls(files, handshake_s=PATIENCE_S, max_handshakes=3)
    with served(tls) as port, silent(port, 10) as clients:
        until(lambda: dropped(clients) == list(range(7)), "the first seven are dropped")
        assert ask(port, authority) == 200
        assert dropped(clients) == list(range(8))


def test_a_handshake_that_takes_too_long_is_ended(files: TlsFiles) -> None:
    with served(ServerTls(files, handshake_s=0.05)) as port, silent(port, 2) as clients:
        until(lambda: dropped(clients) == [0, 1], "both are dropped")


def test_a_port_shuts_down_during_handshakes(files: TlsFiles) -> None:
    with contextlib.ExitStack() as held:
        with served(ServerTls(files)) as port:
            clients = held.enter_context(silent(port, 5))
        until(lambda: dropped(clients) == [0, 1, 2, 3, 4], "all are dropped")


def test_connections_are_accepted_again_after_a_failed_accept(
    monkeypatch: pytest.MonkeyPatch, files: TlsFiles
) -> None:
    """An example of the failure is that the process temporarily has no free file descriptors."""

    class Taken(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            transport.write(b"here")
            transport.close()

    async def play() -> bytes:
        loop, failures = asyncio.get_running_loop(), [OSError("too many open files")]
        works = loop.sock_accept

        async def accept(listening: socket.socket) -> Any:
            if failures:
                raise failures.pop()
            return await works(listening)

        monkeypatch.setattr(loop, "sock_accept", accept)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            accepting = loop.create_task(Handshakes(Taken, ServerTls(files)).accept(listening))
            address = listening.getsockname()
            trusting = ssl.create_default_context()
            trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
            reader, writer = await asyncio.open_connection(*address, ssl=trusting)
            read = await reader.read()
            writer.close()
            accepting.cancel()
            await asyncio.wait([accepting])
        assert not failures
        return read

    assert asyncio.run(play()) == b"here"
