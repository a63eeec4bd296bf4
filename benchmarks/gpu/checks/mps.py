"""Checks which lists of processes contain MPS clients, and whether MPS limits their memory."""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.children import ChildFailed
from benchmarks.gpu.lines import Line, NotPossible, gib, judged, mib
from benchmarks.gpu.machine import Machine, device_of
from headroom.contract.gpunode import UNATTRIBUTED_TOLERANCE_BYTES

_CONTROL = "nvidia-cuda-mps-control"
_CLIENT_BYTES = (1 << 30, 2 << 30)
_START_S = 30.0
#: The device plugin sets such a limit for every client: device memory / replicas.
_DEFAULT_MIB = 4096
#: Case -> the variable of the client, as Headroom's webhook sets it, and the limit that must hold.
_LIMITS: dict[str, tuple[dict[str, str], int]] = {
    "no variable": ({}, _DEFAULT_MIB << 20),
    "2 GiB": ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2048M"}, 2048 << 20),
    "8 GiB": ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=8192M"}, _DEFAULT_MIB << 20),
}
_WANTED_BYTES, _PIECE_BYTES = 10 << 30, 64 << 20


def two_clients(machine: Machine) -> Line:
    with daemon(machine) as places:
        return _measured(machine, places)


def limited_clients(machine: Machine) -> Line:
    """Let clients allocate until they fail, with the daemon's limit, and with a lower and a higher
    one."""
    with daemon(machine) as places:
        limit = f"set_default_device_pinned_mem_limit 0 {_DEFAULT_MIB}M\n"
        machine.children.run([machine.tool(_CONTROL)], _START_S, limit, **places)
        figures = {
            case: _filled(machine, places | variable) | {"limit": limit_bytes}
            for case, (variable, limit_bytes) in _LIMITS.items()
        }
    machine.fixtures.keep("mps-limit.json", figures)
    told = "; ".join(f"{case}: {_told(each)}" for case, each in figures.items())
    summary = (
        f"the daemon limits each client to {gib(_DEFAULT_MIB << 20)}; variable of a client: {told}"
    )
    return judged("mps-limit", summary, judge_limits(figures), figures)


def _filled(machine: Machine, places: dict[str, str]) -> dict[str, Any]:
    try:
        worker = machine.worker(**places)
    except NotPossible as err:
        return {"got": 0, "listed": None, "error": str(err)}
    try:
        seen = worker.ask(_START_S, do="profile")
        answer = worker.ask(_START_S, do="fill", bytes=_WANTED_BYTES, piece=_PIECE_BYTES)
        lists = machine.measure("lists", machine.uuid)
    finally:
        worker.end()
    listed = dict(map(tuple, lists["decoded"] or ())).get(worker.pid)
    return {"sees": seen["total"], "got": answer["got"], "listed": listed} | (
        {"error": answer["rejected"]} if "rejected" in answer else {}
    )


def judge_limits(figures: dict[str, dict[str, Any]]) -> list[str]:
    differences = []
    for case, found in figures.items():
        limit_bytes = found["limit"]
        if found["got"] > limit_bytes:
            differences.append(f"{case}: {gib(found['got'])} allocated, limit {gib(limit_bytes)}")
        elif (found["listed"] or 0) > limit_bytes + UNATTRIBUTED_TOLERANCE_BYTES:
            differences.append(
                f"{case}: the process uses {mib(found['listed'] - limit_bytes)} more than its limit"
            )
    return differences


def _told(found: dict[str, Any]) -> str:
    if "sees" not in found:
        return f"no start ({found['error']})"
    listed = "nothing" if found["listed"] is None else gib(found["listed"])
    end = f"then {found['error']}" if "error" in found else "without an error"
    return f"sees {gib(found['sees'])}, gets {gib(found['got'])}, {end}, listed with {listed}"


@contextlib.contextmanager
def daemon(machine: Machine) -> Iterator[dict[str, str]]:
    """Run our own MPS daemon. Yield the environment of its clients."""
    machine.alone()
    control = machine.tool(_CONTROL)
    if other := _running(Path("/proc")):
        raise NotPossible(f"another user's MPS daemon runs here (pid {other})")
    # It will contain a socket, whose path must be short.
    folder = tempfile.mkdtemp(prefix="mps-")
    machine.children.at_end.append(lambda: shutil.rmtree(folder, ignore_errors=True))
    places = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    places["CUDA_VISIBLE_DEVICES"] = machine.uuid
    daemon = machine.children.start([control, "-f"], **places)
    try:
        _wait_for(Path(folder, "control"))
        yield places
    finally:
        with contextlib.suppress(ChildFailed):  # otherwise it is killed below
            machine.children.run([control], _START_S, "quit\n", **places)
        daemon.end(at_once=True)


