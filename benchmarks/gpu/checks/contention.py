"""Measures how much two processes on one GPU slow each other down, by time-slicing and by MPS.

Each process runs equal kernels one after the other. A process *keeps* the ratio of its kernels per
second beside the other process to its kernels per second alone.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu.checks.mps import daemon
from benchmarks.gpu.children import Child
from benchmarks.gpu.lines import Line, NotPossible, judged
from benchmarks.gpu.machine import Machine, device_of

#: Load -> the ratio of the SMs that its kernels use, and the ratio of the time in which they run.
LOADS = {
    "one block": (0.0, 1.0),
    "half of the SMs": (0.5, 1.0),
    "half of the time": (1.0, 0.5),
    "all": (1.0, 1.0),
}
PAIRS = (
    ("all", "all"),
    ("half of the SMs", "half of the SMs"),
    ("one block", "all"),
    ("half of the SMs", "all"),
    ("half of the time", "all"),
    ("half of the time", "half of the time"),
)
#: Way of sharing -> pairs whose loss headroom plan computes from activity alone, and the ratio that
#: each process keeps.
#: With time-slicing, kernels of two processes never run together, however few SMs they use.
EXPECTED = {
    "time-slicing": {PAIRS[0]: 0.5, PAIRS[1]: 0.5, PAIRS[2]: 0.5, PAIRS[3]: 0.5},
    "MPS": {PAIRS[0]: 0.5, PAIRS[1]: 1.0},
}
_TOLERANCE_RATIO = 0.15
_KERNEL_S = 0.04
_WORK_S, _AGENT_S, _ANSWER_S = 2.0, 2.0, 30.0


def contention(machine: Machine) -> Line:
    machine.alone()
    with _workers(machine, {}) as workers:
        rounds = {load: _rounds(workers[0], load) for load in LOADS}
        activities = {load: _activity(machine, workers[0], load, rounds[load]) for load in LOADS}
        figures: dict[str, Any] = {"time-slicing": _measured(machine, workers, rounds)}
    try:
        with daemon(machine) as places, _workers(machine, places) as workers:
            figures["MPS"] = _measured(machine, workers, rounds)
    except NotPossible as err:
        figures["MPS"] = {"not possible": str(err)}
    machine.fixtures.keep("contention.json", {"activity": activities, **figures})
    summary = "; ".join(f"{name}: {_told(found)}" for name, found in figures.items())
    return judged("contention", summary, judge_contention(figures), figures)


def _measured(
    machine: Machine, workers: Sequence[Child], rounds: Mapping[str, int]
) -> dict[str, Any]:
    length_s = min(_WORK_S, machine.options.cost_s)
    alone = {load: _rates(workers[:1], (load,), rounds, length_s)[0] for load in LOADS}
    pairs = []
    for pair in PAIRS:
        rates = _rates(workers, pair, rounds, length_s)
        kept = [rate / alone[load] for load, rate in zip(pair, rates, strict=True)]
        pairs.append({"loads": [*pair], "kept": [round(each, 3) for each in kept]})
    return {"alone_per_s": {load: round(rate, 2) for load, rate in alone.items()}, "pairs": pairs}


def _activity(machine: Machine, worker: Child, load: str, rounds: int) -> dict[str, Any]:
    """Return SM activity and utilization (time with any kernel) of a load, as the agent reports it.

    The kernels end some time after the agent.
    """
    _start(worker, load, rounds, machine.options.pause_s + _AGENT_S)
    device = device_of(machine.agent(machine.options.pause_s), machine.uuid)
    worker.read(_ANSWER_S)
    activity = device.get("smActivity") or {}
    return {"sm_activity": activity.get("ratio"), "utilization": device.get("utilization")}


def _rates(
    workers: Sequence[Child], loads: Sequence[str], rounds: Mapping[str, int], length_s: float
) -> list[float]:
    """Return the kernels per second of each worker. All run at the same time."""
    for worker, load in zip(workers, loads, strict=True):
        _start(worker, load, rounds[load], length_s)
    return [worker.read(_ANSWER_S)["rate"] for worker in workers]


def _start(worker: Child, load: str, rounds: int, length_s: float) -> None:
    sms, busy = LOADS[load]
    pause_s = _KERNEL_S * (1 / busy - 1)
    worker.send(do="work", sms=sms, rounds=rounds, pause_s=pause_s, seconds=length_s)


def _rounds(worker: Child, load: str) -> int:
    answer = worker.ask(_ANSWER_S, do="rounds", sms=LOADS[load][0], kernel_s=_KERNEL_S)
    if "error" in answer:
        raise NotPossible(f"no kernel can be started: {answer['error']}")
    return int(answer["rounds"])


@contextlib.contextmanager
def _workers(machine: Machine, environment: dict[str, str]) -> Iterator[list[Child]]:
    workers: list[Child] = []
    try:
        workers.extend(machine.worker(**environment) for _ in range(2))
        yield workers
    finally:
        for worker in workers:
            worker.end()


def judge_contention(figures: dict[str, Any]) -> list[str]:
    differences = []
    for name, found in figures.items():
        for pair in found.get("pairs", ()):
            expected = EXPECTED[name].get(tuple(pair["loads"]))
            for load, kept in zip(pair["loads"], pair["kept"], strict=True):
                if expected is not None and abs(kept - expected) > _TOLERANCE_RATIO:
                    differences.append(
                        f"{name}, {' with '.join(pair['loads'])}: {load} keeps {kept:.0%} of its"
                        f" speed, expected {expected:.0%}"
                    )
    return differences


def _told(found: dict[str, Any]) -> str:
    if "not possible" in found:
        return f"not measured ({found['not possible']})"
    return ", ".join(
        f"{' with '.join(pair['loads'])} keep {pair['kept'][0]:.0%} and {pair['kept'][1]:.0%}"
        for pair in found["pairs"]
    )
