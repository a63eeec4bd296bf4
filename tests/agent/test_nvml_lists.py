"""Tests that process lists and memory are read with the versions of the functions that the driver
exports.
"""

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from agent.probes.nvml import Memory
from agent.probes.nvml_errors import (
    DeviceFault,
)
from tests.agent.nvml_library import NOT_AVAILABLE, gate, listing

pytestmark = pytest.mark.usefixtures("threads_end")


def test_process_lists_are_read_once_per_kind_and_merged_by_pid() -> None:
    sizes: list[int] = []
    found = gate(
        nvmlDeviceGetComputeRunningProcesses_v3=listing((1, 100), (2, NOT_AVAILABLE), sizes=sizes),
        nvmlDeviceGetGraphicsRunningProcesses_v3=listing((1, 30), (2, 5), sizes=sizes),
        nvmlDeviceGetMPSComputeRunningProcesses_v3=listing((3, NOT_AVAILABLE), sizes=sizes),
    ).processes(0)
    assert found == {1: 100, 2: 5, 3: None}
    assert len(sizes) == 3


def test_a_list_that_does_not_fit_is_read_again_with_a_larger_buffer() -> None:
    sizes: list[int] = []
    many = [(pid, pid * 10) for pid in range(1, 201)]
    found = gate(nvmlDeviceGetComputeRunningProcesses_v3=listing(*many, sizes=sizes)).processes(0)
    assert found == dict(many)
    assert sizes == [64, 400]


@pytest.mark.parametrize("clears", [False, True], ids=["", "clears the whole array first"])
@pytest.mark.parametrize("count", [1, 2, 47, 48, 49, 63, 64])
@pytest.mark.parametrize("entry_bytes", [16, 24, 32])
def test_the_length_of_entries_follows_the_driver(
    entry_bytes: int, count: int, clears: bool
) -> None:
    """An entry of version 3 has 24 bytes in the header, but drivers write fewer or more bytes
    (docs/design/agent.md).
    """

    def call(handle: Any, room: Any, array: Any) -> int:
        size, room._obj.value = room._obj.value, count
        at = ctypes.addressof(array)
        if clears:
            ctypes.memset(at, 0, size * entry_bytes)
        for number in range(count):
            entry = struct.pack("<IxxxxQII", 1000 + number, 1 << 30, 0xFFFFFFFF, 0xFFFFFFFF)
            entry = entry.ljust(entry_bytes, b"\0")[:entry_bytes]
            ctypes.memmove(at + number * entry_bytes, entry, entry_bytes)
        return 0

    found = gate(nvmlDeviceGetComputeRunningProcesses_v3=call).processes(0)
    assert found == {1000 + number: 1 << 30 for number in range(count)}


@pytest.mark.parametrize("length", [40, 100])
def test_entries_of_an_unknown_length_are_not_guessed(length: int) -> None:
    def call(handle: Any, room: Any, array: Any) -> int:
        room._obj.value = 3
        ctypes.memset(ctypes.addressof(array), 1, 3 * length)
        return 0

    with pytest.raises(DeviceFault, match="cannot be read: UnknownLayout"):
        gate(nvmlDeviceGetComputeRunningProcesses_v3=call).processes(0)


@pytest.mark.parametrize("version", ["_v3", "_v2", ""])
def test_the_newest_supported_version_of_each_call_is_determined_once(version: str) -> None:
    listed = gate(
        **{
            f"nvmlDeviceGetComputeRunningProcesses{version}": listing((7, 70)),
            "nvmlDeviceGetGraphicsRunningProcesses_v3": listing((8, 80)),
        }
    )
    asked: list[str] = []
    find = listed._library._nvmlGetFunctionPointer
    listed._library._nvmlGetFunctionPointer = lambda name: asked.append(name) or find(name)
    first = listed.processes(0)
    before = asked.copy()
    asked.clear()
    assert first == listed.processes(0) == {7: 70, 8: 80}
    assert asked == [
        f"nvmlDeviceGetComputeRunningProcesses{version}",
        "nvmlDeviceGetGraphicsRunningProcesses_v3",
    ]
    assert len(before) > len(asked)


def test_a_failed_call_is_not_repeated_in_an_older_version() -> None:
    """The call is not repeated, because an older version could report fewer processes."""
    listed = gate(
        nvmlDeviceGetComputeRunningProcesses_v3=lambda *_: 3,
        nvmlDeviceGetComputeRunningProcesses_v2=listing((7, 70)),
    )
    assert listed.processes(0) is None


def test_the_supported_version_of_the_memory_call_is_determined_once() -> None:
    asked: list[int | None] = []

    def memory(handle: object, version: int | None = None) -> Any:
        asked.append(version)
        if version is not None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return SimpleNamespace(total=100, free=60)

    opened = gate(nvmlDeviceGetMemoryInfo=memory)
    assert [opened.memory(0), opened.memory(0)] == [Memory(100, 60, None)] * 2
    assert asked == [pynvml.nvmlMemory_v2, None, None]


def test_without_process_lists_the_processes_are_unknown() -> None:
    assert gate().processes(0) is None
