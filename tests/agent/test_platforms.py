"""Tests drivers that do not report everything: vGPU guests, WSL, Jetson and Grace.

Each test checks the path from the driver library through the agent's report to the user's
explanation. A missing value must be reported or explained as a reason. The host's values are used
only for a GPU that has no memory of its own.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from agent.probes.unified_memory import UNSET
from headroom.contract.gpunode import GPUNodeStatus
from headroom.contract.reasons import Reason
from headroom.core.placement.device_accounting import DeviceTerms
from headroom.core.placement.explain import explain
from headroom.core.placement.explanation_text import explanation_lines
from headroom.core.placement.policy import Weights
from headroom.core.placement.snapshot import NodeTerms
from tests.agent.test_on_driver_library import A100
from tests.builders import FRESH_S, GIB, judged, reason_for, reservation, weighed_anew

Report = Callable[..., dict[str, Any]]

NO_PROCESSES = "".join(
    f"code nvmlDeviceGetComputeRunningProcesses_v{version} 3\n" for version in (2, 3)
)
#: A vGPU guest sees a smaller GPU, which has the frame buffer of its profile.
VGPU = NO_PROCESSES + f"device GPU-a {20 * GIB} {GIB} {9 * GIB} GRID A100D-20C\n"
#: On WSL, the driver also reports no reserve.
WSL = NO_PROCESSES + f"device GPU-a {24 * GIB} 0 {14 * GIB} NVIDIA GeForce RTX 4090\n"
#: A GH200 has 96 GB of its own memory, in addition to 480 GB of the host. The part that the system
#: uses is not attributed to a process.
GRACE = f"device GPU-a {95 * GIB} {GIB} {84 * GIB} NVIDIA GH200 480GB\n"
TELLS_NOTHING = "code nvmlDeviceGetMemoryInfo_v2 3\ncode nvmlDeviceGetMemoryInfo 3\n" + A100
#: The driver of GB10 reports zeros.
TELLS_ZERO = "device GPU-a 0 0 0 NVIDIA GB10\n"


def weighed(report: Report, table: str, **how: Any) -> tuple[GPUNodeStatus, DeviceTerms]:
    flags = ("--replicas", "4", "--sharing", "time-slicing")
    status = msgspec.convert(report(table, *flags), GPUNodeStatus)
    (terms,) = weighed_anew(status, how.pop("reservations", {}), **how)
    return status, terms


def read(terms: DeviceTerms, vram: str) -> list[str]:
    """Return the explanation of a pod on a node with this device."""
    verdicts = judged(vram, NodeTerms("n", None, FRESH_S, (terms,)))[1]
    return explanation_lines(explain(verdicts, Weights()).nearest[0])


_UNIFIED = pytest.mark.parametrize(
    "table",
    [
        pytest.param(TELLS_NOTHING, id="Jetson: not supported"),
        pytest.param(TELLS_ZERO, id="DGX Spark: nothing of it"),
    ],
)


@_UNIFIED
def test_a_shared_gpu_without_memory_takes_no_pods_and_the_reason_names_the_setting(
    report: Report, table: str
) -> None:
    status, terms = weighed(report, table)
    (device,) = status.devices
    assert device.memory_bytes <= 0
    assert not device.healthy
    assert terms.allocatable_bytes == 0
    node = NodeTerms("n", None, FRESH_S, (terms,))
    for vram in ("1", None):
        assert reason_for(vram, node) is Reason.MEMORY_UNKNOWN
    assert read(terms, "1Gi") == [f"n: {Reason.MEMORY_UNKNOWN.sentence}", f"  GPU-a: {UNSET}"]
    assert "headroom.gpu/unified-memory: auto" in UNSET
    assert "headroom.gpu/unified-memory=auto" in Reason.MEMORY_UNKNOWN.remedy


@_UNIFIED
def test_a_shared_gpu_with_unified_memory_uses_the_configured_pool(
    report: Report, table: str
) -> None:
    flags = ("--replicas", "4", "--sharing", "time-slicing", "--unified-memory", "64Mi")
    (device,) = msgspec.convert(report(table, *flags), GPUNodeStatus).devices
    assert device.healthy
    assert device.memory_bytes == 64 << 20


@_UNIFIED
def test_a_pod_without_a_memory_request_gets_a_whole_gpu_with_unified_memory(
    report: Report, table: str
) -> None:
    """The pod gets the GPU even if an unknown process uses it, because the memory of such a GPU is
    unknown.
    """
    table += f"process 0 4242 {3 * GIB}\n"
    flags = ("--replicas", "1", "--sharing", "none")
    status = msgspec.convert(report(table, *flags), GPUNodeStatus)
    (device,) = status.devices
    assert (device.healthy, device.used_bytes, device.unattributed_bytes) == (True, 0, 0)
    assert device.memory_bytes > 0
    (terms,) = weighed_anew(status, {})
    assert reason_for(None, NodeTerms("n", None, FRESH_S, (terms,))) is None


def test_a_gpu_without_memory_next_to_a_gpu_with_memory_has_a_fault(report: Report) -> None:
    fails = "fail nvmlDeviceGetMemoryInfo_v2 3\nfail nvmlDeviceGetMemoryInfo 3\n"
    second = A100.replace("GPU-a", "GPU-b")
    status = msgspec.convert(report(A100 + fails + second), GPUNodeStatus)
    assert [device.healthy for device in status.devices] == [False, True]
    assert status.devices[0].health_reason == "driver does not report the memory of this device"


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
    # If a pod is no longer listed, it is unknown whether it has freed its memory.
    assert not status.shows_every_pod


def test_unified_memory_counts_the_gpus_own_memory_and_the_systems_pages_in_it(
    report: Report,
) -> None:
    status, terms = weighed(report, GRACE)
    assert status.devices[0].memory_bytes == 95 * GIB
    assert terms.allocatable_bytes == 94 * GIB
    # The system may keep pages there that belong to no listed process. These pages are not free.
    assert terms.unattributed_bytes == 10 * GIB
    node = NodeTerms("n", None, FRESH_S, (terms,))
    assert reason_for("84Gi", node) is None
    assert reason_for("85Gi", node) is Reason.MEMORY_ON_ANY
    # A reservation counts completely, even if the driver reports less use.
    held = {"u": reservation({"GPU-a": 60 * GIB})}
    _, beside = weighed(report, GRACE, reservations=held)
    assert beside.headroom_bytes == (94 - 10 - 60) * GIB
