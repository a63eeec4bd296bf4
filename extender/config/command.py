"""``headroom config``: what a file of settings is worth before anything is started with it."""

from pathlib import Path
from typing import Annotated

import typer

from extender.config.loading import look

config = typer.Typer(no_args_is_help=True, help="Look at a file of settings.")


@config.callback()
def _with_commands() -> None:
    """Else the only command would need no name."""


@config.command()
def check(
    file: Annotated[Path, typer.Argument(help="The extender's YAML file of settings.")],
) -> None:
    """Say all that is wrong with a file of settings: the line, why, and what is right.

    Looks at the file alone, not at the environment, and not at the files that it names. The exit
    status is 0 where the extender would start with it, else 2.
    """
    _, problems = look(file, {}, {})
    for problem in problems:
        typer.echo(str(problem), err=True)
    if problems:
        raise typer.Exit(2)
    typer.echo(f"{file}: nothing is wrong with it")
