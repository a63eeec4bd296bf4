"""Writes the history of a made-up cluster, for `headroom plan`.

python -m benchmarks.plan generate cluster --days 14 --nodes 16
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.packing.__main__ import machine_line
from benchmarks.plan import backtest, generated
from benchmarks.plan.backtest import Cluster

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command()
def generate(
    folder: Annotated[Path, typer.Argument(help="Folder for pods.csv and nodes.csv.")],
    days: Annotated[int, typer.Option(help="Days, from a Monday on.")] = 14,
    nodes: Annotated[int, typer.Option(help="Nodes of 4 GPUs.")] = 16,
    scale: Annotated[float, typer.Option(help="Multiplies the number of pods.")] = 1.0,
    drift: Annotated[float, typer.Option(help="Growth of the number of pods a week.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 1,
) -> None:
    """Write the pods and the nodes as CSV."""
    found = generated.rows(days, seed, scale, drift)
    for path in generated.write(folder, found, nodes):
        typer.echo(path)


@app.command("backtest")
def ranges(
    clusters: Annotated[int, typer.Option(help="Generated clusters.")] = 10,
    weeks: Annotated[int, typer.Option(help="Weeks of each; all but the first are held out.")] = 4,
    scale: Annotated[float, typer.Option(help="Multiplies the number of pods.")] = 0.3,
    drift: Annotated[
        list[float] | None, typer.Option(help="Growth of the number of pods a week.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Replays for each range.")] = 5,
    by_demand: Annotated[
        bool, typer.Option("--demand", help="Compare the largest demands, without a replay.")
    ] = False,
) -> None:
    """Print the table of docs/plan.md: coverage and width of the stated ranges."""
    cores = len(os.sched_getaffinity(0))
    columns = "weeks | mean need | covered | width | last week: covered | width"
    what = "demands" if by_demand else "replays"
    typer.echo(f"{machine_line()}; scale {scale:g}, {seeds} {what} for each range\n")
    typer.echo(f"| drift a week | {columns} |\n{'|---' * 7}|")
    for growth in drift or (0.0, 0.05):
        played = [
            Cluster(seed, weeks, scale, growth, seeds, not by_demand) for seed in range(clusters)
        ]
        typer.echo(backtest.table(f"{100 * growth:g} %", backtest.run(played, cores)))


if __name__ == "__main__":
    app()
