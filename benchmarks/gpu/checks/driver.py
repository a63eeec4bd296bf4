"""Measures the driver's latency, and checks its answers to unsupported requests."""

from typing import Any

from agent.probes.nvml_errors import Outcome, outcome_of
from benchmarks.gpu.lines import Line, judged, quantile
from benchmarks.gpu.machine import Machine

_FRESH_PROCESSES = 5
_AGAIN = 20
#: Maximum seconds of all calls for one sample of the devices. The agent samples every 5 s, and
#: every 0.5 s at most.
MOST_LOOK_S = 0.5


def init(machine: Machine) -> Line:
    deadline_s = machine.options.deadline_s
    runs = [machine.measure("init", str(_AGAIN)) for _ in range(_FRESH_PROCESSES)]
    first_s = [run["first_s"] for run in runs]
    again_s = [seconds for run in runs for seconds in run["again_s"]]
    summary = (
        f"first in a process {_ms(first_s)} of {len(first_s)}; again {_ms(again_s)} of"
        f" {len(again_s)}; deadline {deadline_s:g} s"
    )
    slowest_s = max(*first_s, *again_s)
    differences = []
    if slowest_s > deadline_s:
        differences.append(f"the slowest took {slowest_s:.3f} s, over the deadline")
    return judged(
        "init", summary, differences, {"first": _spread(first_s), "again": _spread(again_s)}
    )


def latency(machine: Machine) -> Line:
    measured = machine.measure("looks", str(machine.options.looks))
    look = _spread(measured["look_s"])
    calls = {
        name: _spread([s for seconds in codes.values() for s in seconds])
        | {"codes": {code: len(seconds) for code, seconds in codes.items()}}
        for name, codes in measured["calls"].items()
    }
    slowest = max(calls, key=lambda name: calls[name]["p99_ms"])
    summary = (
        f"a look at all devices p50 {look['p50_ms']:.2f} ms, p99 {look['p99_ms']:.2f} ms;"
        f" slowest of {len(calls)} calls {slowest}: p50 {calls[slowest]['p50_ms']:.2f} ms,"
        f" p99 {calls[slowest]['p99_ms']:.2f} ms"
    )
    machine.fixtures.keep("codes.json", {name: call["codes"] for name, call in calls.items()})
    differences = judge_latency(look, calls, machine.options.deadline_s)
    return judged("latency", summary, differences, {"look": look, "calls": calls})


def judge_latency(
    look: dict[str, float], calls: dict[str, dict[str, Any]], deadline_s: float
) -> list[str]:
    differences = [
        f"{name} took up to {call['max_ms']:.0f} ms, over the deadline of {deadline_s:g} s"
        for name, call in calls.items()
        if call["max_ms"] > deadline_s * 1000
    ]
    if look["p99_ms"] > MOST_LOOK_S * 1000:
        differences.append(f"a look takes more than {MOST_LOOK_S:g} s")
    return differences


def unknown_fields(machine: Machine) -> Line:
    answers = machine.measure("fields", machine.uuid)
    machine.fixtures.keep("fields.json", answers)
    parts = [f"{name}: {_answer(answer)}" for name, answer in answers.items()]
    return judged("unknown-fields", "; ".join(parts), judge_fields(answers), answers)


def judge_fields(answers: dict[str, dict[str, Any]]) -> list[str]:
    """Return the differences. The gate must not take an unknown field for a device fault."""
    harmless = (Outcome.ABSENT, Outcome.STALE_HANDLE)
    differences = []
    for name, answer in answers.items():
        outcome = outcome_of(answer["code"])
        if outcome not in harmless:
            differences.append(f"{name}: the agent takes code {answer['code']} for {outcome.value}")
    unknown, codes = answers["unknown"], answers["unknown"]["fields"].values()
    if unknown["code"] == 0 and 0 in codes:
        differences.append("unknown: the driver gives a value for a field that does not exist")
    return differences


def _answer(answer: dict[str, Any]) -> str:
    if answer["code"]:
        return f"the call answers {answer['code']}"
    return ", ".join(f"field {number} answers {code}" for number, code in answer["fields"].items())


def _spread(seconds: list[float]) -> dict[str, Any]:
    return {
        "p50_ms": round(quantile(seconds, 0.5) * 1000, 4),
        "p99_ms": round(quantile(seconds, 0.99) * 1000, 4),
        "max_ms": round(max(seconds) * 1000, 4),
        "count": len(seconds),
    }


def _ms(seconds: list[float]) -> str:
    spread = _spread(seconds)
    return f"p50 {spread['p50_ms']:.2f} ms, p99 {spread['p99_ms']:.2f} ms"
