"""Compares Headroom's policies with another policy, on every variant of a workload.

    python -m benchmarks.packing.matrix --nodes nodes.csv --pods pods.csv [--choice steered]
        [--baseline pack] [--mix random-1] [--seed 1 --seed 2] [--others bestfit] [--ties 4]

All policies have the same pools of nodes. The baseline is the published BestFit unless
``--baseline`` names another policy. BestFit places pods without a GPU by its own rule. Headroom
places them as it asks kube-scheduler to, or as ``--others`` sets. The figures are percentage points
admitted above the baseline @90 and @100: the mean over the seeds, its standard error if there are
several seeds, and the minimum. Both runs of a pair have the same seed. Below the table are the
goals of ``docs/design/packing.md`` (for BestFit), and the workloads on which a policy is below the
baseline by more than two standard errors. ``--ties`` also compares BestFit with itself, with equal
nodes in different orders, which shows how large differences by chance are."""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.packing.__main__ import OPENB, SEEDS, check, check_mix, in_turn, machine_line
from benchmarks.packing.mixes import MIXES, mix
from benchmarks.packing.product import CHOICES, POLICIES
from benchmarks.packing.rules import RULES
from benchmarks.packing.runs import OTHERS, Run
from benchmarks.packing.workload import Ask, Node, ask, read_nodes, read_pods
from headroom.errors import BadSettings

#: Minimum points @90 and @100 on any workload, and minimum mean @100 over all workloads.
LEAST, MEAN = -0.5, 1.5
READ = ("90", "100")
BASELINE = "bestfit"
ITSELF = "bestfit, other ties"


def main(
    nodes: Annotated[Path, typer.Option(help="CSV of nodes.")] = OPENB / "nodes_small.csv",
    pods: Annotated[Path, typer.Option(help="CSV of pods.")] = OPENB / "pods.csv",
    seed: Annotated[
        list[int] | None, typer.Option(help="Seed of the order of pods. Can be repeated.")
    ] = None,
    mixed: Annotated[
        list[str] | None, typer.Option("--mix", help=f"{', '.join(MIXES)}, or random-1 ...")
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Policy. Can be repeated.")] = None,
    baseline: Annotated[str, typer.Option(help="Policy to compare with.")] = BASELINE,
    choice: Annotated[str, typer.Option(help=f"One of {', '.join(CHOICES)}.")] = "steered",
    others: Annotated[
        str, typer.Option(help=f"Who places pods without a GPU: own, {', '.join(OTHERS)}.")
    ] = "own",
    churn: Annotated[
        bool, typer.Option("--churn", help="Let pods end again, and compare the running pods.")
    ] = False,
    ties: Annotated[
        int, typer.Option(help="Number of other orders of equal nodes, for BestFit.")
    ] = 0,
) -> None:
    """Print how much more each policy admits than the baseline, in percentage points."""
    policies = policy or [each for each in ("pack", "fragmentation") if each != baseline]
    check("choice", choice, tuple(CHOICES))
    check("others", others, ("own", *OTHERS))
    for each in (baseline, *policies):
        check("policy", each, (*RULES, *POLICIES))
    for name in mixed or ():
        check_mix(name)
    try:
        there, listed = tuple(read_nodes(nodes)), read_pods(pods)
    except BadSettings as err:
        raise typer.BadParameter(str(err)) from err
    seeds = tuple(seed or SEEDS)
    counts = f"seeds {', '.join(map(str, seeds))}"
    typer.echo(f"{nodes.name}, {pods.name}, {choice}, others {others}; {counts}; {machine_line()}")
    typer.echo(f"Percentage points above {baseline}: mean +- standard error (minimum)")
    titles = [*policies, *([ITSELF] if ties and baseline == BASELINE else [])]
    typer.echo(f"\n| workload | {' | '.join(titles)} |\n{'|---' * (1 + len(titles))}|")
    above: dict[str, list[tuple[float, ...]]] = {name: [] for name in policies}
    below: dict[str, list[str]] = {name: [] for name in policies}
    for name in mixed or MIXES:
        asks = tuple(ask(pod, "vram") for pod in mix(name, listed, there))
        base = _figures(
            baseline, there, asks, choice, others if baseline in POLICIES else "own", seeds, churn
        )
        cells = []
        for each in policies:
            found = _figures(each, there, asks, choice, others, seeds, churn)
            columns = _above(found, base)
            above[each].append(tuple(statistics.mean(column) for column in columns))
            if any(_below(column) for column in columns):
                below[each].append(name)
            cells.append(_cell(columns))
        if ties and baseline == BASELINE:
            found = _figures(BASELINE, there, asks, choice, "own", seeds, churn, ties)
            cells.append(_cell(_above(found, [each for each in base for _ in range(ties)])))
        typer.echo(f"| {name} | {' | '.join(cells)} |")
    for each, rows in above.items():
        least, mean = min(min(row) for row in rows), statistics.mean(row[-1] for row in rows)
        met = "met" if least >= LEAST and mean >= MEAN else "not met"
        goals = f": goals {met}" if baseline == BASELINE else ""
        typer.echo(f"\n{each}: at least {least:+.2f}, on average {mean:+.2f}{goals}")
        names = ", ".join(below[each]) or "no workload"
        typer.echo(f"below {baseline} by more than two standard errors on: {names}")


def _figures(
    policy: str,
    nodes: tuple[Node, ...],
    asks: tuple[Ask, ...],
    choice: str,
    others: str,
    seeds: Sequence[int],
    churn: bool,
    ties: int = 0,
) -> list[tuple[float, ...]]:
    """Return the figures for each seed and, with ``ties``, for each order of equal nodes."""
    orders = range(1, ties + 1) if ties else (0,)
    runs = [
        Run(
            nodes,
            asks,
            "vram",
            policy,
            choice,
            others,
            number,
            ranks=_order(len(nodes), number, tie),
            churn=churn,
        )
        for number, tie in itertools.product(seeds, orders)
    ]
    found = list(in_turn(runs))
    if any(each["overcommits"] for each in found):
        raise RuntimeError(f"{policy} overcommitted: {found}")
    if churn:
        return [(each["running_pct"],) for each in found]
    return [tuple(each["admitted_pct"][at] for at in READ) for each in found]


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
