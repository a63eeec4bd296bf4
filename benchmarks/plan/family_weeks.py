"""Tests the ranges of a plan on families of clusters, with the week that follows each range.

Needs are the largest demands of a week, unshared and with 4 replicas, and the saving by sharing.
The rival states the need of the last week plus and minus a ratio of it. This is the smallest ratio
for which its range contains 90 % of the needs of the tuned families."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.plan import families, generated
from benchmarks.plan.backtest import MIB, PEAKS, REPLICAS, SHARED, UNSHARED, cut
from headroom.planner.demand import demand, mean_gpu_bytes
from headroom.planner.intervals import need_interval, part_interval, wider
from headroom.planner.resampling import resampled
from headroom.planner.scenarios import split, variation_of
from headroom.planner.wording import outward
from headroom.planner.workload import DAY_S, History, Life, Machine, with_workloads

#: Number of days of each cluster, and of the periods into which they are cut.
DAYS, PERIOD_DAYS = 28, 7
#: Approximate numbers of GPUs that the clusters of a family need.
SIZES = (10, 40, 120)
#: Number of replays of a plan: the unchanged history, and drawn histories.
_SEEDS = 5
_COVERED = 0.9
#: Minimum number of ranges from which a row shows ratios.
_LEAST_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Stated:
    """The ranges that a plan states from one week, and the figures of the next week.

    Each is a pair of the unshared need and the need with replicas, in GPUs.
    """

    before: tuple[int, int]
    after: tuple[int, int]
    #: None if there is no range.
    ranges: tuple[tuple[int, int], tuple[int, int]] | None
    #: Range of the saved ratio, and the saved ratio of the next week.
    part: tuple[float, float]
    after_part: float
    why_none: str = ""


def weeks(name: str, seed: int, size: float, days: int = PERIOD_DAYS) -> Iterator[Stated]:
    """Yield all periods of ``days`` days of one cluster except the first."""
    whole, length_s = _history(name, seed, size), days * DAY_S
    histories = [
        with_workloads(cut(whole, number * length_s, length_s)) for number in range(DAYS // days)
    ]
    for before, after in pairwise(histories):
        if before.lives and after.lives:
            yield _stated(before, after)


def _history(name: str, seed: int, size: float) -> History:
    rows = families.rows(name, seed, DAYS, size)
    lives = [
        Life(
            row.name,
            row.workload,
            float(row.created_s),
            float(row.ended_s - row.created_s),
            row.gpus,
            None,
            row.peak_mib * MIB,
        )
        for row in rows
    ]
    machine = Machine("n", "L40S", generated.GPUS_OF_NODE, generated.GPU_MIB * MIB)
    return History((machine,), tuple(lives), ())


def _stated(before: History, after: History) -> Stated:
    unshared, shared = (variation_of(before, each) for each in (UNSHARED, SHARED))
    needs = [_needs(before, resampled(before, seed)) for seed in range(_SEEDS)]
    after_needs = _needs(after, after.lives)
    after_part = 1 - after_needs[1] / after_needs[0]
    missing = unshared.missing or shared.missing
    if missing:
        return Stated(needs[0], after_needs, None, (0.0, 0.0), after_part, missing)
    one, other = zip(*needs, strict=True)
    parts = [1 - some / every for every, some in needs]
    return Stated(
        needs[0],
        after_needs,
        (
            outward(*need_interval(one, unshared.reach)),
            outward(*need_interval(other, shared.reach)),
        ),
        part_interval(parts, wider(unshared.reach, shared.reach)),
        after_part,
    )


def _needs(history: History, lives: Sequence[Life]) -> tuple[int, int]:
    size = mean_gpu_bytes(history.machines)
    stay, share = split(lives, history.machines, SHARED)
    shared = demand(stay, 1, PEAKS, size)[0] + demand(share, REPLICAS, PEAKS, size)[0]
    return math.ceil(demand(lives, 1, PEAKS, size)[0]), math.ceil(shared)


def rival_factor(tuned: Mapping[str, Sequence[Stated]], at: int) -> float:
    """Return the ratio by which the last week's need is widened. ``at`` selects the need."""
    every = [week for some in tuned.values() for week in some]
    parts = (percent / 100 for percent in range(1, 400))
    return next(part for part in parts if _rival_covered(every, at, part) >= _COVERED)


def _rival_covered(some: Sequence[Stated], at: int, factor: float) -> float:
    with_range = [each for each in some if each.ranges]
    inside = [
        each.before[at] * (1 - factor) <= each.after[at] <= each.before[at] * (1 + factor)
        for each in with_range
    ]
    return statistics.mean(inside) if inside else 1.0


def row(name: str, some: Sequence[Stated], factors: tuple[float, float]) -> str:
    """Return a row of the table of docs/design/plan.md. Widths are ratios of the need."""
    with_range = [each for each in some if each.ranges]
    differ, dates = (
        sum(why in each.why_none for each in some) for why in ("differ too much", "follow dates")
    )
    small = len(some) - len(with_range) - differ - dates
    cells = [name, str(len(some)), str(small), str(differ), str(dates)]
    if len(with_range) < _LEAST_SHOWN:
        return f"| {' | '.join([*cells, *['-'] * 9])} |"
    for at, factor in enumerate(factors):
        inside = [e.ranges[at][0] <= e.after[at] <= e.ranges[at][1] for e in with_range if e.ranges]
        wide = [(e.ranges[at][1] - e.ranges[at][0]) / e.after[at] for e in with_range if e.ranges]
        last = [2 * factor * e.before[at] / e.after[at] for e in with_range]
        cells += [f"{100 * statistics.mean(inside):.0f} %", f"{statistics.mean(wide):.2f}"]
        cells += [f"{100 * _rival_covered(some, at, factor):.0f} %", f"{statistics.mean(last):.2f}"]
    parts = [each.part[0] <= each.after_part <= each.part[1] for each in with_range]
    cells.append(f"{100 * statistics.mean(parts):.0f} %")
    return f"| {' | '.join(cells)} |"
