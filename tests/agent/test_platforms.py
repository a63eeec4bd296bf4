"""Drivers that do not report everything: vGPU guests, WSL, Jetson, Grace.

From the driver's library through the agent's report to what a user reads. What is absent is a
reason or is reported, and nothing is ever derived from the host's figures.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from contract.gpunode import GPUNodeStatus
from contract.reasons import Reason
from extender.placement.device_accounting import DeviceTerms
from extender.placement.explain import explain
from extender.placement.explanation_text import explanation_lines
from extender.placement.policy import Weights
from extender.placement.snapshot import NodeTerms
from tests.agent.test_on_driver_library import A100
from tests.builders import FRESH_S, GIB, judged, reason_for, reservation, weighed_anew

Report = Callable[..., dict[str, Any]]

NO_PROCESSES = "".join(
    f"code nvmlDeviceGetComputeRunningProcesses_v{version} 3\n" for version in (2, 3)
)
#: A guest sees a smaller GPU: its profile's frame buffer.
VGPU = NO_PROCESSES + f"device GPU-a {20 * GIB} {GIB} {9 * GIB} GRID A100D-20C\n"
#: No reserve either.
WSL = NO_PROCESSES + f"device GPU-a {24 * GIB} 0 {14 * GIB} NVIDIA GeForce RTX 4090\n"
#: 96 GB of its own beside 480 GB of the host; the system's part of it is attributed to no process.
GRACE = f"device GPU-a {95 * GIB} {GIB} {84 * GIB} NVIDIA GH200 480GB\n"
TELLS_NOTHING = "code nvmlDeviceGetMemoryInfo_v2 3\ncode nvmlDeviceGetMemoryInfo 3\n" + A100
#: GB10 answers, with zeros.
TELLS_ZERO = "device GPU-a 0 0 0 NVIDIA GB10\n"


def weighed(report: Report, table: str, **how: Any) -> tuple[GPUNodeStatus, DeviceTerms]:
    flags = ("--replicas", "4", "--sharing", "time-slicing")
    status = msgspec.convert(report(table, *flags), GPUNodeStatus)
    (terms,) = weighed_anew(status, how.pop("reservations", {}), **how)
    return status, terms


def read(terms: DeviceTerms, vram: str) -> list[str]:
    """The explanation of a node with this device."""
    verdicts = judged(vram, NodeTerms("n", None, FRESH_S, (terms,)))[1]
    return explanation_lines(explain(verdicts, Weights()).nearest[0])


@pytest.mark.parametrize(
    ("table", "why"),
    [
        pytest.param(
            TELLS_NOTHING,
            "driver does not report the memory of this device",
            id="Jetson: not supported",
        ),
        pytest.param(
            TELLS_ZERO,
            "driver reports an impossible amount of memory",
            id="DGX Spark: nothing of it",
        ),
    ],
)
def test_absent_memory_is_a_reason_and_never_the_hosts(
    report: Report, table: str, why: str
) -> None:
    status, terms = weighed(report, table)
    (device,) = status.devices
    assert device.memory_bytes <= 0
    assert not device.healthy
    assert terms.allocatable_bytes == 0
    node = NodeTerms("n", None, FRESH_S, (terms,))
    for vram in ("1", None):
        assert reason_for(vram, node) is Reason.MEMORY_UNKNOWN
    assert read(terms, "1Gi") == [f"n: {Reason.MEMORY_UNKNOWN.sentence}", f"  GPU-a: {why}"]


@pytest.mark.parametrize(
    ("table", "allocatable_gib", "used_gib"),
    [pytest.param(VGPU, 19, 10, id="a vGPU guest"), pytest.param(WSL, 24, 10, id="WSL")],
)
def test_without_a_process_list_all_use_above_reservations_is_charged_and_reported(
    report: Report, table: str, allocatable_gib: int, used_gib: int
) -> None:
    status, terms = weighed(report, table)
    assert terms.allocatable_bytes == allocatable_gib * GIB
    assert terms.unattributed_bytes == used_gib * GIB
    assert not terms.attributed
    (nvml,) = [source for source in status.sources if source.name == "nvml"]
    assert (nvml.state, "lists no processes" in nvml.message) == ("degraded", True)
    left_gib = allocatable_gib - used_gib
    assert reason_for(f"{left_gib}Gi", NodeTerms("n", None, FRESH_S, (terms,))) is None
    shown = read(terms, f"{left_gib + 1}Gi")
    assert shown[0] == f"n: {Reason.MEMORY_ON_ANY.sentence}"
    assert "cannot attribute use to pods" in shown[2]
    # It is unknown whether a pod that is gone from the lists has freed its memory.
    assert not status.shows_every_pod


def test_unified_memory_counts_the_gpus_own_and_what_the_system_keeps_in_it(
    report: Report,
) -> None:
    status, terms = weighed(report, GRACE)
    assert status.devices[0].memory_bytes == 95 * GIB
    assert terms.allocatable_bytes == 94 * GIB
    # The system may keep pages there that no process is listed for: they are not free.
    assert terms.unattributed_bytes == 10 * GIB
    node = NodeTerms("n", None, FRESH_S, (terms,))
    assert reason_for("84Gi", node) is None
    assert reason_for("85Gi", node) is Reason.MEMORY_ON_ANY
    # A pod with a reservation is charged all of it, however little the driver counts.
    held = {"u": reservation({"GPU-a": 60 * GIB})}
    _, beside = weighed(report, GRACE, reservations=held)
    assert beside.headroom_bytes == (94 - 10 - 60) * GIB
