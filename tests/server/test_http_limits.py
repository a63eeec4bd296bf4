"""Checks that the server disconnects clients that send too slowly, too much or nothing."""

import contextlib
import os
import select
import socket
import time
from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from prometheus_client import Counter
from starlette.requests import Request
from starlette.responses import Response

from headroom.runtime.server.http_limits import CPU_COUNTER, LimitedProtocol, read_whole
from tests.listening import listening
from tests.waiting import PATIENCE_S, until

HALF = b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The port of a server that many tests share, because each server takes 0.1 s to end."""
    with served() as port:
        yield port


@contextlib.contextmanager
def served(protocol: type[LimitedProtocol] = LimitedProtocol, grace_s: int = 1) -> Iterator[int]:
    app = FastAPI()

    @app.post("/p")
    @app.post("/bind")
    async def post(request: Request) -> str:
        return str(len(await request.body()))

    with listening(app, protocol=protocol, drain_s=0.05, grace_s=grace_s) as port:
        yield port


class Counting(LimitedProtocol):
    """A protocol that counts the requests that have begun to arrive."""

    begun = 0

    def on_message_begin(self) -> None:
        type(self).begun += 1
        super().on_message_begin()


def limited(**limits: float) -> type[Counting]:
    """Return the protocol with these limits."""
    return type("Limited", (Counting,), limits)


def everything(port: int, sent: bytes) -> bytes:
    """Send bytes. Return all bytes that the server sends until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
        client.sendall(sent)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while data := client.recv(1 << 16):
                answer += data
        return answer


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(HALF, id="half a body"),
        pytest.param(b"POST /p HTTP/1.1\r\nHost: x\r\nX-A", id="half the headers"),
        pytest.param(
            b"POST /p HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", id="half a chunk"
        ),
    ],
)
def test_an_incomplete_request_is_ended(sent: bytes) -> None:
    with served(limited(request_s=0.05)) as port:
        assert everything(port, sent).startswith(b"HTTP/1.1 408 ")


def test_a_client_that_sends_no_request_is_disconnected() -> None:
    # The server checks every ``request_s``.
    with served(limited(request_s=0.05, idle_s=0.1)) as port:
        assert everything(port, b"") == b""


def test_an_incomplete_request_does_not_block_shutdown() -> None:
    counting = limited()
    with contextlib.ExitStack() as after, served(counting, grace_s=0) as port:
        client = after.enter_context(socket.create_connection(("127.0.0.1", port)))
        client.sendall(HALF)
        until(lambda: counting.begun == 1, "half a request has come")


def test_other_clients_are_answered_meanwhile(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as slow:
        slow.sendall(HALF)
        whole = b"POST /p HTTP/1.1\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
        assert everything(port, whole).endswith(b'"2"')


def test_a_response_without_a_body_is_sent(port: int) -> None:
    head = everything(port, b"HEAD /p HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 405 ")
    assert everything(port, b"no request at all\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_a_body_in_parts_is_passed_on_unchanged_and_its_cpu_time_is_counted() -> None:
    counter, content = Counter("cpu_seconds", "Of the test.", registry=None), os.urandom(300_000)
    app = FastAPI()

    @app.post("/p")
    async def post(request: Request) -> Response:
        request.scope[CPU_COUNTER] = counter
        return Response(await read_whole(request, 1 << 20))

    head = b"POST /p HTTP/1.1\r\nConnection: close\r\n"
    parts = [content[at : at + 70_000] for at in range(0, len(content), 70_000)]
    chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in parts]
    with listening(app) as port:
        for sent in (
            [head + b"Content-Length: 300000\r\n\r\n", *parts],
            [head + b"Transfer-Encoding: chunked\r\n\r\n", *chunks, b"0\r\n\r\n"],
        ):
            before_s = cpu_seconds(counter)
            with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
                for part in sent:
                    client.sendall(part)
                with client.makefile("rb") as answer:
                    assert answer.read().endswith(b"\r\n\r\n" + content)
            assert 0.0 < cpu_seconds(counter) - before_s < 5.0


def test_cpu_time_of_other_requests_is_not_counted() -> None:
    counter, app = Counter("cpu_seconds", "Of the test.", registry=None), FastAPI()

    @app.post("/p")
    async def post(request: Request) -> Response:
        request.scope[CPU_COUNTER] = counter
        return Response(await read_whole(request, 1 << 20))

    @app.post("/busy")
    async def busy() -> Response:
        until_s = time.thread_time() + 0.5
        while time.thread_time() < until_s:
            pass
        return Response()

    head = b"POST /%b HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    with (
        listening(app) as port,
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client,
    ):
        client.sendall(head % (b"p", 4) + b"ab")
        assert everything(port, head % (b"busy", 0)).startswith(b"HTTP/1.1 200 ")
        client.sendall(b"cd")
        with client.makefile("rb") as answer:
            assert answer.read().endswith(b"\r\n\r\nabcd")
    assert 0.0 < cpu_seconds(counter) < 0.4


