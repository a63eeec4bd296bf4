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
from benchmarks.plan.backtest import PEAKS
from headroom.contract.quantity import parse_bytes
from headroom.planner.csv_source import read_history
from headroom.planner.next_steps import advice, quantity
from headroom.planner.workload import with_workloads

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
    name, size, weeks = _cluster(number, first_seed)
    one, other = (_planned(week, size) for week in weeks)
    peaks = _peaks(weeks[0])
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


def advised(number: int, first_seed: int) -> Checked:
    """Check the advice from each week of one cluster, which needs no replays."""
    name, size, weeks = _cluster(number, first_seed)
    annotations = below = both = 0
    for week in filter(None, weeks):
        with tempfile.TemporaryDirectory() as folder:
            history = read_history(*generated.write(Path(folder), week, size))
        share, stay = advice(with_workloads(history), PEAKS)
        peaks = _peaks(week)
        for each in share:
            assert each.need_bytes is not None
            annotations += 1
            below += parse_bytes(quantity(each.need_bytes)) >> 20 < peaks[each.workload]
        both += len({each.workload for each in share} & {each.workload for each in stay})
    return Checked(name, sum(map(len, weeks)), None, annotations, below, both)


def _cluster(number: int, first_seed: int) -> tuple[str, int, list[list[generated.Row]]]:
    """Return the family of a cluster, its size, and the pods of both weeks."""
    names = list(families.TUNED | families.JUDGED)
    name, size = names[number % len(names)], SIZES[number % len(SIZES)]
    rows = families.rows(name, first_seed + number, 14, size)
    return name, size, [sorted(_week(rows, at), key=lambda row: row.created_s) for at in (0, 1)]


def _peaks(rows: list[generated.Row]) -> dict[str, int]:
    """Return the highest peak of each workload, in MiB."""
    peaks: dict[str, int] = {}
    for row in rows:
        peaks[row.workload] = max(peaks.get(row.workload, 0), row.peak_mib)
    return peaks


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
