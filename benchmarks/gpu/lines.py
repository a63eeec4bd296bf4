"""One line of the report: a verdict, a sentence, and the figures behind it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    OK = "ok"
    DIFFERS = "differs"
    NOT_POSSIBLE = "not possible here"


class NotPossible(Exception):
    """The machine cannot run a check. The text is the reason."""


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    verdict: Verdict
    #: One sentence for people.
    summary: str
    figures: dict[str, Any] = field(default_factory=dict)


def judged(name: str, summary: str, differences: Sequence[str], figures: dict[str, Any]) -> Line:
    """Return verdict ``differs`` with the differences first in the summary, or else ``ok``."""
    if differences:
        return Line(name, Verdict.DIFFERS, "; ".join([*differences, summary]), figures)
    return Line(name, Verdict.OK, summary, figures)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def gib(figure: int) -> str:
    return f"{figure / (1 << 30):.1f} GiB"


def mib(figure: int) -> str:
    return f"{figure / (1 << 20):.1f} MiB"


def plural(count: int, noun: str) -> str:
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}es" if noun.endswith("s") else f"{count} {noun}s"
