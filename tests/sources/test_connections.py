"""The API server is spoken to over connections that stay open."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from kubernetes.client import Configuration

from extender.kubeapi import KubeApi, NoAnswer
from extender.wiring.replica import BIND_THREADS
from tests.ledger.store_behaviour import run_together


def test_as_many_as_there_are_binds_at_once_are_kept_for_the_next() -> None:
    opened: list[object] = []
    all_here = threading.Barrier(BIND_THREADS)

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
    api = KubeApi(configuration)
    try:
        for _ in range(3):
            run_together(BIND_THREADS, lambda i: api.call("GET", "/"))
        assert len(opened) == BIND_THREADS
    finally:
        api.close()
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
