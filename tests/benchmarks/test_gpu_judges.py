"""The differences of ``make gpu``, line by line, from figures alone."""

from typing import Any

import pytest

from benchmarks.gpu.checks.activity import judge_activity
from benchmarks.gpu.checks.cost import judge_cost
from benchmarks.gpu.checks.driver import judge_fields, judge_latency
from benchmarks.gpu.checks.fields import compare
from benchmarks.gpu.checks.limits import judge_limits
from benchmarks.gpu.checks.mps import judge_mps
from benchmarks.gpu.checks.processes import entry_bytes, judge_capabilities, judge_lists
from benchmarks.gpu.fixtures import Fixtures
from benchmarks.gpu.lines import quantile
from benchmarks.gpu.smi import dmon, parse

GIB, MIB = 1 << 30, 1 << 20
UUID = "GPU-9b07c1d2-3e4f-5a6b-7c8d-9e0f1a2b3c4d"

MIG_XML = f"""<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
 <driver_version>580.95.05</driver_version>
 <gpu id="00000000:01:00.0">
  <product_name>NVIDIA H100 80GB HBM3</product_name>
  <uuid>{UUID}</uuid>
  <minor_number>N/A</minor_number>
  <mig_devices>
   <mig_device>
    <gpu_instance_id>3</gpu_instance_id>
    <fb_memory_usage>
     <total>9856 MiB</total><reserved>16 MiB</reserved><used>40 MiB</used>
    </fb_memory_usage>
   </mig_device>
  </mig_devices>
  <fb_memory_usage>
   <total>81559 MiB</total><reserved>N/A</reserved><used>0 MiB</used>
  </fb_memory_usage>
  <processes>
   <process_info><pid>7</pid><type>M+C</type><used_memory>N/A</used_memory></process_info>
  </processes>
 </gpu>
</nvidia_smi_log>
"""


def test_the_xml_is_read_with_mig_devices_and_without_what_is_not_available() -> None:
    (gpu,) = parse(MIG_XML).gpus
    assert (gpu.uuid, gpu.minor, gpu.memory.reserved_mib) == (UUID, None, None)
    assert gpu.instances[3].total_mib == 9856
    assert [(p.pid, p.kind, p.used_mib) for p in gpu.processes] == [(7, "M+C", None)]


@pytest.mark.parametrize(
    ("used_mib", "differences"),
    [(40, []), (50, ["device 0: used 50.0 MiB, nvidia-smi 40 MiB"])],
)
def test_a_mig_device_is_compared_with_its_instance(used_mib: int, differences: list[str]) -> None:
    device = {
        "uuid": "MIG-1",
        "parent": UUID,
        "kind": "mig",
        "gpuInstance": 3,
        "index": 0,
        "memory": 9856 * MIB,
        "reserved": 16 * MIB,
        "used": used_mib * MIB,
    }
    assert compare([device], [device], parse(MIG_XML)) == differences


def test_a_figure_that_changes_between_two_reads_is_no_difference() -> None:
    before = {"uuid": UUID, "index": 0, "memory": 81559 * MIB, "reserved": 0, "used": 0}
    after = before | {"used": 900 * MIB}
    smi = parse(MIG_XML.replace("<used>0 MiB</used>", "<used>512 MiB</used>"))
    assert compare([before], [after], smi) == []
    assert compare([before], [before], smi) == ["device 0: used 0.0 MiB, nvidia-smi 512 MiB"]


def test_a_device_that_only_one_of_both_shows_differs() -> None:
    other = {"uuid": "GPU-other", "index": 0, "memory": 1, "reserved": 0, "used": 0}
    assert compare([other], [other], parse(MIG_XML)) == [
        "device 0: nvidia-smi does not show its UUID",
        "nvidia-smi shows GPU 0, the agent does not",
    ]


def test_dmon_is_read_by_the_names_in_its_first_line() -> None:
    text = (
        "# gpu     sm    mem smutil\n# Idx      %      %    GPM\n    0     99      -   12.5\n"
        "# gpu     sm    mem smutil\n    0     98      1   13\n"
    )
    assert dmon(text) == [
        {"gpu": 0, "sm": 99, "smutil": 12.5},
        {"gpu": 0, "sm": 98, "mem": 1, "smutil": 13},
    ]


