"""When the agent reports that a restart would help, and the maximum age of a usable sample."""

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

from agent import liveness_probe
from agent.gate_decision import Verdict
from agent.http_endpoints import LatestSample, Server
from agent.logs import log_to_stderr
from contract.gpunode import Device, GPUNodeStatus
from tests.builders import shared
from tests.waiting import PATIENCE_S, until

MAX_CONNECTIONS = 256

STALE_AFTER_S = 35.0


class World:
    def __init__(self) -> None:
        self.now_s = 1024.0
        self.board = LatestSample("n1", lambda: self.now_s, STALE_AFTER_S)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def server(world: World) -> Iterator[Server]:
    server = Server(world.board, "127.0.0.1", 0, 0, None, {})
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


def healthy(http: httpx.Client) -> bool:
    return {HTTPStatus.OK: True, HTTPStatus.SERVICE_UNAVAILABLE: False}[
        HTTPStatus(http.get("/healthz").status_code)
    ]


def test_only_samples_that_do_not_come_are_a_reason_to_restart(
    world: World, local: httpx.Client
) -> None:
    assert healthy(local)  # the first one may still come
    assert local.get("/readyz").status_code == HTTPStatus.SERVICE_UNAVAILABLE
    assert local.get("/v1/report").status_code == HTTPStatus.SERVICE_UNAVAILABLE
    world.now_s += STALE_AFTER_S
    assert healthy(local)
    world.now_s += 0.125
    assert not healthy(local)
    world.board.set(GPUNodeStatus(observed_at="then"))
    assert healthy(local)
    assert local.get("/v1/report").json() == {"observedAt": "then"}
    assert local.get("/readyz").status_code == HTTPStatus.OK
    world.now_s += STALE_AFTER_S + 5
    assert not healthy(local)
    # The last known values are still served, with their age.
    assert local.get("/v1/report").status_code == HTTPStatus.OK
    assert "headroom_agent_sample_age_seconds 40.0" in local.get("/metrics").text


def test_a_sample_that_is_too_old_is_none_to_go_by(world: World) -> None:
    assert world.board.fresh is None
    status = GPUNodeStatus(observed_at="then")
    world.board.set(status)
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
def test_a_request_without_a_pod_is_rejected_with_an_example(
    http: httpx.Client, query: str
) -> None:
    answer = http.get(f"/v1/gate{query}")
    assert answer.status_code == 400
    assert "/v1/gate?pod_uid=" in answer.json()["error"]


def test_a_mistake_of_ours_is_logged_and_a_client_that_hangs_up_is_not(world: World) -> None:
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


def test_a_log_line_shows_the_place_of_an_exception(capsys: pytest.CaptureFixture[str]) -> None:
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
    shown = json.loads(line)
    assert shown["exception"].startswith("Traceback")
    assert shown["exception"].endswith("KeyError: 'missing'")


def test_only_a_request_beyond_its_limit_is_not_answered(http: httpx.Client) -> None:
    """64 clients that send 100 headers of 64 KiB each would take 400 MiB."""
    assert http.get("/healthz", headers={"A": "x" * 4000}).status_code == 200
    with pytest.raises(httpx.TransportError):
        http.get("/healthz", headers={f"A{number}": "x" * 1000 for number in range(60)})
    assert http.get("/healthz").status_code == 200


#: Seven clients of the loopback, each with an address of its own.
ADDRESSES = [f"127.0.0.{last}" for last in range(11, 18)]


@contextlib.contextmanager
def connected(
    port: int, address: str = "", sent: bytes = b"", receive_bytes: int = 0
) -> Iterator[socket.socket]:
    with socket.socket() as sock:
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.settimeout(60)
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


