"""Tests when the agent's liveness probe fails, and the maximum age of a sample."""

import json
import subprocess
import sys
from collections.abc import Iterator
from http import HTTPStatus

import httpx
import pytest
import structlog

from agent import liveness_probe
from agent.http_endpoints import Server
from agent.logs import log_to_stderr
from headroom.contract.gpunode import Device, GPUNodeStatus
from tests.agent.served import STALE_AFTER_S, ServedSample, http, local, server, world
from tests.builders import shared
from tests.waiting import PATIENCE_S

__all__ = ["http", "local", "server", "world"]


def healthy(http: httpx.Client) -> bool:
    return {HTTPStatus.OK: True, HTTPStatus.SERVICE_UNAVAILABLE: False}[
        HTTPStatus(http.get("/healthz").status_code)
    ]


def test_the_agent_is_unhealthy_only_while_samples_are_missing(
    world: ServedSample, local: httpx.Client
) -> None:
    assert healthy(local)  # The first sample can still arrive.
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
    # The agent still serves the last known values, with their age.
    assert local.get("/v1/report").status_code == HTTPStatus.OK
    assert "headroom_agent_sample_age_seconds 40.0" in local.get("/metrics").text


def test_a_too_old_sample_is_not_used(world: ServedSample) -> None:
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


def test_a_log_event_shows_the_location_of_an_exception(capsys: pytest.CaptureFixture[str]) -> None:
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


class Read(list[Device]):
    """A list of devices that counts how often it is read."""

    times = 0

    def __iter__(self) -> Iterator[Device]:
        self.times += 1
        return super().__iter__()


def test_the_metrics_of_a_sample_are_rendered_once(
    world: ServedSample, server: Server, http: httpx.Client
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


def test_the_probe_of_the_container_uses_the_local_port(
    world: ServedSample, server: Server, capsys: pytest.CaptureFixture[str]
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


#: A script that runs in a separate network with a second address in addition to loopback.
_IN_A_NETWORK = """
import http.client
from agent.http_endpoints import LatestSample, Server
from headroom.contract.gpunode import GPUNodeStatus
from tests.debian import ip
from tests.install.network import run
from tests.waiting import PATIENCE_S

run(*ip(), "link", "set", "lo", "up")
run(*ip(), "address", "add", "10.9.8.7/32", "dev", "lo")
board = LatestSample("n1", lambda: 0.0, 1.0)
board.set(GPUNodeStatus(observed_at="then"))
server = Server(board, "0.0.0.0", 0, 0, None, {})
server.start()
for host in ("127.0.0.1", "10.9.8.7"):
    for name, port in (("public", server.port), ("local", server.local_port)):
        for path in ("/v1/report", "/metrics", "/healthz", "/readyz"):
            client = http.client.HTTPConnection(host, port, timeout=PATIENCE_S)
            try:
                client.request("GET", path)
                print(host, name, path, client.getresponse().status)
            except ConnectionRefusedError:
                print(host, name, "closed")
            client.close()
server.stop()
"""


def test_report_and_metrics_are_served_only_on_the_loopback() -> None:
    """The report contains the processes of every tenant, and any pod can reach the public port."""
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", _IN_A_NETWORK],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    for_all = ("/healthz", "/readyz")
    closed = [f"public {path} 403" for path in ("/v1/report", "/metrics")]
    assert done.stdout.splitlines() == [
        *(f"127.0.0.1 {each}" for each in closed),
        *(f"127.0.0.1 public {path} 200" for path in for_all),
        *(f"127.0.0.1 local {path} 200" for path in ("/v1/report", "/metrics", *for_all)),
        *(f"10.9.8.7 {each}" for each in closed),
        *(f"10.9.8.7 public {path} 200" for path in for_all),
        *["10.9.8.7 local closed"] * 4,
    ], done.stderr
