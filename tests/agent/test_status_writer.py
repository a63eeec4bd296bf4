"""Writes to the API server, on the wire, and how the status writer handles its answers."""

import math
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from kubernetes import client
from kubernetes.config import ConfigException
from structlog.testing import capture_logs

from agent.api_server import of_client
from agent.kube_publisher import KubernetesPublisher, NotDelivered, NotThereYet, status_patch
from agent.status_writer import StatusWriter
from contract.gpunode import Device, GPUNodeStatus, PodUse, SmActivity, Source
from contract.heartbeat import Confirmation, confirmation_of
from contract.kube import Lease
from tests.agent.scripted import GPUNODE, LEASES, ApiServer, merged
from tests.agent.test_node_probe import NO_ANSWER
from tests.waiting import until

GROWN_BYTES = 64 << 20

NO_PORTS = ("--listen", "127.0.0.1:0", "--local-port", "0")
NEVER_AGAIN = ("--interval", "3600", "--heartbeat", "3600")
VOUCH = Confirmation(sampled_at="later", gpunode="uid-1", observed_at="then", after="7")
NOW = datetime(2026, 11, 21, 1, 2, 3, tzinfo=UTC)


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer.serving() as state:
        yield state


@pytest.fixture
def publisher(api: ApiServer) -> Iterator[KubernetesPublisher]:
    configuration = client.Configuration(host=api.url)
    configuration.api_key = {"authorization": "Bearer secret"}
    configuration.no_proxy = "*"
    with client.ApiClient(configuration) as kube:
        yield KubernetesPublisher(of_client(kube), "n1", "headroom-system", heartbeat_s=30)
        kube.rest_client.pool_manager.clear()


@pytest.mark.parametrize("body", NO_ANSWER)
def test_an_answer_that_cannot_be_read_is_none(
    api: ApiServer, publisher: KubernetesPublisher, body: bytes
) -> None:
    api.objects[f"{GPUNODE}?resourceVersion=0"] = body
    with pytest.raises(NotDelivered, match="cannot be read"):
        publisher.held()


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
def status_writer(publisher: KubernetesPublisher, clock: Clock) -> StatusWriter:
    return StatusWriter(publisher, 30.0, clock.monotonic, clock.now, random.Random(1))


def status(
    used_bytes: int = 0, observed_at: str = "2026-11-21T01:02:03Z", **changes: Any
) -> GPUNodeStatus:
    device = Device(uuid="GPU-a", memory_bytes=1 << 36, reserved_bytes=0, used_bytes=used_bytes)
    return GPUNodeStatus(devices=[device], observed_at=observed_at, **changes)


def vouch(sampled_at: str, gpunode: str, observed_at: str, after: str) -> Confirmation:
    return Confirmation(
        sampled_at=sampled_at, gpunode=gpunode, observed_at=observed_at, after=after
    )


def busy(sm_ratio: float, observed_at: str) -> GPUNodeStatus:
    device = Device(
        uuid="GPU-a", used_bytes=5, sm_activity=SmActivity(ratio=sm_ratio, source="gpm")
    )
    return GPUNodeStatus(devices=[device], observed_at=observed_at)


def deliver(status_writer: StatusWriter, clock: Clock, status: GPUNodeStatus) -> float:
    """Deliver a sample of this moment."""
    return status_writer.deliver(status, clock.at_s)


def vouched(api: ApiServer) -> Confirmation:
    assert api.lease is not None
    vouch = confirmation_of(msgspec.convert(api.lease, Lease))
    assert vouch is not None
    return vouch


def used(api: ApiServer) -> int:
    assert api.gpunode is not None
    figure: int = api.gpunode["status"]["devices"][0]["used"]
    return figure


def test_report_is_a_merge_patch_of_the_status_alone(
    api: ApiServer, publisher: KubernetesPublisher
) -> None:
    api.create("uid-1")
    assert publisher.report(status(5)).uid == "uid-1"
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
        "limits": [],
        "unattributedProcesses": [],
        "sources": [],
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
    later = msgspec.structs.replace(VOUCH, after="101")
    assert publisher.heartbeat(NOW, VOUCH) == "101"
    assert vouched(api) == VOUCH
    assert publisher.heartbeat(NOW.replace(minute=59), later) == "102"
    assert vouched(api) == later
    assert api.sent() == [
        ("PATCH", f"{LEASES}/n1"),
        ("POST", LEASES),
        ("PATCH", f"{LEASES}/n1"),
    ]
    assert api.lease is not None
    assert api.lease["metadata"].items() >= {"name": "n1", "namespace": "headroom-system"}.items()
    assert api.lease["spec"] == {
        "holderIdentity": "n1",
        "leaseDurationSeconds": 90,
        "renewTime": "2026-11-21T01:59:03.000000Z",
    }


