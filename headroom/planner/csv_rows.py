"""Reads rows of a CSV file, and validates each cell that is used."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headroom.errors import BadSettings

#: Maximum number of digits of a number. With this limit, sums fit in 64 bits.
_MOST_DIGITS = 15


@dataclass(frozen=True, slots=True)
class Row:
    """A row and its position. A method that reads an invalid cell raises ``BadSettings``."""

    path: Path
    line: int
    values: Mapping[str, str]

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
            found = float(self.values[column])
        except ValueError:
            found = -1.0
        if not 0.0 <= found <= 1.0:
            raise self.wrong(column, "a number from 0 to 1", "0.35")
        return found

    def wrong(self, column: str, wanted: str, example: str) -> BadSettings:
        """Return the error for a cell. It names file, line and column."""
        return BadSettings(
            f"{self.path}, line {self.line}, column {column}: {self.values[column][:40]!r} is not "
            f"{wanted}. Example: {example}"
        )


def read_rows(path: Path, needed: Sequence[str]) -> Iterator[Row]:
    """Yield the rows.

    Raises ``BadSettings`` if the file cannot be read, is not a CSV file in UTF-8, lacks a needed
    column, or has a row whose number of cells differs from the first line.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, strict=True)
            names = reader.fieldnames or ()
            if missing := [name for name in needed if name not in names]:
                raise BadSettings(
                    f"{path}, line 1: column {missing[0]} is missing. Example of a first line: "
                    f"{','.join(needed)}"
                )
            for values in reader:
                if None in values or None in values.values():
                    raise BadSettings(
                        f"{path}, line {reader.line_num}: the number of cells is not {len(names)}, "
                        f"as in line 1: {','.join(names)}"
                    )
                yield Row(path, reader.line_num, values)
    except OSError as err:
        raise BadSettings(f"{path} cannot be read: {err.strerror}") from err
    except (csv.Error, UnicodeDecodeError) as err:
        raise BadSettings(f"{path} is not a CSV file in UTF-8: {err}") from err
