"""Prints rows of the debug API as CSV, for a spreadsheet."""

import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headroom.contract.printable import printable


def show_csv(rows: Iterable[Mapping[str, Any]], fields: Sequence[str] = ()) -> None:
    """Print rows of the API as CSV. Columns have the names of the API's fields.

    Without ``fields``, the columns are the fields of the first row that are not lists or objects.
    """
    found = list(rows)
    if not fields and found:
        fields = [key for key, each in found[0].items() if not isinstance(each, (list, dict))]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(fields)
    writer.writerows([_cell(row[field]) for field in fields] for row in found)


def _cell(value: Any) -> Any:
    """Return a cell for a spreadsheet. Text that looks like a formula is quoted."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
