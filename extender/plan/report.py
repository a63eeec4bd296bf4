"""Words of a plan: sentences, the table, the assumptions, and the same as plain data."""

import math
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from extender.plan.intervals import LEAST, interval
from extender.plan.lives import EXCLUSIVE_ABOVE, GIB, STEP_BYTES, largest_bytes
from extender.plan.prices import monthly
from extender.plan.scenarios import NO_WAIT_S, Configuration
from extender.plan.study import Figures, Study, models_of

#: Maximum number of workloads that a report lists.
_MOST_LISTED = 10
#: Width of lines for a terminal.
_COLUMNS = 100
FORMAT = "headroom.gpu/plan/v1alpha1"


def sentences(study: Study, prices: Mapping[str, float] | None) -> list[str]:
    """Return the answer in plain sentences, the most important first."""
    history, found = study.history, [_scope(study)]
    unshared = _range([each.gpus for each in study.unshared])
    days = _plural(history.days, "day")
    if unshared is None:
        found.append(
            f"Unshared, no number of nodes gives the waiting time of today's {history.gpus} GPUs."
        )
    else:
        wait = _seconds(study.unshared[0].today_wait_s or 0.0)
        found.append(
            f"Unshared, the work of these {days} needs {unshared} of today's {history.gpus} GPUs "
            f"for the same mean waiting time ({wait})."
        )
    best = best_row(study)
    if best is None:
        found.append("No configuration with shared GPUs gives the same waiting time.")
    else:
        found.append(_best_sentence(study, *best))
        if prices is not None:
            found += _money(study, best[1], prices)
    found += _counting(study, best)
    found += _exclusive(study)
    return found


def _scope(study: Study) -> str:
    history = study.history
    peaks = [life.peak_bytes for life in history.lives if life.peak_bytes is not None]
    sizes = sorted(
        machine.memory_bytes for machine in history.machines for _ in range(machine.gpus)
    )
    text = (
        f"Over {_plural(history.days, 'day')}, {_plural(len(history.lives), 'pod')} with a GPU ran "
        f"on a cluster of {_plural(history.gpus, 'GPU')} ({_plural(len(history.machines), 'node')})"
    )
    if peaks:
        peak, size = statistics.median(peaks) / GIB, statistics.median(sizes) / GIB
        text += f"; their median peak was {peak:.1f} of {size:.1f} GiB"
    return text + "."


def best_row(study: Study) -> tuple[Configuration, list[Figures]] | None:
    """Return the configuration without memory losses that needs the fewest GPUs in its worst
    replay; of equal ones the one with fewer replicas."""
    rows = [
        row
        for row in study.rows
        if row[0].mode != "counting" and all(each.gpus is not None for each in row[1])
    ]
    return min(
        rows,
        key=lambda row: (max(each.gpus or 0 for each in row[1]), row[0].replicas),
        default=None,
    )


def _best_sentence(study: Study, best: Configuration, figures: Sequence[Figures]) -> str:
    needed = _range([each.gpus for each in figures])
    text = (
        f"Shared by time-slicing with {best.replicas} replicas and {best.mode} placement "
        f"(vram from {best.vram.text}), the same work needs {needed} GPUs"
    )
    saved = [
        100 * (1 - each.gpus / unshared.gpus)
        for each, unshared in zip(figures, study.unshared, strict=True)
        if each.gpus is not None and unshared.gpus
    ]
    if saved:
        low, high = (round(each) for each in interval(saved))
        if low > 0:
            text += f", {_span(low, high)} % fewer"
        elif high <= 0:
            text += ": sharing saves none"
        else:
            text += f", between {max(0, low)} and {high} % fewer"
    return text + "."


def _money(study: Study, figures: Sequence[Figures], prices: Mapping[str, float]) -> Iterator[str]:
    saved = [
        monthly(unshared.models, prices) - monthly(each.models, prices)
        for each, unshared in zip(figures, study.unshared, strict=True)
        if each.gpus is not None and unshared.gpus is not None
    ]
    if saved:
        low, high = whole(saved)
        yield (
            f"At the given prices that is {_span(low, high)} a month less than unshared GPUs cost."
        )


