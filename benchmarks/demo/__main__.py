"""The demo's command line: ``python -m benchmarks.demo``, or ``make demo``."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.demo import run


def demo(
    trace: Annotated[
        Path | None, typer.Option(help="Directory with nodes.csv and pods.csv to replay instead.")
    ] = None,
    pods: Annotated[int | None, typer.Option(help="Pods per seed.")] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds.")] = 3,
) -> None:
    """Replay the problem on this machine: four pods on one GPU, then a fleet of 1,213 nodes.

    On a terminal the server stays up until Ctrl-C. Otherwise the last line is the result. The exit
    status is 1 if Headroom overcommitted any device.
    """
    raise typer.Exit(run(trace, pods, seeds))


if __name__ == "__main__":
    typer.run(demo)
