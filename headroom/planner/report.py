"""The report of a plan: text for a terminal, rows of its table, and JSON data."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headroom.planner.decision import choices, saves
from headroom.planner.next_steps import (
    Candidate,
    advice,
    device_choice,
    namespace_defaults,
    plugin_config,
)
from headroom.planner.prices import monthly
from headroom.planner.savings import saved_month_cost, saved_ratio
from headroom.planner.sentences import assumptions, sentences
from headroom.planner.study import WITH_HEADROOM, Figures, Row, Study, best_row, models_of
from headroom.planner.wording import need_range, number_range, percent_range, runs, wait_range

#: Maximum number of workloads that a report lists.
_MOST_LISTED = 10
#: Maximum width of lines on a terminal.
_COLUMNS = 100
FORMAT = "headroom.gpu/plan/v1alpha1"


def table(study: Study, prices: Mapping[str, float] | None) -> list[list[str]]:
    """Return the rows of the table, beginning with the heading."""
    heading = ["configuration", "GPUs", "nodes", "wait today", "memory", "SM", "competing"]
    heading.append("out of memory")
    shown = shown_rows(study, prices)
    return [
        heading + (["a month"] if prices else []),
        *([each.name, *each.cells] for each in shown),
    ]


@dataclass(frozen=True, slots=True)
class Shown:
    """A row of the table, which stands for all configurations with equal cells."""

    name: str
    cells: list[str]
    #: The first of the configurations.
    row: Row


def shown_rows(study: Study, prices: Mapping[str, float] | None) -> list[Shown]:
    """Return the rows of the table: unshared GPUs first, and configurations in which pods run out
    of memory last."""
    alike: dict[tuple[object, ...], list[Row]] = {}
    for number, row in enumerate(table_rows(study)):
        kind = row.configuration
        # Counting is compared with Headroom, so the two are never in one row.
        plain = kind.choice in (*WITH_HEADROOM, "counting") and not (kind.one_pool or kind.max_sm)
        key = (kind.choice == "counting", kind.vram) if plain else (number,)
        alike.setdefault((row.loses_pods, *key, *_cells(study, row, prices)), []).append(row)
    found = [
        Shown(_names(study, rows), _cells(study, rows[0], prices), rows[0])
        for rows in alike.values()
    ]
    return sorted(found, key=lambda each: each.row.loses_pods)


def _names(study: Study, rows: Sequence[Row]) -> str:
    """Return one name for configurations with equal figures."""
    if len(rows) == 1:
        return row_name(study, rows[0])
    replicas: dict[str, list[int]] = {}
    for row in rows:
        replicas.setdefault(row.configuration.choice, []).append(row.configuration.replicas)
    choices: dict[str, list[str]] = {}
    for choice, counts in replicas.items():
        choices.setdefault(runs(sorted(counts)), []).append(choice)
    text = "; ".join(
        f"{counts} replicas, {' or '.join(names).replace('counting', 'counted only')}"
        for counts, names in choices.items()
    )
    return text + _other_vram(study, rows[0])


def _cells(study: Study, row: Row, prices: Mapping[str, float] | None) -> list[str]:
    """Return the cells of a row behind its name."""
    figures = row.figures
    has_sm = any(life.sm_ratio is not None for life in study.history.lives)
    has_activity = any(life.has_activity for life in study.history.lives)
    active = [each.sm_ratio for each in figures if each.gpus]
    competing = [each.contention.competing_ratio for each in figures if each.gpus]
    cells = [
        row.gpus_text or "no number suffices",
        need_range([each.nodes for each in figures], row.variation.reach) or "-",
        wait_range([each.today_wait_s for each in figures]),
        percent_range([each.memory_ratio for each in figures if each.gpus]),
        percent_range(active) if has_sm else "unknown",
        percent_range(competing) if has_activity else "unknown",
        number_range([each.out_of_memory for each in figures]) or "-",
    ]
    if prices:
        costs = [round(monthly(each.models, prices)) for each in figures if each.gpus]
        cells.append(need_range(costs, row.variation.reach) or "-")
    return cells


def table_rows(study: Study) -> list[Row]:
    """Return the rows of all configurations, unshared GPUs first."""
    return [study.unshared, *study.rows]


def row_name(study: Study, row: Row) -> str:
    """Return the name of a configuration in the report."""
    return row.configuration.text + _other_vram(study, row)


def _other_vram(study: Study, row: Row) -> str:
    vram = row.configuration.vram
    return "" if vram == study.vram else f", vram from {vram.text}"


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
    lines += next_step_lines(study)
    lines += ["", "Assumptions:"]
    lines += [line for each in assumptions(study) for line in _wrapped(f"- {each}", "  ")]
    return "\n".join(lines)


def next_step_lines(study: Study) -> list[str]:
    """Return the next steps as lines of text, or none if sharing saves no GPU."""
    best = best_row(study.rows)
    if best is None or not saves(study, best):
        return []
    steps = [["Configure the device plugin of the nodes to share:", ""]]
    steps[-1] += plugin_config(best.configuration).splitlines()
    if best.configuration.choice != "predicted":
        steps.append(["Let Headroom choose the GPU on these nodes:", ""])
        steps[-1].append(device_choice(best.configuration))
    share, stay = advice(study.history, study.vram)
    if share:
        steps.append(["Annotate these workloads; the first leave the most memory to others:"])
        steps[-1] += ["", *_annotations(share)]
    defaults, without = namespace_defaults(share, stay)
    if defaults or without:
        steps.append(["Or give namespaces a default, which covers their largest pod:", ""])
        steps[-1] += [f"{name}  {default}" for name, default in defaults[:_MOST_LISTED]]
        steps[-1] += [
            f"{name}  none, because {workload} should stay exclusive"
            for name, workload in without[:_MOST_LISTED]
        ]
    lines = ["", "Next steps:"]
    for number, (heading, *rest) in enumerate(steps, 1):
        lines += [f"{number}. {heading}", *(f"     {line}" if line else "" for line in rest), ""]
    return lines[:-1]


def _annotations(share: Sequence[Candidate]) -> list[str]:
    width = max(len(each.workload) for each in share[:_MOST_LISTED])
    lines = [
        f"{each.workload:<{width}}  {each.annotation}  # {each.remark}"
        for each in share[:_MOST_LISTED]
    ]
    more = len(share) - _MOST_LISTED
    return [*lines, f"and {more} more: --json"] if more > 0 else lines


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _COLUMNS, subsequent_indent=indent, break_on_hyphens=False)


def as_data(study: Study, prices: Mapping[str, float] | None) -> dict[str, Any]:
    """Return the report as JSON data. Times are in seconds, and ratios start at 0."""
    history = study.history
    _, stay = advice(history, study.vram)
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
        "decision": {
            "today_gpus": history.gpus,
            **{
                each.name: {
                    "configuration": row_name(study, each.row),
                    "history_gpus": each.history_gpus,
                    "gpus_range": each.gpus_range,
                    "keep_at_least_gpus": each.keep_gpus,
                }
                for each in choices(study)
            },
        },
        "assumptions": assumptions(study),
        "exclusive_workloads": [
            {"workload": each.workload, "reason": each.reason} for each in stay
        ],
        "next_steps": _next_steps_data(study),
        "configurations": [
            {
                "configuration": row_name(study, row),
                "vram": row.configuration.vram.text,
                "gpus_range": None if row.variation.missing else row.gpus_ends,
                "saved_ratio_range": None if _no_savings(study, row) else saved_ratio(study, row),
                "saved_month_cost_range": (
                    None
                    if prices is None or _no_savings(study, row)
                    else saved_month_cost(study, row, prices)
                ),
                "no_range_because": row.variation.missing or None,
                "replays": [_figures_data(each, prices) for each in row.figures],
            }
            for row in table_rows(study)
        ],
    }


def _no_savings(study: Study, row: Row) -> bool:
    """Return whether the row has no range of savings."""
    return bool(row.variation.missing or study.unshared.variation.missing)


def _next_steps_data(study: Study) -> dict[str, Any]:
    best = best_row(study.rows)
    share, stay = advice(study.history, study.vram)
    shared = best.configuration if best and saves(study, best) else None
    return {
        "plugin_config": plugin_config(shared) if shared else None,
        "device_choice": shared.choice if shared else None,
        "annotate": [
            {
                "workload": each.workload,
                "pods": each.pods,
                "annotation": each.annotation,
                "gained_bytes": each.gained_bytes,
                "pods_above": each.above,
                "unmeasured_pods": each.unmeasured,
            }
            for each in share
        ],
        "namespaces": [
            {"namespace": name, "annotation": default}
            for name, default in namespace_defaults(share, stay)[0]
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
        "competing_ratio": round(each.contention.competing_ratio, 4),
        "lost_ratio": round(each.contention.lost_ratio, 4),
        "competing_pairs": [
            {"workloads": [one, other], "seconds": round(seconds)}
            for one, other, seconds in each.contention.pairs
        ],
        "out_of_memory_pods": each.out_of_memory,
        "today_out_of_memory_pods": each.today_out_of_memory,
    }
    if prices is not None:
        data["month_cost"] = round(monthly(each.models, prices), 2)
    return data