def _counting(study: Study, best: tuple[Configuration, list[Figures]] | None) -> Iterator[str]:
    rows = [row for row in study.rows if row[0].mode == "counting"]
    same = [row for row in rows if best is not None and row[0].replicas == best[0].replicas]
    for configuration, figures in same or rows[:1]:
        lost = [each.out_of_memory for each in figures if each.gpus is not None]
        if lost:
            low, high = whole(lost)
            part = 100 * high / max(1, len(study.history.lives))
            pods = f"{_span(low, high)} pods (up to {part:.1f} % of all)"
            yield (
                f"With the same {configuration.replicas} replicas but without Headroom, "
                f"{pods if max(lost) else 'no pod'} would have run out of memory: kube-scheduler "
                "counts replicas only."
            )


def _exclusive(study: Study) -> Iterator[str]:
    stay = exclusive_workloads(study)
    if stay:
        names = ", ".join(f"{name} ({why})" for name, why in stay[:_MOST_LISTED])
        more = len(stay) - _MOST_LISTED
        also = f", and {more} more" if more > 0 else ""
        stays = "1 workload should" if len(stay) == 1 else f"{len(stay)} workloads should"
        yield f"{stays} stay exclusive: {names}{also}."


def exclusive_workloads(study: Study) -> list[tuple[str, str]]:
    """Return the workloads that keep GPUs of their own, with the reason; most pods first.

    Empty if the source has no names of workloads: then each pod is a workload of its own.
    """
    sizes = largest_bytes(study.history.machines)
    counts: dict[str, list[int]] = {}
    reasons: dict[str, str] = {}
    for life in study.history.lives:
        need_bytes = study.vram.need_bytes(life)
        allowed = [size for model, size in sizes.items() if not life.models or model in life.models]
        count = counts.setdefault(life.workload, [0, 0])
        count[0] += 1
        if life.gpus > 1:
            reasons[life.workload] = f"{life.gpus} GPUs a pod"
        elif need_bytes is None:
            reasons[life.workload] = "requests whole GPUs"
        elif need_bytes > EXCLUSIVE_ABOVE * max(allowed, default=0):
            reasons[life.workload] = f"needs {need_bytes / GIB:.1f} GiB"
        else:
            continue
        count[1] += 1
    if len(counts) == len(study.history.lives):
        return []
    stay = [name for name, (pods, exclusive) in counts.items() if 2 * exclusive > pods]
    return [(name, reasons[name]) for name in sorted(stay, key=lambda n: (-counts[n][0], n))]


def assumptions(study: Study) -> list[str]:
    """Return everything that the figures assume."""
    history = study.history
    found = [*history.assumptions]
    if study.left_out:
        found.append(f"{study.left_out:,} pods fit on no node of the cluster and are left out.")
    if study.seeds == 1:
        ranges = "The only replay is that of the history as it was, so no figure has a range."
    else:
        kind = "the lowest and the highest figure of"
        if study.seeds >= LEAST:
            kind = "where the figure of another such history lies with probability 90 %, from"
        ranges = (
            f"Ranges are {kind} {study.seeds} replays: the history as it was, and "
            f"{study.seeds - 1} with its days and the number of their pods drawn again."
        )
    found += [
        ranges,
        f"A mean waiting time below {NO_WAIT_S:.0f} s counts as none.",
        "Each pod uses its peak from its start to its end, arrives when it was created and runs as "
        "long as it did: a pod that shares a GPU is not slowed down.",
        "Pods with several GPUs, and pods that need more than "
        f"{100 * EXCLUSIVE_ABOVE:.0f} % of the largest GPU that they may use, keep unshared nodes.",
        "Nodes are added and removed in today's mix of GPU models and sizes.",
        "A pod runs only on GPUs with at least the memory of its peak.",
        "Unshared nodes are packed as Headroom packs them; a scheduler that spreads needs more.",
        "The device plugin takes a GPU with the fewest replicas in use, at random between equals.",
        "Replica counting spreads pods over the nodes with the most free replicas.",
    ]
    if study.vram.source == "peaks":
        found.append(
            f"Pods request their measured peak plus {100 * study.vram.margin_ratio:.0f} %, rounded "
            f"up to {STEP_BYTES / GIB:.2f} GiB."
        )
    return found