def cpu_seconds(counter: Counter) -> float:
    (sample,) = (
        each for each in next(iter(counter.collect())).samples if each.name.endswith("_total")
    )
    return sample.value


LONG = b"x" * 100_000


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(
            b"GET /p HTTP/1.1\r\nConnection: close\r\nA: " + LONG + b"\r\n\r\n", id="one header"
        ),
        pytest.param(
            b"GET /p HTTP/1.1\r\nConnection: close\r\n" + b"A: b\r\n" * 20_000 + b"\r\n",
            id="many headers",
        ),
        pytest.param(b"GET /" + LONG + b" HTTP/1.1\r\nConnection: close\r\n\r\n", id="the path"),
        pytest.param(b"GET /p HTTP/1.1\r\nA: " + LONG, id="half a header"),
        pytest.param(
            b"POST /p HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: " + LONG,
            id="a trailer",
        ),
    ],
)
def test_too_long_headers_are_rejected(port: int, sent: bytes) -> None:
    assert b"HTTP/1.1 431 " in everything(port, sent)


@pytest.mark.parametrize(("too_many", "status"), [(0, b"405"), (1, b"431")])
def test_headers_may_have_exactly_the_limit(too_many: int, status: bytes) -> None:
    others = b"Connection: close\r\nA: \r\n"  # Each header counts 4 bytes for separators.
    text = b"x" * (1000 - len(b"/p") - len(others) + too_many)
    sent = b"GET /p HTTP/1.1\r\n" + others.replace(b"A: ", b"A: " + text) + b"\r\n"
    with served(limited(max_header_bytes=1000)) as port:
        assert everything(port, sent).startswith(b"HTTP/1.1 %b " % status)


@pytest.mark.parametrize("size", [0, 1000, 300_000])
def test_a_long_body_does_not_count_as_headers(port: int, size: int) -> None:
    chunk = b"%x\r\n%s\r\n" % (1000, b"x" * 1000)
    chunked = b"Transfer-Encoding: chunked\r\n\r\n" + chunk * (size // 1000) + b"0\r\n\r\n"
    whole = b"Content-Length: %d\r\n\r\n%s" % (size, b"x" * size)
    for sent in (chunked, whole):
        head = b"POST /p HTTP/1.1\r\nConnection: close\r\n"
        assert everything(port, head + sent).endswith(b'"%d"' % size)


def test_pipelined_requests_do_not_count_as_headers(port: int) -> None:
    whole = b"POST /p HTTP/1.1\r\nContent-Length: 50000\r\n\r\n" + b"x" * 50_000
    last = b"POST /p HTTP/1.1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    assert everything(port, whole * 5 + last).count(b'"50000"') == 5


def ended(*clients: socket.socket) -> bool:
    """Return whether the server has closed any of these connections, which get no response."""
    return bool(select.select(clients, [], [], 0)[0])


def test_with_too_many_connections_the_longest_waiting_are_dropped() -> None:
    counting = limited(max_connections=4)
    whole = b"POST /p HTTP/1.1\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
    with served(counting) as port, contextlib.ExitStack() as after:
        clients = []
        for sent in (HALF, HALF, b"GET /p HT", b""):
            client = after.enter_context(
                socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
            )
            client.sendall(sent)
            clients.append(client)
        until(lambda: counting.begun == 3, "the requests have begun")
        assert everything(port, whole).endswith(b'"2"')
        until(lambda: ended(*clients), "a connection that waits has ended")


def test_beyond_the_budget_the_largest_unfinished_body_is_dropped() -> None:
    head = b"POST /p HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    with contextlib.ExitStack() as after, served(limited(max_bodies_bytes=1_000_000)) as port:
        large = after.enter_context(
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        )
        large.sendall(head % 2_000_000 + b"x" * 900_000)
        small = head % 200_000 + b"x" * 200_000

        def dropped() -> bool:
            assert everything(port, small).endswith(b'"200000"')
            return ended(large)

        until(dropped, "the large request is dropped")