def test_a_rejection_shows_what_was_rejected_and_why(
    api: ApiServer, publisher: KubernetesPublisher
) -> None:
    api.reject["PATCH", f"{GPUNODE}/status"] = (403, {})
    with pytest.raises(NotDelivered, match=r"status of GPUNode n1 was rejected with 403.*the test"):
        publisher.report(status())


def test_server_that_does_not_listen_is_not_delivered() -> None:
    configuration = client.Configuration(host="http://127.0.0.1:9")
    configuration.no_proxy = "*"
    with client.ApiClient(configuration) as kube:
        publisher = KubernetesPublisher(of_client(kube), "n1", "headroom-system", 30)
        with pytest.raises(NotDelivered, match="API server not reached"):
            publisher.report(status())


def test_token_that_cannot_be_read_again_is_not_delivered() -> None:
    configuration = client.Configuration(host="http://127.0.0.1:9")
    configuration.api_key = {"authorization": "Bearer old"}

    def unreadable(_: client.Configuration) -> None:
        raise ConfigException("Token file exists but empty.")

    configuration.refresh_api_key_hook = unreadable
    with client.ApiClient(configuration) as kube:
        publisher = KubernetesPublisher(of_client(kube), "n1", "headroom-system", 30)
        with pytest.raises(NotDelivered, match="exists but empty"):
            publisher.heartbeat(NOW, VOUCH)


