"""``headroom config``: checks a settings file before a process starts with it."""

from pathlib import Path
from typing import Annotated

import typer

from extender.config.loading import look

config = typer.Typer(no_args_is_help=True, help="Check settings files.")


@config.callback()
def _with_commands() -> None:
    """Make `check` a subcommand; typer would otherwise run a single command without its name."""


@config.command()
def check(
    file: Annotated[Path, typer.Argument(help="The extender's settings file (YAML).")],
) -> None:
    """List all mistakes in a settings file, each with its line, the reason and an example.

    Reads only this file: no environment variables, and none of the files that it names. The exit
    status is 0 if the extender would start with the file, and otherwise 2.
    """
    _, problems = look(file, {}, {})
    for problem in problems:
        typer.echo(str(problem), err=True)
    if problems:
        raise typer.Exit(2)
    typer.echo(f"{file}: valid")
