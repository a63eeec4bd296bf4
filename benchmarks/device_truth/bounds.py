"""Shows how much memory better choices of nodes could use if the plugin chooses the device.

    python -m benchmarks.device_truth.bounds [--mix 4-60] [--seeds 2] [--pods 1000] [--horizon 200]

The simulation is simplified: there are no delays, the policy is ``distributed``, and a pod that
fits on no node is dropped. The rows differ in what the scheduler can predict or choose:

predicted       It predicts nothing, so the pod must fit on each device with the fewest replicas in
                use. Nodes have the product's scores.
draw known      It predicts which of these devices the plugin draws. The pod must fit only there.
future known    It predicts all draws, arrivals and lives. It simulates the next pods for each node
                that fits by the rule of *predicted*, and takes the node with the most used memory.
device chosen   It predicts nothing, but it chooses the device, as on steered nodes.
"""

import heapq
import multiprocessing
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.device_truth.arrivals import GIB, MIXES, Job, arrivals

NODES, DEVICES, REPLICAS, DEVICE_GIB = 24, 8, 10, 79.0
LOAD, LIFE_S = 0.95, 1800.0
ROWS = ("predicted", "draw known", "future known", "device chosen")
#: More memory than any device has free.
PLENTY_GIB = 1e9

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Placed:
    """The place of one pod in each world. All arrays are (worlds,). Node -1 means it is dropped."""

    node: Ints
    device: Ints


class Worlds:
    """Equal fleets that develop differently. Arrays are (worlds, nodes, devices)."""

    def __init__(self, free_gib: Floats, level: Ints) -> None:
        self.free_gib, self.level = free_gib, level
        self._each = np.arange(len(free_gib))

    @classmethod
    def empty(cls, nodes: int) -> "Worlds":
        shape = 1, nodes, DEVICES
        return cls(np.full(shape, DEVICE_GIB), np.zeros(shape, np.int64))

    def copies(self, count: int) -> "Worlds":
        """Return this many copies of the only world."""
        return Worlds(np.repeat(self.free_gib, count, 0), np.repeat(self.level, count, 0))

    def take(self, placed: Placed, size_gib: float, sign: int = 1) -> None:
        """Place the pod. With ``sign`` -1, end it."""
        at = self._each[placed.node >= 0], placed.node[placed.node >= 0]
        device = placed.device[placed.node >= 0]
        self.free_gib[(*at, device)] -= sign * size_gib
        self.level[(*at, device)] += sign

    def offers(self, size_gib: float, draw: float, row: str) -> tuple[Floats, Ints]:
        """Return score and device for each node as arrays (worlds, nodes). The score is -inf if the
        pod does not fit. ``draw`` (0..1) decides between the candidates of the plugin."""
        free, level = self.free_gib, self.level
        is_open = level < REPLICAS
        if row == "device chosen":
            usable = np.where(is_open & (free >= size_gib), free, PLENTY_GIB)
            device = usable.argmin(2)
            left = usable.min(2) - size_gib
            score = -(4 * left + (free.sum(2) - size_gib) / DEVICES) / DEVICE_GIB
            return np.where(left < DEVICE_GIB, score, -np.inf), device
        lowest = np.where(is_open, level, REPLICAS).min(2)
        candidates = is_open & (level == lowest[..., None])
        count = candidates.sum(2)
        turn = (draw * count).astype(np.int64)
        drawn = (candidates & (np.cumsum(candidates, 2) == turn[..., None] + 1)).argmax(2)
        at = drawn if row == "draw known" else np.where(candidates, free, PLENTY_GIB).argmin(2)
        before = np.take_along_axis(free, at[..., None], 2)[..., 0]
        score = _score(free, level, lowest, at, before, count, size_gib)
        return np.where((count > 0) & (before >= size_gib), score, -np.inf), drawn


def _score(
    free: Floats, level: Ints, lowest: Ints, at: Ints, before: Floats, count: Ints, size_gib: float
) -> Floats:
    """Return packing and prediction as in ``core.placement.score_terms``."""
    left = before - size_gib
    other = np.arange(DEVICES) != at[..., None]
    stranded = []
    for own, which in ((before, lowest), (left, lowest + 1)):
        mates = other & (level == which[..., None])
        least = np.where(mates, free, PLENTY_GIB).min(2)
        difference = np.clip(own - least, -DEVICE_GIB, DEVICE_GIB)
        stranded.append(np.where(difference >= 0, difference, -difference * mates.sum(2)))
    lowered = np.maximum(np.minimum(least, DEVICE_GIB) - left, 0)
    change = stranded[1] - stranded[0] + lowered / 4
    even = np.clip(0.5 - change / (2 * DEVICE_GIB), 0, 1)
    packing = 1 - (4 * left + (free.sum(2) - size_gib) / DEVICES) / (5 * DEVICE_GIB)
    harmless = (free >= size_gib).all(2)
    value: Floats = packing + (8 * even + 1 / np.maximum(count, 1) + harmless) / 10
    return value


def _best(worlds: Worlds, size_gib: float, draw: float, row: str) -> Placed:
    score, device = worlds.offers(size_gib, draw, row)
    node = score.argmax(1)
    each = np.arange(len(node))
    fits = np.isfinite(score[each, node])
    return Placed(np.where(fits, node, -1), device[each, node])


Ends = list[tuple[float, int]]


