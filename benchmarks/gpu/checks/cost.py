"""Measures the agent's CPU and memory on this machine, and its open file descriptors."""

import re
import sys
import time
import urllib.error
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.children import Child, ChildFailed
from benchmarks.gpu.lines import Line, judged
from benchmarks.gpu.machine import Machine
from benchmarks.vitals import Vitals, at_rest

MOST_RESIDENT_MIB, MOST_CORE_RATIO = 80.0, 0.01
#: Minimum window in seconds. A shorter one is too inexact for CPU.
_LEAST_WINDOW_S = 30.0
_STARTED_S = 60.0
_TRIES = 10


def cost(machine: Machine) -> Line:
    argv = [sys.executable, "-m", "agent", "--no-publish", "--node", "gpu-check"]
    # It gets its own ports, because an agent may already run on the machine.
    agent = machine.children.start([*argv, "--listen", "127.0.0.1:0", "--local-port", "0"])
    try:
        _wait_until_ready(agent)
        time.sleep(machine.options.cost_s * 0.1)  # until the first samples are taken
        before = at_rest(agent.pid)
        for _ in range(_TRIES):  # threads that start late do not count as growth
            last, before = before, at_rest(agent.pid)
            if not _grew(last, before):
                break
        time.sleep(machine.options.cost_s * 0.9)
        after = at_rest(agent.pid)
        for _ in range(_TRIES):  # nor does a sample in progress
            if not _grew(before, after):
                break
            after = at_rest(agent.pid)
        held = held_nodes(agent.pid)
        others = [pid for pid in _pids() if pid != agent.pid and held_nodes(pid)]
    finally:
        status = agent.end(at_once=True)
    figures = {
        "before": asdict(before),
        "after": asdict(after),
        "window_s": after.at_s - before.at_s,
        "core_ratio": (after.cpu_s - before.cpu_s) / (after.at_s - before.at_s),
        "holds": held,
        "other holders": len(others),
        "exit status": status,
    }
    summary = (
        f"over {figures['window_s']:.0f} s: {after.resident_mib:.1f} MiB resident (peak"
        f" {after.peak_mib:.1f}), {figures['core_ratio']:.2%} of a core, threads"
        f" {before.threads} -> {after.threads}, descriptors {before.fds} -> {after.fds}; it holds"
        f" {', '.join(f'{path} ({count})' for path, count in held.items()) or 'no /dev/nvidia*'};"
        f" {len(others)} other processes hold some"
    )
    return judged("cost", summary, judge_cost(figures), figures)


def _grew(before: Vitals, after: Vitals) -> bool:
    return after.threads > before.threads or after.fds > before.fds


def judge_cost(figures: dict[str, Any]) -> list[str]:
    before, after = figures["before"], figures["after"]
    differences = []
    if after["peak_mib"] > MOST_RESIDENT_MIB:
        differences.append(f"{after['peak_mib']:.1f} MiB resident, limit {MOST_RESIDENT_MIB:g}")
    if figures["window_s"] > _LEAST_WINDOW_S and figures["core_ratio"] > MOST_CORE_RATIO:
        differences.append(f"{figures['core_ratio']:.2%} of a core, limit {MOST_CORE_RATIO:.0%}")
    differences += [
        f"{key} grow from {before[key]} to {after[key]}"
        for key in ("threads", "fds")
        if after[key] > before[key]
    ]
    if figures["exit status"] != 0:
        differences.append(f"after SIGTERM it ends with status {figures['exit status']}")
    return differences


def held_nodes(pid: int) -> dict[str, int]:
    """Return the NVIDIA device nodes that a process has open, and how often, if we may look."""
    found: dict[str, int] = {}
    try:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            target = str(path.readlink())
            if target.startswith("/dev/nvidia"):
                found[target] = found.get(target, 0) + 1
    except OSError:
        return found
    return dict(sorted(found.items()))


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _wait_until_ready(agent: Child) -> None:
    until_s = time.monotonic() + _STARTED_S
    while time.monotonic() < until_s:
        if agent.process.poll() is not None:
            raise ChildFailed(f"the agent ended: {agent.log()[-300:]}")
        port = re.search(r'"port": (\d+)', agent.log())
        if port is not None and _ready(f"http://127.0.0.1:{port[1]}/readyz"):
            return
        time.sleep(0.1)
    raise ChildFailed(f"the agent was not ready within {_STARTED_S:g} s: {agent.log()[-300:]}")


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
