"""What reaches the API server, on the wire, and what the courier makes of its answers."""

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from kubernetes.config import ConfigException
from structlog.testing import capture_logs

from agent.cluster import KubernetesPublisher, status_patch
from agent.publish import Courier, NotDelivered, NotThereYet
from contract.gpunode import Device, GPUNodeStatus, PodUse

NOW = datetime(2026, 11, 21, 1, 2, 3, tzinfo=UTC)
GPUNODE = "/apis/headroom.gpu/v1alpha1/gpunodes/n1"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/headroom-system/leases"


@dataclass
class ApiServer:
    """Just enough of an API server: GPUNode n1, if it is there, and Leases, both merge-patched."""

    url: str = ""
    gpunode: dict[str, Any] | None = None
    lease: dict[str, Any] | None = None
    #: (method, path) -> a status to answer instead, with headers.
    refuse: dict[tuple[str, str], tuple[int, dict[str, str]]] = field(default_factory=dict)
    requests: list[tuple[str, str, dict[str, str], Any]] = field(default_factory=list)

    def create(self, uid: str) -> None:
        self.gpunode = {"metadata": {"name": "n1", "uid": uid}, "spec": {"initialised": True}}

    def answer(self, method: str, path: str, body: Any) -> tuple[int, dict[str, str], Any]:
        if (method, path) in self.refuse:
            status, headers = self.refuse[method, path]
            return status, headers, {"kind": "Status", "message": "refused by the test"}
        match method, path:
            case ("PATCH", p) if p == f"{GPUNODE}/status" and self.gpunode is not None:
                self.gpunode["status"] = merged(self.gpunode.get("status"), body["status"])
                return 200, {}, self.gpunode
            case ("GET", p) if p == f"{GPUNODE}?resourceVersion=0" and self.gpunode is not None:
                return 200, {}, self.gpunode
            case ("PATCH", p) if p == f"{LEASES}/n1" and self.lease is not None:
                self.lease = merged(self.lease, body)
                return 200, {}, self.lease
            case ("POST", p) if p == LEASES:
                self.lease = body
                return 201, {}, body
        return 404, {}, {"kind": "Status", "reason": "NotFound"}

    def sent(self) -> list[tuple[str, str]]:
        return [(method, path) for method, path, _, _ in self.requests]


