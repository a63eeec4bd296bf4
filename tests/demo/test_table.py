"""The result table of the demo."""

from fractions import Fraction

from benchmarks.demo.match import Result
from benchmarks.demo.referee import Verdict
from benchmarks.demo.table import table

GIB = 1 << 30


def result(ratio: Fraction, excess_bytes: int, working_bytes: int = 0) -> Result:
    verdict = Verdict(
        bound=10,
        devices_overcommitted=int(excess_bytes > 0),
        worst_ratio=ratio,
        worst_excess_bytes=excess_bytes,
        died=frozenset(),
        too_large=frozenset(),
        turned_away=frozenset(),
        shared_bytes=200 * GIB,
        working_bytes=working_bytes,
        stranded_bytes=0,
    )
    return Result(verdict, waiting=())


def cells(counting: list[Result], headroom: list[Result]) -> dict[str, list[str]]:
    labels, *columns = (list(column.cells) for column in table(counting, headroom).columns)
    return {label: [column[i] for column in columns] for i, label in enumerate(labels)}


def test_the_worst_overcommit_is_that_of_one_device() -> None:
    """Not the highest ratio of one seed beside the most bytes of another."""
    counting = [result(Fraction(5, 2), 12 * GIB), result(Fraction(3, 2), 40 * GIB)]
    found = cells(counting, [result(Fraction(1), 0), result(Fraction(9, 10), 0)])
    assert found["worst overcommit"] == ["250 %, 12.0 GiB over", "none"]


def test_percentages_are_rounded() -> None:
    found = cells([result(Fraction(1), 0, 199 * GIB)], [result(Fraction(1), 0, 100 * GIB)])
    assert found["shared memory in use"] == ["199.0 GiB (100 %)", "100.0 GiB (50 %)"]