@pytest.mark.parametrize(("size", "found"), [(24, 24), (32, 32), (40, None)])
def test_the_size_of_an_entry_follows_from_the_position_of_the_pids(
    size: int, found: int | None
) -> None:
    pids = (4001, 4002, 4003)
    raw = b"".join(pid.to_bytes(4, "little") + b"\xa5" * (size - 4) for pid in pids)
    assert entry_bytes(raw + b"\xa5" * 64, len(pids), set(pids)) == found


@pytest.mark.parametrize(
    ("found", "theirs", "grown", "difference"),
    [
        pytest.param({1: 2 * GIB}, {1: 2048}, 2 * GIB, "", id="as allocated, with a context"),
        pytest.param({1: 4 * GIB}, None, 4 * GIB, "is listed with 4.0 GiB", id="far too much"),
        pytest.param({1: None}, None, GIB, "gives no bytes", id="no bytes"),
        pytest.param({2: GIB}, None, GIB, "does not list the process", id="another process"),
        pytest.param(
            {1: GIB}, {1: 1030}, GIB, "nvidia-smi shows 1030 MiB", id="nvidia-smi differs"
        ),
        pytest.param({1: GIB}, None, 2 * GIB, "1024.0 MiB of the growth", id="unattributed use"),
        pytest.param({1: GIB}, None, None, "", id="the growth is that of others"),
    ],
)
def test_processes_are_judged(
    found: dict[int, int | None],
    theirs: dict[int, int | None] | None,
    grown: int | None,
    difference: str,
) -> None:
    differences = judge_lists({1: GIB}, found, theirs, grown)
    assert len(differences) == bool(difference)
    assert difference in "".join(differences)


def limits(**changes: Any) -> dict[str, Any]:
    read = {"used": GIB + 300 * MIB, "soft": None, "hard": None}
    return {
        "before": read,
        "set_code": 0,
        "limited": read | {"hard": 3 * GIB},
        "beyond": "CUDA_ERROR_OUT_OF_MEMORY",
        "ended": read,
    } | changes


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({}, ""),
        ({"before": None}, "the driver reads no limits of a cgroup"),
        ({"before": {"used": 0}}, "the count of the cgroup is 0.0 GiB"),
        ({"set_code": 4}, "a limit cannot be set: code 4"),
        ({"limited": {"hard": None}}, "the agent does not read the limit that was set"),
        ({"beyond": ""}, "an allocation beyond the hard limit succeeds"),
    ],
)
def test_memory_limits_are_judged(changes: dict[str, Any], difference: str) -> None:
    assert judge_limits(limits(**changes)) == ([difference] if difference else [])


@pytest.mark.parametrize(
    ("listed", "total", "differences"),
    [
        ([GIB, 2 * GIB], 3 * GIB, []),
        ([GIB, GIB], 2 * GIB, ["the client with 2.0 GiB is listed with 1.0 GiB"]),
        ([GIB, 2 * GIB], 6 * GIB, ["the agent counts 3072.0 MiB twice"]),
    ],
)
def test_mps_is_judged(listed: list[int], total: int, differences: list[str]) -> None:
    figures = {"clients": [GIB, 2 * GIB], "listed": listed, "sum": total, "used": 3 * GIB}
    assert judge_mps(figures) == differences


def phase(agent: float, source: str = "gpm", sm: float = 1.0, gpm: float | None = None) -> Any:
    return {"agent": agent, "source": source, "dmon sm": sm, "dmon gpm": gpm}


