"""Writes the history of a made-up cluster, for `headroom plan`.

python -m benchmarks.plan generate /tmp/cluster --days 14 --nodes 16
"""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.plan import generated

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def _with_commands() -> None:
    """Make each function a subcommand, even a single one."""


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


if __name__ == "__main__":
    app()