def _future(
    worlds: Worlds,
    ends: Ends,
    placed: dict[int, Placed],
    jobs: Sequence[Job],
    draws: Sequence[float],
    first: int,
    horizon: int,
) -> int:
    """Return the best node for job number ``first`` in the only world, or -1 if none fits."""
    size_gib = jobs[first].request_bytes / GIB
    score, device = worlds.offers(size_gib, draws[first], "predicted")
    nodes = np.flatnonzero(np.isfinite(score[0]))
    if len(nodes) < 2:
        return int(nodes[0]) if len(nodes) else -1
    trials, ends = worlds.copies(len(nodes)), list(ends)
    until = min(first + horizon, len(jobs) - 1)
    until_s = jobs[until].at_s
    value = 1e-6 * score[0, nodes]
    here = {
        number: Placed(each.node.repeat(len(nodes)), each.device.repeat(len(nodes)))
        for number, each in placed.items()
    }
    for number in range(first, until):
        job, size_gib = jobs[number], jobs[number].request_bytes / GIB
        while ends[:1] and ends[0][0] <= job.at_s:
            _, gone = heapq.heappop(ends)
            trials.take(here.pop(gone), jobs[gone].request_bytes / GIB, -1)
        if number == first:
            choice = Placed(nodes, device[0, nodes])
        else:
            choice = _best(trials, size_gib, draws[number], "predicted")
        trials.take(choice, size_gib)
        here[number] = choice
        heapq.heappush(ends, (job.at_s + job.life_s, number))
        used_s = min(job.at_s + job.life_s, until_s) - job.at_s
        value += np.where(choice.node >= 0, size_gib * used_s, 0)
    return int(nodes[value.argmax()])


@dataclass(frozen=True, slots=True)
class Run:
    row: str
    mix: str
    seed: int
    pods: int
    horizon: int
    nodes: int = NODES


def play(run: Run) -> tuple[float, float]:
    """Return the ratio of memory in use and the ratio of rejected pods, in percent."""
    capacity_gib = run.nodes * DEVICES * DEVICE_GIB
    jobs, since_s = arrivals(
        MIXES[run.mix], run.pods, int(capacity_gib * GIB), LOAD, LIFE_S, run.seed
    )
    lots = random.Random(run.seed)
    draws = [lots.random() for _ in jobs]
    worlds, ends, placed = Worlds.empty(run.nodes), Ends(), dict[int, Placed]()
    now_s, used_gib, used_gib_s, rejected = since_s, 0.0, 0.0, 0
    for number, job in enumerate(jobs):
        size_gib = job.request_bytes / GIB
        while ends[:1] and ends[0][0] <= job.at_s:
            end_s, gone = heapq.heappop(ends)
            used_gib_s += used_gib * max(0.0, end_s - now_s)
            now_s = max(now_s, end_s)
            used_gib -= jobs[gone].request_bytes / GIB
            worlds.take(placed.pop(gone), jobs[gone].request_bytes / GIB, -1)
        used_gib_s += used_gib * max(0.0, job.at_s - now_s)
        now_s = max(now_s, job.at_s)
        if run.row == "future known":
            node = _future(worlds, ends, placed, jobs, draws, number, run.horizon)
            _, device = worlds.offers(size_gib, draws[number], "predicted")
            choice = Placed(np.array([node]), device[:, node])
        else:
            choice = _best(worlds, size_gib, draws[number], run.row)
        if choice.node[0] < 0:
            rejected += job.at_s >= since_s
            continue
        worlds.take(choice, size_gib)
        if worlds.free_gib.min() < 0:
            raise AssertionError(f"{run.row} overcommitted a device")
        placed[number] = choice
        heapq.heappush(ends, (job.at_s + job.life_s, number))
        used_gib += size_gib
    lasted_s = jobs[-1].at_s - since_s
    return 100 * used_gib_s / (capacity_gib * lasted_s), 100 * rejected / run.pods


def main(
    mix: Annotated[str, typer.Option(help=f"One of: {', '.join(MIXES)}.")] = "4-60",
    row: Annotated[list[str] | None, typer.Option(help=f"One of: {', '.join(ROWS)}.")] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds of the arrivals.")] = 2,
    pods: Annotated[int, typer.Option(help="Number of measured arrivals.")] = 2000,
    horizon: Annotated[int, typer.Option(help="Number of arrivals simulated for each node.")] = 200,
) -> None:
    """Print a table with the memory in use and the rejected pods of each row."""
    for name, given, known in (("mix", [mix], list(MIXES)), ("row", row or [], list(ROWS))):
        for each in given:
            if each not in known:
                raise typer.BadParameter(f"{name} {each!r} is not one of: {', '.join(known)}")
    typer.echo(f"mix {mix}, {NODES} nodes, {pods} pods, seeds 0-{seeds - 1}, horizon {horizon}\n")
    typer.echo("| row | memory used, % | rejected, % |\n|---|---|---|")
    rows = row or list(ROWS)
    with multiprocessing.Pool() as pool:
        runs = [Run(each, mix, seed, pods, horizon) for each in rows for seed in range(seeds)]
        found = pool.map(play, runs, chunksize=1)
    for i, each in enumerate(rows):
        columns = list(zip(*found[i * seeds : (i + 1) * seeds], strict=True))
        cells = [
            f"{statistics.mean(column):.1f} ± "
            f"{statistics.stdev(column) if len(column) > 1 else 0:.1f}"
            for column in columns
        ]
        typer.echo(f"| {each} | {' | '.join(cells)} |")


if __name__ == "__main__":
    typer.run(main)
