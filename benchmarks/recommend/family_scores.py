"""Scores recommendations on each family of workloads, compared with another rule.

    python -m benchmarks.recommend.family_scores

A life counts once, except in the columns of hours, where it counts with the hours that it runs. The
other rule is the 99 % quantile of the last 1,000 peaks plus 15 %.
"""

import sys
from collections.abc import Iterable, Mapping
from typing import Annotated

import typer

from benchmarks.recommend import families, workloads
from benchmarks.recommend.life import Workload
from benchmarks.recommend.replay import Rule, Score, fixed_quantile, headroom, score

DAYS, WARM_DAYS = 90.0, 21.0
OTHER = fixed_quantile(0.99, 0.15, window=1000)
_COLUMNS = (
    "lives",
    "with a recommendation",
    "found",
    "above, per 1,000",
    "of these above the author's request too",
    "GiB-hours found",
    "pod-hours above, per 1,000",
    "p99 + 15 %: found",
    "above, per 1,000",
)


def main(
    count: Annotated[int, typer.Option(help="Number of workloads of each family.")] = 40,
    tuned_seed: Annotated[str, typer.Option(help="Seed of the tuned families.")] = "tune",
    judged_seed: Annotated[
        str, typer.Option(help="Second seed of the tuned families, and seed of the judged ones.")
    ] = "judge",
    ratio: Annotated[
        float, typer.Option(help="Median ratio of a request to the usual peak.")
    ] = 2.0,
) -> None:
    """Print a Markdown table with the tuned families, the same with another seed, and the judged
    families."""
    sys.stdout.write(f"| family | {' | '.join(_COLUMNS)} |\n|{'---|' * (len(_COLUMNS) + 1)}\n")
    _rows("tuned", _drawn(families.TUNED, tuned_seed, count, ratio))
    _rows("other seed", _drawn(families.TUNED, judged_seed, count, ratio))
    _rows("judged", _drawn(families.JUDGED, judged_seed, count, ratio))
    own = [workloads.workload("held-out", n, DAYS, ratio, held_out=True) for n in range(3 * count)]
    _rows("held out", {"workloads of the calibration": own})


def _drawn(
    names: Iterable[str], seed: str, count: int, ratio: float
) -> Mapping[str, list[Workload]]:
    return {
        name: [families.workload(name, seed, index, DAYS, ratio) for index in range(count)]
        for name in names
    }


def _rows(kind: str, drawn: Mapping[str, list[Workload]]) -> None:
    totals = Score(), Score(), Score()
    for name, some in drawn.items():
        rule = _remembered(headroom, some)
        scores = (
            score(some, rule, WARM_DAYS).total,
            score(some, rule, WARM_DAYS, by_hours=True).total,
            score(some, OTHER, WARM_DAYS).total,
        )
        for total, each in zip(totals, scores, strict=True):
            total.add(each)
        sys.stdout.write(_row(f"{name}, {kind}", *scores))
        sys.stdout.flush()
    if len(drawn) > 1:
        sys.stdout.write(_row(f"*all, {kind}*", *totals))


def _remembered(rule: Rule, some: Iterable[Workload]) -> Rule:
    """Return a rule with the same requests, which are computed once."""
    requests = {each.name: rule(each) for each in some}
    return lambda workload: requests[workload.name]


def _row(name: str, lives: Score, hours: Score, other: Score) -> str:
    both = lives.missed - lives.missed_fitting
    cells = (
        f"{lives.lives:,.0f}",
        f"{lives.recommended / max(1.0, lives.lives):.0%}",
        _found(lives),
        _above(lives),
        f"{both:.0f} of {lives.missed:.0f}",
        _found(hours),
        _above(hours),
        _found(other),
        _above(other),
    )
    return f"| {name} | {' | '.join(cells)} |\n"


def _found(each: Score) -> str:
    return f"{each.found / each.reclaimable:.1%}" if each.reclaimable else "-"


def _above(each: Score) -> str:
    return f"{1000 * each.missed / each.recommended:.2f}" if each.recommended else "-"


if __name__ == "__main__":
    typer.run(main)
