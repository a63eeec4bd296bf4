"""Queries the driver through the agent's own code, in a separate process, and prints JSON.

    python -m benchmarks.gpu.measures identity|init|looks|lists|fields|xids|limits ...

If a driver call hangs or crashes, only this process ends, and the check goes on.
"""

import ctypes
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml

from agent.logs import log_to_stderr
from agent.probes.nvml import Gate
from agent.probes.nvml_errors import NvmlError
from agent.probes.nvml_probe import Found, NvmlProbe
from agent.probes.sm_activity import GPM_APART_S

_KINDS = ("Compute", "Graphics", "MPSCompute")
_ROOM = 512
_POISON = 0xA5
_WIDEST_BYTES = 64
_XID_EVENTS = 8
#: Fields that every driver has, that only new drivers have, and that no driver has.
FIELDS = {"uncorrected ECC errors": 4, "recovery action": 230, "unknown": 99_999}


class RecordingGate(Gate):
    """The agent's gate, which also records duration and result of each driver call."""

    def __init__(self) -> None:
        super().__init__()
        #: (name, seconds, NVML code)
        self.calls: list[tuple[str, float, int]] = []

    def _made(self, name: str, call: Callable[[], Any]) -> Any:
        began_s, code = time.perf_counter(), 0

        def timed() -> Any:
            nonlocal code
            try:
                return call()
            except pynvml.NVMLError as err:
                code = err.value
                raise

        try:
            return super()._made(name, timed)
        finally:
            self.calls.append((name, time.perf_counter() - began_s, code))


def identity() -> dict[str, Any]:
    """Return every device as the agent's probe reads it, with what the kernel reports about it."""
    found = NvmlProbe(Gate()).read()
    return {
        "why_not": found.driver.why_not,
        "driver": found.driver.version,
        "cuda": found.driver.cuda_version,
        "devices": _devices(found),
        "degraded": [each.what for each in found.degraded],
        "kernel_minors": kernel_minors(Path("/proc/driver/nvidia/gpus")),
    }


def _devices(found: Found) -> list[dict[str, Any]]:
    buses = {facts.uuid: facts.pci_bus_id for facts in found.facts}
    return [
        {
            "uuid": device.uuid,
            "index": device.index,
            "minor": device.minor,
            "model": device.model,
            "kind": device.kind,
            "parent": device.parent,
            "bus": buses.get(device.uuid, ""),
            "fault": device.fault,
            "total": None if device.memory is None else device.memory.total_bytes,
            "free": None if device.memory is None else device.memory.free_bytes,
            "reserved": None if device.memory is None else device.memory.reserved_bytes,
            "processes": None if device.processes is None else [*device.processes.items()],
        }
        for device in found.devices
    ]


def kernel_minors(root: Path) -> dict[str, int]:
    """Return UUID -> minor number from the driver's files in /proc, or {} if they are missing."""
    found: dict[str, int] = {}
    for path in root.glob("*/information"):
        pairs = (line.partition(":") for line in path.read_text().splitlines())
        known = {key.strip(): value.strip() for key, _, value in pairs}
        if known.get("Device Minor", "").isdecimal() and "GPU UUID" in known:
            found[known["GPU UUID"]] = int(known["Device Minor"])
    return found


def init(times: int) -> dict[str, Any]:
    """Return the seconds of the first initialisation in this process, and of ``times`` more."""
    gate, took_s = Gate(), []
    for _ in range(times + 1):
        began_s = time.perf_counter()
        gate.start()
        took_s.append(time.perf_counter() - began_s)
        gate.stop()
    return {"first_s": took_s[0], "again_s": took_s[1:]}


def looks(times: int) -> dict[str, Any]:
    """Return the durations of the agent's reads of the driver, in total and by call."""
    gate = RecordingGate()
    probe = NvmlProbe(gate)
    look_s: list[float] = []
    for _ in range(times + 1):
        began_s = time.perf_counter()
        found = probe.read()
        look_s.append(time.perf_counter() - began_s)
        if found.driver.why_not:
            raise SystemExit(found.driver.why_not)
        time.sleep(max(0.0, GPM_APART_S + 0.01 - look_s[-1]))
    calls: dict[str, dict[str, list[float]]] = {}
    for name, seconds, code in gate.calls:
        calls.setdefault(name, {}).setdefault(str(code), []).append(seconds)
    return {
        "first_s": look_s[0],
        "look_s": look_s[1:],
        "calls": calls,
        "capabilities": _status("CapEff"),
        "forbidden": sorted(gate.forbidden),
        "devices": _devices(found),
    }


def _status(key: str) -> str:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{key}:"))


