"""The demo's command line: ``python -m benchmarks.demo``, or ``make demo``."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.demo import run


def demo(
    trace: Annotated[
        Path | None, typer.Option(help="Folder with nodes.csv and pods.csv to replay instead.")
    ] = None,
    pods: Annotated[int | None, typer.Option(help="Pods per seed (default 2,000).")] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds.")] = 3,
) -> None:
    """Compare Headroom with replica counting: four pods on one GPU, then 1,213 simulated nodes.

    On a terminal the server stays up until Ctrl-C. Otherwise the last line is the result. The exit
    status is 1 if Headroom overcommitted any device, and 2 if the demo cannot run.
    """
    raise typer.Exit(run(trace, pods, seeds))


if __name__ == "__main__":
    typer.run(demo)
