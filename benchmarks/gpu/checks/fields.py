"""Compares the agent's figures with nvidia-smi's, and minor numbers with indexes."""

from pathlib import Path
from typing import Any

from benchmarks.gpu.lines import Line, judged, plural
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.smi import Smi, SmiGpu, SmiMemory, parse

_MIB = 1 << 20
#: Allowed difference: nvidia-smi prints whole MiB, and rounds each figure separately.
_ROUNDING_MIB = 2
#: Number of tries. Figures may differ because other processes allocate between two samples.
_TRIES = 3


def fields(machine: Machine) -> Line:
    machine.tool("nvidia-smi")
    differences: list[str] = []
    for _ in range(_TRIES):
        before = machine.agent()
        xml = machine.smi_xml()
        after = machine.agent()
        smi = parse(xml)
        differences = compare([*before["devices"]], [*after["devices"]], smi)
        if not differences:
            break
    machine.fixtures.keep_xml("smi.xml", xml)
    machine.fixtures.keep("agent.json", after)
    rows = [
        {key: device.get(key) for key in ("index", "uuid", "memory", "reserved", "used")}
        for device in after["devices"]
    ]
    gpu = smi.gpu(machine.uuid)
    summary = f"{plural(len(smi.gpus), 'GPU')} compared with nvidia-smi -q -x"
    if gpu is not None:
        memory = gpu.memory
        summary += (
            f"; GPU {gpu.index}: total {memory.total_mib} MiB,"
            f" reserved {memory.reserved_mib} MiB, used {memory.used_mib} MiB"
        )
    return judged("fields", summary, differences, {"agent": rows})


def compare(before: list[dict[str, Any]], after: list[dict[str, Any]], smi: Smi) -> list[str]:
    """Return the differences, field by field.

    ``before`` and ``after`` are the devices that the agent reported before and after nvidia-smi
    ran."""
    earlier = {device["uuid"]: device for device in before}
    differences = []
    for device in after:
        first = earlier.get(device["uuid"], device)
        gpu = smi.gpu(device.get("parent") or device["uuid"])
        name = f"device {device['index']}"
        if gpu is None:
            differences.append(f"{name}: nvidia-smi does not show its UUID")
            continue
        if gpu.index != device["index"]:
            differences.append(f"{name}: nvidia-smi's index is {gpu.index}")
        memory = _memory(gpu, device)
        for key, theirs in (
            ("memory", memory.total_mib),
            ("reserved", memory.reserved_mib),
            ("used", memory.used_mib),
        ):
            ours = sorted((first.get(key, -1) / _MIB, device.get(key, -1) / _MIB))
            if theirs is None:
                continue  # nvidia-smi shows N/A
            if not ours[0] - _ROUNDING_MIB <= theirs <= ours[1] + _ROUNDING_MIB:
                differences.append(f"{name}: {key} {ours[1]:.1f} MiB, nvidia-smi {theirs} MiB")
    shown = {device.get("parent") or device["uuid"] for device in after}
    differences += [
        f"nvidia-smi shows GPU {gpu.index}, the agent does not"
        for gpu in smi.gpus
        if gpu.uuid not in shown
    ]
    return differences


def _memory(gpu: SmiGpu, device: dict[str, Any]) -> SmiMemory:
    if device.get("kind") != "mig":
        return gpu.memory
    return gpu.instances.get(int(device.get("gpuInstance", -1)), SmiMemory(None, None, None))


def minor(machine: Machine) -> Line:
    devices = machine.identity["devices"]
    smi = machine.smi() if machine.has("nvidia-smi") else Smi("", ())
    kernel = machine.identity["kernel_minors"]
    rows, differences = [], []
    for device in devices:
        uuid = device["parent"] or device["uuid"]
        gpu = smi.gpu(uuid)
        row = {
            "index": device["index"],
            "agent": device["minor"],
            "nvidia-smi": None if gpu is None else gpu.minor,
            "kernel": kernel.get(uuid),
            "node": Path(f"/dev/nvidia{device['minor']}").exists(),
        }
        rows.append(row)
        others = {row["nvidia-smi"], row["kernel"]} - {None}
        if others - {row["agent"]}:
            differences.append(
                f"device {row['index']}: the minor number is {row['agent']} in the agent,"
                f" {row['nvidia-smi']} in nvidia-smi and {row['kernel']} in the kernel"
            )
    apart = [row for row in rows if row["agent"] != row["index"]]
    summary = f"minor equals index on {len(rows) - len(apart)} of {plural(len(rows), 'device')}"
    summary += "".join(f"; index {row['index']} is minor {row['agent']}" for row in apart)
    return judged("minor", summary, differences, {"devices": rows})
