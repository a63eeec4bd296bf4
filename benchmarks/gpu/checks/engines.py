"""Starts two inference engines on one GPU: at the same time, and one after the other.

At start-up, an engine reads the free memory and allocates most of it. Here two processes do this,
first concurrently and then in sequence.
"""

from typing import Any

from benchmarks.gpu.lines import Line, gib, judged
from benchmarks.gpu.machine import Machine

_SHARE = 0.9
_PIECE_BYTES = 256 << 20
_FILL_S = 60.0


def two_engines(machine: Machine) -> Line:
    machine.alone()
    figures = {"together": _together(machine), "in order": _in_order(machine)}
    machine.fixtures.keep("engines.json", figures)
    summary = (
        f"at the same time: {_told(figures['together'])}. One after the other:"
        f" {_told(figures['in order'])}. An order prevents the failed start; it does not share the"
        f" memory, since the second engine gets {_SHARE:.0%} of what the first one leaves"
    )
    return judged("engines", summary, judge_engines(figures), figures)


def _together(machine: Machine) -> list[dict[str, Any]]:
    """Let both processes read the free memory before either allocates."""
    engines = [machine.worker(), machine.worker()]
    try:
        free = [engine.ask(_FILL_S, do="profile")["free"] for engine in engines]
        for engine, free_bytes in zip(engines, free, strict=True):
            engine.send(do="fill", bytes=int(free_bytes * _SHARE), piece=_PIECE_BYTES)
        answers = [engine.read(_FILL_S) for engine in engines]
    finally:
        for engine in engines:
            engine.end()
    return [{"free": f, **answer} for f, answer in zip(free, answers, strict=True)]


def _in_order(machine: Machine) -> list[dict[str, Any]]:
    """Let the second process start after the first has allocated."""
    engines, found = [], []
    try:
        for _ in range(2):
            engines.append(machine.worker())
            free_bytes = engines[-1].ask(_FILL_S, do="profile")["free"]
            wanted_bytes = int(free_bytes * _SHARE)
            answer = engines[-1].ask(_FILL_S, do="fill", bytes=wanted_bytes, piece=_PIECE_BYTES)
            found.append({"free": free_bytes, **answer})
    finally:
        for engine in engines:
            engine.end()
    return found


def judge_engines(figures: dict[str, list[dict[str, Any]]]) -> list[str]:
    differences = []
    if not any("rejected" in engine for engine in figures["together"]):
        differences.append("two engines that start at the same time both get what they want")
    if any("rejected" in engine for engine in figures["in order"]):
        differences.append("an engine fails although the other had started before")
    return differences


def _told(engines: list[dict[str, Any]]) -> str:
    parts = []
    for name, engine in zip(("the first", "the second"), engines, strict=True):
        end = (
            f"fails at {gib(engine['got'])} with {engine['rejected']}"
            if "rejected" in engine
            else (f"gets {gib(engine['got'])}")
        )
        parts.append(f"{name} reads {gib(engine['free'])} free and {end}")
    return ", ".join(parts)