def lists(uuid: str) -> dict[str, Any]:
    """Return the process lists: the driver's bytes, and what the agent reads from them."""
    gate = Gate()
    gate.start()
    handle = gate.ask("nvmlDeviceGetHandleByUUID", uuid)
    decoded = gate.processes(handle)
    raw = {}
    for kind in _KINDS:
        for version in ("_v3", "_v2"):
            name = f"nvmlDeviceGet{kind}RunningProcesses{version}"
            raw[name] = _raw_list(name, handle)
    return {"decoded": None if decoded is None else [*decoded.items()], "raw": raw}


def _raw_list(name: str, handle: Any) -> dict[str, Any]:
    try:
        call = pynvml._nvmlGetFunctionPointer(name)
    except pynvml.NVMLError as err:
        return {"code": err.value}
    buffer = (ctypes.c_ubyte * (_ROOM * _WIDEST_BYTES))()
    ctypes.memset(buffer, _POISON, len(buffer))
    count = ctypes.c_uint(_ROOM)
    code = int(call(handle, ctypes.byref(count), buffer))
    kept = bytes(buffer)[: (count.value + 1) * _WIDEST_BYTES] if code == 0 else b""
    return {"code": code, "count": count.value, "bytes": kept.hex()}


def fields(uuid: str) -> dict[str, Any]:
    """Return the answers of GetFieldValues for known and unknown ids, single and together."""
    gate = Gate()
    gate.start()
    handle = gate.ask("nvmlDeviceGetHandleByUUID", uuid)
    questions = {name: [number] for name, number in FIELDS.items()}
    questions["all together"] = [*FIELDS.values()]
    answers: dict[str, Any] = {}
    for name, numbers in questions.items():
        try:
            values = pynvml.nvmlDeviceGetFieldValues(handle, numbers)
            answers[name] = {
                "code": 0,
                "fields": {str(v.fieldId): v.nvmlReturn for v in values},
                "values": {str(v.fieldId): v.value.uiVal for v in values if v.nvmlReturn == 0},
            }
        except pynvml.NVMLError as err:
            answers[name] = {"code": err.value, "fields": {}, "values": {}}
    return answers


def xids(uuid: str) -> None:
    """Print each XID of a device until the input ends. The first line lists the event types."""
    gate = Gate()
    gate.start()
    handle = gate.ask("nvmlDeviceGetHandleByUUID", uuid)
    kinds = gate.ask("nvmlDeviceGetSupportedEventTypes", handle) or 0
    events = gate.ask("nvmlEventSetCreate")
    listens = bool(kinds & _XID_EVENTS) and gate.does(
        "nvmlDeviceRegisterEvents", handle, _XID_EVENTS, events
    )
    _print({"listens": listens, "kinds": kinds})
    ended = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    while listens and not ended.is_set():
        event = gate.event(events, 200)
        if event is not None:
            _print({"xid": int(event.eventData), "at": time.time()})
    ended.wait()


def limits(uuid: str, cgroup: str, hard_bytes: int | None) -> dict[str, Any]:
    """Return the memory limits of a cgroup (r615). If ``hard_bytes`` is given, set the hard limit
    first; 0 removes it."""
    gate = Gate()
    gate.start()
    handle = gate.ask("nvmlDeviceGetHandleByUUID", uuid)
    code = 0
    if hard_bytes is not None:
        asked = pynvml.c_nvmlSetMemoryLimits_v1_t(nameSpace=cgroup.encode())
        unlimited = pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX
        asked.softLimit, asked.hardLimit = 0, hard_bytes or unlimited
        try:
            pynvml.nvmlDeviceSetMemoryLimits_v1(handle, asked)
        except pynvml.NVMLError as err:
            code = err.value
    read = gate.limits(handle, cgroup)
    return {
        "set_code": code,
        "read": read
        and {"used": read.used_bytes, "soft": read.soft_bytes, "hard": read.hard_bytes},
    }


def _print(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main(argv: list[str]) -> int:
    log_to_stderr()  # the answer goes to stdout
    try:
        match argv:
            case ["identity"]:
                _print(identity())
            case ["init", times]:
                _print(init(int(times)))
            case ["looks", times]:
                _print(looks(int(times)))
            case ["lists", uuid]:
                _print(lists(uuid))
            case ["fields", uuid]:
                _print(fields(uuid))
            case ["xids", uuid]:
                xids(uuid)
            case ["limits", uuid, cgroup, *hard]:
                _print(limits(uuid, cgroup, int(hard[0]) if hard else None))
            case _:
                raise SystemExit(f"unknown measure {argv}; example: init 20")
    except NvmlError as err:
        sys.stderr.write(f"{err}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
