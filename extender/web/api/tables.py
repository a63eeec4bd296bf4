"""Lists as plain text, for who reads them in a terminal: a line for each thing, units in headers.

Fields are parted by two spaces at least and hold no two themselves; what is absent is a dash.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
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


def mib(count_bytes: int | None) -> int | None:
    """For columns whose header says (MiB); rounded down."""
    return None if count_bytes is None else count_bytes >> 20


def percent(ratio: float | None) -> int | None:
    """For columns whose header says (%)."""
    return None if ratio is None else round(100 * ratio)


def written(field: Field) -> str:
    if field is None:
        return _ABSENT
    if isinstance(field, float):
        return f"{field:.3f}".rstrip("0").rstrip(".")
    return " ".join(str(field).split()) or _ABSENT


def aligned(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of written fields, each ended; columns of which every field is a number to the
    right."""
    columns = list(zip(headers, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(map(_is_number, column[1:])) for column in columns]
    for row in (headers, *rows):
        fields = (
            field.rjust(width) if to_the_right else field.ljust(width)
            for field, width, to_the_right in zip(row, widths, right, strict=True)
        )
        yield "  ".join(fields).rstrip() + "\n"


def _is_number(field: str) -> bool:
    return field == _ABSENT or field.removeprefix("-").replace(".", "", 1).isdigit()
