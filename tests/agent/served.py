"""Runs an agent's HTTP server, which serves a sample that the test sets."""

from collections.abc import Iterator

import httpx
import pytest

from agent.http_endpoints import LatestSample, Server
from tests.waiting import PATIENCE_S

STALE_AFTER_S = 35.0


class ServedSample:
    def __init__(self) -> None:
        self.now_s = 1024.0
        self.board = LatestSample("n1", lambda: self.now_s, STALE_AFTER_S)


@pytest.fixture
def world() -> ServedSample:
    return ServedSample()


@pytest.fixture
def server(world: ServedSample) -> Iterator[Server]:
    server = Server(world.board, "127.0.0.1", 0, 0, None, {}, open_metrics=True)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def client(port: int) -> httpx.Client:
    return httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=PATIENCE_S)


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with client(server.port) as found:
        yield found


@pytest.fixture
def local(server: Server) -> Iterator[httpx.Client]:
    with client(server.local_port) as found:
        yield found
