"""Prints answers of the debug API as JSON, YAML or a table."""

import json
import sys
from collections.abc import Mapping
from enum import Enum
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table as Drawn
from rich.text import Text

from headroom.kubectl.tables import Table


class Output(Enum):
    JSON = "json"
    YAML = "yaml"
    WIDE = "wide"


def print_data(body: Any, output: Output | None) -> bool:
    """Print the body as JSON or YAML, if asked for; return whether it was."""
    match output:
        case Output.JSON:
            print(json.dumps(body, indent=2))  # noqa: T201
        case Output.YAML:
            print(yaml.safe_dump(body, sort_keys=False), end="")  # noqa: T201
        case _:
            return False
    return True


def show_table(body: Any, table: Table, output: Output | None) -> None:
    """Print the table, or the body as JSON or YAML if asked for."""
    if print_data(body, output):
        return
    if not table.rows:
        print("nothing to show", file=sys.stderr)  # noqa: T201
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        # Do not wrap lines in pipes, so that grep and awk get whole lines.
        console = Console(highlight=False, no_color=True, width=1000)
    drawn = Drawn(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in table.columns:
        drawn.add_column(column, no_wrap=column != "STATE")
    for number, row in enumerate(table.rows):
        style = "red" if number in table.bad else ""
        drawn.add_row(*(Text(cell) for cell in row), style=style)
    console.print(drawn)


def note_more(body: Mapping[str, Any]) -> None:
    """Note on stderr that the answer is the first page only."""
    if body["continue"]:
        print("there are more: raise --limit", file=sys.stderr)  # noqa: T201
