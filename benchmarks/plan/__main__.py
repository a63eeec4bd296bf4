"""Writes the history of a generated cluster for `headroom plan`, tests its ranges, and times it.

python -m benchmarks.plan generate cluster --days 14 --nodes 16
python -m benchmarks.plan backtest
python -m benchmarks.plan savings
python -m benchmarks.plan families
python -m benchmarks.plan commanded
python -m benchmarks.plan speed --pods 10000 --pods 100000
python -m benchmarks.plan played --device-choice predicted --replicas 4 --html report.html
"""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.packing.__main__ import machine_line
from benchmarks.plan import (
    backtest,
    families,
    family_weeks,
    generated,
    played,
    speed,
)
from benchmarks.plan.backtest import Cluster, Week
from headroom.planner.scenarios import Configuration

app = typer.Typer(no_args_is_help=True, add_completion=False)
SCALES, DRIFTS = (0.3, 1.0, 4.0), (0.0, 0.05)
#: First seed of the clusters that were used to choose constants.
_CHOSEN = 1000
#: First seed of the clusters that test the ranges.
_TESTED = 2000
#: Before this day of the published trace, few pods run.
_FIRST_DAY = 113


@app.command()
def generate(
    folder: Annotated[Path, typer.Argument(help="Folder for pods.csv and nodes.csv.")],
    days: Annotated[int, typer.Option(help="Number of days, beginning on a Monday.")] = 14,
    nodes: Annotated[int, typer.Option(help="Number of nodes of 4 GPUs.")] = 16,
    scale: Annotated[float, typer.Option(help="Multiplies the number of pods.")] = 1.0,
    drift: Annotated[float, typer.Option(help="Weekly growth of the number of pods.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 1,
) -> None:
    """Write the pods and the nodes as CSV."""
    found = generated.rows(days, seed, scale, drift)
    for path in generated.write(folder, found, nodes):
        typer.echo(path)


@app.command("backtest")
def ranges(
    clusters: Annotated[int, typer.Option(help="Generated clusters for each row.")] = 30,
    weeks: Annotated[int, typer.Option(help="Weeks of each; all but the first are held out.")] = 4,
    scale: Annotated[
        list[float] | None, typer.Option(help="Multiplies the number of pods. Can be repeated.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Replays for each range.")] = 5,
    replayed: Annotated[
        bool, typer.Option("--replayed", help="Replay the weeks, instead of using largest demands.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Folder of the published trace: pods.csv and nodes.csv.")
    ] = None,
) -> None:
    """Print the table of docs/design/plan.md: coverage and width of the stated ranges."""
    cores = len(os.sched_getaffinity(0))
    sizes = scale or SCALES

    def played(first: int, replayed: bool, size: float, drift: float) -> list[Week]:
        each = [
            Cluster(first + number, weeks, size, drift, seeds, replayed)
            for number in range(clusters)
        ]
        return backtest.run(each, cores)

    chosen = {(s, drift): played(_CHOSEN, False, s, drift) for s in sizes for drift in DRIFTS}
    factors = {s: backtest.rival_factor([chosen[s, drift] for drift in DRIFTS]) for s in sizes}
    found = {(s, drift): played(_TESTED, replayed, s, drift) for s in sizes for drift in DRIFTS}
    parts = ", ".join(f"{100 * factor:.0f} % at scale {s:g}" for s, factor in factors.items())
    typer.echo(f"{machine_line()}; last week: ± {parts}\n")
    columns = "held-out weeks | mean need | covered | width | last week: covered | width"
    typer.echo(f"| weeks | {columns} |\n{'|---' * 7}|")
    for name, kinds in (("on which constants were chosen", chosen), ("all of these", found)):
        if kinds is found:
            for (s, drift), some in found.items():
                row = f"scale {s:g}, drift {100 * drift:g} %"
                typer.echo(backtest.table(row, [(week, factors[s]) for week in some]))
        every = [(week, factors[s]) for (s, _), some in kinds.items() for week in some]
        typer.echo(backtest.table(name, every))
    if trace is not None:
        some = backtest.trace_weeks(trace / "pods.csv", trace / "nodes.csv", _FIRST_DAY, seeds)
        # The largest generated clusters are the most like it.
        factor = factors[max(factors)]
        typer.echo(backtest.table("published trace", [(week, factor) for week in some]))


@app.command()
def savings(
    clusters: Annotated[int, typer.Option(help="Generated clusters for each row.")] = 30,
    weeks: Annotated[int, typer.Option(help="Weeks of each; all but the first are held out.")] = 4,
    seeds: Annotated[
        int, typer.Option(help="Number of histories, drawn ones and the given one.")
    ] = 5,
) -> None:
    """Print coverage and width of the stated ranges of savings, in GPUs and in percent."""
    columns = (
        "held-out weeks | mean saved, GPUs | covered | width | mean saved, % | covered | width"
    )
    typer.echo(f"{machine_line()}\n\n| weeks | {columns} |\n{'|---' * 8}|")
    cores, found = len(os.sched_getaffinity(0)), []
    for size in SCALES:
        for drift in DRIFTS:
            each = [
                Cluster(_TESTED + number, weeks, size, drift, seeds, False)
                for number in range(clusters)
            ]
            found.append(backtest.run_savings(each, cores))
            row = f"scale {size:g}, drift {100 * drift:g} %"
            typer.echo(backtest.savings_row(row, found[-1]))
    typer.echo(backtest.savings_row("all of these", [week for some in found for week in some]))


@app.command("families")
def of_families(
    clusters: Annotated[int, typer.Option(help="Clusters of each family and size.")] = 10,
    tuned_seed: Annotated[int, typer.Option(help="First seed of the tuned families.")] = 100,
    judged_seed: Annotated[int, typer.Option(help="First seed of all families, judged.")] = 500,
    days: Annotated[int, typer.Option(help="Days of a history, and of the one after it.")] = 7,
    family: Annotated[
        list[str] | None, typer.Option(help="Only this family is judged. Can be repeated.")
    ] = None,
) -> None:
    """Print coverage and width of the stated ranges on each family of clusters."""

    def played_weeks(name: str, first: int) -> list[family_weeks.Stated]:
        return [
            week
            for size in family_weeks.SIZES
            for number in range(clusters)
            for week in family_weeks.weeks(name, first + number, size, days)
        ]

    tuned = {name: played_weeks(name, tuned_seed) for name in families.TUNED}
    factors = family_weeks.rival_factor(tuned, 0), family_weeks.rival_factor(tuned, 1)
    typer.echo(f"{machine_line()}; last week: ± {factors[0]:.0%} unshared, {factors[1]:.0%} shared")
    both = "covered | width | last week: covered | width"
    typer.echo(
        f"\n| family | weeks | too small | days differ | dates | unshared: {both} | shared: {both} "
        f"| saved: covered |\n{'|---' * 14}|"
    )
    for name, some in tuned.items():
        typer.echo(family_weeks.row(f"{name}, tuned", some, factors))
    for name in family or families.TUNED | families.JUDGED:
        kind = "other seeds" if name in families.TUNED else "judged"
        found = played_weeks(name, judged_seed)
        typer.echo(family_weeks.row(f"{name}, {kind}", found, factors))


@app.command("commanded")
def of_command(
    clusters: Annotated[int, typer.Option(help="Clusters, of all families in turn.")] = 24,
    seed: Annotated[int, typer.Option(help="Seed of the first cluster.")] = 9000,
    advice: Annotated[
        bool,
        typer.Option(
            "--advice", help="Check all printed advice, and of auto, from the first week."
        ),
    ] = False,
) -> None:
    """Run headroom plan on two weeks of clusters, and check its ranges and annotations."""
    # It imports the console and the webhook, whose memory would count in the table of ``speed``.
    from benchmarks.plan import commanded

    if advice:
        total: Counter[str] = Counter()
        for number in range(clusters):
            name, outcomes = commanded.advised(number, seed)
            total.update(outcomes)
            typer.echo(f"{name}: {dict(outcomes)}")
        typer.echo("\n".join(f"{outcome}: {total[outcome]}" for outcome in sorted(total)))
        return
    found = []
    for number in range(clusters):
        found.append(commanded.check(number, seed))
        typer.echo(found[-1])
    ranges = [each.contained for each in found if each.contained is not None]
    totals = [sum(some) for some in zip(*ranges, strict=True)]
    typer.echo(
        f"{len(ranges)} of {clusters} with ranges; of these contained (unshared, shared, saved): "
        f"{totals}; annotations: {sum(each.annotations for each in found)}, below a peak: "
        f"{sum(each.below for each in found)}, also exclusive: {sum(each.both for each in found)}"
    )


@app.command("speed")
def times(
    pods: Annotated[
        list[int] | None, typer.Option(help="Number of pods, about. Can be repeated.")
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(help="exclusive, counting, predicted or steered."),
    ] = None,
    replicas: Annotated[int, typer.Option(help="Replicas of each GPU.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the generated history.")] = 1,
) -> None:
    """Print the table of docs/design/plan.md: time and memory for one configuration and one
    seed."""
    typer.echo(f"{machine_line()}\n")
    typer.echo("| configuration | pods | nodes | GPUs needed | time | CPU time | memory |")
    typer.echo("|---" * 7 + "|")
    for count in pods or (10_000,):
        for each in mode or ("exclusive", "counting", "predicted", "steered"):
            shared = each != "exclusive"
            configuration = Configuration(each, replicas if shared else 1, speed.PEAKS)
            found = speed.measure(count, configuration, seed)
            typer.echo(f"| {configuration.text} | {found.row} |")


@app.command("played", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def from_prometheus(
    options: typer.Context,
    days: Annotated[int, typer.Option(help="Days until now.")] = 14,
    nodes: Annotated[int, typer.Option(help="Nodes of 4 GPUs.")] = 12,
    scale: Annotated[float, typer.Option(help="Multiplies the number of pods.")] = 0.3,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 1,
) -> None:
    """Fill a real Prometheus with days of a simulated cluster, and plan from it.

    All other options are passed to headroom plan.
    """
    with played.filled(days, nodes, scale, seed) as address:
        plan = ["plan", "--prometheus", address, "--window", f"{days}d", *options.args]
        raise typer.Exit(subprocess.run([sys.executable, "-m", "headroom", *plan]).returncode)


if __name__ == "__main__":
    app()
