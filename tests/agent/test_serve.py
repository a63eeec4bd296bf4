"""When the agent says that a restart would help it, and how old a sample may be to go by."""

import contextlib
import json
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from http import HTTPStatus

import httpx
import pytest
import structlog
from structlog.testing import capture_logs

from agent.__main__ import log_to_stderr
from agent.gate import Verdict
from agent.serve import MOST_CLIENTS, Board, Server
from contract.gpunode import GPUNodeStatus
from tests.waiting import until

STALE_AFTER_S = 35.0


class World:
    def __init__(self) -> None:
        self.now_s = 1024.0
        self.board = Board("n1", lambda: self.now_s, STALE_AFTER_S)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def http(world: World) -> Iterator[httpx.Client]:
    server = Server(world.board, "127.0.0.1", 0, None, {})
    server.start()
    try:
        base = f"http://127.0.0.1:{server.port}"
        with httpx.Client(base_url=base, trust_env=False, timeout=30) as client:
            yield client
    finally:
        server.stop()


def healthy(http: httpx.Client) -> bool:
    return {HTTPStatus.OK: True, HTTPStatus.SERVICE_UNAVAILABLE: False}[
        HTTPStatus(http.get("/healthz").status_code)
    ]


def test_only_samples_that_do_not_come_are_a_reason_to_restart(
    world: World, http: httpx.Client
) -> None:
    assert healthy(http)  # the first one may still come
    assert http.get("/readyz").status_code == HTTPStatus.SERVICE_UNAVAILABLE
    assert http.get("/v1/report").status_code == HTTPStatus.SERVICE_UNAVAILABLE
    world.now_s += STALE_AFTER_S
    assert healthy(http)
    world.now_s += 0.125
    assert not healthy(http)
    world.board.show(GPUNodeStatus(observed_at="then"))
    assert healthy(http)
    assert http.get("/v1/report").json() == {"observedAt": "then"}
    assert http.get("/readyz").status_code == HTTPStatus.OK
    world.now_s += STALE_AFTER_S + 5
    assert not healthy(http)
    # What was known last is still told, with its age.
    assert http.get("/v1/report").status_code == HTTPStatus.OK
    assert "headroom_agent_sample_age_seconds 40.0" in http.get("/metrics").text


def test_a_sample_that_is_too_old_is_none_to_go_by(world: World) -> None:
    assert world.board.fresh is None
    status = GPUNodeStatus(observed_at="then")
    world.board.show(status)
    world.now_s += STALE_AFTER_S
    assert world.board.fresh is status
    world.now_s += 0.125
    assert world.board.fresh is None


def test_without_a_cluster_no_gated_pod_starts(http: httpx.Client) -> None:
    answer = http.get("/v1/gate", params={"pod_uid": "00000001-1111-4222-8333-000000000001"})
    assert answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE
    assert answer.json()["reason"] == "this agent reports to no cluster"


@pytest.mark.parametrize(
    "query", ["", "?pod_uid=", "?uid=x", "?pod_uid=a%0ab", "?pod_uid=a&pod_uid=b"]
)
def test_a_question_that_names_no_pod_is_refused_with_a_right_example(
    http: httpx.Client, query: str
) -> None:
    answer = http.get(f"/v1/gate{query}")
    assert answer.status_code == 400
    assert "/v1/gate?pod_uid=" in answer.json()["error"]


def test_a_mistake_of_ours_is_logged_and_a_client_that_hangs_up_is_not(world: World) -> None:
    def mistaken(uid: str) -> Verdict:
        raise LookupError("a mistake for the tests")

    server = Server(world.board, "127.0.0.1", 0, mistaken, {})
    server.start()
    try:
        with capture_logs() as logs:
            with socket.create_connection(("127.0.0.1", server.port)) as rude:
                reset = struct.pack("ii", 1, 0)
                rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                rude.sendall(b"GET /metr")
            with pytest.raises(httpx.RemoteProtocolError):
                httpx.get(f"http://127.0.0.1:{server.port}/v1/gate?pod_uid=u", trust_env=False)
            until(lambda: bool(logs), "something is logged")
    finally:
        server.stop()
    (entry,) = logs
    assert (entry["event"], entry["log_level"]) == ("answer_failed", "error")
    assert entry["exc_info"]


