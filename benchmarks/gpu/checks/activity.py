"""Compares SM activity with ``nvidia-smi dmon`` for a large and a small kernel."""

from typing import Any

from benchmarks.gpu.lines import Line, NotPossible, judged
from benchmarks.gpu.machine import Machine, device_of
from benchmarks.gpu.smi import dmon

#: More blocks than the SMs of any GPU, and a single block.
_FULL_BLOCKS, _ONE_BLOCK = 2048, 1
#: Seconds by which the kernel runs longer, for the start of the two samplers and the end of dmon.
_SPIN_MORE_S = 15.0
_GPM_SM_UTIL = "2"
#: Columns of dmon -s u without GPM. The driver gives the GPM column its name.
_PLAIN = {"gpu", "idx", "sm", "mem", "enc", "dec", "jpg", "ofa"}
#: Allowed difference, because two samplers do not sample at the same time.
_APART_RATIO = 0.15
_BUSY_RATIO, _IDLE_RATIO, _ONE_BLOCK_RATIO = 0.8, 0.05, 0.2


def sm_activity(machine: Machine) -> Line:
    machine.alone()
    smi = machine.tool("nvidia-smi")
    found: dict[str, dict[str, Any]] = {}
    for name, blocks in (("idle", 0), ("one block", _ONE_BLOCK), ("full", _FULL_BLOCKS)):
        found[name] = _phase(machine, smi, blocks)
    machine.fixtures.keep("sm-activity.json", found)
    summary = "; ".join(f"{name}: {_told(phase)}" for name, phase in found.items())
    return judged("sm-activity", summary, judge_activity(found), found)


def _phase(machine: Machine, smi: str, blocks: int) -> dict[str, Any]:
    worker = machine.worker() if blocks else None
    try:
        if worker is not None:
            worker.send(do="spin", seconds=machine.options.pause_s + _SPIN_MORE_S, blocks=blocks)
            answer = worker.read(30.0)
            if "spinning" not in answer:
                raise NotPossible(f"no kernel can be started: {answer}")
            early = worker.read_or_none(0.5)  # a launch that fails returns at once
            if early is not None and "error" in early:
                raise NotPossible(f"no kernel can be started: {early['error']}")
        device = device_of(machine.agent(machine.options.pause_s), machine.uuid)
        samples = _dmon(machine, smi)
    finally:
        if worker is not None:
            worker.end(at_once=True)
    activity = device.get("smActivity") or {}
    return {
        "agent": activity.get("ratio"),
        "source": activity.get("source", ""),
        "utilization": device.get("utilization"),
        **samples,
    }


def _dmon(machine: Machine, smi: str) -> dict[str, float | None]:
    """Return ratios of dmon: time with any kernel, and SM activity (GPM) if dmon has it."""
    command = [smi, "dmon", "-i", str(machine.gpu["index"]), "-s", "u", "-d", "1", "-c", "3"]
    done = machine.children.run([*command, "--gpm-metrics", _GPM_SM_UTIL], 30.0)
    gpm = done.status == 0
    if not gpm:
        done = machine.children.run(command, 30.0)
    samples = dmon(done.out)[1:]  # the first sample may reach back to before the kernel
    machine.fixtures.keep("dmon.json", {"out": done.out.splitlines()})
    kernel = [s["sm"] for s in samples if "sm" in s]
    sm = [value for s in samples if gpm for key, value in s.items() if key not in _PLAIN]
    return {
        "dmon sm": sum(kernel) / len(kernel) / 100 if kernel else None,
        "dmon gpm": sum(sm) / len(sm) / 100 if sm else None,
    }


def judge_activity(phases: dict[str, dict[str, Any]]) -> list[str]:
    differences = []
    for name, phase in phases.items():
        ours = phase["agent"]
        if ours is None:
            differences.append(f"{name}: the agent reports no SM activity")
            continue
        theirs = phase["dmon gpm"] if phase["source"] == "gpm" else phase["dmon sm"]
        if theirs is not None and abs(ours - theirs) > _APART_RATIO:
            differences.append(f"{name}: {ours:.0%} by the agent, {theirs:.0%} by dmon")
        if name == "idle" and ours > _IDLE_RATIO:
            differences.append(f"idle: the agent reports {ours:.0%}")
        if name == "full" and ours < _BUSY_RATIO:
            differences.append(f"full: the agent reports {ours:.0%} of a GPU that is filled")
        if name == "one block" and phase["source"] == "gpm" and ours > _ONE_BLOCK_RATIO:
            differences.append(f"one block: the agent reports {ours:.0%}")
    return differences


def _told(phase: dict[str, Any]) -> str:
    def percent(ratio: float | None) -> str:
        return "none" if ratio is None else f"{ratio:.0%}"

    return (
        f"{percent(phase['agent'])} ({phase['source'] or 'no source'}), dmon GPM"
        f" {percent(phase['dmon gpm'])}, dmon sm {percent(phase['dmon sm'])}"
    )