def test_steady_node_writes_its_status_once_and_one_heartbeat_in_thirty_seconds(
    api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    api.create("uid-1")
    for _ in range(12):  # a minute
        deliver(status_writer, clock, status(5))
        clock.at_s += 5
    patches = [path for method, path in api.sent() if method in ("PATCH", "POST")]
    assert patches.count(f"{GPUNODE}/status") == 1
    assert patches.count(f"{LEASES}/n1") == 2


def test_newest_report_is_delivered_after_failures_and_only_the_newest(
    api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    api.create("uid-1")
    api.reject["PATCH", f"{GPUNODE}/status"] = (503, {})
    with capture_logs() as logs:
        for used_bytes in range(1, 8):
            deliver(status_writer, clock, status(used_bytes))
            clock.at_s += 5
        api.reject.clear()
        clock.at_s += 30
        deliver(status_writer, clock, status(99))
    assert used(api) == 99
    accepted = [
        body for method, _, _, body in api.requests if method == "PATCH" and "status" in body
    ]
    assert len([log for log in logs if log["event"] == "report_not_delivered"]) == len(accepted) - 1
    assert not [log for log in logs if "exc_info" in log]


def test_failures_are_spaced_ever_wider(
    api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    api.reject["PATCH", f"{GPUNODE}/status"] = (500, {})
    tries: list[float] = []
    for _ in range(1200):  # ten minutes, every half second
        before = len(api.requests)
        deliver(status_writer, clock, status())
        if len(api.requests) > before:
            tries.append(clock.at_s)
        clock.at_s += 0.5
    gaps = [b - a for a, b in pairwise(tries)]
    assert gaps[0] <= 1.0
    assert max(gaps) <= 30.5
    assert min(gaps[6:]) >= 15


def test_wait_that_the_server_asks_for_is_kept(
    api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    api.create("uid-1")
    api.reject["PATCH", f"{GPUNODE}/status"] = (429, {"Retry-After": "20"})
    assert deliver(status_writer, clock, status()) == 20.0
    clock.at_s += 19
    assert deliver(status_writer, clock, status()) == 1.0
    assert len(api.requests) == 1


def test_no_heartbeat_vouches_for_a_report_that_was_not_taken(
    api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    api.create("uid-1")
    deliver(status_writer, clock, status(1))
    api.reject["PATCH", f"{GPUNODE}/status"] = (422, {})
    renewed = api.lease
    for _ in range(20):
        clock.at_s += 10
        deliver(status_writer, clock, status(1 << 35))
    assert api.lease == renewed
    assert api.sent().count(("PATCH", f"{LEASES}/n1")) == 1


def test_heartbeat_confirms_the_very_status_that_was_taken(
    api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    api.create("uid-1")
    deliver(status_writer, clock, status(5, "t0"))
    assert vouched(api) == vouch("t0", "uid-1", "t0", "")
    clock.at_s += 30
    deliver(status_writer, clock, status(6, "t1"))  # not worth a write
    assert vouched(api) == vouch("t1", "uid-1", "t0", "101")
    api.create("uid-2")
    clock.at_s += 30
    deliver(status_writer, clock, status(6, "t2"))
    assert vouched(api) == vouch("t2", "uid-2", "t2", "102")


def test_heartbeat_names_no_version_that_came_after_the_sample_was_begun(
    api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    api.create("uid-1")
    begun_s = clock.at_s
    clock.at_s += 1
    status_writer.deliver(status(5, "t0"), begun_s)
    clock.at_s += 30
    status_writer.deliver(status(5, "t1"), begun_s + 0.5)  # a probe that hung all the while
    assert vouched(api).after == ""
    clock.at_s += 30
    status_writer.deliver(status(5, "t2"), clock.at_s)
    assert vouched(api).after == "102"


def test_heartbeat_waits_for_a_report_that_is_held_back(
    api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    api.create("uid-1")
    deliver(status_writer, clock, status(5, "t0"))
    clock.at_s += 29
    assert deliver(status_writer, clock, status(4, "t1")) == math.inf  # freed: written at once
    clock.at_s += 1
    beats = api.version
    assert deliver(status_writer, clock, status(4 + GROWN_BYTES, "t2")) == 4.0
    assert api.version == beats
    clock.at_s += 4
    assert deliver(status_writer, clock, status(4 + GROWN_BYTES, "t3")) == math.inf
    assert vouched(api) == vouch("t3", "uid-1", "t3", "101")


def test_heartbeat_does_not_wait_for_sm_activity(
    api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    api.create("uid-1")
    deliver(status_writer, clock, busy(0.1, "t0"))
    clock.at_s += 30
    assert deliver(status_writer, clock, busy(0.9, "t1")) == math.inf
    assert vouched(api).sampled_at == "t1"


@pytest.mark.parametrize(
    "after",
    [
        pytest.param({"used_bytes": 4}, id="memory is freed"),
        pytest.param({"pods": [PodUse(uid="u", device="GPU-a")]}, id="a pod appears"),
        pytest.param({"devices": []}, id="a device is lost"),
        pytest.param({"devices": [Device(uuid="GPU-a", healthy=False)]}, id="it is unhealthy"),
        pytest.param({"sources": [Source(name="proc", state="absent")]}, id="a source is lost"),
    ],
)
def test_what_others_wait_for_is_written_at_once(
    api: ApiServer, status_writer: StatusWriter, clock: Clock, after: dict[str, Any]
) -> None:
    api.create("uid-1")
    deliver(status_writer, clock, status(5, "t0"))
    clock.at_s += 1
    newest = msgspec.structs.replace(status(after.pop("used_bytes", 5), "t1"), **after)
    assert deliver(status_writer, clock, newest) == math.inf
    assert api.gpunode is not None
    assert api.gpunode["status"]["observedAt"] == "t1"


def test_storm_of_samples_is_written_once_a_second_the_first_at_once(
    api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    """Pods that come and go wake the loop at every change."""
    api.create("uid-1")
    deliver(status_writer, clock, status(5))
    clock.at_s += 10
    written_at_s: list[float] = []
    for i in range(50):  # five seconds
        pods = [PodUse(uid=f"uid-{i}", device="GPU-a")]
        before = len(api.requests)
        held_s = deliver(status_writer, clock, status(5, f"t{i}", pods=pods))
        if len(api.requests) > before:
            written_at_s.append(clock.at_s)
            assert held_s == math.inf
        else:
            assert held_s == pytest.approx(written_at_s[-1] + 1 - clock.at_s)
        clock.at_s += 0.1
    assert written_at_s == pytest.approx([1010.0, 1011.0, 1012.0, 1013.0, 1014.0])


def test_a_report_with_a_lost_answer_is_sent_again_before_a_heartbeat_confirms_it(
    api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    """It may have been taken, and memory may since be as it was before."""
    api.create("uid-1")
    deliver(status_writer, clock, status(5, "t0"))
    api.lost = 1
    clock.at_s += 30
    assert 0 < deliver(status_writer, clock, status(1 << 35, "t1")) <= 1
    assert used(api) == 1 << 35
    clock.at_s += 2
    deliver(status_writer, clock, status(5, "t2"))
    assert used(api) == 5
    assert vouched(api) == vouch("t2", "uid-1", "t2", "101")


def test_a_gpunode_that_is_created_again_gets_the_whole_report(
    api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    api.create("uid-1")
    deliver(status_writer, clock, status(5))
    api.create("uid-2")
    clock.at_s += 30
    deliver(status_writer, clock, status(5))
    assert used(api) == 5


def test_waiting_for_the_gpunode_is_its_own_event(
    api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    with capture_logs() as logs:
        deliver(status_writer, clock, status())
    assert [log["event"] for log in logs] == ["gpunode_missing"]


def test_whole_agent_waits_for_its_gpunode_and_then_reports(
    api: ApiServer, environment: dict[str, str], tmp_path: Path
) -> None:
    Path(environment["FAKE_NVML_TABLE"]).write_text("device GPU-a 1000 100 700 A100\n")
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(api.kubeconfig))
    process = subprocess.Popen(
        # It tries again before its next regular sample, which would come too late for the test.
        [sys.executable, "-m", "agent", *NO_PORTS, *NEVER_AGAIN],
        env=environment | {"KUBECONFIG": str(kubeconfig), "PYTHONWARNINGS": "default"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: any(r[0] == "PATCH" for r in api.requests), "it reports")
        api.create("uid-1")  # an extender comes
        until(lambda: api.lease is not None, "it has a lease")
        assert used(api) == 200
        assert api.lease is not None
        assert api.requests[0][2]["authorization"] == "Bearer t0ken"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
    finally:
        process.kill()
        _, log = process.communicate()
    assert "gpunode_missing" in log
    assert "Traceback" not in log


def peaked(used: int, peak: int, observed_at: str = "t0", **life: Any) -> GPUNodeStatus:
    life = {"peak_source": "nvml", "started_at": "s1", **life}
    row = PodUse(uid="u", device="GPU-a", used_bytes=used, peak_bytes=peak, **life)
    return status(5, observed_at, pods=[row])


def written_peak(api: ApiServer) -> int:
    assert api.gpunode is not None
    (row,) = api.gpunode["status"]["pods"]
    return int(row["peak"])


def test_peaks_ride_along_with_the_report_of_memory(
    api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    api.create("uid-1")
    deliver(status_writer, clock, peaked(9 * GROWN_BYTES, 9 * GROWN_BYTES))
    clock.at_s += 1
    deliver(status_writer, clock, peaked(GROWN_BYTES, 20 * GROWN_BYTES, "t1"))  # freed
    assert written_peak(api) == 20 * GROWN_BYTES


@pytest.mark.parametrize(
    ("change", "is_written"),
    [
        pytest.param({"peak": 5 + GROWN_BYTES}, True, id="a peak 64 MiB higher"),
        pytest.param({"peak": 5 + GROWN_BYTES - 1}, False, id="a peak hardly higher"),
        pytest.param({"started_at": "s2"}, True, id="another life"),
        pytest.param({"peak": 4, "started_at": "s2"}, True, id="another life with a lower peak"),
        pytest.param({"peak_source": "driver"}, True, id="another source"),
        pytest.param({"peak_partial": True}, True, id="a gap"),
        pytest.param({"startup_peak_bytes": 5}, False, id="which settled_at implies"),
        pytest.param({}, False, id="nothing"),
    ],
)
def test_peaks_alone_are_written_once_a_minute(
    api: ApiServer,
    status_writer: StatusWriter,
    clock: Clock,
    change: dict[str, Any],
    is_written: bool,
) -> None:
    api.create("uid-1")
    deliver(status_writer, clock, peaked(5, 5))
    newest = peaked(**{"used": 5, "peak": 5, "observed_at": "t1", **change})
    for _ in range(11):  # until 55 s after the first report
        clock.at_s += 5
        assert deliver(status_writer, clock, newest) == math.inf
        assert written(api) == "t0"
    clock.at_s += 5
    deliver(status_writer, clock, newest)
    assert written(api) == ("t1" if is_written else "t0")


def test_the_end_of_a_start_is_written_at_once(
    api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    api.create("uid-1")
    deliver(status_writer, clock, peaked(5, 5))
    clock.at_s += 1
    deliver(status_writer, clock, peaked(5, 5, "t1", settled_at="s2"))
    assert written(api) == "t1"
    clock.at_s += 5
    assert deliver(status_writer, clock, peaked(5, 5, "t2", settled_at="s2")) == math.inf
    assert written(api) == "t1"


def test_heartbeat_does_not_wait_for_peaks(
    api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    api.create("uid-1")
    deliver(status_writer, clock, peaked(5, 5))
    clock.at_s += 30
    assert deliver(status_writer, clock, peaked(5, 50 * GROWN_BYTES, "t1")) == math.inf
    assert vouched(api).sampled_at == "t1"


def written(api: ApiServer) -> str:
    assert api.gpunode is not None
    return str(api.gpunode["status"]["observedAt"])
