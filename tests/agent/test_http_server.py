"""Tests the limits of the agent's HTTP server, and checks that it serves other clients while a
client abuses it.
"""

import contextlib
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator

import httpx
import pytest
from structlog.testing import capture_logs

from agent.gate_decision import Verdict
from agent.http_endpoints import Server
from headroom.contract.gpunode import GPUNodeStatus
from tests.agent.served import ServedSample, client, http, server, world
from tests.builders import shared
from tests.waiting import PATIENCE_S, until

__all__ = ["http", "server", "world"]

MAX_CONNECTIONS = 256


def test_only_a_request_beyond_its_limit_is_not_answered(http: httpx.Client) -> None:
    """Without the limit, 64 clients that each send 100 headers of 64 KiB would use 400 MiB."""
    assert http.get("/healthz", headers={"A": "x" * 4000}).status_code == 200
    with pytest.raises(httpx.TransportError):
        http.get("/healthz", headers={f"A{number}": "x" * 1000 for number in range(60)})
    assert http.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    ("request_line", "status"),
    [(b"POST /healthz HTTP/1.1", 405), (b"GET", 400), (b"GET \xff HTTP/1.1", 400)],
)
def test_other_methods_than_get_are_rejected(
    server: Server, request_line: bytes, status: int
) -> None:
    with connected(server.port, sent=request_line + b"\r\n\r\n") as sock:
        assert sock.recv(100).startswith(f"HTTP/1.1 {status} ".encode())


def test_an_internal_error_is_logged_but_a_client_that_disconnects_is_not(
    world: ServedSample,
) -> None:
    def mistaken(uid: str) -> Verdict:
        raise LookupError("a mistake for the tests")

    server = Server(world.board, "127.0.0.1", 0, 0, mistaken, {})
    server.start()
    try:
        with capture_logs() as logs, client(server.port) as http:
            with socket.create_connection(("127.0.0.1", server.port)) as rude:
                reset = struct.pack("ii", 1, 0)
                rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                rude.sendall(b"GET /metr")
            assert http.get("/v1/gate?pod_uid=u").status_code == 500
    finally:
        server.stop()
    (entry,) = logs
    assert (entry["event"], entry["log_level"]) == ("answer_failed", "error")
    assert entry["exc_info"]


#: Addresses of seven clients on loopback.
ADDRESSES = [f"127.0.0.{last}" for last in range(11, 18)]


@contextlib.contextmanager
def connected(
    port: int, address: str = "", sent: bytes = b"", receive_bytes: int = 0
) -> Iterator[socket.socket]:
    with socket.socket() as sock:
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.settimeout(PATIENCE_S)
        sock.bind((address, 0))
        sock.connect(("127.0.0.1", port))
        sock.sendall(sent)
        yield sock


def closed(sock: socket.socket) -> bool:
    ready, _, _ = select.select([sock], [], [], 0)
    try:
        return bool(ready) and sock.recv(1) == b""
    except ConnectionError:
        return True


def test_with_too_many_connections_the_busiest_address_loses_one(
    server: Server, http: httpx.Client
) -> None:
    half = b"GET /healthz HTTP/1.1\r\nX: "
    with contextlib.ExitStack() as stack:
        few = stack.enter_context(connected(server.port, ADDRESSES[0], half))
        many = [
            stack.enter_context(connected(server.port, ADDRESSES[1], half))
            for _ in range(MAX_CONNECTIONS)
        ]
        until(lambda: closed(many[0]), "the earliest of the many was closed")
        assert http.get("/healthz").status_code == 200
        assert not closed(few)
        few.sendall(b"y\r\n\r\n")
        assert few.recv(100).startswith(b"HTTP/1.1 200")


ATTACKS = {
    "silent": b"",
    "half a request": b"GET / HTTP/1.1\r\nX: ",
    "metrics that are not read": b"GET /metrics HTTP/1.1\r\n\r\n",
    "gates that wait": b"GET /v1/gate?pod_uid=u HTTP/1.1\r\n\r\n",
    "headers without end": b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000,
    "a pipeline": b"GET /metrics HTTP/1.1\r\n\r\n" * 200,
}


