"""Where NVML does not tell a device's memory (Jetson, DGX Spark, some guests), to the very reason.

From the driver's library through the agent's report to what a user and an SRE read.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from contract.gpunode import GPUNodeStatus
from contract.reasons import Reason
from extender.placement.equation import weigh
from extender.placement.snapshot import NodeTerms
from tests.agent.test_on_driver_library import A100
from tests.builders import FRESH_S, reason_for

TELLS_NOTHING = (
    "code nvmlDeviceGetMemoryInfo_v2 3\ncode nvmlDeviceGetMemoryInfo 3\n" + A100,
    "driver does not tell the memory of this device",
)
#: GB10 answers, with zeros.
TELLS_ZERO = (
    "device GPU-a 0 0 0 NVIDIA GB10\n",
    "driver reports an impossible amount of memory",
)


@pytest.mark.parametrize(
    ("table", "why"),
    [
        pytest.param(*TELLS_NOTHING, id="not supported"),
        pytest.param(*TELLS_ZERO, id="nothing of it"),
    ],
)
def test_absent_memory_is_a_reason_and_never_the_hosts(
    report: Callable[..., dict[str, Any]], table: str, why: str
) -> None:
    status = msgspec.convert(
        report(table, "--replicas", "4", "--sharing", "time-slicing"), GPUNodeStatus
    )
    (device,) = status.devices
    assert device.memory_bytes <= 0
    assert not device.healthy
    (terms,) = weigh(status, {}, 0, 0)
    assert terms.allocatable_bytes == 0
    assert terms.fence_detail == why
    node = NodeTerms("n", None, FRESH_S, (terms,))
    for vram in ("1", None):
        assert reason_for(vram, node) is Reason.MEMORY_UNKNOWN