@pytest.mark.parametrize(
    ("name", "found", "difference"),
    [
        ("idle", phase(0.01, sm=0, gpm=0), ""),
        ("idle", phase(0.1, sm=0, gpm=0), "idle: the agent reports 10%"),
        ("full", phase(0.97, gpm=0.99), ""),
        ("full", phase(0.5, gpm=0.55), "full: the agent reports 50%"),
        ("full", phase(0.95, gpm=0.4), "full: 95% by the agent, 40% by dmon"),
        ("one block", phase(0.01, gpm=0.01), ""),
        ("one block", phase(0.9, gpm=0.9), "one block: the agent reports 90%"),
        ("one block", phase(1.0, "nvml-process", gpm=0.01), ""),  # SM time of processes
    ],
)
def test_sm_activity_is_judged(name: str, found: Any, difference: str) -> None:
    differences = judge_activity({name: found})
    assert len(differences) == bool(difference)
    assert difference in "".join(differences)


def vitals(**changes: float) -> dict[str, float]:
    return {"peak_mib": 60, "threads": 20, "fds": 12} | changes


@pytest.mark.parametrize(
    ("changes", "differences"),
    [
        ({}, []),
        ({"after": vitals(peak_mib=81)}, ["81.0 MiB resident, limit 80"]),
        ({"core_ratio": 0.02}, ["2.00% of a core, limit 1%"]),
        ({"core_ratio": 0.02, "window_s": 3.0}, []),  # too short to judge
        ({"after": vitals(fds=14)}, ["fds grow from 12 to 14"]),
        ({"exit status": -9}, ["after SIGTERM it ends with status -9"]),
    ],
)
def test_cost_is_judged(changes: dict[str, Any], differences: list[str]) -> None:
    figures = {"before": vitals(), "after": vitals(), "core_ratio": 0.005, "window_s": 108.0}
    assert judge_cost(figures | {"exit status": 0} | changes) == differences


def answer(code: int, **fields: int) -> dict[str, Any]:
    return {"code": code, "fields": fields}


@pytest.mark.parametrize(
    ("unknown", "differences"),
    [
        (answer(0, id=3), []),
        (answer(2), []),
        (answer(999), ["unknown: the agent takes code 999 for device fault"]),
        (answer(0, id=0), ["unknown: the driver gives a value for a field that does not exist"]),
    ],
)
def test_answers_to_unknown_fields_are_judged(
    unknown: dict[str, Any], differences: list[str]
) -> None:
    assert judge_fields({"unknown": unknown}) == differences


def test_latency_is_judged_by_call_and_by_sample() -> None:
    fast = {"p99_ms": 3.0, "max_ms": 4.0}
    assert judge_latency(fast, {"nvmlDeviceGetName": fast}, 10.0) == []
    slow = {"p99_ms": 600.0, "max_ms": 12_000.0}
    assert judge_latency(slow, {"nvmlDeviceGetName": slow}, 10.0) == [
        "nvmlDeviceGetName took up to 12000 ms, over the deadline of 10 s",
        "a look takes more than 0.5 s",
    ]


def test_fewer_capabilities_must_show_the_same_devices() -> None:
    device = {"index": 0, "uuid": UUID, "minor": 0, "total": GIB, "reserved": MIB, "fault": ""}
    full = {"devices": [device], "calls": {"nvmlDeviceGetName": {"0": []}}}
    assert judge_capabilities(full, full) == []
    assert judge_capabilities(full, full | {"devices": []}) == ["devices seen: 0 of 1"]
    bound = {
        "devices": [device | {"minor": None}],
        "calls": {"nvmlDeviceGetMinorNumber": {"4": []}},
    }
    assert judge_capabilities(full, bound) == [
        "no permission for nvmlDeviceGetMinorNumber",
        "device 0: minor is None, with all capabilities 0",
    ]


def test_a_uuid_gets_the_same_number_in_every_text() -> None:
    fixtures = Fixtures()
    other = UUID.replace("9b07", "0000")
    text = fixtures.anonymous(f"{UUID} {other} {UUID}")
    first, second, again = text.split()
    assert first == again == "GPU-00000000-0000-0000-0000-000000000000"
    assert second == "GPU-00000000-0000-0000-0000-000000000001"
    assert fixtures.anonymous(UUID) == first


def test_a_quantile_is_one_of_the_values() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [quantile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert quantile([7.0], 0.5) == 7.0
