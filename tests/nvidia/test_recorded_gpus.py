"""Compares the answers that real GPUs gave to ``make gpu`` with the stand-in and with the agent's
decoding.
"""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from agent.probes.nvml import _process_list
from benchmarks.gpu.smi import parse
from headroom.planner.contention import Contentions
from headroom.planner.placers import Spot
from headroom.planner.workload import Life
from tests.benchmarks.gpu.stage import Stage
from tests.controlplane import ROOT
from tests.processes import starts_processes

MIB = 1 << 20
FOLDERS = sorted((ROOT / "tests/recorded/gpu").iterdir())
MODELS = {"580.159.04-h100-80gb-hbm3": (81559, 480), "580.159.04-h200": (143771, 616)}

recorded = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def read(folder: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text())
    return content


def test_an_h100_and_an_h200_are_recorded() -> None:
    assert [folder.name for folder in FOLDERS] == [*MODELS]


@recorded
def test_each_report_has_no_difference(folder: Path) -> None:
    lines = read(folder, "report.json")["lines"]
    verdicts = {line["name"]: line["verdict"] for line in lines}
    assert len(verdicts) == 19
    assert {name for name, verdict in verdicts.items() if verdict != "ok"} == {"memory-limits"}


@recorded
def test_the_agent_reported_the_values_of_nvidia_smi(folder: Path) -> None:
    (gpu,) = parse((folder / "smi.xml").read_text()).gpus
    (device,) = read(folder, "agent.json")["devices"]
    assert (gpu.memory.total_mib, gpu.memory.reserved_mib) == MODELS[folder.name]
    assert device["memory"] == gpu.memory.total_mib * MIB
    # nvidia-smi rounds up to a whole number of MiB.
    assert -(-device["reserved"] // MIB) == gpu.memory.reserved_mib
    assert (device["uuid"], device["model"]) == (gpu.uuid, gpu.model)


@pytest.fixture
@starts_processes
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


#: Calls that the agent makes since the recordings were made. No answers of a real GPU are recorded
#: yet.
NOT_RECORDED = {"nvmlDeviceGetNvLinkState"}


@recorded
def test_the_stand_in_answers_every_call_with_the_same_codes(folder: Path, stage: Stage) -> None:
    stage.driver.say("", f"driver {folder.name.partition('-')[0]}")
    assert stage.verdicts("--looks", "5", "--only", "latency")["latency"][0] == "ok"
    answers = read(stage.out, "codes.json")
    expected = read(folder, "codes.json")
    assert answers.keys() - expected.keys() == NOT_RECORDED
    assert {name: {*answers[name]} for name in expected} == {
        name: {*codes} for name, codes in expected.items()
    }


@recorded
@pytest.mark.parametrize("name", ["lists-three-processes.json", "lists-mps.json"])
def test_the_entries_of_the_driver_are_read_as_24_bytes_a_process(folder: Path, name: str) -> None:
    found = 0
    for raw in read(folder, name)["raw"].values():
        written, count = bytes.fromhex(raw["bytes"]), raw["count"]
        expected = [struct.unpack_from("<I4xQ", written, 24 * entry) for entry in range(count)]
        # The array was longer, but the rest, which is not recorded, has the fill pattern.
        assert _process_list(written + b"\xa5" * 32, count, count + 1) == expected
        found += count
    assert found >= 6


@recorded
def test_mps_limits_the_memory_of_a_client_including_its_context(folder: Path) -> None:
    limits = read(folder, "mps-limit.json")
    listed = {case: found["listed"] / found["limit"] for case, found in limits.items()}
    assert {case: limit["limit"] >> 30 for case, limit in limits.items()} == {
        "no variable": 4,
        "2 GiB": 2,
        "8 GiB": 4,  # A client can lower the limit but cannot raise it.
    }
    assert all(0.9 < ratio <= 1 for ratio in listed.values()), listed


@recorded
def test_a_plan_computes_the_measured_speed_of_two_time_slicing_processes(
    folder: Path,
) -> None:
    measured = read(folder, "contention.json")
    for pair in measured["time-slicing"]["pairs"]:
        first, second = pair["loads"]
        if first == second == "half of the time":
            # Kernels of processes that start together collide each time, so a mean over time would
            # hide this.
            assert all(0.6 < kept < 0.7 for kept in pair["kept"])
            continue
        contentions = Contentions([1.0])
        for number, load in enumerate(pair["loads"]):
            activity = measured["activity"][load]
            contentions.start(number, life(load, **activity), Spot(0, (0,)), 0.0)
        for number in range(2):
            contentions.end(number, Spot(0, (0,)), 100.0)
        mean_kept = sum(pair["kept"]) / 2
        assert 1 - contentions.result().lost_ratio == pytest.approx(mean_kept, abs=0.08), pair


@recorded
def test_the_observations_in_a_cluster_match_the_docs(folder: Path) -> None:
    total_mib, _ = MODELS[folder.name]
    checks, by_mps = read(folder, "cluster.json"), read(folder, "cluster-mps.json")
    assert all(check["ok"] for check in (*checks.values(), *by_mps.values()))
    both, later = "memory of first and second", "memory of first and third"
    for check in (checks[both], checks[later], by_mps[both]):
        contexts = {check["used"][pod] - n for pod, n in check["allocated"].items()}
        assert all(515 * MIB < each < 519 * MIB for each in contexts), contexts
        sum_bytes = sum(check["used"].values()) + check["unattributed"]
        assert abs(check["device_used"] - sum_bytes) < 4 * MIB
    rejection = checks["memory beyond a request counts"]
    assert sum(rejection["requests_gib"]) <= rejection["free_gib"]
    assert "insufficient GPU memory" in rejection["message"]
    assert "has reserved 8.0 GiB" in checks["a pod that leaks is evicted"]["message"]
    second, first = checks["engines start one after the other"]["free_bytes_at_start"]
    request_gib = checks["engines start one after the other"]["request_gib"]
    assert first - second > (request_gib - 2) << 30
    above = by_mps["a request above the limit of MPS"]
    assert above["limit_mib"] == total_mib // 4
    assert "above the MPS limit" in above["message"]


def life(load: str, sm_activity: float, utilization: float) -> Life:
    return Life(load, load, 0.0, 100.0, 1, None, None, sm_activity, utilization)


@recorded
def test_processes_on_half_of_the_sms_slow_each_other_down_unless_they_share_by_mps(
    folder: Path,
) -> None:
    kept = {
        name: [pair["kept"] for pair in read(folder, "contention.json")[name]["pairs"]]
        for name in ("time-slicing", "MPS")
    }
    assert all(each < 0.5 for each in kept["time-slicing"][1])
    assert all(each > 0.99 for each in kept["MPS"][1])
