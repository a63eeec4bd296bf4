"""Replays workloads and asks each rule for a request at the start of each life."""

import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.recommend.life import DAY, HOUR, Life, Workload
from headroom.core.recommend import lives as product
from headroom.core.recommend.growth import Growth
from headroom.core.recommend.profile import ContainerProfile

#: A rule returns the request of each life of a workload in bytes, or None where it recommends
#: nothing.
Rule = Callable[[Workload], Sequence[int | None]]
ENDINGS = {
    "completed": product.Ending.COMPLETED,
    "failed": product.Ending.FAILED,
    "evicted": product.Ending.EVICTED,
    "oom": product.Ending.OOM_KILLED,
}


@dataclass(slots=True)
class Score:
    """Sums over lives. Each life counts once, or with the hours that it runs."""

    lives: float = 0
    recommended: float = 0
    #: Lives with a recommendation whose peak is above it.
    missed: float = 0
    #: The missed lives that fitted what their author requests.
    missed_fitting: float = 0
    #: Lives whose peak is above what their author requests, with or without a recommendation.
    over_author: float = 0
    #: Bytes that authors request beyond the workload's highest peak in the whole evaluation.
    reclaimable: float = 0
    #: The part of ``reclaimable`` that the recommendations give back.
    found: float = 0

    def add(self, other: "Score") -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class Scores:
    by_kind: dict[str, Score] = field(default_factory=lambda: defaultdict(Score))
    #: Workload -> number of its lives that were missed.
    missed_by: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> Score:
        total = Score()
        for each in self.by_kind.values():
            total.add(each)
        return total


def score(
    workloads: Iterable[Workload], rule: Rule, warm_days: float, by_hours: bool = False
) -> Scores:
    """Return the score of a rule. Lives that start in the first ``warm_days`` do not count.

    A life without a recommendation keeps what its author requests, and gives nothing back. With
    ``by_hours`` each life counts with the hours that it runs, instead of once.
    """
    scores = Scores()
    for workload in workloads:
        counted = [
            (life, request)
            for life, request in zip(workload.lives, rule(workload), strict=True)
            if life.start_s >= warm_days * DAY
        ]
        most = max((life.peak_bytes for life, _ in counted), default=0)
        total = scores.by_kind[workload.kind]
        for life, request in counted:
            author = workload.requested_at(life.start_s)
            reclaimable = max(0, author - most)
            weight = (life.end_s - life.start_s) / HOUR if by_hours else 1
            total.lives += weight
            total.reclaimable += weight * reclaimable
            total.over_author += weight * (life.peak_bytes > author)
            if request is None:
                continue
            request = min(request, workload.device_bytes)
            total.recommended += weight
            total.found += weight * min(reclaimable, max(0, author - request))
            if life.peak_bytes > request:
                total.missed += weight
                total.missed_fitting += weight * (life.peak_bytes <= author)
                scores.missed_by[workload.name] += 1
    return scores


def in_order(workload: Workload) -> Iterator[tuple[Life, list[Life], list[Life]]]:
    """Yield each life at its start, with the lives that ended since the previous start, and the
    lives that still run."""
    running: list[Life] = []
    for life in workload.lives:
        ended = sorted((e for e in running if e.end_s <= life.start_s), key=lambda e: e.end_s)
        running = [e for e in running if e.end_s > life.start_s]
        yield life, ended, running
        running.append(life)


def headroom(workload: Workload) -> list[int | None]:
    """Return Headroom's recommendations."""
    profile = ContainerProfile()
    requests = []
    for life, ended, running in in_order(workload):
        now_s = life.start_s
        for each in ended:
            requested = workload.requested_at(each.start_s)
            ended_life = recorded(each, each.end_s, ENDINGS[each.ending])
            profile.record(each.program, replace(ended_life, requested_bytes=requested))
        profile.replace_running(
            (each.program, recorded(each, now_s)) for each in running if each.peak_until(now_s)
        )
        requests.append(profile.recommendation(life.program, now_s).request_bytes)
    return requests


