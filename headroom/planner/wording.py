"""Formats figures as text: ranges, percentages and waiting times."""

import itertools
import math
from collections.abc import Sequence

from headroom.planner.intervals import Reach, interval, need_interval


def need_range(figures: Sequence[int | None], reach: Reach | None) -> str | None:
    """Return the range of what another history needs as text, or None if a figure is missing."""
    ends = need_ends(figures, reach)
    return span(*ends) if ends else None


def need_ends(
    figures: Sequence[int | None], reach: Reach | None, step: float = 0.0
) -> tuple[int, int] | None:
    """Return the range of what another history needs, or None if a figure is missing.

    ``reach`` and ``step`` are passed to ``need_interval``.
    """
    known = [each for each in figures if each is not None]
    if len(known) < len(figures) or not known:
        return None
    return outward(*need_interval(known, reach, step))


def number_range(figures: Sequence[int | None]) -> str | None:
    """Return the range as text, such as "96 to 104", or None if a figure is missing."""
    known = [each for each in figures if each is not None]
    return span(*whole(known)) if len(known) == len(figures) and known else None


def whole(figures: Sequence[float]) -> tuple[int, int]:
    """Return the range of figures that are not negative, in whole numbers."""
    return outward(*interval(figures))


def outward(low: float, high: float) -> tuple[int, int]:
    """Return the smallest range of non-negative whole numbers that contains this range."""
    # Sums of prices are inexact: 3,504.0000000000005 must not become 3,505.
    return max(0, math.floor(round(low, 6))), math.ceil(round(high, 6))


def span(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def percent_range(ratios: Sequence[float]) -> str:
    return f"{span(*whole([round(100 * ratio) for ratio in ratios]))} %" if ratios else "-"


def wait_range(figures: Sequence[float | None]) -> str:
    known = [each for each in figures if each is not None]
    if not known or len(known) < len(figures):
        return "too few GPUs"
    low, high = seconds_text(min(known)), seconds_text(max(known))
    return low if low == high else f"{low} to {high}"


def seconds_text(seconds: float) -> str:
    if seconds < 1:
        return "0 s" if seconds < 0.05 else f"{seconds:.1f} s"
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 36_000 else f"{seconds / 3600:.0f} h"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def first_few(names: Sequence[str], most: int = 5) -> str:
    """Return the first names, and the number of the others."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def skipped(noun: str, why: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return a sentence that names what a plan does not use, or nothing if there are no names."""
    if not names:
        return ()
    return (f"Skipped {plural(len(names), noun)} {why}: {first_few(names)}.",)


def runs(numbers: Sequence[int]) -> str:
    """Return increasing numbers as text, with three or more successive numbers as a range."""
    parts: list[str] = []
    for _, same in itertools.groupby(enumerate(numbers), lambda each: each[1] - each[0]):
        run = [number for _, number in same]
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))
