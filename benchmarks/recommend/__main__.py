"""Measures how much of the requested GPU memory recommendations give back, and how often they are
too small, compared with other rules.

    python -m benchmarks.recommend SUMMARIES.csv [--part tuning]

docs/design/recommendations.md describes the method. The generated lives are calibrated on
SUMMARIES.csv (``calibration.py``). The command stops if the constants in the code do not
follow from the file.
"""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.recommend import calibration
from benchmarks.recommend.life import GIB
from benchmarks.recommend.replay import (
    Rule,
    Score,
    Scores,
    all_other_lives,
    fixed_quantile,
    headroom,
    margin_for,
    score,
    vertical_pod_autoscaler,
)
from benchmarks.recommend.workloads import HELD_OUT_KINDS, KINDS, workload
from tests.gobin.build import build, default_cache

#: The recommender's constants were chosen on the first part. The second part has other workloads,
#: and a kind of workload that the first does not have.
SEEDS = {"tuning": "tune", "held-out": "held-out"}
VPA = "VPA 1.8.1"
#: The goal for the share of lives above the recommendation.
GOAL = 0.001


def main(
    summaries: Annotated[Path, typer.Argument(help="CSV file with the calibration data.")],
    part: Annotated[str, typer.Option(help=f"Part to score: {' or '.join(SEEDS)}.")] = "held-out",
    workloads: Annotated[int, typer.Option(help="Number of workloads.")] = 600,
    days: Annotated[float, typer.Option(help="Simulated days.")] = 90,
    warm_days: Annotated[
        float, typer.Option(help="Lives that start in these first days do not count.")
    ] = 21,
    ratio: Annotated[
        float, typer.Option(help="Median ratio of a request to the usual peak.")
    ] = 2.0,
    vpa: Annotated[bool, typer.Option(help="Also run the Vertical Pod Autoscaler's code.")] = True,
    bound: Annotated[bool, typer.Option(help="Also run a rule that uses all later lives.")] = True,
    kinds: Annotated[bool, typer.Option(help="Also print Headroom's result by kind.")] = True,
) -> None:
    """Print a table in Markdown."""
    measured = calibration.calibrate(summaries)
    if wrong := {name: at for name, at in measured.items() if getattr(calibration, name) != at}:
        sys.exit(f"calibration.py differs from {summaries}, which gives {wrong}")
    begun_s = time.monotonic()
    generated = [
        workload(SEEDS[part], index, days, ratio, held_out=part == "held-out")
        for index in range(workloads)
    ]
    rules: dict[str, Rule] = {"Headroom": headroom}
    if vpa:
        binary, _ = build("vpa-memory", default_cache())
        rules[f"{VPA}, as shipped"] = vertical_pod_autoscaler(binary, generated)
        rules[f"{VPA}, half-life 10 days"] = vertical_pod_autoscaler(
            binary, generated, ("-half-life", "240h")
        )
    rules["95 % quantile of 100 lives, + 15 %"] = fixed_quantile(0.95, 0.15)
    rules["highest of 100 lives, + 15 %"] = fixed_quantile(1.0, 0.15)
    if bound:
        margin = margin_for(generated, GOAL, warm_days)
        rules[f"all other lives, also later ones, + {margin:.1%}"] = all_other_lives(margin)
    sys.stdout.write(
        f"{part}: {workloads} workloads, {sum(len(w.lives) for w in generated):,} lives, "
        f"{days:.0f} days, requests {ratio} times the usual peak\n\n"
    )
    results = {name: score(generated, rule, warm_days) for name, rule in rules.items()}
    _print("rule", {name: found.total for name, found in results.items()})
    if kinds:
        by_kind = results["Headroom"].by_kind
        sys.stdout.write("\n")
        _print(
            "kind, Headroom",
            {kind: by_kind[kind] for kind in KINDS | HELD_OUT_KINDS if kind in by_kind},
        )
    sys.stdout.write(f"\n{time.monotonic() - begun_s:.0f} s\n")
    _check(results["Headroom"])


def _print(title: str, scores: Mapping[str, Score]) -> None:
    sys.stdout.write(
        f"| {title} | lives | with a recommendation | reclaimable GiB | found | lives above "
        "it, per 1,000 |\n|---|---|---|---|---|---|\n"
    )
    for name, each in scores.items():
        found = each.found / each.reclaimable if each.reclaimable else 0.0
        missed = 1000 * each.missed / each.recommended if each.recommended else 0.0
        sys.stdout.write(
            f"| {name} | {each.lives:,} | {each.recommended / each.lives:.1%} | "
            f"{each.reclaimable / GIB:,.0f} | {found:.1%} | {missed:.2f} |\n"
        )


def _check(found: Scores) -> None:
    total = found.total
    worst = ", ".join(f"{name} {missed}" for name, missed in found.missed_by.most_common(5))
    sys.stdout.write(
        f"missed: {total.missed} lives of {len(found.missed_by)} workloads ({worst})\n"
    )
    sys.stdout.write(f"lives that use more than their author requests: {total.over_author}\n")


if __name__ == "__main__":
    typer.run(main)