def recorded(life: Life, until_s: float, ending: product.Ending | None = None) -> product.Life:
    """Return the life until a time, as a recorder sees it that reads its peak once a day."""
    growth = Growth()
    for day in range(1, int((until_s - life.start_s) // DAY) + 1):
        growth = growth.until(day * DAY, life.peak_until(life.start_s + day * DAY))
    return product.Life(
        life.peak_until(until_s),
        life.start_s,
        until_s,
        ending,
        unsettled=growth.unsettled,
        first_day_bytes=growth.first_bytes,
    )


def fixed_quantile(share: float, margin: float, window: int = 100) -> Rule:
    """Return a rule that adds a fixed margin to a quantile of the peaks of the last lives."""

    def rule(workload: Workload) -> list[int | None]:
        peaks: list[int] = []
        requests: list[int | None] = []
        for _, ended, _ in in_order(workload):
            peaks = [*peaks, *(each.peak_bytes for each in ended)][-window:]
            ordered = sorted(peaks)
            at = min(len(ordered) - 1, int(share * len(ordered)))
            requests.append(int(ordered[at] * (1 + margin)) if ordered else None)
        return requests

    return rule


def all_other_lives(margin: float) -> Rule:
    """Return a rule that no recommender can follow, because it uses future lives.

    It adds a margin to the highest peak of all other lives of the same program, including later
    lives. If most programs of a workload have one life, as in sweeps, it uses all lives together.
    """

    def rule(workload: Workload) -> list[int | None]:
        counts = Counter(life.program for life in workload.lives)
        varies = 2 * len(counts) > len(workload.lives)
        highest: dict[str, list[int]] = defaultdict(list)
        for life in workload.lives:
            highest["" if varies else life.program].append(life.peak_bytes)
        highest = {program: sorted(peaks)[-2:] for program, peaks in highest.items()}
        requests: list[int | None] = []
        for life in workload.lives:
            others = list(highest["" if varies else life.program])
            if life.peak_bytes == others[-1]:
                others.pop()
            requests.append(int(others[-1] * (1 + margin)) if others else None)
        return requests

    return rule


def margin_for(workloads: Sequence[Workload], goal: float, warm_days: float) -> float:
    """Return the smallest margin of ``all_other_lives``, to 0.1 %, with which at most this share of
    lives is above the recommendation."""
    low, high = 0, 1000
    while low < high:
        tried = (low + high) // 2
        total = score(workloads, all_other_lives(tried / 1000), warm_days).total
        low, high = (low, tried) if total.missed <= goal * total.recommended else (tried + 1, high)
    return low / 1000


def vertical_pod_autoscaler(
    binary: Path, workloads: Sequence[Workload], arguments: Sequence[str] = ()
) -> Rule:
    """Return the targets of the Vertical Pod Autoscaler's recommender, which ``binary`` runs.

    It gets all samples of all lives in order of time, and each out-of-memory kill.
    """
    lines: list[str] = []
    for workload in workloads:
        lines.append("w")
        # Tuples of time, order at equal times (samples, kills, the question), and line.
        events: list[tuple[float, int, str]] = []
        for index, life in enumerate(workload.lives):
            events.append((life.start_s, 2, f"r {life.start_s:.0f}"))
            events += [(t, 0, f"s {index} {t:.0f} {used}") for t, used in life.use]
            if life.ending == "oom":
                requested = workload.requested_at(life.start_s)
                events.append((life.end_s, 1, f"o {index} {life.end_s:.0f} {requested}"))
        lines += [line for _, _, line in sorted(events)]
    done = subprocess.run(
        [str(binary), *arguments],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=True,
    )
    answers = iter(done.stdout.split())
    requests = {
        workload.name: [int(next(answers)) or None for _ in workload.lives]
        for workload in workloads
    }
    return lambda workload: requests[workload.name]
