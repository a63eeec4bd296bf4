"""Stands in for nvidia-smi. It reads the values from the driver library, as the real program does.

FAKE_SMI_USED_MIB is added to each value of used memory, FAKE_SMI_MINOR to each minor number, and
FAKE_SMI_SM to the columns of dmon. With these variables, nvidia-smi and the agent disagree, and the
check must find the difference.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import pynvml as nvml

MIB = 1 << 20
LISTS = {
    "C": nvml.nvmlDeviceGetComputeRunningProcesses_v3,
    "M+C": nvml.nvmlDeviceGetMPSComputeRunningProcesses_v3,
}


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def added(name: str) -> int:
    return int(os.environ.get(f"FAKE_SMI_{name}", "0"))


def listed(processes: Callable[[Any], list[Any]], gpu: Any) -> list[Any]:
    try:
        return processes(gpu)
    except nvml.NVMLError:
        return []


def query() -> None:
    say('<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">')
    say(f"<nvidia_smi_log>\n<driver_version>{nvml.nvmlSystemGetDriverVersion()}</driver_version>")
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2)
        say(f'<gpu id="00000000:{index + 1:02X}:00.0">')
        say(f"<product_name>{nvml.nvmlDeviceGetName(gpu)}</product_name>")
        say(f"<serial>165402300{index}</serial>\n<uuid>{nvml.nvmlDeviceGetUUID(gpu)}</uuid>")
        say(f"<minor_number>{nvml.nvmlDeviceGetMinorNumber(gpu) + added('MINOR')}</minor_number>")
        say("<fb_memory_usage>")
        for key in ("total", "reserved", "used", "free"):
            more = added("USED_MIB") if key == "used" else 0
            say(f"<{key}>{getattr(memory, key) // MIB + more} MiB</{key}>")
        say("</fb_memory_usage>\n<processes>")
        for kind, processes in LISTS.items():
            for process in listed(processes, gpu):
                say(f"<process_info><pid>{process.pid}</pid><type>{kind}</type>")
                say("<process_name>/home/somebody/train.py</process_name>")
                used = process.usedGpuMemory // MIB
                say(f"<used_memory>{used} MiB</used_memory></process_info>")
        say("</processes>\n</gpu>")
    say("</nvidia_smi_log>")


def dmon(args: list[str]) -> None:
    gpu = nvml.nvmlDeviceGetHandleByIndex(int(args[args.index("-i") + 1]))
    util = nvml.nvmlDeviceGetUtilizationRates(gpu).gpu
    older, newer = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
    nvml.nvmlGpmSampleGet(gpu, older)
    time.sleep(0.15)
    nvml.nvmlGpmSampleGet(gpu, newer)
    asked = nvml.c_nvmlGpmMetricsGet_t(version=1, numMetrics=1, sample1=older, sample2=newer)
    asked.metrics[0].metricId = 2
    nvml.nvmlGpmMetricsGet(asked)
    say("# gpu     sm    mem    enc    dec    jpg    ofa smutil")
    say("# Idx      %      %      %      %      %      %    GPM")
    for _ in range(int(args[args.index("-c") + 1])):
        say(f"    0 {util:6} 0 0 0 0 0 {asked.metrics[0].value + added('SM'):.0f}")


nvml.nvmlInit()
if sys.argv[1:] == ["-q", "-x"]:
    query()
else:
    dmon(sys.argv[2:])
