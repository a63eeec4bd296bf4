"""Lays out a table in lines of text that also fit a narrow terminal. Only pure functions.

Numbers and states are never cut. If the terminal is too narrow, names are shortened in the middle,
and a state that does not fit is printed below its row.
"""

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from headroom.contract.printable import printable

Row = tuple[str, ...]
Style = Literal["", "bold", "red"]

#: Name of the last column if it contains free text.
STATE = "STATE"
#: Columns with names, in the order in which they are shortened.
_NAMES = ("PREDICTED", "ACTUAL", "NODE", "NEAREST", "FROM", "TO", "MODEL", "NAMESPACE", "POD")
_ELLIPSIS = "…"
_GAP = "  "
#: Minimum width of a shortened column.
_NAME_WIDTH = 13
#: Names are shortened only for states up to this length. Longer states go below their rows.
_SHORT_STATE = len("overcommitted")
_BELOW = 4 * " "
#: Minimum number of characters to show of the end of a shortened name. Fewer would be useless.
_LEAST_TAIL = 4
_NUMBER = re.compile(r"[-+]?[\d,.]+( GiB| %|/\d+)?")


@dataclass(slots=True)
class Table:
    columns: Row
    rows: list[Row] = field(default_factory=list)
    #: Indices of rows to highlight because of a problem.
    bad: set[int] = field(default_factory=set)
    #: Lines that are printed below the rows.
    total: list[str] = field(default_factory=list)
    #: Names of pods if the rows are not single pods.
    pods: list[str] | None = None

    def add(self, *cells: str, bad: bool = False) -> None:
        if bad:
            self.bad.add(len(self.rows))
        self.rows.append(tuple(map(printable, cells)))

    def resources(self) -> list[str]:
        """Return TYPE/NAME of each pod of the table, or else of each node, once."""
        kind = "POD" if "POD" in self.columns else "NODE"
        at = self.columns.index(kind)
        names = (row[at] for row in self.rows) if self.pods is None else map(printable, self.pods)
        return list(dict.fromkeys(f"{kind.lower()}/{name}" for name in names))


def laid_out(
    table: Table, width: int | None, *, headers: bool = True
) -> Iterator[tuple[Style, str]]:
    """Yield the lines of the table with their styles. ``width`` is the width of the terminal, or
    None. Without ``headers``, only the rows are yielded.

    If the columns are wider than the terminal, headers of several words take several lines.
    """
    has_state = table.columns[-1] == STATE
    states = [row[-1] for row in table.rows] if has_state else []
    columns = list(zip(table.columns, *table.rows, strict=True))[: -1 if has_state else None]
    if width is not None:
        short = [len(state) for state in (STATE, *states) if len(state) <= _SHORT_STATE]
        _shorten_names(columns, width - (len(_GAP) + max(short) if has_state else 0))
    depth = 1
    if width is not None and _total(columns) + has_state * len(f"{_GAP}{STATE}") > width:
        depth = max(len(header.split()) for header, *_ in columns)
        columns = [_stacked(column, depth) for column in columns]
    columns = [_aligned(column, depth) for column in columns]
    lines = [_GAP.join(cells) for cells in zip(*columns, strict=True)]
    above, rows = lines[:depth], lines[depth:]
    if has_state:
        above[-1] += f"{_GAP}{STATE}"
    for header in above if headers else ():
        yield "bold", header.rstrip()
    for number, row in enumerate(rows):
        style: Style = "red" if number in table.bad else ""
        if not has_state:
            yield style, row.rstrip()
            continue
        state = states[number]
        if width is None or len(row) + len(_GAP) + len(state) <= width:
            yield style, f"{row}{_GAP}{state}".rstrip()
            continue
        yield style, row.rstrip()
        for line in wrapped(state, width, _BELOW):
            yield style, line
    for line in table.total if headers else ():
        yield "bold", line


def wrapped(
    text: str, width: int | None, indent: str = "", further: str | None = None
) -> list[str]:
    """Break a text between words into lines of at most ``width``. Return one line if it is None.

    ``indent`` precedes the first line, and ``further`` all other lines. By default both are equal.
    """
    if width is None or len(indent) + len(text) <= width:
        return [indent + text]
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent if further is None else further,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _shorten_names(columns: list[Row], width: int) -> None:
    """Shorten columns of names in place, until the table has the width or no name can shrink."""
    over = _total(columns) - width
    at = {column[0]: number for number, column in enumerate(columns)}
    for number in (at[name] for name in _NAMES if name in at):
        if over <= 0:
            return
        header, *cells = columns[number]
        natural = _width(columns[number])
        hosts = (len(name.partition(".")[0]) + len(_ELLIPSIS) for name in cells if "." in name)
        short = shortened(cells, max(_NAME_WIDTH, len(header), natural - over, *hosts))
        columns[number] = (header, *short)
        over -= natural - _width(columns[number])


def shortened(names: Sequence[str], width: int) -> list[str]:
    """Shorten names in the middle to the width. If different names would become equal, use the
    smallest width at which they stay different."""
    different = sorted(set(names))
    for wide in range(width, max(map(len, names), default=0)):
        for keep in (_both_ends, _start, _end):
            short = {name: name if len(name) <= wide else keep(name, wide) for name in different}
            if len(set(short.values())) == len(different):
                return [short[name] for name in names]
    return list(names)


def _both_ends(name: str, width: int) -> str:
    """Shorten a name to its start and end. For a domain name (ip-10-0-123-45.eu-central-1...), keep
    the host, which identifies a node, and the end only if the width allows it."""
    kept = width - len(_ELLIPSIS)
    host, dot, _ = name.partition(".")
    head = min(kept, len(host)) if dot else kept - kept // 2
    tail = kept - head
    return name[:head] + _ELLIPSIS + (name[-tail:] if tail >= _LEAST_TAIL else "")


def _start(name: str, width: int) -> str:
    return name[: width - len(_ELLIPSIS)] + _ELLIPSIS


def _end(name: str, width: int) -> str:
    return _ELLIPSIS + name[len(_ELLIPSIS) - width :]


def _stacked(column: Row, depth: int) -> Row:
    """Return the column with each word of its header in a line of its own."""
    header, *cells = column
    words = header.split()
    return *[""] * (depth - len(words)), *words, *cells


def _aligned(column: Row, depth: int) -> Row:
    """Pad the cells to equal width: numbers on the left, other text on the right. The first
    ``depth`` cells are the header."""
    width, cells = _width(column), column[depth:]
    if all(cell == "-" or _NUMBER.fullmatch(cell) for cell in cells):
        return tuple(cell.rjust(width) for cell in column)
    return tuple(cell.ljust(width) for cell in column)


def _total(columns: Sequence[Row]) -> int:
    return sum(map(_width, columns)) + len(_GAP) * (len(columns) - 1)


def _width(column: Row) -> int:
    return max(map(len, column))
