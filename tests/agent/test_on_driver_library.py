"""Runs the agent's process on a real shared library, through the real pynvml and its structs."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.driver import Driver, h100
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow

Report = Callable[..., dict[str, Any]]

MIB = 1 << 20
A100 = "device GPU-a 85899345920 637534208 53687091200 NVIDIA A100-SXM4-80GB\n"
B100 = "device GPU-b 85899345920 637534208 85261811712 NVIDIA A100-SXM4-80GB\n"


def condition(status: dict[str, Any], kind: str) -> tuple[str, str]:
    (found,) = [c for c in status["conditions"] if c["type"] == kind]
    return found["status"], found.get("message", "")


def test_used_memory_is_total_minus_free_minus_reserved(report: Report) -> None:
    status = report(A100, "--replicas", "4", "--sharing", "time-slicing")
    (device,) = status["devices"]
    assert device == {
        "uuid": "GPU-a",
        "index": 0,
        "model": "NVIDIA A100-SXM4-80GB",
        "memory": 85899345920,
        "reserved": 637534208,
        "used": 85899345920 - 53687091200 - 637534208,
        "unattributed": 85899345920
        - 53687091200
        - 637534208,  # This memory is in use, but no process is listed for it.
        "sharing": "time-slicing",
        "resource": "nvidia.com/gpu",
        "replicas": {"free": 4},
        "smActivity": {"ratio": 0.0, "source": "nvml-process"},
        "pciBusId": "00000000:01:00.0",
        "architecture": "hopper",
        "computeMode": "default",
    }
    assert status["driverVersion"] == "580.95.05"
    assert condition(status, "DriverReady") == ("True", "")
    assert condition(status, "Complete") == ("True", "")


def test_without_the_v2_memory_call_reserved_memory_is_zero_and_reported_as_missing(
    report: Report,
) -> None:
    status = report("code nvmlDeviceGetMemoryInfo_v2 13\n" + A100)
    (device,) = status["devices"]
    assert (device["reserved"], device["used"]) == (0, 85899345920 - 53687091200)
    assert "reserve" in condition(status, "Complete")[1]


def test_a_failed_call_is_remembered_and_the_device_still_reported(report: Report) -> None:
    status = report(A100 + "fail nvmlDeviceGetMemoryInfo_v2 4\n")
    assert "no permission for nvmlDeviceGetMemoryInfo" in condition(status, "Complete")[1]
    assert status["devices"][0]["used"] > 0


def test_compute_instances_of_one_gpu_instance_report_its_memory(report: Report) -> None:
    status = report(
        A100
        + "mig MIG-1 1 0 10000 10 4000 NVIDIA A100 MIG 1c.2g.20gb\n"
        + "mig MIG-2 1 1 10000 10 4000 NVIDIA A100 MIG 1c.2g.20gb\n"
        + "mig MIG-3 2 0 20000 10 20000 NVIDIA A100 MIG 3g.40gb\n"
    )
    seen = [
        (d["uuid"], d["kind"], d["parent"], d["gpuInstance"], d["used"]) for d in status["devices"]
    ]
    assert seen == [
        ("MIG-1", "mig", "GPU-a", 1, 5990),
        ("MIG-2", "mig", "GPU-a", 1, 5990),
        ("MIG-3", "mig", "GPU-a", 2, 0),
    ]


def test_a_device_lost_before_the_agent_started_is_reported_without_figures(report: Report) -> None:
    status = report(A100 + "fail all 15\n" + B100)
    assert [d["uuid"] for d in status["devices"]] == ["GPU-b"]
    assert "device 0 does not report its UUID: GPU is lost" in condition(status, "Complete")[1]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        pytest.param(15, "GPU is lost", id="lost"),
        pytest.param(16, "GPU requires restart", id="reset required"),
        pytest.param(999, "Unknown Error", id="unknown"),
        pytest.param(
            777, "an error that only this driver has", id="an error code that pynvml lacks"
        ),
        pytest.param(3, "does not report the memory", id="integrated GPU without memory figures"),
        pytest.param(2, "Invalid Argument", id="permanently stale handle"),
    ],
)
def test_only_the_device_with_failing_memory_is_unhealthy(
    report: Report, code: int, reason: str
) -> None:
    calls = ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo")
    status = report(A100 + "".join(f"fail {call} {code}\n" for call in calls) + B100)
    bad, good = status["devices"]
    assert bad["healthy"] is False
    assert reason in bad["healthReason"]
    assert not {"memory", "reserved", "used"} & set(bad)
    assert "healthy" not in good  # The JSON omits the default value.


def test_contradictory_values_are_reported_and_nothing_is_computed_from_them(
    report: Report,
) -> None:
    (device,) = report("device GPU-a 1000 10 2000 X\n")["devices"]
    assert (device["memory"], device["reserved"]) == (1000, 10)
    assert "used" not in device
    assert device["healthReason"] == "driver reports more free memory than total memory"


def test_a_node_without_a_driver_library_reports_that(
    report: Report, environment: dict[str, str], tmp_path: Path
) -> None:
    environment["LD_LIBRARY_PATH"] = str(tmp_path)
    status = report("")
    assert condition(status, "DriverReady") == (
        "False",
        "NVML Shared Library Not Found (NVML 12)",
    )
    assert "devices" not in status


@contextmanager
def serving(
    environment: dict[str, str], *flags: str
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "agent", "--no-publish"),
            *("--listen", "127.0.0.1:0", "--local-port", "0", "--interval", "1", *flags),
        ],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        started = process.stderr.readline()
        assert '"started"' in started, started
        port = started.split('"local_port": ')[1].split(",")[0]
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.communicate()


def arenas(pid: int) -> int:
    """Return the number of threads that have their own heap, because glibc reserves 64 MiB for each
    heap.
    """
    reserved = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        place, permissions, *_ = line.split()
        first, last = (int(each, 16) for each in place.split("-"))
        reserved += permissions == "---p" and last - first > 32 * MIB
    return reserved


def metric(http: httpx.Client, name: str) -> list[tuple[dict[str, str], float]]:
    families = text_string_to_metric_families(http.get("/metrics").text)
    return [(s.labels, s.value) for f in families for s in f.samples if s.name == name]


def test_an_agent_without_kubernetes_serves_metrics_notices_a_lost_device_and_ends_on_sigterm(
    environment: dict[str, str], tmp_path: Path
) -> None:
    table = Path(environment["FAKE_NVML_TABLE"])
    table.write_text(A100 + B100)
    with (
        serving(environment) as (url, process),
        httpx.Client(base_url=url, trust_env=False) as http,
    ):
        until(lambda: http.get("/v1/report").status_code == 200, "a report")
        assert http.get("/healthz").status_code == 200
        labels = {
            "gpu": "0",
            "UUID": "GPU-a",
            "Hostname": "n1",
            "model_name": "NVIDIA A100-SXM4-80GB",
            "GPU_I_ID": "",
            "GPU_I_PROFILE": "",
        }
        assert metric(http, "headroom_device_used_bytes")[0] == (labels, 31574720512)

        new = tmp_path / "new"
        new.write_text(A100 + "fail all 15\n" + B100)
        os.replace(new, table)

        def lost() -> bool:
            first = http.get("/v1/report").json()["devices"][0]
            return first["uuid"] == "GPU-a" and "lost" in first.get("healthReason", "")

        until(lost, "the loss is reported")

        def healthy() -> list[float]:
            return [value for _, value in metric(http, "headroom_device_healthy")]

        until(lambda: healthy() == [0, 1], "metrics are rendered again")
        assert [labels["UUID"] for labels, _ in metric(http, "headroom_device_used_bytes")] == [
            "GPU-b"
        ]
        assert http.get("/nothing").status_code == 404
        assert arenas(process.pid) == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=PATIENCE_S) == 0


@contextmanager
def printing(environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """An agent that prints a status every second."""
    process = subprocess.Popen(
        [sys.executable, "-m", "agent", "--json", "--interval", "1"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def printed(process: subprocess.Popen[str], right: Callable[[dict[str, Any]], bool]) -> Any:
    """Return the first status that ``right`` accepts. If there is none, the test waits until the
    agent ends.
    """
    assert process.stdout is not None
    for line in process.stdout:
        if right(status := json.loads(line)):
            return status
    raise AssertionError("it ended")


def test_after_a_driver_replacement_the_process_restarts_itself(
    environment: dict[str, str],
) -> None:
    driver = Driver(Path(environment["FAKE_NVML_TABLE"]), [h100("GPU-a")])
    with printing(environment) as process:
        printed(process, lambda status: status["driverVersion"] == "580.95.05")
        driver.say("", "driver 615.10.02")
        shown = printed(process, lambda status: condition(status, "DriverReady")[0] == "False")
        assert condition(shown, "DriverReady")[1] == (
            "driver was unloaded or replaced: RM has detected an NVML/RM version mismatch. "
            "(NVML 18); the agent restarts itself"
        )
        (device,) = shown["devices"]
        assert (device["healthy"], "used" in device) == (False, False)
        after = printed(process, lambda status: status["driverVersion"] == "615.10.02")
        assert condition(after, "DriverReady") == ("True", "")
        # The agent has not restarted, because its output came through the same pipe.
        assert process.poll() is None


def test_a_driver_that_is_unloaded_for_a_while_is_waited_for(environment: dict[str, str]) -> None:
    driver = Driver(Path(environment["FAKE_NVML_TABLE"]), [h100("GPU-a")])
    with printing(environment) as process:
        printed(process, lambda status: bool(status.get("devices")))
        driver.say("", "driver none")
        # The first message comes from the process that had the old driver, and the second from the
        # new process, which has no driver.
        printed(process, lambda status: "unloaded" in condition(status, "DriverReady")[1])
        printed(process, lambda status: "Not Loaded" in condition(status, "DriverReady")[1])
        driver.say("", "driver 615.10.02")
        printed(process, lambda status: status.get("driverVersion") == "615.10.02")


def test_the_process_exits_for_a_new_container_if_a_restart_did_not_help(
    environment: dict[str, str],
) -> None:
    driver = Driver(Path(environment["FAKE_NVML_TABLE"]), [h100("GPU-a")])
    driver.say("", "driver 615.10.02", "library 580.95.05")
    environment["HEADROOM_AGENT_RESTARTS"] = "5 0"
    done = subprocess.run(
        [sys.executable, "-m", "agent", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 3
    assert "did not help" in done.stderr
    assert "Traceback" not in done.stderr
    assert "replaced" in condition(json.loads(done.stdout), "DriverReady")[1]


def test_a_hanging_driver_call_blocks_neither_reports_nor_shutdown(
    environment: dict[str, str],
) -> None:
    driver = Driver(Path(environment["FAKE_NVML_TABLE"]), [h100("GPU-a"), h100("GPU-b")])
    driver.say("GPU-a", "stuck nvmlDeviceGetMemoryInfo_v2")
    with serving(environment, "--driver-timeout", "0.5") as (url, process):
        with httpx.Client(base_url=url, trust_env=False) as http:
            until(lambda: http.get("/v1/report").status_code == 200, "a report")
            first = http.get("/v1/report").json()
            assert [d["uuid"] for d in first["devices"]] == ["GPU-b"]
            what = "device 0 does not report its UUID: driver call nvmlDeviceGetMemoryInfo_v2 hangs"
            assert condition(first, "Complete") == ("False", f"nvml: {what}")

            def later() -> bool:
                return bool(http.get("/v1/report").json()["observedAt"] > first["observedAt"])

            until(later, "a later report")
            assert http.get("/healthz").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=PATIENCE_S) == 0
