"""Prints answers of the debug API as JSON, YAML or a table.

Imports ``rich`` and ``yaml`` only if they are needed: they take longer to import than the rest of a
command takes to start.
"""

import json
import sys
from collections.abc import Mapping
from enum import Enum
from typing import Any

from headroom.kubectl.tables import Table


class Output(Enum):
    JSON = "json"
    YAML = "yaml"
    WIDE = "wide"


def print_data(body: Any, output: Output | None) -> bool:
    """Print the body if the output is JSON or YAML; return whether it was printed."""
    match output:
        case Output.JSON:
            print(json.dumps(body, indent=2))  # noqa: T201
        case Output.YAML:
            import yaml

            print(yaml.safe_dump(body, sort_keys=False), end="")  # noqa: T201
        case _:
            return False
    return True


def show_table(body: Any, table: Table, output: Output | None) -> None:
    """Print the table, or the body if the output is JSON or YAML."""
    if print_data(body, output):
        return
    if not table.rows:
        print("nothing to show", file=sys.stderr)  # noqa: T201
        return
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        # Do not wrap lines in pipes, so that grep and awk get whole lines.
        console = Console(highlight=False, no_color=True, width=1000)
    rich_table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in table.columns:
        rich_table.add_column(column, no_wrap=column != "STATE")
    for number, row in enumerate(table.rows):
        style = "red" if number in table.bad else ""
        rich_table.add_row(*(Text(cell) for cell in row), style=style)
    console.print(rich_table)


def note_more(body: Mapping[str, Any]) -> None:
    """Print a note on stderr if the answer is only the first page."""
    if body["continue"]:
        print("there are more: raise --limit", file=sys.stderr)  # noqa: T201
