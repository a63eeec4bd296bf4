"""Lists as plain text, for who reads them in a terminal: a line for each thing, units in headers.

Fields are parted by two spaces at least and hold no two themselves; what is absent is a dash.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

V = TypeVar("V")
Field = str | int | float | None
_ABSENT = "-"


@dataclass(frozen=True, slots=True)
class Table(Generic[V]):
    """``rows`` makes the fields of each line that a view is shown in, one for each header."""

    headers: tuple[str, ...]
    rows: Callable[[V], Iterable[Sequence[Field]]]


def gib(count_bytes: int | None) -> str | None:
    """For columns whose header says (GiB): one decimal, rounded down."""
    if count_bytes is None:
        return None
    tenths = count_bytes * 10 >> 30
    return f"{'-' if tenths < 0 else ''}{abs(tenths) // 10}.{abs(tenths) % 10}"


def percent(ratio: float | None) -> int | None:
    """For columns whose header says (%)."""
    return None if ratio is None else round(100 * ratio)


def written(field: Field) -> str:
    if field is None:
        return _ABSENT
    if isinstance(field, float):
        return f"{field:.3f}".rstrip("0").rstrip(".")
    return " ".join(str(field).split()) or _ABSENT


class Columns:
    """As wide as the widest of all fields in them; those of which every field is a number are
    written to the right."""

    def __init__(self, headers: Sequence[str]) -> None:
        self._widths = list(map(len, headers))
        self._right = [True] * len(headers)

    def fit(self, row: Sequence[str]) -> None:
        for column, field in enumerate(row):
            if len(field) > self._widths[column]:
                self._widths[column] = len(field)
            if self._right[column] and not _is_number(field):
                self._right[column] = False

    def line(self, row: Sequence[str]) -> str:
        """With its end; of fields that were fitted before."""
        fields = (
            field.rjust(width) if to_the_right else field.ljust(width)
            for field, width, to_the_right in zip(row, self._widths, self._right, strict=True)
        )
        return "  ".join(fields).rstrip() + "\n"


def _is_number(field: str) -> bool:
    return field == _ABSENT or field.removeprefix("-").replace(".", "", 1).isdigit()
