"""The API server is spoken to over connections that stay open, and in whole requests."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from kubernetes.client import Configuration

from extender.kubeapi import KubeApi, NoAnswer
from extender.wiring.replica import BIND_THREADS
from tests.ledger.store_behaviour import run_together


@contextlib.contextmanager
def serving(
    before_each: Callable[[BaseHTTPRequestHandler, bytes], None], opened: list[object]
) -> Iterator[KubeApi]:
    """Speaks to a server that is told of each request, with its body, before it is answered."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            opened.append(self)
            super().setup()

        def do_GET(self) -> None:
            before_each(self, self.rfile.read(int(self.headers.get("Content-Length", 0))))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    configuration = Configuration()
    configuration.host = f"http://127.0.0.1:{server.server_port}"
    api = KubeApi(configuration)
    try:
        yield api
    finally:
        api.close()
        server.shutdown()
        thread.join()
        server.server_close()


def test_as_many_as_there_are_binds_at_once_are_kept_for_the_next() -> None:
    opened: list[object] = []
    all_here = threading.Barrier(BIND_THREADS)
    with serving(lambda handler, body: void(all_here.wait(60)), opened) as api:
        for _ in range(3):
            run_together(BIND_THREADS, lambda i: api.call("GET", "/"))
    assert len(opened) == BIND_THREADS


def test_a_request_is_sent_in_one_piece() -> None:
    """Segments with data that the server got, as its kernel counts them."""
    segments: list[int] = []
    bodies: list[bytes] = []

    def count(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        told = handler.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
        segments.append(struct.unpack_from("=I", told, 152)[0])
        bodies.append(body)

    with serving(count, []) as api:
        for number in range(5):
            api.call("POST", "/", body=b"%d" % number)
        api.call("GET", "/")
    assert bodies == [b"0", b"1", b"2", b"3", b"4", b""]
    assert segments == [1, 2, 3, 4, 5, 6]


def test_what_cannot_be_sent_is_no_answer_and_the_next_is_sent_whole() -> None:
    bodies: list[bytes] = []
    with serving(lambda handler, body: bodies.append(body), []) as api:
        api.call("POST", "/", body=b"1")
        with pytest.raises(ValueError, match="Invalid header value"):
            api.call("POST", "/", body=b"2", content_type="a\nb")
        api.call("POST", "/", body=b"3")
        host, api._host = api._host, "http://127.0.0.1:1"
        with pytest.raises(NoAnswer, match=r"POST /: .*refused"):
            api.call("POST", "/", body=b"4")
        api._host = host
        api.call("POST", "/", body=b"5")
    assert bodies == [b"1", b"3", b"5"]


def void(_: object) -> None:
    pass
