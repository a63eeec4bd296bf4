"""Checks that for any response of the driver, the probe raises no error and reports no device
twice.
"""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from agent.probes.nvml import Gate
from agent.probes.nvml_probe import NvmlProbe
from tests.agent.nvml_library import gate, library, probing, refusing

pytestmark = pytest.mark.usefixtures("threads_end")

#: Every call that the probe makes.
CALLS = [
    "nvmlInitWithFlags",
    "nvmlSystemGetDriverVersion",
    "nvmlSystemGetCudaDriverVersion",
    "nvmlDeviceGetCount",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    "nvmlDeviceGetProcessUtilization",
    "nvmlDeviceGetUtilizationRates",
    "nvmlGpmQueryDeviceSupport",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetRetiredPagesPendingStatus",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetArchitecture",
    "nvmlDeviceGetComputeMode",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
]
#: Faulty behaviors of a call: any NVML error code, an invalid answer, or an exception.
MISHAPS: dict[str, Callable[..., Any]] = {
    **{f"code {code}": refusing(code) for code in [*range(1, 30), 777, 999]},
    "no sense": lambda *args: "no sense",
    "nothing": lambda *args: None,
    "not text": lambda *args: b"\xff".decode(),
    "mistake": lambda *args: {}["missing"],
}


def play(opened: Gate, calls: dict[str, Any]) -> None:
    vars(opened._library).clear()
    vars(opened._library).update(calls)


def test_a_uuid_shared_by_two_devices_is_reported_once_as_unhealthy() -> None:
    opened = gate(nvmlDeviceGetCount=lambda: 2, nvmlDeviceGetUUID=lambda handle: "GPU-same")
    (device,) = probing(opened).read().devices
    assert (device.uuid, device.fault) == ("GPU-same", "driver reports its UUID for two devices")


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(CALLS), st.sampled_from(sorted(MISHAPS)))))
def test_the_probe_raises_no_error_and_shows_no_device_twice(
    cycles: list[dict[str, str]],
) -> None:
    opened = Gate(library(nvmlDeviceGetCount=lambda: 2))
    normal = dict(vars(opened._library))
    probe = NvmlProbe(opened)
    try:
        for mishaps in cycles:
            play(opened, normal)
            for name, mishap in mishaps.items():
                setattr(opened._library, name, MISHAPS[mishap])
            with capture_logs():  # Our own errors would be logged with all stack frames.
                found = probe.read()
            uuids = [device.uuid for device in found.devices]
            assert len(uuids) == len(set(uuids))
        play(opened, normal)
        assert [d.fault for d in probe.read().devices] == ["", ""]
    finally:
        probe.close()


def test_a_device_with_a_pending_mig_mode_takes_no_pods() -> None:
    pending = probing(gate(nvmlDeviceGetMigMode=lambda handle: [0, 1])).read().devices
    assert [device.fault for device in pending] == [
        "its MIG mode is about to change, which requires a reset"
    ]
    assert [device.fault for device in probing(gate()).read().devices] == [""]


@pytest.mark.parametrize("code", [2, 999])
@pytest.mark.parametrize(
    "failing",
    [
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetRetiredPagesPendingStatus",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetArchitecture",
        "nvmlDeviceGetComputeMode",
    ],
)
def test_a_failed_call_does_not_affect_the_other_values(failing: str, code: int) -> None:
    calls = {
        "nvmlDeviceGetRemappedRows": lambda handle: (0, 9, 0, 1),
        "nvmlDeviceGetArchitecture": lambda handle: 9,
        failing: refusing(code),
    }
    found = probing(gate(**calls)).read()
    (checkup,) = found.checkups.values()
    assert checkup.causes == ["a row remap failed"]
    (facts,) = found.facts
    assert facts.architecture == ("" if failing == "nvmlDeviceGetArchitecture" else "hopper")
    assert any(f"(NVML {code})" in each.what for each in found.degraded)


@pytest.mark.parametrize(
    ("ask", "minor"), [(lambda handle: 5, 5), (refusing(3), None), (refusing(999), None)]
)
def test_the_minor_number_is_reported_if_the_driver_has_it(
    ask: Callable[..., Any], minor: int | None
) -> None:
    (device,) = probing(gate(nvmlDeviceGetMinorNumber=ask)).read().devices
    assert (device.minor, device.fault) == (minor, "")
