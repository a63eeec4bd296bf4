"""Compares the range that a plan states from one week with what the next week really needs.

The need is the fewest GPUs for the same waiting time, shared with 4 replicas and steered. Nodes of
generated clusters have one GPU each, so needs are exact to one GPU. To test many weeks in little
time, the need can also be the most GPUs that the pods use at a time if none of them waits and
packing is perfect. What sharing saves is the difference of two such needs.

The rival states the need of the last week plus and minus a ratio of it. Like the constants of the
plan, this ratio is chosen so that 90 % of the needs of each kind of weeks are contained. But it is
chosen separately for clusters of each size, which the plan does not require.
"""

import math
import multiprocessing
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.plan import generated
from headroom.planner.csv_source import read_history
from headroom.planner.demand import demand, mean_gpu_bytes
from headroom.planner.intervals import need_interval, part_interval, saving_interval, wider
from headroom.planner.resampling import resampled
from headroom.planner.scenarios import (
    NO_WAIT_S,
    Baseline,
    Configuration,
    answer,
    exclusive_pool,
    split,
    variation_of,
)
from headroom.planner.wording import outward
from headroom.planner.workload import DAY_S, History, Life, Machine, Vram, with_workloads

MIB = 1 << 20
WEEK_S = 7 * DAY_S
PEAKS = Vram("peaks", 0.1)
REPLICAS = 4
UNSHARED = Configuration("exclusive", 1, PEAKS)
SHARED = Configuration("steered", REPLICAS, PEAKS)
#: More GPUs than a test week needs, for each unit of its scale.
_MANY = 250
#: Ratio of the needs that a range should contain.
COVERED = 0.9


@dataclass(frozen=True, slots=True)
class Cluster:
    """One generated cluster of the test."""

    seed: int
    weeks: int
    scale: float
    drift_a_week: float
    seeds: int
    #: Whether to replay the weeks, instead of using their largest demands.
    replayed: bool


@dataclass(frozen=True, slots=True)
class Week:
    """A held-out week: the range stated from the week before it, and the needs of both weeks."""

    low: int
    high: int
    before: int
    need: int


@dataclass(frozen=True, slots=True)
class Saving:
    """The saving of a held-out week, and the range stated from the week before."""

    low: int
    high: int
    saved: float


def play(cluster: Cluster) -> list[Week]:
    """Return all weeks of a cluster except the first."""
    return held_out(_weeks(cluster), PEAKS, cluster.seeds, cluster.replayed)


def _weeks(cluster: Cluster) -> list[History]:
    """Return the history of each week of a cluster, without pods with several GPUs."""
    rows = generated.rows(7 * cluster.weeks, cluster.seed, cluster.scale, cluster.drift_a_week)
    rows = [row for row in rows if row.gpus == 1]
    return [history_of(rows, week, cluster.scale) for week in range(cluster.weeks)]


def held_out(
    histories: Sequence[History], vram: Vram, seeds: int, replayed: bool = False
) -> list[Week]:
    """Return all weeks except the first, each with the range stated from the week before it.

    Weeks for which no range is stated are left out.
    """
    need = replayed_need if replayed else largest_demand
    needs = [need(history, history.lives, vram, 0) for history in histories]
    found = []
    for week, before in enumerate(histories[:-1]):
        drawn = [need(before, resampled(before, seed), vram, seed) for seed in range(1, seeds)]
        reach = variation_of(before, replace(SHARED, vram=vram)).reach
        if reach is not None:
            low, high = outward(*need_interval([needs[week], *drawn], reach))
            found.append(Week(low, high, needs[week], needs[week + 1]))
    return found


def savings(cluster: Cluster) -> list[tuple[Saving, Saving]]:
    """Return the savings of all weeks of a cluster except the first, in GPUs and in percent.

    The ranges are stated by the week before, from largest demands.
    """
    histories = _weeks(cluster)
    saved = [_saved(history, history.lives) for history in histories]
    found = []
    for week, before in enumerate(histories[:-1]):
        drawn = [_saved(before, resampled(before, seed)) for seed in range(1, cluster.seeds)]
        gpus, parts = zip(saved[week], *drawn, strict=True)
        reach = wider(*(variation_of(before, each).reach for each in (UNSHARED, SHARED)))
        if reach is None:
            continue
        low, high = outward(*saving_interval(gpus, reach))
        least, most = (100 * end for end in part_interval(parts, reach))
        next_gpus, next_part = saved[week + 1]
        found.append(
            (Saving(low, high, next_gpus), Saving(round(least), round(most), 100 * next_part))
        )
    return found


def _saved(history: History, lives: Sequence[Life]) -> tuple[float, float]:
    """Return the number of GPUs that sharing saves, and its ratio to the unshared GPUs."""
    unshared = demand(lives, 1, PEAKS, mean_gpu_bytes(history.machines))[0]
    gpus = unshared - largest_demand(history, lives, PEAKS, 0)
    return gpus, gpus / unshared if unshared else 0.0


