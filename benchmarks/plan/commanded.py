"""Runs `headroom plan` on two weeks of clusters of all families, and checks what it prints.

The ranges of week 1 are compared with the replays of week 2, and annotations with the peaks in the
CSV file of week 1. Nodes have 4 GPUs.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.plan import families, generated
from headroom.contract.quantity import parse_bytes

WEEK_S = 7 * generated.DAY_S
#: Sizes of clusters, which are also their numbers of nodes.
SIZES = (15, 30, 50)
_OPTIONS = (
    *("--mode", "steered", "--replicas", "4", "--vram", "peaks"),
    *("--seeds", "2", "--processes", "1", "--json"),
)


@dataclass(frozen=True, slots=True)
class Checked:
    """The checks of what was printed about one cluster."""

    family: str
    pods: int
    #: Whether the ranges of the unshared need, of the need with replicas and of the saved ratio
    #: contain the figures of week 2; None without ranges.
    contained: tuple[bool, bool, bool] | None
    annotations: int
    #: Number of annotations below a peak of their workload, and of workloads also named exclusive.
    below: int
    both: int


def check(number: int, first_seed: int) -> Checked:
    """Plan both weeks of one cluster."""
    names = list(families.TUNED | families.JUDGED)
    name, size = names[number % len(names)], SIZES[number % len(SIZES)]
    rows = families.rows(name, first_seed + number, 14, size)
    weeks = [sorted(_week(rows, at), key=lambda row: row.created_s) for at in (0, 1)]
    one, other = (_planned(week, size) for week in weeks)
    peaks: dict[str, int] = {}
    for row in weeks[0]:
        peaks[row.workload] = max(peaks.get(row.workload, 0), row.peak_mib)
    amounts = {
        each["workload"]: parse_bytes(each["annotation"].partition(": ")[2]) >> 20
        for each in one["next_steps"]["annotate"]
    }
    exclusive = {each["workload"] for each in one["exclusive_workloads"]}
    return Checked(
        name,
        len(weeks[0]),
        _contained(one["configurations"], other["configurations"]),
        len(amounts),
        sum(amount < peaks[workload] for workload, amount in amounts.items()),
        len(exclusive & amounts.keys()),
    )


def _week(rows: list[generated.Row], number: int) -> Iterator[generated.Row]:
    for row in rows:
        begin_s = max(row.created_s, number * WEEK_S) - number * WEEK_S
        end_s = min(row.ended_s, (number + 1) * WEEK_S) - number * WEEK_S
        if begin_s < end_s:
            figures = row.name, row.workload, row.gpus, row.peak_mib, row.sm_ratio
            yield generated.Row(*figures, begin_s, end_s)


def _planned(rows: list[generated.Row], nodes: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        pods, machines = generated.write(Path(folder), rows, nodes)
        files = "--pods", str(pods), "--machines", str(machines)
        command = [sys.executable, "-m", "headroom", "plan", *files, *_OPTIONS]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)


def _contained(one: Any, other: Any) -> tuple[bool, bool, bool] | None:
    ranges = [each["gpus_range"] for each in one]
    if None in ranges:
        return None
    needs = [each["replays"][0]["gpus"] for each in other]
    low, high = one[1]["saved_ratio_range"]
    unshared, shared = (
        first <= need <= last for (first, last), need in zip(ranges, needs, strict=True)
    )
    return unshared, shared, low <= round(1 - needs[1] / needs[0], 9) <= high