def _measured(machine: Machine, places: dict[str, str]) -> Line:
    before = device_of(machine.agent(), machine.uuid)
    clients = {}
    workers = []
    try:
        for size in _CLIENT_BYTES:
            workers.append(machine.worker(**places))
            answer = workers[-1].ask(_START_S, do="allocate", bytes=size)
            if "error" in answer:
                raise NotPossible(f"an MPS client cannot allocate: {answer['error']}")
            clients[workers[-1].pid] = size
        lists = machine.measure("lists", machine.uuid)
        status = machine.agent()
        smi = machine.smi().gpu(machine.uuid) if machine.has("nvidia-smi") else None
    finally:
        for worker in workers:
            worker.end()
    machine.fixtures.keep("lists-mps.json", {"clients": clients, **lists})
    machine.fixtures.keep("agent-mps.json", status)
    device = device_of(status, machine.uuid)
    named = [p for p in status.get("unattributedProcesses", []) if p["device"] == machine.uuid]
    found = dict(map(tuple, lists["decoded"] or ()))
    if not clients.keys() & found.keys() and not machine.in_first_pid_namespace:
        raise NotPossible("the driver lists no process of this PID namespace")
    figures = {
        "clients": [*clients.values()],
        "listed": [found.get(pid) for pid in clients],
        "lists": {name: _in_list(raw, set(clients)) for name, raw in lists["raw"].items()},
        "nvidia-smi types": smi and [p.kind for p in smi.processes if p.pid in clients],
        "others": [p.get("used") for p in named if p["pid"] not in clients],
        "sum": sum(p.get("used") or 0 for p in named),
        "used": device["used"],
        "grown": device["used"] - before["used"],
    }
    shown = ", ".join("nothing" if b is None else gib(b) for b in figures["listed"])
    kinds = (
        name.removeprefix("nvmlDeviceGet").partition("Running")[0] for name in figures["lists"]
    )
    where = {
        kind: text
        for kind, text in zip(kinds, figures["lists"].values(), strict=True)
        if not text.startswith(("code", "0 "))
    }
    summary = (
        f"clients of 1 and 2 GiB are listed with {shown} by"
        f" {'; '.join(f'{kind}: {text}' for kind, text in where.items()) or 'no list'}; nvidia-smi"
        f" calls them {', '.join(figures['nvidia-smi types'] or []) or 'nothing'}; processes"
        f" have {gib(figures['sum'])} of {gib(figures['used'])} used"
    )
    return judged("mps", summary, judge_mps(figures), figures)


def judge_mps(figures: dict[str, Any]) -> list[str]:
    differences = []
    for size, listed in zip(figures["clients"], figures["listed"], strict=True):
        if listed is None:
            differences.append(f"no list gives the bytes of the client with {gib(size)}")
        elif listed < size:
            differences.append(f"the client with {gib(size)} is listed with {gib(listed)}")
    too_much_bytes = figures["sum"] - figures["used"]
    if too_much_bytes > UNATTRIBUTED_TOLERANCE_BYTES:
        differences.append(f"the agent counts {mib(too_much_bytes)} twice")
    return differences


def _in_list(raw: dict[str, Any], clients: set[int]) -> str:
    if raw["code"]:
        return f"code {raw['code']}"
    entries = bytes.fromhex(raw["bytes"])
    words = {int.from_bytes(entries[i : i + 4], "little") for i in range(0, len(entries), 8)}
    return f"{raw['count']} processes, {len(clients & words)} of 2 clients"


def _wait_for(control: Path) -> None:
    """Wait for the daemon's socket. Without it, clients would silently run without MPS."""
    until_s = time.monotonic() + _START_S
    while not control.exists():
        if time.monotonic() > until_s:
            raise NotPossible(f"the MPS daemon does not start within {_START_S:g} s")
        time.sleep(0.05)


def _running(proc: Path) -> int | None:
    for path in proc.glob("[0-9]*/comm"):
        try:
            if path.read_text().startswith("nvidia-cuda-mps"):
                return int(path.parent.name)
        except OSError:
            continue
    return None