def history_of(rows: Sequence[generated.Row], week: int, scale: float) -> History:
    start_s = week * WEEK_S
    lives = [
        Life(
            row.name,
            row.workload,
            row.created_s - start_s,
            row.ended_s - row.created_s,
            1,
            None,
            row.peak_mib * MIB,
        )
        for row in rows
        if start_s <= row.created_s < start_s + WEEK_S
    ]
    many = math.ceil(_MANY * scale)
    machines = [Machine(f"n{at}", "L40S", 1, generated.GPU_MIB * MIB) for at in range(many)]
    return with_workloads(History(tuple(machines), tuple(lives), ()))


def trace_weeks(pods: Path, nodes: Path, first_day: int, seeds: int) -> list[Week]:
    """Return all weeks of a trace that begin on ``first_day`` or later and follow another week.
    Pods that run at the start or the end of a week count only for their time in it."""
    whole, vram = read_history(pods, nodes), Vram("requests")
    days = range(first_day, int(whole.span_s // DAY_S) - 6)
    week = {day: cut(whole, day * DAY_S) for day in days}
    pairs = [(week[day], week[day + 7]) for day in days if day + 7 in week]
    return [found for pair in pairs for found in held_out(pair, vram, seeds)]


def cut(whole: History, since_s: float, length_s: float = WEEK_S) -> History:
    """Return a part of a history from this time on, including pods that run across its ends."""
    lives = []
    for life in whole.lives:
        begin_s = max(life.created_s, since_s)
        end_s = min(life.created_s + life.run_s, since_s + length_s)
        if begin_s < end_s:
            lives.append(replace(life, created_s=begin_s - since_s, run_s=end_s - begin_s))
    return replace(whole, lives=tuple(sorted(lives, key=lambda life: life.created_s)))


def largest_demand(history: History, lives: Sequence[Life], vram: Vram, seed: int) -> int:
    """Return the most GPUs that the pods use at a time if none waits and packing is perfect."""
    stay, share = split(lives, history.machines, Configuration("steered", REPLICAS, vram))
    size = mean_gpu_bytes(history.machines)
    return math.ceil(demand(stay, 1, vram, size)[0] + demand(share, REPLICAS, vram, size)[0])


def replayed_need(history: History, lives: Sequence[Life], vram: Vram, seed: int) -> int:
    """Return the fewest GPUs with which no pod waits longer than on the whole cluster."""
    today = Baseline(0.0, NO_WAIT_S, 0)
    configuration = Configuration("steered", REPLICAS, vram)
    exclusive = exclusive_pool(history, lives, configuration, seed, today)
    found = answer(history, lives, configuration, seed, today, exclusive)
    assert found.gpus is not None
    return found.gpus


def run(clusters: Sequence[Cluster], processes: int) -> list[Week]:
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return [week for weeks in pool.map(play, clusters, chunksize=1) for week in weeks]


def run_savings(clusters: Sequence[Cluster], processes: int) -> list[tuple[Saving, Saving]]:
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return [each for some in pool.map(savings, clusters, chunksize=1) for each in some]


def savings_row(name: str, weeks: Sequence[tuple[Saving, Saving]]) -> str:
    """Return a row: weeks, then mean, coverage and mean width of the savings in GPUs and
    percent."""
    cells = [name, str(len(weeks))]
    for some in zip(*weeks, strict=True):
        inside = [each.low <= each.saved <= each.high for each in some]
        cells.append(f"{statistics.mean(each.saved for each in some):.1f}")
        cells.append(f"{100 * statistics.mean(inside):.0f} %")
        cells.append(f"{statistics.mean(each.high - each.low for each in some):.1f}")
    return f"| {' | '.join(cells)} |"


def rival_factor(kinds: Sequence[Sequence[Week]]) -> float:
    """Return the smallest ratio, in percent steps, by which the last week's need must be widened to
    contain ``COVERED`` of the needs of each kind of weeks."""
    for percent in range(1, 100):
        factor = percent / 100
        if all(_covered([rival(w, factor) for w in weeks], weeks) >= COVERED for weeks in kinds):
            return factor
    return 1.0


def rival(week: Week, factor: float) -> tuple[int, int]:
    """Return the range around the need of the last week."""
    return outward(week.before * (1 - factor), week.before * (1 + factor))


def table(name: str, weeks: Sequence[tuple[Week, float]]) -> str:
    """Return a row: weeks, mean need, coverage and mean width of both ranges.

    ``weeks`` pairs each week with the rival's factor.
    """
    held = [week for week, _ in weeks]
    cells = [name, str(len(held)), f"{statistics.mean(week.need for week in held):.1f}"]
    stated = [(week.low, week.high) for week in held]
    for ranges in (stated, [rival(week, factor) for week, factor in weeks]):
        cells.append(f"{100 * _covered(ranges, held):.0f} %")
        cells.append(f"{statistics.mean(high - low for low, high in ranges):.1f}")
    return f"| {' | '.join(cells)} |"


def _covered(ranges: Sequence[tuple[int, int]], weeks: Sequence[Week]) -> float:
    inside = [low <= each.need <= high for (low, high), each in zip(ranges, weeks, strict=True)]
    return sum(inside) / len(inside)
