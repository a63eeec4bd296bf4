"""Tests the requests that the status writer sends to the API server, and how it handles the
responses.
"""

import math
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from structlog.testing import capture_logs

from agent.status_writer import StatusWriter
from headroom.contract.gpunode import Device, PodUse, Source
from tests.agent.scripted import GPUNODE, LEASES, ApiServer
from tests.agent.writing import GROWN_BYTES, Clock, busy, deliver, status, used, vouch, vouched
from tests.waiting import PATIENCE_S, until

NO_PORTS = ("--listen", "127.0.0.1:0", "--local-port", "0")
NEVER_AGAIN = ("--interval", "3600", "--heartbeat", "3600", "--stale-after", "3600")


def test_a_steady_node_writes_its_status_once_and_one_heartbeat_in_thirty_seconds(
    api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    api.create("uid-1")
    for _ in range(12):  # a minute
        deliver(status_writer, clock, status(5))
        clock.at_s += 5
    patches = [path for method, path in api.sent() if method in ("PATCH", "POST")]
    assert patches.count(f"{GPUNODE}/status") == 1
    assert patches.count(f"{LEASES}/n1") == 2


def test_only_the_newest_report_is_delivered_after_failures(
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


@pytest.mark.parametrize("kind", ["report", "heartbeat"])
def test_failed_writes_are_counted_by_kind(
    kind: str, api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    api.create("uid-1")
    path = f"{GPUNODE}/status" if kind == "report" else f"{LEASES}/n1"
    api.reject["PATCH", path] = (503, {})
    deliver(status_writer, clock, status(5))
    assert status_writer.writes[kind, "failed"] == 1
    assert status_writer.writes[kind, "accepted"] == 0
    api.reject.clear()
    clock.at_s += 35
    deliver(status_writer, clock, status(5))
    assert status_writer.writes == {
        ("report", "accepted"): 1,
        ("heartbeat", "accepted"): 1,
        (kind, "failed"): 1,
    }


def test_failed_writes_are_retried_with_growing_intervals(
    api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    api.reject["PATCH", f"{GPUNODE}/status"] = (500, {})
    tries: list[float] = []
    for _ in range(1200):  # Ten minutes, every half second.
        before = len(api.requests)
        deliver(status_writer, clock, status())
        if len(api.requests) > before:
            tries.append(clock.at_s)
        clock.at_s += 0.5
    gaps = [b - a for a, b in pairwise(tries)]
    assert gaps[0] <= 1.0
    assert max(gaps) <= 30.5
    assert min(gaps[6:]) >= 15


def test_a_retry_after_header_is_respected(
    api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    api.create("uid-1")
    api.reject["PATCH", f"{GPUNODE}/status"] = (429, {"Retry-After": "20"})
    assert deliver(status_writer, clock, status()) == 20.0
    clock.at_s += 19
    assert deliver(status_writer, clock, status()) == 1.0
    assert len(api.requests) == 1


def test_no_heartbeat_confirms_a_report_that_was_not_accepted(
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


def test_a_heartbeat_confirms_exactly_the_accepted_status(
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


def test_a_heartbeat_contains_no_version_newer_than_the_start_of_its_sample(
    api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    api.create("uid-1")
    begun_s = clock.at_s
    clock.at_s += 1
    status_writer.deliver(status(5, "t0"), begun_s)
    clock.at_s += 30
    status_writer.deliver(status(5, "t1"), begun_s + 0.5)  # A probe hung during this time.
    assert vouched(api).after == ""
    clock.at_s += 30
    status_writer.deliver(status(5, "t2"), clock.at_s)
    assert vouched(api).after == "102"


def test_a_heartbeat_waits_for_a_report_that_is_held_back(
    api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    api.create("uid-1")
    deliver(status_writer, clock, status(5, "t0"))
    clock.at_s += 29
    # Freed memory is written immediately.
    assert deliver(status_writer, clock, status(4, "t1")) == math.inf
    clock.at_s += 1
    beats = api.version
    assert deliver(status_writer, clock, status(4 + GROWN_BYTES, "t2")) == 4.0
    assert api.version == beats
    clock.at_s += 4
    assert deliver(status_writer, clock, status(4 + GROWN_BYTES, "t3")) == math.inf
    assert vouched(api) == vouch("t3", "uid-1", "t3", "101")


def test_a_heartbeat_does_not_wait_for_sm_activity(
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
        pytest.param(
            {"devices": [Device(uuid="GPU-a", healthy=False)]}, id="a device is unhealthy"
        ),
        pytest.param({"sources": [Source(name="proc", state="absent")]}, id="a source is lost"),
    ],
)
def test_changes_that_others_wait_for_are_written_at_once(
    api: ApiServer, status_writer: StatusWriter, clock: Clock, after: dict[str, Any]
) -> None:
    api.create("uid-1")
    deliver(status_writer, clock, status(5, "t0"))
    clock.at_s += 1
    newest = msgspec.structs.replace(status(after.pop("used_bytes", 5), "t1"), **after)
    assert deliver(status_writer, clock, newest) == math.inf
    assert api.gpunode is not None
    assert api.gpunode["status"]["observedAt"] == "t1"


def test_many_samples_are_written_once_a_second_with_the_first_at_once(
    api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    """Pods that start or end trigger the sampling loop at every change."""
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


def test_a_report_with_a_lost_response_is_sent_again_before_a_heartbeat_confirms_it(
    api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    """The API server may have stored the lost report, but the memory use has changed back."""
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


def test_a_recreated_gpunode_gets_the_whole_report(
    api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    api.create("uid-1")
    deliver(status_writer, clock, status(5))
    api.create("uid-2")
    clock.at_s += 30
    deliver(status_writer, clock, status(5))
    assert used(api) == 5


def test_waiting_for_the_gpunode_is_a_separate_log_event(
    api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    with capture_logs() as logs:
        deliver(status_writer, clock, status())
    assert [log["event"] for log in logs] == ["gpunode_missing"]


def test_an_agent_process_waits_for_its_gpunode_and_then_reports(
    api: ApiServer, environment: dict[str, str], tmp_path: Path
) -> None:
    Path(environment["FAKE_NVML_TABLE"]).write_text("device GPU-a 1000 100 700 A100\n")
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(api.kubeconfig))
    process = subprocess.Popen(
        # The agent must retry before its next regular sample, because the test does not wait that
        # long.
        [sys.executable, "-m", "agent", *NO_PORTS, *NEVER_AGAIN],
        env=environment | {"KUBECONFIG": str(kubeconfig), "PYTHONWARNINGS": "default"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: any(r[0] == "PATCH" for r in api.requests), "it reports")
        api.create("uid-1")  # An extender starts.
        until(lambda: api.lease is not None, "it has a lease")
        assert used(api) == 200
        assert api.lease is not None
        assert api.requests[0][2]["authorization"] == "Bearer t0ken"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=PATIENCE_S) == 0
    finally:
        process.kill()
        _, log = process.communicate()
    assert "gpunode_missing" in log
    assert "Traceback" not in log
