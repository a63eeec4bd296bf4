"""Formats the results: a table for a terminal, a report for docs/, and JSON."""

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.lines import Line, Verdict

_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Facts:
    """The machine and the command that produced the figures."""

    date: str
    command: str
    driver: str
    cuda: str
    model: str
    gpus: int
    user: str
    took_s: float
    busy: str


def table(lines: Sequence[Line], facts: Facts) -> str:
    """Return one row for each line. The summary wraps below its own column."""
    rows = [f"{facts.model}, driver {facts.driver}, CUDA {facts.cuda}, as {facts.user}"]
    rows += [f"GPU in use by others: {facts.busy}"] if facts.busy else []
    rows.append("")
    for line in lines:
        head = f"{line.name:<17}{line.verdict.value:<18}"
        rows += textwrap.wrap(
            line.summary,
            _WIDTH,
            initial_indent=head,
            subsequent_indent=" " * len(head),
            break_long_words=False,
        )
    counts = ", ".join(f"{_count(lines, v)} {v.value}" for v in Verdict)
    rows += ["", f"{counts}; {facts.took_s:.0f} s"]
    return "\n".join(rows) + "\n"


def markdown(lines: Sequence[Line], facts: Facts, fixtures: Sequence[str]) -> str:
    title = f"# Headroom's agent on {facts.model}, driver {facts.driver}"
    about = [
        f"`{facts.command}` on {facts.date}: {facts.gpus} x {facts.model}, driver {facts.driver},"
        f" CUDA {facts.cuda}, as {facts.user}, {facts.took_s:.0f} s.",
        f"GPU in use by others: {facts.busy or 'no'}.",
    ]
    rows = ["| line | verdict | figures |", "|---|---|---|"]
    rows += [f"| {line.name} | {line.verdict.value} | {_cell(line.summary)} |" for line in lines]
    parts = [title, "\n".join(about), "\n".join(rows)]
    calls = next((line.figures.get("calls") for line in lines if line.name == "latency"), None)
    if calls:
        parts.append("\n".join(["## Driver calls", "", *_calls(calls)]))
    parts.append("Recorded beside this file: " + ", ".join(f"`{name}`" for name in fixtures) + ".")
    return "\n\n".join(parts) + "\n"


def as_json(lines: Sequence[Line], facts: Facts) -> str:
    return (
        json.dumps(
            {
                "facts": {key: getattr(facts, key) for key in facts.__slots__},
                "lines": [
                    {
                        "name": line.name,
                        "verdict": line.verdict.value,
                        "summary": line.summary,
                        "figures": line.figures,
                    }
                    for line in lines
                ],
            },
            indent=1,
        )
        + "\n"
    )


def _calls(calls: dict[str, dict[str, Any]]) -> list[str]:
    rows = ["| call | p50 | p99 | calls | NVML codes |", "|---|---|---|---|---|"]
    for name, call in sorted(calls.items(), key=lambda each: -each[1]["p99_ms"]):
        codes = ", ".join(sorted(call["codes"]))
        rows.append(
            f"| `{name}` | {call['p50_ms']:.3f} ms | {call['p99_ms']:.3f} ms |"
            f" {call['count']} | {codes} |"
        )
    return rows


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _count(lines: Sequence[Line], verdict: Verdict) -> int:
    return sum(line.verdict is verdict for line in lines)
