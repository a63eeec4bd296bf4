"""Reads rows of a CSV file, also as Excel writes it, and validates each cell that is used.

Where the comma is the decimal separator, Excel separates cells by semicolons. It writes UTF-8 with
a byte order mark, or UTF-16 with tabs ("Unicode text"), and rows of empty cells below the data.
"""

import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from io import TextIOWrapper
from itertools import chain
from pathlib import Path

from headroom.errors import BadSettings

#: Maximum number of digits of a number. With this limit, sums fit in 64 bits.
_MOST_DIGITS = 15
_DECIMAL = re.compile(rf"[0-9]{{1,{_MOST_DIGITS}}}(\.[0-9]{{1,9}})?")
_SEPARATORS = ",;\t"
_THOUSANDS = re.compile(r"-?[0-9]{1,3}([.,' \u00a0\u202f][0-9]{3})+")
_PERCENT = re.compile(r"([0-9]{1,3}(?:[.,][0-9]{1,9})?)[ \u00a0\u202f]?%")
_UTF_16_MARKS = b"\xff\xfe", b"\xfe\xff"


@dataclass(frozen=True, slots=True)
class Row:
    """A row and its position. A method that reads an invalid cell raises ``BadSettings``."""

    path: Path
    line: int
    values: Mapping[str, str]
    #: Whether the cells are not separated by commas, so that a comma can be a decimal comma.
    decimal_comma: bool = False

    def text(self, column: str, example: str) -> str:
        if not self.values[column]:
            raise self.wrong(column, "a name", example)
        return self.values[column]

    def number(self, column: str, example: str, least: int = 0, most: int | None = None) -> int:
        """Return a whole number from ``least`` to ``most``."""
        text = self.values[column]
        digits = text.removeprefix("-")
        # Check first, because int() also accepts spaces, underscores and other alphabets.
        if not (digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS):
            if _THOUSANDS.fullmatch(text):
                example = re.sub(r"[^-0-9]", "", text)
            raise self.wrong(column, "a whole number", example)
        number = int(text)
        if number < least or (most is not None and number > most):
            limits = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise self.wrong(column, f"a whole number {limits}", example)
        return number

    def optional(self, column: str, example: str, least: int = 0) -> int | None:
        """Return the number, or None if the column or the value is missing."""
        return self.number(column, example, least) if self.values.get(column) else None

    def ratio(self, column: str) -> float:
        """Return a number from 0 to 1."""
        try:
            found = float(self._with_point(column))
        except ValueError:
            found = -1.0
        if not 0.0 <= found <= 1.0:
            percent = _PERCENT.fullmatch(self.values[column])
            part = float(percent[1].replace(",", ".")) / 100 if percent else math.inf
            example = f"{part:.6g}" if part <= 1 else "0.35"
            raise self.wrong(column, "a number from 0 to 1", example)
        return found

    def seconds(self, column: str, example: str) -> float:
        """Return seconds since any start, or the Unix time of an RFC 3339 time."""
        text = self._with_point(column)
        if _DECIMAL.fullmatch(text):
            return float(text)
        try:
            # A number such as 20261128 would also be a date.
            time = datetime.fromisoformat(text if "-" in text and ":" in text else "")
        except ValueError:
            wanted = "a number of seconds or a time such as 2026-11-28T18:30:00Z"
            example = _of_excel_time(text) or example
            raise self.wrong(column, wanted, example) from None
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()

    def _with_point(self, column: str) -> str:
        text = self.values[column]
        return text.replace(",", ".") if self.decimal_comma else text

    def wrong(self, column: str, wanted: str, example: str) -> BadSettings:
        """Return the error for a cell. It names file, line and column."""
        return BadSettings(
            f"{self.path}, line {self.line}, column {column}: {self.values[column][:40]!r} is not "
            f"{wanted}. Example: {example}"
        )


def _of_excel_time(text: str) -> str | None:
    """Return a time such as 29.11.2026 18:30 in a format that is read, or None for other texts."""
    for wanted in ("%d.%m.%Y %H:%M", "%d.%m.%Y %H:%M:%S"):
        try:
            return datetime.strptime(text, wanted).isoformat(" ")  # noqa: DTZ007
        except ValueError:
            continue
    return None


def read_rows(path: Path, needed: Sequence[str]) -> Iterator[Row]:
    """Yield the rows that are not empty.

    Raises ``BadSettings`` if the file cannot be read, is not a CSV file in UTF-8 or UTF-16, lacks a
    needed column, or has a row whose number of cells differs from the first line.
    """
    try:
        with path.open("rb") as raw:
            # Do not seek, because the file may be a pipe.
            encoding = "utf-16" if raw.peek(2)[:2] in _UTF_16_MARKS else "utf-8-sig"
            with TextIOWrapper(raw, encoding, newline="") as file:
                yield from _rows(path, file, needed)
    except OSError as err:
        raise BadSettings(f"{path} cannot be read: {err.strerror}") from err
    except (csv.Error, UnicodeError) as err:
        raise BadSettings(
            f"{path} is not a CSV file in UTF-8 or UTF-16: {err}. In Excel, save it as "
            "'CSV UTF-8 (Comma delimited)'"
        ) from err


def _rows(path: Path, file: TextIOWrapper, needed: Sequence[str]) -> Iterator[Row]:
    first = file.readline()
    separator = max(_SEPARATORS, key=lambda each: (_known(first, each, needed), first.count(each)))
    names = _cells(first, separator)
    if missing := [name for name in needed if name not in names]:
        found = ", ".join(filter(None, names))
        has = f"The line has the columns {found}" if found else "The line is empty"
        raise BadSettings(
            f"{path}, line 1: column {missing[0]} is missing. {has}. Example of a first line: "
            f"{','.join(needed)}"
        )
    for name in filter(None, names):
        if names.count(name) > 1:
            raise BadSettings(
                f"{path}, line 1: column {name[:40]} exists {names.count(name)} times; remove or "
                "rename the others"
            )
    reader = csv.reader(chain([first], file), delimiter=separator, strict=True)
    next(reader)
    for cells in reader:
        if not any(cells):
            continue
        if len(cells) != len(names):
            raise BadSettings(
                f"{path}, line {reader.line_num}: the number of cells is {len(cells)}, not "
                f"{len(names)} as in line 1: {','.join(names)}"
            )
        values = dict(zip(names, map(str.strip, cells), strict=True))
        yield Row(path, reader.line_num, values, separator != ",")


def _cells(line: str, separator: str) -> list[str]:
    return [cell.strip() for cell in next(csv.reader([line], delimiter=separator), ())]


def _known(line: str, separator: str, needed: Sequence[str]) -> int:
    """Return how many of the needed columns the first line has if this is the separator."""
    return len({*needed} & {*_cells(line, separator)})