def test_a_log_line_tells_where_a_mistake_was_made(capsys: pytest.CaptureFixture[str]) -> None:
    before = structlog.get_config()
    try:
        log_to_stderr()
        try:
            {}["missing"]
        except KeyError:
            structlog.get_logger().exception("broken")
    finally:
        structlog.configure(**before)
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert told["exception"].startswith("Traceback")
    assert told["exception"].endswith("KeyError: 'missing'")


def test_only_a_request_beyond_its_limit_is_not_answered(http: httpx.Client) -> None:
    """64 clients that send 100 headers of 64 KiB each would take 400 MiB."""
    assert http.get("/healthz", headers={"A": "x" * 4000}).status_code == 200
    with pytest.raises(httpx.TransportError):
        http.get("/healthz", headers={f"A{number}": "x" * 1000 for number in range(60)})
    assert http.get("/healthz").status_code == 200


@pytest.fixture
def silent(http: httpx.Client) -> Iterator[list[socket.socket]]:
    """As many clients that send nothing as are served at once."""
    address = http.base_url.host, http.base_url.port
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(address)) for _ in range(MOST_CLIENTS)]


def test_of_too_many_silent_clients_the_earliest_gives_way(
    http: httpx.Client, silent: list[socket.socket]
) -> None:
    assert http.get("/healthz").status_code == 200
    assert silent[0].recv(1) == b""
    ready, _, _ = select.select(silent[1:], [], [], 0)
    assert ready == []


def test_nobody_who_is_being_answered_gives_way(world: World) -> None:
    answers, asked = threading.Event(), list[str]()

    def ask(uid: str) -> Verdict:
        asked.append(uid)
        answers.wait(60)
        return Verdict("yes", "")

    server = Server(world.board, "127.0.0.1", 0, ask, {})
    server.start()
    try:
        with contextlib.ExitStack() as stack:
            clients = []
            for _ in range(MOST_CLIENTS):
                address = "127.0.0.1", server.port
                clients.append(stack.enter_context(socket.create_connection(address)))
                clients[-1].sendall(b"GET /v1/gate?pod_uid=u HTTP/1.0\r\n\r\n")
            until(lambda: len(asked) == MOST_CLIENTS, "every request has been read")
            late = stack.enter_context(socket.create_connection(address))
            with contextlib.suppress(ConnectionError):
                assert late.recv(1) == b""
            answers.set()
            for client in clients:
                assert client.recv(100).startswith(b"HTTP/1.0 200")
    finally:
        answers.set()
        server.stop()


#: In a network of its own, with an address that is not the loopback's.
_IN_A_NETWORK = """
import http.client
from agent.serve import Board, Server
from contract.gpunode import GPUNodeStatus
from tests.debian import ip
from tests.install.network import run

run(*ip(), "link", "set", "lo", "up")
run(*ip(), "address", "add", "10.9.8.7/32", "dev", "lo")
board = Board("n1", lambda: 0.0, 1.0)
board.show(GPUNodeStatus(observed_at="then"))
server = Server(board, "0.0.0.0", 0, None, {})
server.start()
for host in ("127.0.0.1", "10.9.8.7"):
    for path in ("/v1/report", "/metrics", "/healthz", "/readyz"):
        client = http.client.HTTPConnection(host, server.port, timeout=30)
        client.request("GET", path)
        print(host, path, client.getresponse().status)
        client.close()
server.stop()
"""


def test_the_report_is_given_over_loopback_only() -> None:
    """Any pod reaches the port, and the report names the processes of every tenant."""
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", _IN_A_NETWORK],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines() == [
        *(f"127.0.0.1 {path} 200" for path in ("/v1/report", "/metrics", "/healthz", "/readyz")),
        "10.9.8.7 /v1/report 403",
        *(f"10.9.8.7 {path} 200" for path in ("/metrics", "/healthz", "/readyz")),
    ], done.stderr
