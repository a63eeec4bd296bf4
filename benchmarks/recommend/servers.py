"""Shows why some lives of servers exceed a recommendation that no rule could have avoided.

    python -m benchmarks.recommend.servers

The server of the family ``swapped models`` loads another model into its running process. The first
part of the output counts the lives above their recommendation before which no life had shown a
*sign*: peaks that differ, a peak that rises after the first day, or use that falls and stays low.
The second part shows what a rule would cost that waits longer before it recommends a request for
any server, on ``image releases``, whose servers never change.
"""

import math
from typing import Annotated

import typer

from benchmarks.recommend import families
from benchmarks.recommend.life import DAY, HOUR, Life, Workload
from benchmarks.recommend.replay import headroom, score

DAYS, WARM_DAYS = 90.0, 21.0
#: Differences of this size are signs.
SIGN = 1.01
#: A program is a server if its lives last at least this long on average.
SERVER_S = 2 * DAY
#: Use that is lower for this time has fallen.
_LOW_S = 6 * HOUR


def has_sign(lives: list[Life], now_s: float) -> bool:
    """Return whether lives that began before ``now_s`` have shown a sign that the need changes."""
    peaks = [each.peak_until(now_s) for each in lives]
    rises = any(
        each.peak_until(now_s) > SIGN * each.peak_until(each.start_s + DAY) for each in lives
    )
    return max(peaks) > SIGN * min(peaks) or rises or any(_fell(each, now_s) for each in lives)


def _fell(life: Life, now_s: float) -> bool:
    ends = [at_s for at_s, _ in life.use[1:]] + [life.end_s]
    highest = 0
    for (at_s, used), end_s in zip(life.use, ends, strict=True):
        if SIGN * used < highest and min(end_s, now_s) - at_s >= _LOW_S:
            return True
        highest = max(highest, used)
    return False


def begun(workload: Workload, life: Life) -> list[Life]:
    """Return the lives of the program that had reached a peak when ``life`` started."""
    now_s = life.start_s
    return [
        each
        for each in workload.lives
        if each.start_s < now_s and each.program == life.program and each.peak_until(now_s)
    ]


def waited_days(workload: Workload) -> list[float]:
    """Return for each life the age of its program if it is a server, else infinity."""
    found, starts = list[float](), dict[str, list[Life]]()
    for life in workload.lives:
        before = starts.setdefault(life.program, [])
        ran = sum(min(life.start_s, each.end_s) - each.start_s for each in before)
        is_server = bool(before) and ran >= SERVER_S * len(before)
        found.append((life.start_s - before[0].start_s) / DAY if is_server else math.inf)
        before.append(life)
    return found


def main(
    count: Annotated[int, typer.Option(help="Number of workloads of each family.")] = 200,
    seed: Annotated[str, typer.Option(help="Seed of the workloads.")] = "tune",
) -> None:
    """Print how many lives above a recommendation had no sign, and what waiting would cost."""
    swapped, released = (
        [families.workload(name, seed, index, DAYS, 2.0) for index in range(count)]
        for name in ("swapped models", "image releases")
    )
    requests = {each.name: headroom(each) for each in swapped + released}
    ages = {each.name: waited_days(each) for each in swapped + released}
    found = [
        (life.end_s - life.start_s, has_sign(begun(each, life), life.start_s))
        for each in swapped
        for life, request in zip(each.lives, requests[each.name], strict=True)
        if request is not None
        and life.start_s >= WARM_DAYS * DAY
        and life.peak_bytes > min(request, each.device_bytes)
    ]
    typer.echo(
        f"swapped models, lives above their recommendation: {len(found)}, "
        f"{sum(seconds for seconds, _ in found) / HOUR:,.0f} h; before "
        f"{sum(not sign for _, sign in found)} of them, "
        f"{sum(seconds for seconds, sign in found if not sign) / HOUR:,.0f} h, there was no sign"
    )
    columns = "with a recommendation | above, per 1,000 | pod-hours above, per 1,000"
    typer.echo(
        f"\n| servers wait for | swapped models: {columns} | image releases: GiB-hours found |\n"
        f"|{'---|' * 5}"
    )
    for days in (0, 30, 45, 60):

        def rule(workload: Workload, least: int = days) -> list[int | None]:
            each = zip(requests[workload.name], ages[workload.name], strict=True)
            return [request if age >= least else None for request, age in each]

        lives, hours = (score(swapped, rule, WARM_DAYS, each).total for each in (False, True))
        other = score(released, rule, WARM_DAYS, by_hours=True).total
        typer.echo(
            f"| {days} days | {lives.recommended / lives.lives:.0%} "
            f"| {1000 * lives.missed / lives.recommended:.1f} "
            f"| {1000 * hours.missed / hours.recommended:.1f} "
            f"| {other.found / other.reclaimable:.0%} |"
        )


if __name__ == "__main__":
    typer.run(main)