def table(study: Study, prices: Mapping[str, float] | None) -> list[list[str]]:
    """Return the rows of the table, the heading first."""
    heading = ["configuration", "GPUs", "nodes", "wait on today's", "memory", "SM", "out of memory"]
    rows = [heading + (["a month"] if prices else [])]
    for text, figures in table_rows(study):
        sm = any(life.sm_ratio is not None for life in study.history.lives)
        cells = [
            text,
            _range([each.gpus for each in figures]) or "no number suffices",
            _range([each.nodes for each in figures]) or "-",
            _wait_range([each.today_wait_s for each in figures]),
            _percent([each.memory_ratio for each in figures if each.gpus]),
            _percent([each.sm_ratio for each in figures if each.gpus]) if sm else "unknown",
            _range([each.out_of_memory for each in figures]) or "-",
        ]
        if prices:
            costs = [round(monthly(each.models, prices)) for each in figures if each.gpus]
            cells.append(_range(costs) or "-")
        rows.append(cells)
    return rows


def table_rows(study: Study) -> list[tuple[str, list[Figures]]]:
    """Return the name and the figures of each configuration, unshared GPUs first."""
    return [("unshared", study.unshared), *((c.text, found) for c, found in study.rows)]


def as_text(study: Study, prices: Mapping[str, float] | None) -> str:
    """Return the report for a terminal."""
    rows = table(study, prices)
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = [line for each in sentences(study, prices) for line in _wrapped(each)]
    lines.append("")
    for row in rows:
        first = row[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([first, *rest]).rstrip())
    lines += ["", "Assumptions:"]
    lines += [line for each in assumptions(study) for line in _wrapped(f"- {each}", "  ")]
    return "\n".join(lines)


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _COLUMNS, subsequent_indent=indent)


def as_data(study: Study, prices: Mapping[str, float] | None) -> dict[str, Any]:
    """Return the report as plain data; times are in seconds, ratios from 0."""
    history = study.history
    return {
        "format": FORMAT,
        "days": history.days,
        "pods": len(history.lives),
        "gpus": history.gpus,
        "nodes": len(history.machines),
        "models": models_of(history.machines),
        "vram": study.vram.text,
        "seeds": study.seeds,
        "sentences": sentences(study, prices),
        "assumptions": assumptions(study),
        "exclusive_workloads": [
            {"workload": name, "reason": why} for name, why in exclusive_workloads(study)
        ],
        "configurations": [
            {
                "configuration": text,
                "replays": [_figures_data(each, prices) for each in figures],
            }
            for text, figures in table_rows(study)
        ],
    }


def _figures_data(each: Figures, prices: Mapping[str, float] | None) -> dict[str, Any]:
    data: dict[str, Any] = {
        "gpus": each.gpus,
        "nodes": each.nodes,
        "models": dict(each.models),
        "wait_s": round(each.wait_s, 3),
        "today_wait_s": None if each.today_wait_s is None else round(each.today_wait_s, 3),
        "memory_ratio": round(each.memory_ratio, 4),
        "sm_ratio": round(each.sm_ratio, 4),
        "out_of_memory_pods": each.out_of_memory,
        "today_out_of_memory_pods": each.today_out_of_memory,
    }
    if prices is not None:
        data["month_cost"] = round(monthly(each.models, prices), 2)
    return data


def _range(figures: Sequence[int | None]) -> str | None:
    """Return "96 to 104"; None if a figure is missing."""
    known = [each for each in figures if each is not None]
    return _span(*whole(known)) if len(known) == len(figures) and known else None


def whole(figures: Sequence[float]) -> tuple[int, int]:
    """Return the range of figures that are not negative, in whole numbers."""
    low, high = interval(figures)
    return max(0, math.floor(low)), math.ceil(high)


def _span(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _percent(ratios: Sequence[float]) -> str:
    return f"{_span(*whole([round(100 * ratio) for ratio in ratios]))} %" if ratios else "-"


def _wait_range(figures: Sequence[float | None]) -> str:
    known = [each for each in figures if each is not None]
    if not known or len(known) < len(figures):
        return "too few GPUs"
    low, high = _seconds(min(known)), _seconds(max(known))
    return low if low == high else f"{low} to {high}"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return "0 s" if seconds < 0.05 else f"{seconds:.1f} s"
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 36_000 else f"{seconds / 3600:.0f} h"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
