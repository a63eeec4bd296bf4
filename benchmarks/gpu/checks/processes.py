"""Checks the driver's process lists with three processes of known size, read in four ways."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.gpu.children import Child, ChildFailed
from benchmarks.gpu.lines import Line, NotPossible, gib, judged, mib, plural
from benchmarks.gpu.machine import Machine, device_of, last_line, source_of
from headroom.contract.gpunode import UNATTRIBUTED_TOLERANCE_BYTES

_GIB, _MIB = 1 << 30, 1 << 20
#: Maximum size of a CUDA context and its libraries.
_MOST_CONTEXT_BYTES = 2 * _GIB
#: Ratio of the free memory that all holders together use at most.
_MOST_SHARE = 0.5
_ALLOCATE_S = 60.0
_ENTRY_BYTES = (24, 32)


@contextmanager
def holders(machine: Machine) -> Iterator[dict[int, int]]:
    """Run three processes. Yield pid -> bytes that the process has allocated."""
    wanted = [int(size * _GIB) for size in machine.options.sizes_gib]
    scale = min(1.0, machine.free_bytes * _MOST_SHARE / sum(wanted))
    sizes = [max(_MIB, int(size * scale)) for size in wanted]
    workers: list[Child] = []
    held: dict[int, int] = {}
    try:
        for size in sizes:
            workers.append(machine.worker())
            answer = workers[-1].ask(_ALLOCATE_S, do="allocate", bytes=size)
            if "error" in answer:
                raise NotPossible(f"{gib(size)} cannot be allocated: {answer['error']}")
            held[workers[-1].pid] = size
        yield held
    finally:
        for worker in workers:
            worker.end()


def listed(machine: Machine) -> Line:
    before = machine.measure("identity")
    with holders(machine) as held:
        lists = machine.measure("lists", machine.uuid)
        after = machine.measure("identity")
        xml = machine.smi_xml() if machine.has("nvidia-smi") else ""
        smi = machine.smi().gpu(machine.uuid) if xml else None
    if xml:
        machine.fixtures.keep_xml("smi-three-processes.xml", xml)
    machine.fixtures.keep("lists-three-processes.json", {"held": held, **lists})
    found = None if lists["decoded"] is None else dict(map(tuple, lists["decoded"]))
    theirs = None if smi is None else {p.pid: p.used_mib for p in smi.processes}
    grown_bytes = _used(after, machine.uuid) - _used(before, machine.uuid)
    if found is not None and not held.keys() & found.keys() and not machine.in_first_pid_namespace:
        raise NotPossible(
            f"this is not the host's PID namespace: the driver lists {_numbers(found)},"
            f" the three processes are {_numbers(held)}"
        )
    others = len((found or {}).keys() - held.keys()) > 0 or bool(machine.busy)
    differences = judge_lists(held, found, theirs, None if others else grown_bytes)
    ours = {pid: (found or {}).get(pid) for pid in held}
    sum_bytes = sum(used or 0 for used in ours.values())
    summary = (
        f"allocated {', '.join(gib(size) for size in held.values())}; listed"
        f" {', '.join('nothing' if used is None else gib(used) for used in ours.values())};"
        f" the device's used memory grew by {gib(grown_bytes)}, of which"
        f" {mib(grown_bytes - sum_bytes)} belong to no listed process"
    )
    figures = {
        "allocated": [*held.values()],
        "listed": [*ours.values()],
        "nvidia-smi MiB": theirs and [theirs.get(pid) for pid in held],
        "grown": grown_bytes,
        "sum": sum_bytes,
    }
    return judged("processes", summary, differences, figures)


def judge_lists(
    held: dict[int, int],
    found: dict[int, int | None] | None,
    theirs: dict[int, int | None] | None,
    grown_bytes: int | None,
) -> list[str]:
    if found is None:
        return ["the driver lists no processes"]
    differences = []
    for pid, size in held.items():
        used = found.get(pid)
        if pid not in found:
            differences.append(f"the driver does not list the process with {gib(size)}")
        elif used is None:
            differences.append(f"the driver gives no bytes for the process with {gib(size)}")
        elif not size <= used <= size + _MOST_CONTEXT_BYTES:
            differences.append(f"the process with {gib(size)} is listed with {gib(used)}")
        smi_mib = None if theirs is None else theirs.get(pid)
        if used is not None and smi_mib is not None and abs(used / _MIB - smi_mib) > 1:
            differences.append(f"{used / _MIB:.1f} MiB listed, nvidia-smi shows {smi_mib} MiB")
    if grown_bytes is None:  # others use the device, so they may have caused the growth
        return differences
    rest_bytes = grown_bytes - sum(found.get(pid) or 0 for pid in held)
    if not differences and abs(rest_bytes) > UNATTRIBUTED_TOLERANCE_BYTES:
        differences.append(
            f"{mib(rest_bytes)} of the growth belong to no process, over the agent's tolerance of"
            f" {mib(UNATTRIBUTED_TOLERANCE_BYTES)}"
        )
    return differences


def unattributed(machine: Machine) -> Line:
    with holders(machine) as held:
        status = machine.agent()
    machine.fixtures.keep("agent-three-processes.json", status)
    message = source_of(status, "proc").get("message")
    device = device_of(status, machine.uuid)
    if "unattributed" not in device:
        why = message or "the agent attributes no process on this device"
        raise NotPossible(why)
    named = {p["pid"]: p.get("used") for p in status.get("unattributedProcesses", [])}
    pods = [p.get("used") or 0 for p in status.get("pods", []) if p["device"] == machine.uuid]
    differences = judge_unattributed(held, device, named, sum(pods))
    summary = (
        f"{gib(device['used'])} used, {gib(sum(pods))} by pods, {gib(device['unattributed'])}"
        f" unattributed, with {plural(len(named), 'process')} named"
    )
    figures = {
        "used": device["used"],
        "unattributed": device["unattributed"],
        "processes": len(named),
    }
    return judged("unattributed", summary, differences, figures)


def judge_unattributed(
    held: dict[int, int], device: dict[str, Any], named: dict[int, int | None], pods_bytes: int
) -> list[str]:
    differences = [
        f"the agent does not name the process with {gib(size)}"
        for pid, size in held.items()
        if pid not in named
    ]
    apart_bytes = device["unattributed"] + pods_bytes - device["used"]
    if abs(apart_bytes) > UNATTRIBUTED_TOLERANCE_BYTES:
        differences.append(
            f"pods and unattributed together are {mib(apart_bytes)} off the used memory"
        )
    return differences


def stride(machine: Machine) -> Line:
    with holders(machine) as held:
        lists = machine.measure("lists", machine.uuid)
    decoded = dict(map(tuple, lists["decoded"] or ()))
    if not held.keys() & decoded.keys() and not machine.in_first_pid_namespace:
        raise NotPossible("the driver lists no process of this PID namespace")
    figures, differences = {}, []
    for name, raw in lists["raw"].items():
        short = name.removeprefix("nvmlDeviceGet").replace("RunningProcesses", "")
        if raw["code"]:
            figures[short] = f"code {raw['code']}"
        elif raw["count"]:
            size = entry_bytes(bytes.fromhex(raw["bytes"]), raw["count"], set(held))
            figures[short] = f"{raw['count']} of {size} bytes" if size else "unknown layout"
            if size is None:
                differences.append(f"{short}: the entries have neither 24 nor 32 bytes")
        else:
            figures[short] = "none"
    missing = [gib(size) for pid, size in held.items() if pid not in decoded]
    if missing:
        differences.append(f"the agent does not read the process with {', '.join(missing)}")
    summary = "; ".join(f"{name}: {text}" for name, text in figures.items())
    return judged("stride", summary, differences, figures)


def entry_bytes(raw: bytes, count: int, known: set[int]) -> int | None:
    """Return the size of an entry with which every known pid that fits is read, or None."""
    for size in _ENTRY_BYTES:
        pids = {int.from_bytes(raw[i * size : i * size + 4], "little") for i in range(count)}
        if known and known <= pids:
            return size
    return None


def pid_namespace(machine: Machine) -> Line:
    unshare = [machine.tool("unshare")]
    if not machine.is_root:
        unshare += ["--user", "--map-root-user"]
    unshare += ["--pid", "--fork", "--mount-proc", "--kill-child"]
    try:
        done = machine.children.run([*unshare, "true"], 10.0)
    except ChildFailed as err:
        raise NotPossible(str(err)) from err
    if done.status:
        raise NotPossible(f"unshare failed: {last_line(done.err)}")
    with holders(machine) as held:
        inside = machine.agent(prefix=unshare)
        lists = machine.measure("lists", machine.uuid, prefix=unshare)
        outside = machine.agent()
    machine.fixtures.keep("agent-own-pid-namespace.json", inside)
    machine.fixtures.keep("lists-own-pid-namespace.json", {"held": held, **lists})
    shown = dict(map(tuple, lists["decoded"] or ()))
    seen = shown.keys() & held.keys()
    source = source_of(inside, "proc")
    differences = judge_namespace(inside, machine.uuid)
    ours = (
        "attributes" if "unattributed" in device_of(outside, machine.uuid) else "does not attribute"
    )
    summary = (
        f"in a namespace of its own the driver lists {plural(len(shown), 'process')}"
        f" ({len(seen)} of 3 by their pid outside), {gib(sum(b or 0 for b in shown.values()))};"
        f" the agent reports: {source.get('message') or 'nothing'}; outside it {ours} processes"
    )
    figures = {"listed": len(shown), "same pids": len(seen), "source": source}
    return judged("pid-namespace", summary, differences, figures)


def judge_namespace(inside: dict[str, Any], uuid: str) -> list[str]:
    """Check that the agent attributes nothing without the host's processes, and reports why."""
    differences = []
    if "unattributed" in device_of(inside, uuid):
        differences.append("the agent attributes processes that it cannot see")
    if source_of(inside, "proc").get("state", "ok") == "ok":
        differences.append("the agent does not report that it cannot see the host's processes")
    return differences


