"""Tests the measurement of use with the real pynvml and ctypes on the fake driver library."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.agent.conftest import Survey
from tests.agent.exporter import StandIn
from tests.driver import Gpu, Instance, a100, b200, h100, t4

Start = Callable[..., Survey]


def device(status: dict[str, Any], uuid: str) -> dict[str, Any]:
    (found,) = [d for d in status["devices"] if d["uuid"] == uuid]
    return found


def measured(uuid: str) -> Callable[[dict[str, Any]], bool]:
    return lambda status: "smActivity" in device(status, uuid)


@pytest.mark.parametrize(
    ("gpu", "architecture"),
    [(t4("GPU-a"), "turing"), (a100("GPU-a"), "ampere"), (h100("GPU-a"), "hopper")],
    ids=["T4", "A100", "H100"],
)
def test_a_device_is_read_with_all_its_fields(survey: Start, gpu: Gpu, architecture: str) -> None:
    agent = survey([gpu])
    agent.driver.say("GPU-a", "mode 3", "util 37")
    found = device(agent.step(), "GPU-a")
    assert (found["model"], found["architecture"]) == (gpu.model, architecture)
    assert found["memory"] == gpu.memory_bytes
    assert found["pciBusId"] == "00000000:01:00.0"
    assert found["computeMode"] == "exclusive-process"
    assert found["utilization"] == 0.37
    assert found.get("healthy", True)


def test_gpus_that_nvlink_connects_are_in_one_group(survey: Start) -> None:
    agent = survey([h100("GPU-a"), h100("GPU-b"), h100("GPU-c")])
    agent.driver.say("GPU-a", "nvlink 00000000:03:00.0", "nvlink 00000000:03:00.0")
    agent.driver.say("GPU-c", "nvlink 00000000:01:00.0")
    status = agent.step()
    found = {each["uuid"]: each.get("nvlinkGroup") for each in status["devices"]}
    assert found == {"GPU-a": 0, "GPU-b": None, "GPU-c": 0}


def sm_activity(status: dict[str, Any], uuid: str) -> tuple[float, str]:
    found = device(status, uuid)["smActivity"]
    return found["ratio"], found["source"]


def test_cuda_and_driver_versions_are_reported(survey: Start) -> None:
    agent = survey([h100("GPU-a")])
    agent.driver.say("", "driver 615.10.02", "cuda 13040")
    status = agent.step()
    assert (status["driverVersion"], status["cudaVersion"]) == ("615.10.02", "13.4")


def test_hopper_reports_sm_activity_by_gpm_from_the_second_sample_on(survey: Start) -> None:
    agent = survey([b200("GPU-a")])
    agent.driver.say("GPU-a", "sm 62 31", "util 100", f"busy 7 90 {2**60}")
    # The agent uses process samples until GPM has two samples.
    assert sm_activity(agent.step(), "GPU-a") == (0.9, "nvml-process")
    time.sleep(0.1)
    status = agent.step()
    assert sm_activity(status, "GPU-a") == (0.62, "gpm")
    found = device(status, "GPU-a")
    assert found["smOccupancy"] == 0.31
    assert found["utilization"] == 1.0
    # The last values stay, because an immediate second read gives GPM no new samples to compare.
    assert sm_activity(agent.step(), "GPU-a") == (0.62, "gpm")


def test_older_devices_report_the_sum_over_processes_of_at_most_one(survey: Start) -> None:
    agent = survey([a100("GPU-a")])

    def when(*busy: str) -> dict[str, Any]:
        """Return the agent's status for samples that the driver takes now. The agent requests
        samples of the last second.
        """
        for _ in range(20):  # On a slow machine, the second can be over before the request.
            now_us = time.time_ns() // 1000
            agent.driver.say("GPU-a", *(f"busy {each} {now_us}" for each in busy))
            status = agent.step()
            if sm_activity(status, "GPU-a") != (0.0, "nvml-process"):
                break
        return status

    status = when("7 20", "8 15")
    assert sm_activity(status, "GPU-a") == (0.35, "nvml-process")
    assert "smOccupancy" not in device(status, "GPU-a")
    # The driver returns NOT_FOUND if there is no newer sample, which means that the device is idle.
    assert sm_activity(agent.step(), "GPU-a") == (0.0, "nvml-process")
    assert sm_activity(when("7 80", "8 70"), "GPU-a") == (1.0, "nvml-process")


def test_utilisation_is_never_reported_as_sm_activity(survey: Start) -> None:
    agent = survey([a100("GPU-a")])
    agent.driver.say("GPU-a", "util 100", "fail nvmlDeviceGetProcessUtilization 3")
    found = device(agent.step(), "GPU-a")
    assert found["utilization"] == 1.0
    assert "smActivity" not in found


def test_each_gpu_instance_has_its_own_activity(survey: Start) -> None:
    instances = (
        Instance("MIG-1", 1, 0),
        Instance("MIG-2", 1, 1),  # This device shares the GPU instance of MIG-1.
        Instance("MIG-3", 2, 0),
    )
    agent = survey([Gpu("GPU-a", instances=instances)])
    agent.driver.say("MIG-1", "sm 40 10")
    agent.driver.say("MIG-3", "sm 80 20")
    agent.step()
    time.sleep(0.1)
    status = agent.step()
    ratios = {d["uuid"]: d["smActivity"]["ratio"] for d in status["devices"]}
    assert ratios == {"MIG-1": 0.4, "MIG-2": 0.4, "MIG-3": 0.8}
    assert device(status, "MIG-1")["pciBusId"] == "00000000:01:00.0"
    assert agent.ask("vitals")["samples"] == 4
    # After a change of the layout, the samples of the removed instance are freed.
    agent.driver.gpus[0] = Gpu("GPU-a", instances=instances[:2])
    agent.driver.say("MIG-3")
    agent.step()
    assert agent.ask("vitals")["samples"] == 2


def test_dcgm_gives_the_activity_of_an_instance_and_nvml_that_of_a_whole_gpu(
    survey: Start,
) -> None:
    with StandIn().serving() as exporter:
        exporter.text = (
            'DCGM_FI_PROF_GR_ENGINE_ACTIVE{UUID="GPU-a"} 0.9\n'
            'DCGM_FI_PROF_GR_ENGINE_ACTIVE{UUID="GPU-b",GPU_I_ID="1"} 0.7\n'
        )
        gpus = [h100("GPU-a"), Gpu("GPU-b", instances=(Instance("MIG-1", 1), Instance("MIG-2", 2)))]
        agent = survey(gpus, "--dcgm-url", exporter.url)
        agent.driver.say("GPU-a", "util 20")
        status = agent.step()
    shown = {d["uuid"]: d.get("utilization") for d in status["devices"]}
    assert shown == {"GPU-a": 0.2, "MIG-1": 0.7, "MIG-2": None}
    assert not any(d.get("smActivity", {}).get("source") == "dcgm" for d in status["devices"])


@pytest.mark.parametrize("code", [999, 20, 4, 2], ids=lambda code: f"code {code}")
def test_a_failed_counter_leaves_out_only_its_value_and_not_the_device(
    survey: Start, code: int
) -> None:
    agent = survey([h100("GPU-a")])
    agent.driver.say("GPU-a", "sm 50 50", f"fail nvmlGpmSampleGet {code}", "util 10")
    agent.step()
    found = device(agent.step(), "GPU-a")
    assert found["used"] == 0
    assert found.get("healthy", True)
    assert found["smActivity"]["source"] == "nvml-process"


def test_values_that_are_not_a_share_are_skipped(survey: Start) -> None:
    agent = survey([h100("GPU-a")])
    agent.driver.say("GPU-a", "sm 4000 -3", "util 250", f"busy 7 101010 {2**60}")
    agent.step()
    time.sleep(0.1)
    status = agent.step()
    assert sm_activity(status, "GPU-a") == (0.0, "nvml-process")
    found = device(status, "GPU-a")
    assert "smOccupancy" not in found
    assert "utilization" not in found


def test_resources_do_not_grow_over_two_thousand_samples(survey: Start) -> None:
    instances = (Instance("MIG-1", 1), Instance("MIG-2", 2))
    agent = survey([h100("GPU-a"), Gpu("GPU-b", instances=instances)])
    agent.driver.say("GPU-a", "sm 50 50", f"busy 7 90 {2**60}")
    agent.driver.say("MIG-1", "sm 10 10")
    agent.ask("steps 100")
    before = agent.ask("vitals")
    agent.ask("steps 1000")
    agent.driver.say(
        "GPU-a", "fail nvmlGpmSampleGet 999"
    )  # The measurement restarts with every sample.
    agent.driver.say("MIG-1", "fail nvmlDeviceGetMemoryInfo_v2 15")
    agent.ask("steps 1000")
    after = agent.ask("vitals")
    assert (after["fds"], after["threads"]) == (before["fds"], before["threads"])
    assert after["samples"] <= before["samples"]
    assert after["kib"] - before["kib"] < 4096