@pytest.mark.parametrize("sent", [pytest.param(sent, id=name) for name, sent in ATTACKS.items()])
def test_other_clients_are_answered_while_many_clients_misbehave(
    world: ServedSample, sent: bytes
) -> None:
    released = threading.Event()

    def ask(uid: str) -> Verdict:
        released.wait(PATIENCE_S)
        return Verdict("yes", "")

    world.board.set(GPUNodeStatus(devices=[shared(f"GPU-{n}") for n in range(400)]))
    server = Server(world.board, "127.0.0.1", 0, 0, ask, {}, open_metrics=True)
    server.start()
    try:
        with contextlib.ExitStack() as stack:
            for number in range(2 * MAX_CONNECTIONS):
                address = ADDRESSES[number % len(ADDRESSES)]
                with contextlib.suppress(ConnectionError):
                    stack.enter_context(connected(server.port, address, sent, 1 << 12))
            with client(server.port) as http, client(server.local_port) as local:
                for path in ("/healthz", "/readyz", "/metrics"):
                    assert http.get(path).status_code == 200, path
                for path in ("/healthz", "/readyz", "/v1/report"):
                    assert local.get(path).status_code == 200, path
                released.set()
                assert http.get("/v1/gate?pod_uid=v").status_code == 200
    finally:
        released.set()
        server.stop()


#: A program whose server stops although a client still waits for a response.
_WITH_A_GATE_THAT_WAITS = """
import socket, threading
from agent.http_endpoints import LatestSample, Server

asked = threading.Event()

def ask(uid):
    asked.set()
    threading.Event().wait()

server = Server(LatestSample("n1", lambda: 0.0, 1.0), "127.0.0.1", 0, 0, ask, {})
server.start()
client = socket.create_connection(("127.0.0.1", server.port))
client.sendall(b"GET /v1/gate?pod_uid=u HTTP/1.1\\r\\n\\r\\n")
asked.wait()
server.stop()
print("stopped")
"""


def test_a_hanging_request_does_not_block_shutdown() -> None:
    """The API server may not respond, but the shutdown must not wait for it."""
    command = [sys.executable, "-c", _WITH_A_GATE_THAT_WAITS]
    assert subprocess.check_output(command, text=True, timeout=PATIENCE_S) == "stopped\n"


def test_a_slow_reader_gets_the_whole_answer(world: ServedSample, server: Server) -> None:
    world.board.set(GPUNodeStatus(devices=[shared(f"GPU-{n}") for n in range(400)]))
    with capture_logs() as logs:
        for _ in range(5):
            sent = b"GET /metrics HTTP/1.1\r\n\r\n"
            with connected(server.port, sent=sent, receive_bytes=1 << 12) as sock:
                received = b"".join(iter(lambda: sock.recv(1 << 12), b""))
            head, _, body = received.partition(b"\r\n\r\n")
            assert f"Content-Length: {len(body)}\r\n".encode() in head
            assert len(body) > 1 << 17
    assert logs == []


def test_a_silent_client_is_disconnected(server: Server) -> None:
    with connected(server.port, sent=b"GET /metrics HTTP/1.1\r\n") as sock:
        assert sock.recv(1) == b""


#: A program that requests metrics while its process has no free file descriptor, and again when it
#: has one.
_WITHOUT_DESCRIPTORS = """
import os, resource, socket, threading
import structlog
from agent.http_endpoints import LatestSample, Server

failed = threading.Event()

def seen(logger, method, entry):
    print(entry["event"], entry["reason"], flush=True)
    failed.set()
    raise structlog.DropEvent

structlog.configure(processors=[seen])
server = Server(LatestSample("n1", lambda: 0.0, 1.0), "127.0.0.1", 0, 0, None, {})
server.start()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
client = socket.socket()
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
client.connect(("127.0.0.1", server.port))
client.sendall(b"GET /readyz HTTP/1.1\\r\\n\\r\\n")
failed.wait()
for each in taken:
    os.close(each)
print(client.recv(12).decode())
server.stop()
"""


def test_connections_wait_until_a_descriptor_is_free() -> None:
    command = [sys.executable, "-c", _WITHOUT_DESCRIPTORS]
    shown = subprocess.check_output(command, text=True, timeout=PATIENCE_S)
    assert shown.splitlines() == [
        "port_failed [Errno 24] Too many open files",
        "HTTP/1.1 503",
    ]