def test_the_address_with_most_connections_loses_one_when_there_are_too_many(
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
def test_others_are_answered_whatever_many_clients_do(world: World, sent: bytes) -> None:
    released = threading.Event()

    def ask(uid: str) -> Verdict:
        released.wait(PATIENCE_S)
        return Verdict("yes", "")

    world.board.set(GPUNodeStatus(devices=[shared(f"GPU-{n}") for n in range(400)]))
    server = Server(world.board, "127.0.0.1", 0, 0, ask, {})
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


#: Ends after its server, although a client still waits for an answer.
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


def test_an_answer_that_never_comes_does_not_keep_the_agent_from_ending() -> None:
    """As if the API server does not answer, which does not concern the kubelet."""
    command = [sys.executable, "-c", _WITH_A_GATE_THAT_WAITS]
    assert subprocess.check_output(command, text=True, timeout=PATIENCE_S) == "stopped\n"


def test_a_client_that_reads_slowly_gets_the_whole_answer(world: World, server: Server) -> None:
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


class Read(list[Device]):
    """Devices that count how often they are read."""

    times = 0

    def __iter__(self) -> Iterator[Device]:
        self.times += 1
        return super().__iter__()


def test_the_metrics_of_a_sample_are_rendered_once(
    world: World, server: Server, http: httpx.Client
) -> None:
    devices = Read([shared("GPU-0")])
    world.board.set(GPUNodeStatus(devices=devices))
    first = http.get("/metrics").text
    times = devices.times
    assert times
    world.now_s += 5.0
    later = http.get("/metrics").text
    http.get(f"http://127.0.0.1:{server.local_port}/metrics")
    assert devices.times == times
    changed = {*later.splitlines()} - {*first.splitlines()}
    assert changed == {"headroom_agent_sample_age_seconds 5.0"}
    world.board.set(GPUNodeStatus(devices=[shared("GPU-1")]))
    assert "GPU-1" in http.get("/metrics").text


@pytest.mark.parametrize(
    ("request_line", "status"),
    [(b"POST /healthz HTTP/1.1", 405), (b"GET", 400), (b"GET \xff HTTP/1.1", 400)],
)
def test_what_is_not_a_get_request_is_rejected(
    server: Server, request_line: bytes, status: int
) -> None:
    with connected(server.port, sent=request_line + b"\r\n\r\n") as sock:
        assert sock.recv(100).startswith(f"HTTP/1.1 {status} ".encode())


def test_the_probe_of_the_container_goes_by_the_local_port(
    world: World, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    port = str(server.local_port)
    assert liveness_probe.main(["/healthz", port]) == 0
    assert liveness_probe.main(["/readyz", port]) == 1
    world.board.set(GPUNodeStatus())
    assert liveness_probe.main(["/readyz", port]) == 0
    world.now_s += STALE_AFTER_S + 1
    assert liveness_probe.main(["/healthz", port]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "no recent sample"
    server.stop()
    assert liveness_probe.main(["/healthz", port]) == 1


#: In a network of its own, with an address that is not the loopback's.
_IN_A_NETWORK = """
import http.client
from agent.http_endpoints import LatestSample, Server
from contract.gpunode import GPUNodeStatus
from tests.debian import ip
from tests.install.network import run

run(*ip(), "link", "set", "lo", "up")
run(*ip(), "address", "add", "10.9.8.7/32", "dev", "lo")
board = LatestSample("n1", lambda: 0.0, 1.0)
board.set(GPUNodeStatus(observed_at="then"))
server = Server(board, "0.0.0.0", 0, 0, None, {})
server.start()
for host in ("127.0.0.1", "10.9.8.7"):
    for name, port in (("public", server.port), ("local", server.local_port)):
        for path in ("/v1/report", "/metrics", "/healthz", "/readyz"):
            client = http.client.HTTPConnection(host, port, timeout=60)
            try:
                client.request("GET", path)
                print(host, name, path, client.getresponse().status)
            except ConnectionRefusedError:
                print(host, name, "closed")
            client.close()
server.stop()
"""


def test_the_report_is_given_on_the_loopback_only() -> None:
    """Any pod reaches the public port, and the report names the processes of every tenant."""
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", _IN_A_NETWORK],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    for_all = ("/metrics", "/healthz", "/readyz")
    assert done.stdout.splitlines() == [
        "127.0.0.1 public /v1/report 403",
        *(f"127.0.0.1 public {path} 200" for path in for_all),
        *(f"127.0.0.1 local {path} 200" for path in ("/v1/report", *for_all)),
        "10.9.8.7 public /v1/report 403",
        *(f"10.9.8.7 public {path} 200" for path in for_all),
        *["10.9.8.7 local closed"] * 4,
    ], done.stderr
