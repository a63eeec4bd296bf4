"""Families of workloads on which the recommender is judged, in addition to ``workloads``.

Each family is a kind of program that people run, and its lives have a shape of their own. The
families share no code with the recommender, and only the class ``Life`` with ``workloads``. The
recommender's choices were made with ``TUNED``; ``JUDGED`` were only measured. All constants are
assumptions.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.recommend.life import DAY, GIB, HOUR, Life, Workload

#: Memory of an A10, an L40S, an A100 with 40 GB, and an H100.
DEVICES_BYTES = tuple(mib << 20 for mib in (22731, 46068, 40960, 81559))
#: Requests that authors write, in GiB. An author takes the smallest that is large enough.
REQUESTS_GIB = (2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80)
#: Time until a program has loaded what it needs when it starts.
LOADED_S = 180.0


@dataclass(frozen=True, slots=True)
class Owner:
    """The drawn properties of a workload."""

    rng: random.Random
    device_bytes: int
    days: float
    #: Its usual peak, in bytes.
    usual: float

    def capped(self, amount: float) -> int:
        return int(min(max(amount, 0.4 * GIB), 0.98 * self.device_bytes))

    def starts(self, a_day: float) -> Iterator[float]:
        """Yield times of independent arrivals, in seconds."""
        time_s = 0.0
        while (time_s := time_s + self.rng.expovariate(a_day / DAY)) < self.days * DAY:
            yield time_s

    def replicas(self, most: int, mean_days: float) -> Iterator[tuple[float, float]]:
        """Yield start and end of the lives of replicas that are always replaced."""
        for index in range(self.rng.randint(1, most)):
            start_s = 45.0 * index
            while start_s < self.days * DAY:
                end_s = start_s + HOUR + self.rng.expovariate(1 / (mean_days * DAY))
                yield start_s, min(end_s, self.days * DAY)
                start_s = end_s + 30.0

    def life(
        self, start_s: float, end_s: float, steps: list[tuple[float, float]], program: str = "p"
    ) -> Life:
        """Return a life that uses these amounts from these parts of its time on. One in 60 fails
        before it ends."""
        use = [
            (start_s + max(0.01, at) * (end_s - start_s), self.capped(amount))
            for at, amount in sorted(steps)
        ]
        ending = "completed"
        if self.rng.random() < 1 / 60:
            use, ending = use[: self.rng.randint(1, len(use))], "failed"
            end_s = min(end_s, use[-1][0] + 60.0)
        return Life(start_s, end_s, tuple(use), ending, program)


def bounded_text(owner: Owner) -> Iterator[Life]:
    """Training on texts: the longest batch decides the peak, and the length of texts is limited."""
    rng, short = owner.rng, owner.rng.uniform(0.05, 0.4)
    limit = rng.uniform(1.0, 1.15)
    for start_s in owner.starts(rng.uniform(1.5, 8.0)):
        length_s = rng.lognormvariate(math.log(1.5 * HOUR), 1.1)
        batches = max(3, int(length_s / 240))
        longest = rng.random() ** (1 / batches) ** 0.6
        peak = owner.usual * limit * (1 - short * (1 - longest))
        yield owner.life(start_s, start_s + length_s, [(0.05, 0.8 * peak), (rng.random(), peak)])


def rare_batches(owner: Owner) -> Iterator[Life]:
    """Batch inference: one life in 30 to 400 has a batch that is far larger than all others."""
    rng = owner.rng
    one_in, noise = rng.uniform(30, 400), rng.uniform(0.005, 0.04)
    largest = rng.uniform(1.2, 2.5)
    for start_s in owner.starts(rng.uniform(3.0, 18.0)):
        peak = owner.usual * math.exp(rng.gauss(0, noise))
        if rng.random() < 1 / one_in:
            peak *= 1 + (largest - 1) * rng.uniform(0.7, 1.0)
        end_s = start_s + rng.lognormvariate(math.log(0.7 * HOUR), 0.8)
        yield owner.life(start_s, end_s, [(0.05, 0.7 * peak), (0.6, peak)])


def sweeps(owner: Owner) -> Iterator[Life]:
    """Sweeps of hyperparameters: arguments differ in each life, and some of them cost memory."""
    rng, noise = owner.rng, owner.rng.uniform(0.005, 0.03)
    sizes = sorted(rng.uniform(0.35, 1.0) for _ in range(rng.randint(2, 5)))
    number = 0
    for begin_s in owner.starts(rng.uniform(0.1, 0.4)):
        for trial in range(rng.randint(8, 40)):
            number += 1
            start_s = begin_s + trial * rng.uniform(60.0, 1500.0)
            peak = owner.usual * rng.choice(sizes) / sizes[-1] * math.exp(rng.gauss(0, noise))
            end_s = start_s + rng.lognormvariate(math.log(0.6 * HOUR), 0.6)
            steps = [(0.1, 0.85 * peak), (0.7, peak)]
            yield owner.life(start_s, end_s, steps, f"arguments-{number}")


def slow_leaks(owner: Owner) -> Iterator[Life]:
    """Servers that leak 1 to 20 % of their memory a day until a release restarts them."""
    rng = owner.rng
    a_day, mean_days = rng.uniform(0.01, 0.20), rng.uniform(2.0, 14.0)
    for start_s, end_s in owner.replicas(4, mean_days):
        first = 0.6 * owner.usual * math.exp(rng.gauss(0, 0.01))
        days = (end_s - start_s) / DAY
        points = max(2, min(60, int(4 * days)))
        steps = [
            (at / points, first * (1 + a_day * days * at / points)) for at in range(points + 1)
        ]
        yield owner.life(start_s, end_s, steps)


def swapped_models(owner: Owner) -> Iterator[Life]:
    """Servers that load a new model into the running process; some hold both for a while."""
    rng, both = owner.rng, owner.rng.random() < 0.4
    mean_days = rng.uniform(3.0, 12.0)
    models, at_s, factor = [(0.0, 1.0)], 0.0, 1.0
    while (at_s := at_s + rng.expovariate(1 / (mean_days * DAY))) < owner.days * DAY:
        factor = min(1.8, max(0.4, factor * rng.lognormvariate(0.0, 0.25)))
        models.append((at_s, factor))
    for start_s, end_s in owner.replicas(5, rng.uniform(4.0, 20.0)):
        length_s = end_s - start_s
        current = [size for since, size in models if since <= start_s][-1]
        steps = [(0.0, owner.usual * current)]
        for since_s, size in models:
            if start_s < since_s < end_s:
                held = size + current if both else size
                steps.append(((since_s - start_s) / length_s, owner.usual * held))
                current = size
        yield owner.life(start_s, end_s, steps)


def image_releases(owner: Owner) -> Iterator[Life]:
    """Engines that size themselves; a release of the image moves the peak by up to 2 %."""
    rng, noise = owner.rng, owner.rng.uniform(0.0005, 0.003)
    releases, factor = [(0.0, 1.0)], 1.0
    for at_s in owner.starts(1 / rng.uniform(5, 20)):
        factor *= 1 + rng.uniform(-0.02, 0.02)
        releases.append((at_s, factor))
    spans = owner.replicas(6, rng.uniform(1.0, 6.0))
    if rng.random() < 0.5:
        a_day, mean_s = rng.uniform(3.0, 12.0), rng.uniform(1.0, 6.0) * HOUR
        spans = ((s, s + mean_s * rng.uniform(0.2, 2.0)) for s in owner.starts(a_day))
    for start_s, end_s in spans:
        size = [each for since_s, each in releases if since_s <= start_s][-1]
        peak = owner.usual * size * math.exp(rng.gauss(0, noise))
        yield owner.life(start_s, end_s, [(0.02, peak), (1.0, peak)])


def sessions(owner: Owner) -> Iterator[Life]:
    """Notebooks: bursts of cells, whose subject changes from day to day."""
    rng = owner.rng
    for start_s in owner.starts(rng.uniform(0.7, 3.0)):
        cells = [
            (rng.random(), owner.usual * rng.lognormvariate(-0.5, rng.uniform(0.3, 0.7)))
            for _ in range(rng.randint(2, 12))
        ]
        end_s = start_s + rng.uniform(0.5, 9.0) * HOUR
        yield owner.life(start_s, end_s, sorted(cells))


def tests_of_commits(owner: Owner) -> Iterator[Life]:
    """CI: many short lives of a few test suites, in which a new test sometimes needs more."""
    rng, noise = owner.rng, owner.rng.uniform(0.001, 0.02)
    suites = [rng.uniform(0.3, 1.0) for _ in range(rng.randint(1, 4))]
    month = 1.0
    for start_s in owner.starts(rng.uniform(6.0, 30.0)):
        suite = rng.randrange(len(suites))
        if rng.random() < 0.004:
            month *= 1 + rng.uniform(0.0, 0.12)
        peak = owner.usual * suites[suite] * month * math.exp(rng.gauss(0, noise))
        end_s = start_s + rng.uniform(180.0, 2400.0)
        yield owner.life(start_s, end_s, [(0.2, 0.5 * peak), (0.8, peak)], f"suite-{suite}")


def autoscaled_triton(owner: Owner) -> Iterator[Life]:
    """Triton that is scaled by its load: each instance in use adds to its memory."""
    rng = owner.rng
    instances, part = rng.randint(2, 8), rng.uniform(0.05, 0.25)
    weights = 1 - part
    for start_s in owner.starts(rng.uniform(4.0, 24.0)):
        hour = start_s % DAY / HOUR
        load = 0.5 + 0.4 * math.sin(2 * math.pi * (hour - 9) / 24) + rng.gauss(0, 0.15)
        used = min(instances, max(1, round(load * instances)))
        peak = owner.usual * (weights + part * used / instances) * math.exp(rng.gauss(0, 0.004))
        end_s = start_s + rng.lognormvariate(math.log(2.5 * HOUR), 0.7)
        yield owner.life(start_s, end_s, [(0.05, owner.usual * weights), (0.5, peak)])


def loaded_on_demand(owner: Owner) -> Iterator[Life]:
    """Servers of several models, each loaded at its first request; the cache holds a few."""
    rng = owner.rng
    models = [rng.uniform(0.1, 0.5) for _ in range(rng.randint(3, 10))]
    held, a_day = rng.randint(2, 5), rng.uniform(2.0, 40.0)
    for start_s, end_s in owner.replicas(4, rng.uniform(2.0, 10.0)):
        cache, steps, at_s = [], [(0.0, 0.15 * owner.usual)], start_s
        while (at_s := at_s + rng.expovariate(a_day / DAY)) < end_s and len(steps) < 80:
            model = min(len(models) - 1, int(rng.expovariate(1.0) * len(models) / 3))
            if model not in cache:
                cache = [*cache, model][-held:]
                amount = owner.usual * (0.15 + sum(models[each] for each in cache))
                steps.append(((at_s - start_s) / (end_s - start_s), amount))
        yield owner.life(start_s, end_s, steps)


Family = Callable[[Owner], Iterator[Life]]
#: Families that were inspected while the recommender's rules were chosen. ``CI`` was a judged
#: family until its first result led to the margin after lives above a recommendation.
TUNED: dict[str, Family] = {
    "bounded text": bounded_text,
    "rare batches": rare_batches,
    "sweeps": sweeps,
    "slow leaks": slow_leaks,
    "swapped models": swapped_models,
    "CI": tests_of_commits,
}
#: Families that were only measured.
JUDGED: dict[str, Family] = {
    "image releases": image_releases,
    "sessions": sessions,
    "autoscaled Triton": autoscaled_triton,
    "loaded on demand": loaded_on_demand,
}


def workload(name: str, seed: str, index: int, days: float, ratio: float) -> Workload:
    """Return workload ``index`` of a family.

    ``ratio`` is the median ratio of a request to the usual peak.
    """
    rng = random.Random(f"{name}/{seed}/{index}")
    device_bytes = rng.choice(DEVICES_BYTES)
    usual = device_bytes * min(0.8, max(0.03, rng.lognormvariate(math.log(0.22), 0.6)))
    family = (TUNED | JUDGED)[name]
    lives = sorted(
        (
            life
            for life in family(Owner(rng, device_bytes, days, usual))
            if life.end_s - life.start_s > 2 * LOADED_S
        ),
        key=lambda life: life.start_s,
    )
    first = _rounded(usual * rng.lognormvariate(math.log(ratio), 0.3))
    requests = _requests(lives, first, device_bytes)
    return Workload(f"{name}-{index}", name, device_bytes, requests, tuple(lives))


def _requests(lives: list[Life], first: int, device_bytes: int) -> tuple[tuple[float, int], ...]:
    """Return what the author requests; after an overrun it is 1.2 times what the life needed."""
    found = [(0.0, min(first, device_bytes))]
    for life in sorted(lives, key=lambda each: each.end_s):
        if life.peak_bytes > found[-1][1]:
            found.append((life.end_s, min(device_bytes, _rounded(1.2 * life.peak_bytes))))
    return tuple(found)


def _rounded(amount: float) -> int:
    return next((gib * GIB for gib in REQUESTS_GIB if gib * GIB >= amount), 80 * GIB)
