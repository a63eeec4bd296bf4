"""Compares the range that a plan states from one week with what the next week really needs.

The need is the fewest GPUs for the same waiting time, shared with 4 replicas and steered. Nodes
have one GPU each, so that needs are exact to one GPU. To test many weeks in little time, the need
can also be the most GPUs that the pods use at once if none waits, packed without loss.

The rival repeats the need of the last week, in a range whose ends are factors of it: the 5 % and
the 95 % quantile of the change from week to week, over all weeks of the test. So the rival gets in
advance how far weeks differ.
"""

import math
import multiprocessing
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.plan import generated
from extender.plan.intervals import interval
from extender.plan.lives import DAY_S, History, Life, Machine, Vram
from extender.plan.resampling import resampled
from extender.plan.scenarios import (
    NO_WAIT_S,
    Baseline,
    Configuration,
    answer,
    demand,
    exclusive_pool,
    split,
)

MIB = 1 << 20
VRAM = Vram("peaks", 0.1)
CONFIGURATION = Configuration("steered", 4, VRAM)
#: More GPUs than any week of a test needs.
_MANY = 120


@dataclass(frozen=True, slots=True)
class Cluster:
    """One generated cluster of the test."""

    seed: int
    weeks: int
    scale: float
    drift_a_week: float
    seeds: int
    #: Replay the weeks; else take their largest demand.
    replayed: bool


@dataclass(frozen=True, slots=True)
class Week:
    """A held-out week: the range stated from the week before, and the needs of both weeks."""

    low: float
    high: float
    before: int
    need: int

    @property
    def covered(self) -> bool:
        return self.low <= self.need <= self.high


def play(cluster: Cluster) -> list[Week]:
    """Return all weeks of a cluster but the first."""
    rows = [
        row
        for row in generated.rows(
            7 * cluster.weeks, cluster.seed, cluster.scale, cluster.drift_a_week
        )
        if row.gpus == 1
    ]
    need = replayed_need if cluster.replayed else largest_demand
    histories = [history_of(rows, week) for week in range(cluster.weeks)]
    needs = [need(history, history.lives, 0) for history in histories]
    found = []
    for week in range(1, cluster.weeks):
        before = histories[week - 1]
        drawn = [need(before, resampled(before, s), s) for s in range(1, cluster.seeds)]
        low, high = interval([needs[week - 1], *drawn])
        found.append(Week(low, high, needs[week - 1], needs[week]))
    return found


def history_of(rows: Sequence[generated.Row], week: int) -> History:
    start_s = week * 7 * DAY_S
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
        if start_s <= row.created_s < start_s + 7 * DAY_S
    ]
    machines = [Machine(f"n{at}", "L40S", 1, generated.GPU_MIB * MIB) for at in range(_MANY)]
    return History(tuple(machines), tuple(lives), ())


def largest_demand(history: History, lives: Sequence[Life], seed: int) -> int:
    """Return the most GPUs that the pods use at once if none waits, packed without loss."""
    stay, share = split(lives, history.machines[:1], VRAM)
    size = history.machines[0].memory_bytes
    most = demand(stay, 1, VRAM, size)[0] + demand(share, CONFIGURATION.replicas, VRAM, size)[0]
    return math.ceil(most)


def replayed_need(history: History, lives: Sequence[Life], seed: int) -> int:
    """Return the fewest GPUs with which nothing waits longer than on the whole cluster."""
    today = Baseline(0.0, NO_WAIT_S, 0)
    exclusive = exclusive_pool(history, lives, VRAM, seed, today)
    found = answer(history, lives, CONFIGURATION, seed, today, exclusive)
    assert found.gpus is not None
    return found.gpus


def run(clusters: Sequence[Cluster], processes: int) -> list[Week]:
    with multiprocessing.Pool(processes) as pool:
        return [week for weeks in pool.map(play, clusters, chunksize=1) for week in weeks]


def table(name: str, weeks: Sequence[Week]) -> str:
    """Return a row: weeks, mean need, coverage and mean width of both ranges."""
    changes = sorted(week.need / week.before for week in weeks)
    low, high = _quantile(changes, 0.05), _quantile(changes, 0.95)
    rival = [(low * week.before, high * week.before) for week in weeks]
    covered = sum(a <= week.need <= b for week, (a, b) in zip(weeks, rival, strict=True))
    cells = [
        name,
        str(len(weeks)),
        f"{statistics.mean(week.need for week in weeks):.1f}",
        f"{100 * sum(week.covered for week in weeks) / len(weeks):.0f} %",
        f"{statistics.mean(week.high - week.low for week in weeks):.1f}",
        f"{100 * covered / len(weeks):.0f} %",
        f"{statistics.mean(b - a for a, b in rival):.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def _quantile(ordered: Sequence[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
