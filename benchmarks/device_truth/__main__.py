"""Compares ways to place pods on time-sliced nodes, where the plugin chooses the device.

    python -m benchmarks.device_truth [--mix 4-60] [--replicas 10] [--policy distributed]

Every row gets the same arrivals. Kubelet and plugin are the models of ``tests/standin``, and the
judge keeps its own accounts. Headroom's own code makes the decisions of extender and agent (see
docs/design/device-truth.md).
"""

import multiprocessing
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.device_truth.arrivals import GIB, MIXES, arrivals, openb
from benchmarks.device_truth.judge import Judge
from benchmarks.device_truth.play import Delays, Play, Played
from benchmarks.device_truth.product import Gated, Product, Steered
from benchmarks.device_truth.rules import Counting, Scheduler, SomeDevice
from benchmarks.device_truth.world import Shape, World

OPENB = Path("../shared/data/openb")


#: Row -> a function that returns the scheduler of a world. It is given the seed of random choices.
ROWS: dict[str, Callable[[World, int], Scheduler]] = {
    "replica counting": lambda world, seed: Counting(world.shape, seed),
    "fits on some device": lambda world, seed: SomeDevice(world.shape),
    "predicted": lambda world, seed: Product(world),
    "gated": lambda world, seed: Gated(world),
    "steered": lambda world, seed: Steered(world),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One row with one seed."""

    row: str
    seed: int
    shape: Shape
    mix: str
    openb: Path
    arrivals: int
    load_ratio: float
    life_s: float
    delays: Delays


def play(run: Run) -> Played:
    shape = run.shape
    draw = openb(run.openb) if run.mix == "openb" else MIXES[run.mix]
    jobs, since_s = arrivals(
        draw, run.arrivals, shape.capacity_bytes, run.load_ratio, run.life_s, run.seed
    )
    judge = Judge(shape.nodes, shape.gpus, shape.allocatable_bytes, shape.replicas, since_s)
    world = World(shape, run.seed)
    scheduler = ROWS[run.row](world, run.seed)
    return Play(world, scheduler, judge, run.delays, run.seed).run(jobs, since_s)


#: Column -> a function that returns its value for a run.
COLUMNS: dict[str, Callable[[Played], float]] = {
    "devices overcommitted": lambda p: p.verdict.devices_overcommitted,
    "pods without room, %": lambda p: 100 * p.verdict.overcommits / max(1, p.bound),
    "memory used, %": lambda p: 100 * p.verdict.used_ratio,
    "rejected, %": lambda p: 100 * p.verdict.rejected / p.verdict.offered,
    "of these false, %": lambda p: 100 * p.verdict.falsely / max(1, p.verdict.rejected),
    "evictions per bind": lambda p: p.evictions / max(1, p.bound),
    "waited, %": lambda p: 100 * len(p.waits_s) / max(1, p.bound),
    "mean wait, s": lambda p: statistics.mean(p.waits_s) if p.waits_s else 0,
}


def mean_and_spread(figures: Sequence[float]) -> str:
    spread = statistics.stdev(figures) if len(figures) > 1 else 0.0
    mean = statistics.mean(figures)
    if not mean and not spread:
        return "0"
    digits = 1 if mean >= 1 else 3
    return f"{mean:.{digits}f} ± {spread:.{digits}f}"


def main(
    mix: Annotated[list[str] | None, typer.Option(help=f"{', '.join(MIXES)} or openb.")] = None,
    replicas: Annotated[list[int] | None, typer.Option(help="Replicas of each device.")] = None,
    policy: Annotated[str, typer.Option(help="Policy of the plugin: distributed or packed.")] = (
        "distributed"
    ),
    row: Annotated[list[str] | None, typer.Option(help=f"One of: {', '.join(ROWS)}.")] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds of the arrivals.")] = 5,
    pods: Annotated[int, typer.Option(help="Number of measured arrivals.")] = 2000,
    nodes: Annotated[int, typer.Option(help="Nodes of 8 devices of 80 GiB.")] = 24,
    load: Annotated[
        float, typer.Option(help="Ratio of memory that is requested; 1 is all.")
    ] = 0.95,
    life_s: Annotated[float, typer.Option(help="Mean runtime of a pod, in s.")] = 1800.0,
    admission_s: Annotated[float, typer.Option(help="Maximum from bind to admission, in s.")] = 2.0,
    observation_s: Annotated[float, typer.Option(help="Maximum from start to report, in s.")] = 2.0,
    patience_s: Annotated[
        float,
        typer.Option(help="Seconds that a pod that fits nowhere waits before it is dropped."),
    ] = 0.0,
    trace: Annotated[Path, typer.Option(help="Folder with openb's pods.csv.")] = OPENB,
) -> None:
    """Print one table for each mix and number of replicas."""
    mixes = mix or [*MIXES, *(["openb"] if (trace / "pods.csv").exists() else [])]
    for name, known in (("mix", [*MIXES, "openb"]), ("row", list(ROWS))):
        for given in (mix if name == "mix" else row) or ():
            if given not in known:
                raise typer.BadParameter(f"{name} {given!r} is not one of: {', '.join(known)}")
    if policy not in ("distributed", "packed"):
        raise typer.BadParameter(f"policy {policy!r} is unknown. Example: --policy packed")
    if "openb" in mixes and not (trace / "pods.csv").exists():
        raise typer.BadParameter(f"{trace / 'pods.csv'} does not exist: --trace FOLDER")
    rows = row or list(ROWS)
    typer.echo(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    with multiprocessing.Pool(os.cpu_count()) as pool:
        for kind in mixes:
            for count in replicas or [10]:
                shape = Shape(nodes, 8, 80 * GIB, count, policy)  # type: ignore[arg-type]
                runs = [
                    Run(
                        each,
                        seed,
                        shape,
                        kind,
                        trace,
                        pods,
                        load,
                        life_s,
                        Delays(admission_s, observation_s, patience_s),
                    )
                    for each in rows
                    for seed in range(seeds)
                ]
                played = pool.map(play, runs, chunksize=1)
                typer.echo(
                    f"\nmix {kind}, {count} replicas, {policy}, {nodes} nodes, load {load:.0%}, "
                    f"lives {life_s:g} s, admission {admission_s:g} s, observation "
                    f"{observation_s:g} s, patience {patience_s:g} s, {pods} pods, seeds "
                    f"0-{seeds - 1}\n"
                )
                typer.echo(f"| row | {' | '.join(COLUMNS)} |")
                typer.echo("|---" * (1 + len(COLUMNS)) + "|")
                for i, each in enumerate(rows):
                    of_row = played[i * seeds : (i + 1) * seeds]
                    cells = [mean_and_spread([f(p) for p in of_row]) for f in COLUMNS.values()]
                    typer.echo(f"| {each} | {' | '.join(cells)} |")


if __name__ == "__main__":
    typer.run(main)