def capabilities(machine: Machine) -> Line:
    full = machine.measure("looks", "3")
    if not machine.is_root:
        forbidden = forbidden_in(full)
        raise NotPossible(
            "only root can take capabilities away; as this user"
            f" (capabilities {full['capabilities']}) the driver forbids {_names(forbidden)}"
        )
    confined = [sys.executable, "-m", "benchmarks.gpu.confined"]
    done = machine.children.run([*confined, sys.executable, "-c", "import agent.probes.nvml"], 30.0)
    if done.status:  # root may not drop them, or only DAC_OVERRIDE can read the checkout
        raise NotPossible(f"Python does not start with SYS_PTRACE only: {last_line(done.err)}")
    bound = machine.measure("looks", "3", prefix=confined)
    status = machine.agent(prefix=confined)
    machine.fixtures.keep("agent-sys-ptrace-only.json", status)
    forbidden = forbidden_in(bound)
    differences = judge_capabilities(full, bound)
    summary = (
        f"with SYS_PTRACE only (capabilities {bound['capabilities']}) the driver forbids"
        f" {_names(forbidden)}; with all of root's {_names(forbidden_in(full))}"
    )
    figures = {"sys-ptrace only": forbidden, "root": forbidden_in(full)}
    return judged("capabilities", summary, differences, figures)


def forbidden_in(looks: dict[str, Any]) -> list[str]:
    return sorted(name for name, codes in looks["calls"].items() if "4" in codes)


def judge_capabilities(full: dict[str, Any], bound: dict[str, Any]) -> list[str]:
    differences = [f"no permission for {name}" for name in forbidden_in(bound)]
    for ours, theirs in zip(full["devices"], bound["devices"], strict=False):
        differences += [
            f"device {ours['index']}: {key} is {theirs[key]}, with all capabilities {ours[key]}"
            for key in ("uuid", "minor", "total", "reserved", "fault")
            if ours[key] != theirs[key]
        ]
    if len(full["devices"]) != len(bound["devices"]):
        differences.append(f"devices seen: {len(bound['devices'])} of {len(full['devices'])}")
    return differences


def _used(identity: dict[str, Any], uuid: str) -> int:
    (device,) = [each for each in identity["devices"] if each["uuid"] == uuid]
    return int(device["total"] - device["free"])


def _names(names: list[str]) -> str:
    return ", ".join(names) if names else "no call"


def _numbers(pids: dict[int, Any]) -> str:
    return ", ".join(map(str, pids)) or "none"
