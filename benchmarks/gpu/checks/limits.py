"""Checks the memory limits of cgroups, which drivers support from r615 on."""

import os
from pathlib import Path
from typing import Any

from benchmarks.gpu.lines import Line, NotPossible, gib, judged
from benchmarks.gpu.machine import Machine, opened

_FIRST_BRANCH = 615
_CGROUPS = Path("/sys/fs/cgroup")
_FIRST_BYTES, _HARD_BYTES, _MORE_BYTES = 1 << 30, 3 << 30, 4 << 30
_CALL_S = 60.0


def memory_limits(machine: Machine) -> Line:
    branch = machine.driver.partition(".")[0]
    if not branch.isdecimal() or int(branch) < _FIRST_BRANCH:
        raise NotPossible(f"driver {machine.driver} has none; r{_FIRST_BRANCH} and newer do")
    if machine.gpu["kind"] == "mig":
        raise NotPossible("MIG devices have none")
    machine.alone()
    if not (_CGROUPS / "cgroup.controllers").exists():
        raise NotPossible("this machine has no cgroups v2")
    folder = _CGROUPS / f"headroom-gpu-check-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as err:
        raise NotPossible(f"a cgroup cannot be made: {err.strerror}") from err
    try:
        figures = _tried(machine, folder)
    finally:
        folder.rmdir()
    machine.fixtures.keep("memory-limits.json", figures)
    differences = judge_limits(figures)
    summary = (
        f"a process with {gib(_FIRST_BYTES)} is counted as {_gib(figures['before'], 'used')};"
        f" hard limit {gib(_HARD_BYTES)} is read as {_gib(figures['limited'], 'hard')}; then"
        f" {gib(_MORE_BYTES)} more: {figures['beyond'] or 'allocated'}"
    )
    return judged("memory-limits", summary, differences, figures)


def _tried(machine: Machine, folder: Path) -> dict[str, Any]:
    argv = machine.worker_argv
    worker = machine.children.start(argv, CUDA_VISIBLE_DEVICES=machine.uuid)
    ask = ("limits", machine.uuid, str(folder))
    try:
        (folder / "cgroup.procs").write_text(str(worker.pid))
        opened(worker)
        worker.ask(_CALL_S, do="allocate", bytes=_FIRST_BYTES)
        before = machine.measure(*ask)
        limited = machine.measure(*ask, str(_HARD_BYTES))
        beyond = worker.ask(_CALL_S, do="allocate", bytes=_MORE_BYTES)
        ended = machine.measure(*ask, "0")
    finally:
        worker.end()
    return {
        "before": before["read"],
        "set_code": limited["set_code"],
        "limited": limited["read"],
        "beyond": beyond.get("error", ""),
        "ended": ended["read"],
    }


def judge_limits(figures: dict[str, Any]) -> list[str]:
    if figures["before"] is None:
        return ["the driver reads no limits of a cgroup"]
    differences = []
    if not _FIRST_BYTES <= figures["before"]["used"] <= _HARD_BYTES:
        differences.append(f"the count of the cgroup is {gib(figures['before']['used'])}")
    if figures["set_code"]:
        differences.append(f"a limit cannot be set: code {figures['set_code']}")
    elif not figures["limited"] or figures["limited"]["hard"] != _HARD_BYTES:
        differences.append("the agent does not read the limit that was set")
    elif not figures["beyond"]:
        differences.append("an allocation beyond the hard limit succeeds")
    return differences


def _gib(read: dict[str, Any] | None, key: str) -> str:
    figure = None if read is None else read[key]
    return "nothing" if figure is None else gib(figure)
