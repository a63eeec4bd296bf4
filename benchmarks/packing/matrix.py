"""Compares policies with BestFit in one pool, on every variant of a workload and on other fleets.

    python -m benchmarks.packing.matrix --nodes nodes.csv --pods pods.csv [--choice steered]
        [--baseline pack] [--mix random-1] [--mix services] [--seed 1 --seed 2] [--churn daily]

The baseline is the published BestFit, which chooses its devices itself, in one pool. The table
shows its admitted percentage @90 and @100, and how many points more each policy admits: the mean
over the seeds, and the minimum. Each policy has a column for one pool of nodes, and for two pools:
of the size that the demand requires, 20 % smaller, and 20 % larger. On predicted nodes Headroom
places no pods with several devices, so there is no column for one pool. All runs of a seed have the
same order of pods. The column "hindsight" shows what packers admit @100 that know all pods in
advance, and a bound that no packer can exceed.

Below the table are the goals of ``docs/design/packing.md``, and the workloads on which a policy is
below the baseline by more than two standard errors. ``--ties`` also compares BestFit with itself,
with equal nodes in different orders, which shows how large differences by chance are."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.packing import fleets
from benchmarks.packing.__main__ import OPENB, SEEDS, check, check_mix, in_turn, machine_line
from benchmarks.packing.hindsight import hindsight
from benchmarks.packing.mixes import MIXES, mix
from benchmarks.packing.product import POLICIES
from benchmarks.packing.rules import RULES
from benchmarks.packing.runs import OTHERS, Run
from benchmarks.packing.workload import Ask, Node, ask, read_nodes, read_pods
from headroom.errors import BadSettings

#: Minimum points @90 and @100 on any workload, and minimum mean @100 over all workloads.
LEAST, MEAN = -0.5, 1.5
READ = ("90", "100")
BASELINE = "bestfit"
ITSELF = "bestfit, other ties"
CHURNS = ("", "steady", "daily")
#: Title of a column -> size of the unshared pool as a multiple of the demand for it; None for one
#: pool.
POOLS: dict[str, float | None] = {
    "one pool": None,
    "two pools": 1.0,
    "two, 20 % too small": 0.8,
    "two, 20 % too large": 1.2,
}


@dataclass(frozen=True, slots=True)
class Column:
    policy: str
    title: str

    @property
    def name(self) -> str:
        return f"{self.policy}, {self.title}"


@dataclass(frozen=True, slots=True)
class Scene:
    """All that the runs of one workload have in common."""

    nodes: tuple[Node, ...]
    asks: tuple[Ask, ...]
    choice: str
    others: str
    seeds: tuple[int, ...]
    churn: str
    processes: int | None

    def figures(self, policy: str, pools: str, ties: int = 0) -> list[tuple[float, ...]]:
        """Return the figures for each seed and, with ``ties``, for each order of equal nodes."""
        size = POOLS[pools]
        one_pool = "mixed" if policy in RULES else "one-pool"
        orders = range(1, ties + 1) if ties else (0,)
        runs = [
            Run(
                self.nodes,
                self.asks,
                "vram",
                policy,
                one_pool if size is None else self.choice,
                self.others if policy in POLICIES else "own",
                number,
                ranks=_order(len(self.nodes), number, tie),
                churn=bool(self.churn),
                pool_size=size or 1.0,
                daily=self.churn == "daily",
            )
            for number, tie in itertools.product(self.seeds, orders)
        ]
        found = in_turn(runs, self.processes)
        if any(each["overcommits"] for each in found):
            raise RuntimeError(f"{policy} overcommitted: {found}")
        if self.churn:
            return [(each["running_pct"],) for each in found]
        return [tuple(each["admitted_pct"][at] for at in READ) for each in found]


def main(
    nodes: Annotated[Path, typer.Option(help="CSV of nodes.")] = OPENB / "nodes_small.csv",
    pods: Annotated[Path, typer.Option(help="CSV of pods.")] = OPENB / "pods.csv",
    seed: Annotated[
        list[int] | None, typer.Option(help="Seed of the order of pods. Can be repeated.")
    ] = None,
    mixed: Annotated[
        list[str] | None,
        typer.Option("--mix", help=f"{', '.join([*MIXES, *fleets.NAMED])}, random-1, fleet-1 ..."),
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Policy. Can be repeated.")] = None,
    baseline: Annotated[str, typer.Option(help="Policy to compare with.")] = BASELINE,
    choice: Annotated[str, typer.Option(help="steered or predicted.")] = "steered",
    pools: Annotated[
        list[str] | None, typer.Option(help=f"Columns: {', '.join(POOLS)}. Can be repeated.")
    ] = None,
    others: Annotated[
        str, typer.Option(help=f"Who places pods without a GPU: own, {', '.join(OTHERS)}.")
    ] = "own",
    churn: Annotated[
        str, typer.Option(help="Let pods end again: steady or daily. Compares running pods.")
    ] = "",
    ties: Annotated[
        int, typer.Option(help="Number of other orders of equal nodes, for BestFit.")
    ] = 0,
    in_hindsight: Annotated[
        bool, typer.Option("--hindsight", help="Show what packers admit that know all pods.")
    ] = False,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Number of processes. Default: one for each CPU.")
    ] = None,
) -> None:
    """Print how much more each policy admits than the baseline, in percentage points."""
    check("choice", choice, ("steered", "predicted"))
    check("others", others, ("own", *OTHERS))
    check("churn", churn, CHURNS)
    policies = policy or [BASELINE, "pack", "fragmentation"]
    for each in (baseline, *policies):
        check("policy", each, (*RULES, *POLICIES))
    for title in pools or ():
        check("pools", title, tuple(POOLS))
    for name in mixed or ():
        if not fleets.known(name):
            check_mix(name)
    try:
        given = tuple(read_nodes(nodes)), read_pods(pods)
    except BadSettings as err:
        raise typer.BadParameter(str(err)) from err
    seeds = tuple(seed or SEEDS)
    counts = f"seeds {', '.join(map(str, seeds))}"
    churned = f", {churn} churn" if churn else ""
    typer.echo(
        f"{nodes.name}, {pods.name}, {choice}, others {others}{churned}; {counts}; {machine_line()}"
    )
    columns = [
        Column(each, title)
        for each in policies
        for title in pools or POOLS
        if not (each == baseline and POOLS[title] is None)
        and not (each in POLICIES and choice == "predicted" and POOLS[title] is None)
    ]
    base_pools = "two pools" if baseline in POLICIES and choice == "predicted" else "one pool"
    titles = [f"{baseline}, {base_pools}", *(each.name for each in columns)]
    titles += [ITSELF] * bool(ties) + ["hindsight"] * in_hindsight
    typer.echo(f"Points above {baseline} in {base_pools}: mean +- standard error (minimum)\n")
    typer.echo(f"| workload | {' | '.join(titles)} |\n{'|---' * (1 + len(titles))}|")
    above: dict[str, list[tuple[float, ...]]] = {each.name: [] for each in columns}
    below: dict[str, list[str]] = {each.name: [] for each in columns}
    for name in mixed or MIXES:
        there, listed = fleets.fleet(name) if fleets.known(name) else (given[0], given[1])
        if not fleets.known(name):
            listed = mix(name, listed, there)
        asks = tuple(ask(pod, "vram") for pod in listed)
        scene = Scene(tuple(there), asks, choice, others, seeds, churn, processes)
        base = scene.figures(baseline, base_pools)
        cells = [", ".join(f"{statistics.mean(each):.2f}" for each in zip(*base, strict=True))]
        for column in columns:
            points = _above(scene.figures(column.policy, column.title), base)
            above[column.name].append(tuple(statistics.mean(each) for each in points))
            if any(_below(each) for each in points):
                below[column.name].append(name)
            cells.append(_cell(points))
        if ties:
            found = scene.figures(BASELINE, "one pool", ties)
            cells.append(_cell(_above(found, [each for each in base for _ in range(ties)])))
        if in_hindsight:
            best = [hindsight(scene.nodes, asks, number) for number in seeds]
            reached, bound = (statistics.mean(each) for each in zip(*best, strict=True))
            cells.append(f"{reached:.2f} (at most {bound:.2f})")
        typer.echo(f"| {name} | {' | '.join(cells)} |")
    for title, rows in above.items():
        least, mean = min(min(row) for row in rows), statistics.mean(row[-1] for row in rows)
        met = "met" if least >= LEAST and mean >= MEAN else "not met"
        goals = f": goals {met}" if baseline == BASELINE else ""
        typer.echo(f"\n{title}: at least {least:+.2f}, on average {mean:+.2f}{goals}")
        names = ", ".join(below[title]) or "no workload"
        typer.echo(f"below {baseline} by more than two standard errors on: {names}")


def _order(nodes: int, seed: int, tie: int) -> tuple[int, ...]:
    """Return a random order of the nodes, or () for the given order."""
    lots = np.random.default_rng([seed, tie])
    return tuple(lots.permutation(nodes).tolist()) if tie else ()


def _above(
    found: Sequence[tuple[float, ...]], base: Sequence[tuple[float, ...]]
) -> list[list[float]]:
    """Return the differences in points, one list for each figure."""
    pairs = zip(found, base, strict=True)
    points = [[ours - theirs for ours, theirs in zip(*pair, strict=True)] for pair in pairs]
    return [list(column) for column in zip(*points, strict=True)]


def _standard_error(column: Sequence[float]) -> float:
    """Return the standard error of the mean, which is infinite for one seed."""
    if len(column) < 2:
        return float("inf")
    return statistics.stdev(column) / float(len(column)) ** 0.5


def _below(column: Sequence[float]) -> bool:
    return statistics.mean(column) < -2 * _standard_error(column)


def _cell(columns: Sequence[Sequence[float]]) -> str:
    def text(column: Sequence[float]) -> str:
        error = f" +- {_standard_error(column):.2f}" if len(column) > 1 else ""
        return f"{statistics.mean(column):+.2f}{error} ({min(column):+.1f})"

    return ", ".join(text(column) for column in columns)


if __name__ == "__main__":
    typer.run(main)
