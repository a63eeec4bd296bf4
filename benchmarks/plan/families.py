"""Families of clusters on which the ranges of a plan are tuned and judged.

Each family differs in kind from the clusters of ``generated``, which have a steady rhythm. The
families share no code with the product. The constants of the ranges were chosen on ``TUNED``, while
``JUDGED`` was only measured. All constants are made up.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.plan.generated import DAY_S, GPU_MIB, GPUS_OF_NODE, HOUR_S, Row

Drawn = tuple[str, float, float, int, int]


@dataclass(frozen=True, slots=True)
class Cluster:
    """The drawn properties of a cluster."""

    lots: np.random.Generator
    days: int
    #: Approximate number of GPUs that it needs unshared.
    size: float

    def arrivals(self, a_day: float, weekend: float = 1.0, office: bool = False) -> Iterator[float]:
        """Yield times of independent arrivals, in seconds."""
        for day in range(self.days):
            mean = a_day * (weekend if day % 7 >= 5 else 1.0)
            for _ in range(self.lots.poisson(mean)):
                hour = self.lots.normal(12.5, 2.5) if office else self.lots.uniform(0, 24)
                yield day * DAY_S + min(23.9, max(0.0, hour)) * HOUR_S

    def mib(self, low: float, high: float) -> int:
        return int(GPU_MIB * self.lots.uniform(low, high))


def traffic(cluster: Cluster) -> Iterator[Drawn]:
    """Services whose replicas follow the hourly traffic. Some days have much more traffic."""
    lots = cluster.lots
    for service in range(int(lots.integers(3, 8))):
        share, size = cluster.size / 5 * lots.uniform(0.4, 1.6), lots.uniform(0.08, 0.6)
        swing, surge = lots.uniform(0.2, 0.8), lots.uniform(0.05, 0.3)
        running: list[float] = []
        for day in range(cluster.days):
            busy = math.exp(lots.normal(0, surge)) * (0.7 if day % 7 >= 5 else 1.0)
            for hour in range(24):
                level = 1 + swing * math.sin(2 * math.pi * (hour - 8) / 24)
                wanted = max(1, round(share * busy * level / (1 + swing)))
                now_s = float(day * DAY_S + hour * HOUR_S)
                while len(running) < wanted:
                    running.append(now_s + float(lots.uniform(0, 300)))
                while len(running) > wanted:
                    mib = int(GPU_MIB * size * lots.uniform(0.9, 1.0))
                    yield f"service-{service}", running.pop(), now_s + 200, mib, 1
        for began_s in running:
            yield f"service-{service}", began_s, cluster.days * DAY_S, int(GPU_MIB * size), 1


def campaigns(cluster: Cluster) -> Iterator[Drawn]:
    """Campaigns of heavy-tailed size: tens of pods that are submitted together on a few days."""
    lots = cluster.lots
    tail = lots.uniform(1.3, 2.5)
    begun = cluster.arrivals(lots.uniform(0.4, 3.0), 0.3, office=True)
    for number, at_s in enumerate(begun, 1):
        pods = int(min(6 * cluster.size, (1 + lots.pareto(tail)) * cluster.size / 8)) + 1
        mib, hours = cluster.mib(0.1, 0.7), lots.lognormal(math.log(3), 0.7)
        for _ in range(pods):
            began_s = at_s + lots.exponential(600)
            ended_s = began_s + hours * HOUR_S * lots.uniform(0.6, 1.4)
            yield f"campaign-{number % 7}", began_s, ended_s, int(mib * lots.uniform(0.85, 1)), 1
    yield from _steady(cluster, cluster.size / 4)


def retraining(cluster: Cluster) -> Iterator[Drawn]:
    """Models that are trained again every week on their weekday, on more data each time."""
    lots = cluster.lots
    for model in range(max(3, int(cluster.size / 3))):
        weekday, hour = int(lots.integers(0, 6)), lots.uniform(0, 20)
        gpus, hours = int(lots.choice([1, 1, 1, 2, GPUS_OF_NODE])), lots.uniform(3, 16)
        size, growth = lots.uniform(0.15, 0.75), lots.uniform(-0.01, 0.05)
        for week in range(cluster.days // 7 + 1):
            day = 7 * week + weekday + (1 if lots.random() < 0.15 else 0)
            if day >= cluster.days or lots.random() < 0.05:
                continue
            grown = (1 + growth) ** week
            for part in range(int(lots.integers(1, 4))):
                began_s = day * DAY_S + hour * HOUR_S + lots.uniform(0, 2) * HOUR_S + part * 60
                ended_s = began_s + hours * grown * HOUR_S * lots.uniform(0.8, 1.2)
                mib = min(GPU_MIB, int(GPU_MIB * size * lots.uniform(0.93, 1)))
                yield f"model-{model}", began_s, ended_s, mib, gpus
    yield from _steady(cluster, cluster.size / 5)


def sessions(cluster: Cluster) -> Iterator[Drawn]:
    """Notebooks of teams: sessions by day. Teams are away for days, or work towards a date."""
    lots = cluster.lots
    for team in range(int(lots.integers(2, 6))):
        level = cluster.size / 4 * lots.uniform(0.4, 1.6)
        pace, low = 1.0, lots.uniform(0.05, 0.2)
        for day in range(cluster.days):
            pace = 1 + 0.7 * (pace - 1) + lots.normal(0, 0.12)
            mean = level * max(0.1, pace) * (0.15 if day % 7 >= 5 else 1.0)
            for _ in range(lots.poisson(mean)):
                began_s = day * DAY_S + min(23.0, max(0.0, lots.normal(10.5, 2))) * HOUR_S
                ended_s = began_s + lots.gamma(2.0, 2.2) * HOUR_S + 120
                yield f"team-{team}", began_s, ended_s, cluster.mib(low, 3 * low), 1


def drift(cluster: Cluster) -> Iterator[Drawn]:
    """Jobs around the clock whose number grows or shrinks by up to 12 % a week."""
    lots = cluster.lots
    for kind in range(4):
        weekly, hours = lots.uniform(-0.12, 0.12), lots.uniform(0.7, 8)
        a_day = cluster.size / 4 * 24 / hours * lots.uniform(0.5, 1.5)
        low = lots.uniform(0.05, 0.4)
        for day in range(cluster.days):
            busy = (1 + weekly) ** (day / 7) * (0.7 if day % 7 >= 5 else 1.0)
            for _ in range(lots.poisson(a_day * busy * math.exp(lots.normal(0, 0.1)))):
                began_s = (day + lots.random()) * DAY_S
                ended_s = began_s + lots.gamma(2.0, hours / 2) * HOUR_S + 60
                yield f"jobs-{kind}", began_s, ended_s, cluster.mib(low, 1.7 * low), 1


def deadlines(cluster: Cluster) -> Iterator[Drawn]:
    """A group that submits more each day until a date every few weeks, and then pauses."""
    lots = cluster.lots
    every, first = int(lots.integers(10, 30)), int(lots.integers(0, 20))
    for day in range(cluster.days):
        left = (first - day) % every
        level = 0.35 + 0.65 * math.exp(-left / 4) * (1 if left < every - 2 else 0.2)
        for run in range(lots.poisson(cluster.size / 3 * level)):
            began_s = (day + lots.beta(3, 2)) * DAY_S
            for _ in range(int(lots.geometric(0.45))):
                ended_s = began_s + lots.lognormal(math.log(4), 0.6) * HOUR_S
                yield f"group-{run % 5}", began_s, ended_s, cluster.mib(0.1, 0.5), 1


def mixture(cluster: Cluster) -> Iterator[Drawn]:
    """A third each of sessions, traffic and campaigns, as on a cluster that a company shares."""
    part = Cluster(cluster.lots, cluster.days, cluster.size / 3)
    for family in (sessions, traffic, campaigns):
        yield from family(part)


def nightly(cluster: Cluster) -> Iterator[Drawn]:
    """Pipelines over the data of the day, which run at night, and a few people by day."""
    lots = cluster.lots
    data = 1.0
    steps = [
        (lots.uniform(0.5, 3.0), cluster.mib(0.1, 0.6)) for _ in range(int(lots.integers(3, 7)))
    ]
    for day in range(cluster.days):
        data = max(0.4, 1 + 0.5 * (data - 1) + lots.normal(0, 0.2))
        today = data * (0.6 if day % 7 >= 5 else 1.0)
        began_s = day * DAY_S + lots.uniform(0, 2) * HOUR_S
        for step, (hours, mib) in enumerate(steps):
            for _ in range(
                max(1, round(cluster.size / len(steps) * today * lots.uniform(0.7, 1.3)))
            ):
                at_s = began_s + lots.exponential(1200)
                ended_s = at_s + hours * HOUR_S * lots.uniform(0.7, 1.5)
                yield f"step-{step}", at_s, ended_s, int(mib * lots.uniform(0.9, 1)), 1
            began_s += 0.7 * hours * HOUR_S
    for at_s in cluster.arrivals(cluster.size / 3, 0.1, office=True):
        ended_s = at_s + lots.gamma(2.0, 1.5) * HOUR_S
        yield "people", at_s, ended_s, cluster.mib(0.05, 0.3), 1


def courses(cluster: Cluster) -> Iterator[Drawn]:
    """Courses of a university: classes by timetable, and homework that is due each week."""
    lots = cluster.lots
    for course in range(max(2, int(cluster.size / 12))):
        students, weekday = int(lots.integers(8, 30)), int(lots.integers(0, 5))
        hour, due, low = (
            int(lots.integers(8, 17)),
            int(lots.integers(0, 7)),
            lots.uniform(0.04, 0.2),
        )
        for day in range(cluster.days):
            if day % 7 == weekday and lots.random() > 0.05:
                for _ in range(lots.binomial(students, 0.8)):
                    at_s = day * DAY_S + hour * HOUR_S + lots.exponential(400)
                    ended_s = at_s + lots.uniform(0.7, 1.6) * HOUR_S
                    yield f"course-{course}", at_s, ended_s, cluster.mib(low, 2 * low), 1
            left = (due - day) % 7
            for _ in range(lots.poisson(students * 0.35 * math.exp(-left / 1.5))):
                at_s = day * DAY_S + 24 * lots.beta(5, 2) * HOUR_S
                ended_s = at_s + lots.gamma(2.0, 1.0) * HOUR_S + 120
                yield f"homework-{course}", at_s, ended_s, cluster.mib(low, 3 * low), 1


def experiments(cluster: Cluster) -> Iterator[Drawn]:
    """Trainings of days to weeks on several GPUs, each with evaluations of its checkpoints."""
    lots = cluster.lots
    # On average, a training takes 2.5 GPUs for 4 days. Some run before the history begins.
    a_day = 0.75 * cluster.size / 10
    for day in range(-12, cluster.days):
        for _ in range(lots.poisson(a_day)):
            began_s = (day + lots.random()) * DAY_S
            ended_s = began_s + min(16.0, lots.lognormal(math.log(2.8), 0.8)) * DAY_S
            gpus, person = int(lots.choice([1, 2, GPUS_OF_NODE])), int(lots.integers(0, 8))
            mib = cluster.mib(0.5, 0.95)
            if ended_s > 0:
                yield f"person-{person}", max(0.0, began_s), ended_s, mib, gpus
            at_s, every_h, mib = began_s, lots.uniform(2, 8), cluster.mib(0.08, 0.35)
            while (at_s := at_s + every_h * HOUR_S) < min(ended_s, cluster.days * DAY_S):
                yield f"evaluation-{person}", at_s, at_s + lots.uniform(0.1, 0.9) * HOUR_S, mib, 1


def arrays(cluster: Cluster) -> Iterator[Drawn]:
    """Arrays of 20 to 300 tasks. Each group runs as many at a time as its quota allows."""
    lots = cluster.lots
    for group in range(int(lots.integers(3, 7))):
        quota = max(2, int(cluster.size / 5 * lots.uniform(0.6, 1.4)))
        # The quota is in use for 50 to 90 % of the time.
        hours, busy = lots.uniform(0.3, 3), lots.uniform(0.5, 0.9)
        free_s = [0.0] * quota
        for submitted_s in cluster.arrivals(24 * quota * busy / hours / 80, 0.6, office=True):
            mib = cluster.mib(0.08, 0.6)
            for _ in range(int(min(300, 20 + lots.exponential(60)))):
                slot = free_s.index(min(free_s))
                began_s = max(submitted_s, free_s[slot]) + 5
                free_s[slot] = began_s + hours * HOUR_S * lots.uniform(0.5, 1.5)
                yield f"array-{group}", began_s, free_s[slot], int(mib * lots.uniform(0.9, 1)), 1


def customers(cluster: Cluster) -> Iterator[Drawn]:
    """A service for each customer that follows the traffic of the day. Customers come and go."""
    lots = cluster.lots
    for customer in range(int(cluster.size / 2)):
        first, last = 0, cluster.days
        if lots.random() < 0.3:
            first = int(lots.integers(0, cluster.days))
        if lots.random() < 0.15:
            last = int(lots.integers(first, cluster.days))
        pods, growth, mib = lots.uniform(1, 3), lots.uniform(-0.02, 0.08), cluster.mib(0.08, 0.6)
        for day in range(first, last):
            today = pods * (1 + growth) ** ((day - first) / 7) * math.exp(lots.normal(0, 0.1))
            for replica in range(max(1, round(today))):
                # The first replica runs all day, the others by day.
                began_h, ended_h = (0, 24) if not replica else (lots.uniform(6, 9), 20)
                began_s, ended_s = day * DAY_S + began_h * HOUR_S, day * DAY_S + ended_h * HOUR_S
                yield f"customer-{customer}", began_s, ended_s, int(mib * lots.uniform(0.9, 1)), 1


def commits(cluster: Cluster) -> Iterator[Drawn]:
    """Tests of commits: each starts several short pods, and some are repeated. All run at night."""
    lots = cluster.lots
    for repository in range(int(lots.integers(3, 7))):
        pods, minutes, mib = int(lots.integers(2, 9)), lots.uniform(8, 45), cluster.mib(0.05, 0.4)
        # By day, the pods of a repository keep about an eighth of the GPUs busy.
        a_day = cluster.size / 8 * 8 * 60 / (pods * minutes)
        nightly, pace = max(1, round(cluster.size / 5 * lots.uniform(0.4, 1.2))), 1.0
        for day in range(cluster.days):
            pace = 1 + 0.6 * (pace - 1) + lots.normal(0, 0.15)
            wanted = a_day * max(0.2, pace) * (0.1 if day % 7 >= 5 else 1.0)
            for _ in range(lots.poisson(wanted)):
                at_s = day * DAY_S + min(23.0, max(6.0, lots.normal(14, 2.5))) * HOUR_S
                for attempt in range(int(min(3, lots.geometric(0.8)))):
                    for _ in range(pods):
                        began_s = at_s + attempt * minutes * 75 + lots.exponential(60)
                        ended_s = began_s + minutes * 60 * lots.uniform(0.7, 1.4) + 60
                        yield f"tests-{repository}", began_s, ended_s, mib, 1
            for _ in range(nightly):
                began_s = day * DAY_S + (1 + repository / 2) * HOUR_S + lots.exponential(300)
                ended_s = began_s + lots.uniform(1, 3) * HOUR_S
                yield f"all-tests-{repository}", began_s, ended_s, mib, 1


def restarts(cluster: Cluster) -> Iterator[Drawn]:
    """Trainings on several whole nodes for days, which restart after failures, and notebooks."""
    lots = cluster.lots
    for team in range(max(2, int(cluster.size / 20))):
        at_s = -lots.uniform(0, 6) * DAY_S
        while at_s < cluster.days * DAY_S:
            pods = int(lots.choice([1, 2, 2, 4])) if cluster.size > 20 else 1
            gpus = int(lots.choice([2, GPUS_OF_NODE, GPUS_OF_NODE]))
            ends_s, mib = at_s + lots.gamma(3.0, 1.3) * DAY_S, cluster.mib(0.5, 0.95)
            while at_s < ends_s:
                failed_s = min(ends_s, at_s + lots.exponential(1.5 * DAY_S))
                if failed_s > 0:
                    for _ in range(pods):
                        yield f"training-{team}", max(0.0, at_s), failed_s, mib, gpus
                at_s = failed_s + lots.uniform(0.05, 1) * HOUR_S
            at_s += lots.exponential(0.6) * DAY_S
    for at_s in cluster.arrivals(cluster.size, 0.2, office=True):
        ended_s = at_s + lots.gamma(2.0, 1.2) * HOUR_S + 120
        yield f"notebook-{int(lots.integers(0, 6))}", at_s, ended_s, cluster.mib(0.04, 0.3), 1


def renders(cluster: Cluster) -> Iterator[Drawn]:
    """A render farm: each show renders its shots at night, and towards its delivery by day too."""
    lots = cluster.lots
    shows = int(lots.integers(2, 6))
    for show in range(shows):
        first = -int(lots.integers(0, 20))
        while first < cluster.days:
            length, mib = int(lots.integers(8, 36)), cluster.mib(0.1, 0.7)
            level = cluster.size / shows * lots.uniform(0.5, 1.5)
            for day in range(max(0, first), min(cluster.days, first + length)):
                done = (day - first + 1) / length
                for hour in (20.0, 11.0) if done > 0.7 else (20.0,):
                    for _ in range(lots.poisson(level * (0.4 + 0.6 * done))):
                        at_s = (24 * day + hour + lots.exponential(1.0)) * HOUR_S
                        ended_s = at_s + lots.lognormal(math.log(3), 0.5) * HOUR_S
                        yield f"show-{show}", at_s, ended_s, int(mib * lots.uniform(0.85, 1)), 1
            first += length + int(lots.integers(0, 7))


def _steady(cluster: Cluster, gpus: float) -> Iterator[Drawn]:
    """Services that always run, with a few restarts."""
    lots = cluster.lots
    for replica in range(max(1, round(gpus))):
        at_s, mib = 0.0, cluster.mib(0.1, 0.6)
        while at_s < cluster.days * DAY_S:
            ended_s = min(at_s + lots.exponential(5 * DAY_S) + HOUR_S, cluster.days * DAY_S)
            yield f"steady-{replica % 5}", at_s, ended_s, mib, 1
            at_s = ended_s + 20


Family = Callable[[Cluster], Iterator[Drawn]]
#: Families on which the ranges were tuned, together with ``generated``. ``deadlines``, ``mixture``,
#: ``nightly`` and ``experiments`` were judged families until their first results were inspected.
TUNED: dict[str, Family] = {
    "traffic": traffic,
    "campaigns": campaigns,
    "sessions": sessions,
    "deadlines": deadlines,
    "mixture": mixture,
    "nightly": nightly,
    "experiments": experiments,
}
#: Families that were only measured, not used for tuning.
JUDGED: dict[str, Family] = {
    "retraining": retraining,
    "drift": drift,
    "courses": courses,
    "arrays": arrays,
    "customers": customers,
    "commits": commits,
    "restarts": restarts,
    "renders": renders,
}


def rows(name: str, seed: int, days: int, size: float) -> list[Row]:
    """Return the pods of ``days`` days of a cluster of this family, in order of creation."""
    family = (TUNED | JUDGED)[name]
    lots = np.random.default_rng([seed, *name.encode()])
    found = [
        Row(f"{workload}-{number}", workload, gpus, mib, 0.1, int(began_s), int(ended_s))
        for number, (workload, began_s, ended_s, mib, gpus) in enumerate(
            family(Cluster(lots, days, size))
        )
        if 0 <= began_s < days * DAY_S and ended_s >= began_s + 60
    ]
    return sorted(found, key=lambda row: (row.created_s, row.name))
