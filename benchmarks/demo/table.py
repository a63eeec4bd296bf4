"""The result table, which compares replica counting with Headroom, averaged over the seeds."""

from collections.abc import Callable, Sequence
from fractions import Fraction

from rich.table import Table

from benchmarks.demo.match import Result
from headroom.contract.quantity import gib

Figure = Callable[[Result], int]
_COUNTS: tuple[tuple[str, Figure], ...] = (
    ("pods placed", lambda r: r.verdict.bound),
    ("pods pending", lambda r: len(r.waiting)),
    ("GPUs overcommitted", lambda r: r.verdict.devices_overcommitted),
    ("pods that would die", lambda r: len(r.verdict.died)),
    ("  larger than their GPU", lambda r: len(r.verdict.too_large)),
    ("pods placed that live", lambda r: r.verdict.bound - len(r.verdict.died)),
)


def table(counting: Sequence[Result], headroom: Sequence[Result]) -> Table:
    """Return the table. Each sequence has one result per seed."""
    title = "One seed" if len(counting) == 1 else f"Mean of {len(counting)} seeds [lowest-highest]"
    made = Table(title=title.replace("[", "\\["))
    made.add_column("")
    made.add_column("replica counting", justify="right")
    made.add_column("Headroom", justify="right", style="bold")
    for label, figure in _COUNTS:
        made.add_row(label, _mean(map(figure, counting)), _mean(map(figure, headroom)))
        if label == "GPUs overcommitted":
            made.add_row("worst overcommit", _worst(counting), _worst(headroom))
    for label, figure in (
        ("shared memory in use", lambda r: r.verdict.working_bytes),
        ("shared memory stranded", lambda r: r.verdict.stranded_bytes),
    ):
        made.add_row(label, _memory(counting, figure), _memory(headroom, figure))
    return made


def summary(counting: Sequence[Result], headroom: Sequence[Result]) -> tuple[str, int]:
    """Return the totals of all seeds as one line for programs, and the demo's exit status."""
    overcommitted = total(headroom, lambda r: r.verdict.devices_overcommitted)
    line = (
        f"placed={total(headroom, lambda r: r.verdict.bound)} "
        f"pending={total(headroom, lambda r: len(r.waiting))} "
        f"overcommitted_devices={overcommitted} counting_overcommitted_devices="
        f"{total(counting, lambda r: r.verdict.devices_overcommitted)}"
    )
    return line, 1 if overcommitted else 0


def total(results: Sequence[Result], figure: Figure) -> int:
    return sum(map(figure, results))


def _mean(figures: "map[int]") -> str:
    """Format the mean and, if values differ, the range."""
    values = list(figures)
    low, high = min(values), max(values)
    mean = round(Fraction(sum(values), len(values)))
    return f"{mean:,}" if low == high else f"{mean:,} [{low:,}-{high:,}]".replace("[", "\\[")


def _worst(results: Sequence[Result]) -> str:
    """Format the overcommitment of the device with the highest ratio in any seed."""
    ratio, excess_bytes = max(
        (result.verdict.worst_ratio, result.verdict.worst_excess_bytes) for result in results
    )
    return f"{round(100 * ratio)} %, {gib(excess_bytes)} over" if excess_bytes else "none"


def _memory(results: Sequence[Result], figure: Figure) -> str:
    """Format the mean of a figure in bytes, with its share of the shared devices' memory."""
    part_bytes = total(results, figure)
    shared_bytes = total(results, lambda r: r.verdict.shared_bytes)
    percent = round(Fraction(100 * part_bytes, max(1, shared_bytes)))
    return f"{gib(part_bytes // len(results))} ({percent} %)"