def merged(old: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    result = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


@pytest.fixture
def api() -> Iterator[ApiServer]:
    state = ApiServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            state.requests.append((self.command, self.path, dict(self.headers), body))
            status, headers, answer = state.answer(self.command, self.path, body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PATCH = do_POST = handle_one

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def publisher(api: ApiServer) -> Iterator[KubernetesPublisher]:
    configuration = client.Configuration(host=api.url)
    configuration.api_key = {"authorization": "Bearer secret"}
    configuration.no_proxy = "*"
    with client.ApiClient(configuration) as kube:
        yield KubernetesPublisher(kube, "n1", "headroom-system", heartbeat_s=30)
        kube.rest_client.pool_manager.clear()


@dataclass
class Clock:
    at_s: float = 1000.0

    def monotonic(self) -> float:
        return self.at_s

    def now(self) -> datetime:
        return NOW


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def courier(publisher: KubernetesPublisher, clock: Clock) -> Courier:
    return Courier(publisher, 30.0, clock.monotonic, clock.now, random.Random(1))


def status(used_bytes: int = 0, **changes: Any) -> GPUNodeStatus:
    device = Device(uuid="GPU-a", memory_bytes=1 << 36, reserved_bytes=0, used_bytes=used_bytes)
    return GPUNodeStatus(devices=[device], observed_at="2026-11-21T01:02:03Z", **changes)


def used(api: ApiServer) -> int:
    assert api.gpunode is not None
    figure: int = api.gpunode["status"]["devices"][0]["used"]
    return figure


def test_report_is_a_merge_patch_of_the_status_alone(
    api: ApiServer, publisher: KubernetesPublisher
) -> None:
    api.create("uid-1")
    assert publisher.report(status(5)) == "uid-1"
    ((method, path, headers, body),) = api.requests
    assert (method, path) == ("PATCH", f"{GPUNODE}/status")
    assert headers["Content-Type"] == "application/merge-patch+json"
    assert headers["authorization"] == "Bearer secret"
    assert set(body) == {"status"}
    assert api.gpunode is not None
    assert api.gpunode["spec"] == {"initialised": True}
    assert used(api) == 5


def test_what_left_the_status_leaves_the_object_too() -> None:
    full = status(pods=[PodUse(uid="u", device="GPU-a")], driver_version="580")
    stored = merged({}, status_patch(full))
    assert stored["pods"]
    stored = merged(stored, status_patch(GPUNodeStatus(observed_at="later")))
    assert stored == {
        "observedAt": "later",
        "devices": [],
        "pods": [],
        "conditions": [],
        "plugin": {},
        "summary": {},
    }


def test_gpunode_that_is_not_there_is_waited_for_and_never_created(
    api: ApiServer, publisher: KubernetesPublisher
) -> None:
    with pytest.raises(NotThereYet, match="n1 is not there yet"):
        publisher.report(status())
    assert {method for method, _ in api.sent()} == {"PATCH"}


def test_lease_is_created_once_and_then_renewed(
    api: ApiServer, publisher: KubernetesPublisher
) -> None:
    publisher.heartbeat(NOW)
    publisher.heartbeat(NOW.replace(minute=59))
    assert api.sent() == [
        ("PATCH", f"{LEASES}/n1"),
        ("POST", LEASES),
        ("PATCH", f"{LEASES}/n1"),
    ]
    assert api.lease is not None
    assert api.lease["metadata"] == {"name": "n1", "namespace": "headroom-system"}
    assert api.lease["spec"] == {
        "holderIdentity": "n1",
        "leaseDurationSeconds": 90,
        "renewTime": "2026-11-21T01:59:03.000000Z",
    }


def test_refusal_says_what_was_refused_and_why(
    api: ApiServer, publisher: KubernetesPublisher
) -> None:
    api.refuse["PATCH", f"{GPUNODE}/status"] = (403, {})
    with pytest.raises(NotDelivered, match=r"status of GPUNode n1 was refused with 403.*the test"):
        publisher.report(status())


def test_server_that_does_not_listen_is_not_delivered() -> None:
    configuration = client.Configuration(host="http://127.0.0.1:9")
    configuration.no_proxy = "*"
    with client.ApiClient(configuration) as kube:
        publisher = KubernetesPublisher(kube, "n1", "headroom-system", 30)
        with pytest.raises(NotDelivered, match="API server not reached"):
            publisher.report(status())


def test_token_that_cannot_be_read_again_is_not_delivered() -> None:
    configuration = client.Configuration(host="http://127.0.0.1:9")
    configuration.api_key = {"authorization": "Bearer old"}

    def unreadable(_: client.Configuration) -> None:
        raise ConfigException("Token file exists but empty.")

    configuration.refresh_api_key_hook = unreadable
    with client.ApiClient(configuration) as kube:
        publisher = KubernetesPublisher(kube, "n1", "headroom-system", 30)
        with pytest.raises(NotDelivered, match="exists but empty"):
            publisher.heartbeat(NOW)


def test_steady_node_writes_its_status_once_and_one_heartbeat_in_thirty_seconds(
    api: ApiServer, courier: Courier, clock: Clock
) -> None:
    api.create("uid-1")
    for _ in range(12):  # a minute
        courier.deliver(status(5))
        clock.at_s += 5
    patches = [path for method, path in api.sent() if method in ("PATCH", "POST")]
    assert patches.count(f"{GPUNODE}/status") == 1
    assert patches.count(f"{LEASES}/n1") == 2


def test_newest_report_is_delivered_after_failures_and_only_the_newest(
    api: ApiServer, courier: Courier, clock: Clock
) -> None:
    api.create("uid-1")
    api.refuse["PATCH", f"{GPUNODE}/status"] = (503, {})
    with capture_logs() as logs:
        for used_bytes in range(1, 8):
            courier.deliver(status(used_bytes))
            clock.at_s += 5
        api.refuse.clear()
        clock.at_s += 30
        courier.deliver(status(99))
    assert used(api) == 99
    accepted = [
        body for method, _, _, body in api.requests if method == "PATCH" and "status" in body
    ]
    assert len([log for log in logs if log["event"] == "report_not_delivered"]) == len(accepted) - 1
    assert not [log for log in logs if "exc_info" in log]


def test_failures_are_spaced_ever_wider(api: ApiServer, courier: Courier, clock: Clock) -> None:
    api.refuse["PATCH", f"{GPUNODE}/status"] = (500, {})
    tries: list[float] = []
    for _ in range(1200):  # ten minutes, every half second
        before = len(api.requests)
        courier.deliver(status())
        if len(api.requests) > before:
            tries.append(clock.at_s)
        clock.at_s += 0.5
    gaps = [b - a for a, b in pairwise(tries)]
    assert gaps[0] <= 1.0
    assert max(gaps) <= 30.5
    assert min(gaps[6:]) >= 15


def test_wait_that_the_server_asks_for_is_kept(
    api: ApiServer, courier: Courier, clock: Clock
) -> None:
    api.create("uid-1")
    api.refuse["PATCH", f"{GPUNODE}/status"] = (429, {"Retry-After": "20"})
    courier.deliver(status())
    clock.at_s += 19
    courier.deliver(status())
    assert len(api.requests) == 1


def test_no_heartbeat_vouches_for_a_report_that_was_not_taken(
    api: ApiServer, courier: Courier, clock: Clock
) -> None:
    api.create("uid-1")
    courier.deliver(status(1))
    api.refuse["PATCH", f"{GPUNODE}/status"] = (422, {})
    renewed = api.lease
    for _ in range(20):
        clock.at_s += 10
        courier.deliver(status(1 << 35))
    assert api.lease == renewed
    assert api.sent().count(("PATCH", f"{LEASES}/n1")) == 1


def test_gpunode_created_again_is_told_everything_again(
    api: ApiServer, courier: Courier, clock: Clock
) -> None:
    api.create("uid-1")
    courier.deliver(status(5))
    api.create("uid-2")
    clock.at_s += 30
    courier.deliver(status(5))
    assert used(api) == 5


def test_waiting_for_the_gpunode_is_its_own_event(api: ApiServer, courier: Courier) -> None:
    with capture_logs() as logs:
        courier.deliver(status())
    assert [log["event"] for log in logs] == ["gpunode_awaited"]


def test_whole_agent_waits_for_its_gpunode_and_then_reports(
    api: ApiServer, environment: dict[str, str], tmp_path: Path
) -> None:
    Path(environment["FAKE_NVML_TABLE"]).write_text("device GPU-a 1000 100 700 A100\n")
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        yaml.safe_dump(
            {
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": api.url}}],
                "users": [{"name": "u", "user": {"token": "t0ken"}}],
            }
        )
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "agent", "--listen", "127.0.0.1:0", "--interval", "1"],
        env=environment | {"KUBECONFIG": str(kubeconfig), "PYTHONWARNINGS": "default"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        end = time.monotonic() + 15
        while not any(r[0] == "PATCH" for r in api.requests) and time.monotonic() < end:
            time.sleep(0.05)
        api.create("uid-1")  # an extender comes
        while api.lease is None and time.monotonic() < end:
            time.sleep(0.05)
        assert used(api) == 200
        assert api.lease is not None
        assert api.requests[0][2]["authorization"] == "Bearer t0ken"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
    finally:
        process.kill()
        _, log = process.communicate()
    assert "gpunode_awaited" in log
    assert "Traceback" not in log
