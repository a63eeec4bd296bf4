"""Generates the lives of containers on GPUs: when each starts and ends, and how much memory it
uses.

A workload is one owner with one GPU container. Everything about it is drawn from its own random
generator, so it stays the same whichever other workloads are generated. This module shares no code
with the recommender.

Constants are either calibrated (see ``calibration.py``) or marked as assumptions.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from benchmarks.recommend.calibration import (
    LIFETIME_LOG_SD,
    LIFETIME_MEDIAN_S,
    PEAK_BETWEEN_LIVES_LOG_SD,
    PEAK_OVER_P95_LOG_MEAN,
    PEAK_OVER_P95_LOG_SD,
)
from benchmarks.recommend.life import DAY, GIB, HOUR, Life, Workload

#: Memory that drivers report for a T4, an A10, an L40S and an A100 or H100 of 80 GB.
DEVICES_BYTES = tuple(mib << 20 for mib in (15109, 22731, 46068, 81251))
#: Requests that people write, in GiB. An assumption.
SIZES_GIB = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80)
#: The ratio of a request to the typical peak when the workload was created is log-normal. An
#: assumption; the benchmark can vary the median.
REQUEST_LOG_SD = 0.35
#: Days between two changes of a workload's model, on average. An assumption.
CHANGE_EVERY_DAYS = 45.0
#: Share of these changes that show in the pod's arguments or environment. The others come with data
#: or with a file that the pod reads. An assumption.
CHANGE_SHOWN = 0.85
#: The effect of a change on memory is log-normal. An assumption: models grow more often than
#: shrink.
CHANGE_LOG_MEAN, CHANGE_LOG_SD = 0.1, 0.35
#: Time in which a process allocates what it needs when it starts.
STARTUP_S = 120.0


@dataclass(slots=True)
class _Plan:
    """The properties of a workload that are fixed before its lives are drawn."""

    rng: random.Random
    device_bytes: int
    days: float
    born_s: float
    #: Typical peak of the first model, in bytes.
    base_bytes: float
    #: Time, factor and program of each model. The first begins with the workload.
    models: list[tuple[float, float, str]] = field(default_factory=list)

    def model_at(self, time_s: float) -> tuple[float, str]:
        """Return the factor on the memory, and the program, at this time."""
        return [(factor, program) for since, factor, program in self.models if since <= time_s][-1]

    def capped(self, amount_bytes: float) -> int:
        """Return the amount, but at least the CUDA context and at most the device's memory."""
        return int(min(max(amount_bytes, 0.3 * GIB), 0.985 * self.device_bytes))


Drawn = Iterator[Life]


def _ramp(
    start_s: float, end_s: float, peak: int, rng: random.Random, steps: int
) -> list[tuple[float, int]]:
    """Return use that reaches most of its peak at the beginning, and the peak at a random time."""
    length_s = end_s - start_s
    first = min(STARTUP_S, length_s / 2)
    use = [(start_s + first, int(peak * rng.uniform(0.75, 0.97)))]
    at_peak = rng.randrange(1, steps + 1)
    for step in range(1, steps + 1):
        at_s = start_s + first + (length_s - first) * step / steps
        low = int(peak * rng.uniform(0.8, 0.99))
        use.append((at_s, peak if step == at_peak else low))
    return use


def _life(
    plan: _Plan,
    start_s: float,
    end_s: float,
    peak: int,
    program: str,
    *,
    fails: float = 0.0,
    evicted: float = 0.01,
) -> Life:
    """Return a life with this peak, or one that fails or is evicted before it reaches the peak."""
    rng = plan.rng
    drawn = rng.random()
    ending = "failed" if drawn < fails else "evicted" if drawn < fails + evicted else "completed"
    use = _ramp(start_s, end_s, peak, rng, max(2, min(12, int((end_s - start_s) / HOUR))))
    if ending != "completed":
        kept = rng.randrange(1, len(use) + 1)
        use = use[:kept]
        if ending == "failed" and rng.random() < 0.6:  # while it loads its model
            use = [(use[0][0], int(use[0][1] * rng.uniform(0.05, 0.9)))]
        end_s = use[-1][0]
    return Life(start_s, end_s, tuple(use), ending, program)


def _arrivals(plan: _Plan, per_day: float) -> Iterator[float]:
    time_s = plan.born_s
    while True:
        time_s += plan.rng.expovariate(per_day / DAY)
        if time_s >= plan.days * DAY:
            return
        yield time_s


def _lifetime(rng: random.Random, scale: float = 1.0, most_s: float = 3 * DAY) -> float:
    return min(
        most_s, max(180.0, scale * rng.lognormvariate(math.log(LIFETIME_MEDIAN_S), LIFETIME_LOG_SD))
    )


def training(plan: _Plan) -> Drawn:
    """Training jobs, whose caching allocator grows with the longest batch. Half of the workloads
    are sweeps: their arguments, and so their activations, differ from life to life."""
    rng = plan.rng
    spread, growth = rng.uniform(0.01, 0.05), rng.uniform(0.0, 0.15)
    sweep = rng.random() < 0.5
    fails = rng.uniform(0.02, 0.2)
    for start_s in _arrivals(plan, rng.uniform(1.0, 6.0)):
        length_s = _lifetime(rng, 4.0)
        factor, program = plan.model_at(start_s)
        if sweep:
            program = f"{program}-{rng.randrange(10**9)}"
            factor *= 0.45 + 0.55 * rng.choice((0.25, 0.5, 1.0, 1.0))
        grown = 1 + growth * (1 - math.exp(-length_s / (6 * HOUR)))
        # The longest of many batches follows an extreme value distribution.
        longest = -math.log(-math.log(rng.uniform(1e-9, 1 - 1e-9)))
        peak = plan.capped(plan.base_bytes * factor * grown * math.exp(spread * longest * 0.5))
        yield _life(plan, start_s, start_s + length_s, peak, program, fails=fails)


def notebook(plan: _Plan) -> Drawn:
    """Notebook sessions of several hours, where today's work does not show much about
    tomorrow's."""
    rng = plan.rng
    spread = rng.uniform(0.25, 0.6)
    for start_s in _arrivals(plan, rng.uniform(0.5, 2.0)):
        factor, program = plan.model_at(start_s)
        peak = plan.capped(plan.base_bytes * factor * math.exp(rng.gauss(0, spread)))
        length_s = rng.lognormvariate(math.log(3 * HOUR), 0.8)
        yield _life(plan, start_s, start_s + length_s, peak, program, fails=0.05)


def _replicas(plan: _Plan, most: int, releases_per_week: float) -> Iterator[tuple[float, float]]:
    """Yield start and end of each replica's lives. A release replaces all replicas, a drain one."""
    rng = plan.rng
    count = rng.randint(1, most)
    horizon = plan.days * DAY
    releases = list(_arrivals(plan, releases_per_week / 7))
    spans = []
    for index in range(count):
        time_s = plan.born_s + 30.0 * index
        while time_s < horizon:
            drain = time_s + rng.expovariate(1 / (10 * DAY))
            following = min([r for r in releases if r > time_s] + [horizon])
            end_s = min(drain, following + 30.0 * index, horizon)
            if end_s - time_s > 300:
                spans.append((time_s, end_s))
            time_s = max(end_s, time_s + 60) + 20.0
    return iter(sorted(spans))


def service(plan: _Plan) -> Drawn:
    """Inference whose memory follows its requests, like the Stable Diffusion pods of the
    calibration: the high-water mark is far above the usual use, and replicas reach different parts
    of it."""
    rng = plan.rng
    between = PEAK_BETWEEN_LIVES_LOG_SD * rng.uniform(0.3, 1.0)
    rare = math.exp(PEAK_OVER_P95_LOG_MEAN)
    for start_s, end_s in _replicas(plan, 6, rng.uniform(1.0, 4.0)):
        factor, program = plan.model_at(start_s)
        top = plan.base_bytes * factor * math.exp(rng.gauss(0, between))
        usual = top / rare
        # The mark rises with time; most of it is reached within a day, as in the recorded day.
        found = min(1.0, 0.75 + 0.25 * (end_s - start_s) / DAY)
        wobble = math.exp(rng.gauss(0, PEAK_OVER_P95_LOG_SD * 0.25))
        peak = plan.capped(usual + (top - usual) * found * wobble)
        yield _life(plan, start_s, end_s, peak, program, fails=0.02)


def autoscaled(plan: _Plan) -> Drawn:
    """The same inference, but scaled by its load, so it has many shorter lives."""
    rng = plan.rng
    between = PEAK_BETWEEN_LIVES_LOG_SD * rng.uniform(0.3, 1.0)
    for start_s in _arrivals(plan, rng.uniform(4.0, 20.0)):
        length_s = rng.lognormvariate(math.log(2 * HOUR), 0.9)
        factor, program = plan.model_at(start_s)
        peak = plan.capped(plan.base_bytes * factor * math.exp(rng.gauss(0, between)))
        yield _life(plan, start_s, start_s + length_s, peak, program, fails=0.02)


def engine(plan: _Plan) -> Drawn:
    """Engines that size themselves: they allocate once at the start, and then stay flat."""
    rng = plan.rng
    noise = rng.uniform(0.001, 0.006)
    if rng.random() < 0.5:
        spans = _replicas(plan, 6, rng.uniform(1.0, 4.0))
    else:
        spans = (
            (s, s + rng.lognormvariate(math.log(3 * HOUR), 0.8))
            for s in _arrivals(plan, rng.uniform(3.0, 15.0))
        )
    for start_s, end_s in spans:
        factor, program = plan.model_at(start_s)
        peak = plan.capped(plan.base_bytes * factor * math.exp(rng.gauss(0, noise)))
        loaded_s = start_s + min(STARTUP_S, (end_s - start_s) / 2)
        drawn = rng.random()
        if drawn < 0.03:  # it fails while it loads its model
            yield Life(
                start_s,
                loaded_s,
                ((loaded_s, int(peak * rng.uniform(0.05, 0.9))),),
                "failed",
                program,
            )
            continue
        use = tuple((t, peak) for t in (loaded_s, (loaded_s + end_s) / 2, end_s))
        yield Life(start_s, end_s, use, "evicted" if drawn < 0.04 else "completed", program)


def leak(plan: _Plan) -> Drawn:
    """Memory that grows until the process ends, is restarted, or has used up the device."""
    rng = plan.rng
    base = plan.base_bytes * 0.5
    per_s = plan.base_bytes * 0.5 / (rng.uniform(6.0, 48.0) * HOUR)
    restart_s = rng.uniform(12.0, 48.0) * HOUR
    count = rng.randint(1, 3)
    for index in range(count):
        start_s = plan.born_s + 60.0 * index
        while start_s < plan.days * DAY:
            factor, program = plan.model_at(start_s)
            most = plan.capped(2.0 * plan.device_bytes)
            full_s = (most - base * factor) / per_s
            length_s = min(restart_s, rng.expovariate(1 / restart_s) + HOUR)
            ending = "completed"
            if length_s > full_s:
                length_s, ending = full_s, "oom"
            use = tuple(
                (
                    start_s + length_s * step / 8,
                    plan.capped(base * factor + per_s * length_s * step / 8),
                )
                for step in range(1, 9)
            )
            yield Life(start_s, start_s + length_s, use, ending, program)
            start_s += length_s + 30.0


def retries(plan: _Plan) -> Drawn:
    """Short batches. One that fails is retried up to six times, and mostly fails again."""
    rng = plan.rng
    spread = rng.uniform(0.02, 0.1)
    fails = rng.uniform(0.05, 0.3)
    for start_s in _arrivals(plan, rng.uniform(4.0, 15.0)):
        size = math.exp(rng.gauss(0, spread))
        at_s = start_s
        for _ in range(7):
            factor, program = plan.model_at(at_s)
            peak = plan.capped(plan.base_bytes * factor * size)
            life = _life(
                plan, at_s, at_s + _lifetime(rng, 1.0, 6 * HOUR), peak, program, fails=fails
            )
            yield life
            if life.ending == "completed":
                break
            at_s, fails_again = life.end_s + 30.0, 0.7
            if rng.random() > fails_again:
                break


def season(plan: _Plan) -> Drawn:
    """A workload that needs more on some weekdays and at the end of the month."""
    rng = plan.rng
    week, month = rng.uniform(0.05, 0.25), rng.uniform(0.0, 0.4)
    spread = rng.uniform(0.01, 0.06)
    for start_s in _arrivals(plan, rng.uniform(2.0, 12.0)):
        day = start_s / DAY
        factor, program = plan.model_at(start_s)
        factor *= 1 + week * math.sin(2 * math.pi * day / 7)
        if day % 30 >= 28:
            factor *= 1 + month
        peak = plan.capped(plan.base_bytes * factor * math.exp(rng.gauss(0, spread)))
        yield _life(
            plan, start_s, start_s + _lifetime(rng, 2.0, 12 * HOUR), peak, program, fails=0.05
        )


def growing(plan: _Plan) -> Drawn:
    """A nightly job and its parts, over data that grows by 1 to 15 % a month."""
    rng = plan.rng
    per_month, spread = rng.uniform(0.01, 0.15), rng.uniform(0.01, 0.04)
    for day in range(math.ceil(plan.born_s / DAY), int(plan.days)):
        for part in range(rng.randint(2, 5)):
            start_s = day * DAY + part * HOUR / 2
            factor, program = plan.model_at(start_s)
            grown = (1 + per_month) ** ((start_s - plan.born_s) / (30 * DAY))
            peak = plan.capped(plan.base_bytes * factor * grown * math.exp(rng.gauss(0, spread)))
            yield _life(plan, start_s, start_s + 3 * HOUR, peak, program, fails=0.03)


#: Kind -> its generator and its share of the workloads. The shares are an assumption.
KINDS: dict[str, tuple[Callable[[_Plan], Drawn], float]] = {
    "training": (training, 0.24),
    "notebook": (notebook, 0.14),
    "service": (service, 0.14),
    "autoscaled": (autoscaled, 0.10),
    "engine": (engine, 0.18),
    "leak": (leak, 0.04),
    "retries": (retries, 0.10),
    "season": (season, 0.06),
}


#: Only held-out workloads are of this kind. It was written after the tuning.
HELD_OUT_KINDS: dict[str, tuple[Callable[[_Plan], Drawn], float]] = {"growing": (growing, 0.06)}


def workload(seed: str, index: int, days: float, ratio: float, held_out: bool = False) -> Workload:
    """Return workload ``index`` of a seed.

    ``ratio`` is the median of a request over the typical peak.
    """
    rng = random.Random(f"{seed}/{index}")
    kinds = KINDS | HELD_OUT_KINDS if held_out else KINDS
    kind = rng.choices(list(kinds), [share for _, share in kinds.values()])[0]
    device_bytes = rng.choice(DEVICES_BYTES)
    born_s = 0.0 if rng.random() < 0.5 else rng.uniform(0, 0.7 * days * DAY)
    share = (
        rng.uniform(0.3, 0.9)
        if kind == "engine"
        else min(0.9, rng.lognormvariate(math.log(0.25), 0.6))
    )
    plan = _Plan(rng, device_bytes, days, born_s, base_bytes=max(0.5 * GIB, share * device_bytes))
    plan.models.append((born_s, 1.0, "model-0"))
    requests = [(0.0, _request(rng, plan, 1.0, ratio))]
    if kind != "leak":
        _change_models(rng, plan, requests, ratio)
    lives = sorted(kinds[kind][0](plan), key=lambda life: life.start_s)
    return Workload(f"{kind}-{index}", kind, device_bytes, tuple(requests), tuple(lives))


def _change_models(
    rng: random.Random, plan: _Plan, requests: list[tuple[float, int]], ratio: float
) -> None:
    """Draw the changes of the model. If a change needs it, the author raises the request."""
    time_s, factor, program = plan.born_s, 1.0, "model-0"
    while (time_s := time_s + rng.expovariate(1 / (CHANGE_EVERY_DAYS * DAY))) < plan.days * DAY:
        factor *= rng.lognormvariate(CHANGE_LOG_MEAN, CHANGE_LOG_SD)
        factor = min(factor, 0.9 * plan.device_bytes / plan.base_bytes)
        if rng.random() < CHANGE_SHOWN:
            program = f"model-{len(plan.models)}"
        plan.models.append((time_s, factor, program))
        if plan.base_bytes * factor * 1.2 > requests[-1][1]:
            requests.append((time_s, max(requests[-1][1], _request(rng, plan, factor, ratio))))


def _request(rng: random.Random, plan: _Plan, factor: float, ratio: float) -> int:
    """Return what an author requests: a round number, at most the device's memory."""
    wanted = (
        plan.base_bytes * factor * max(1.1, rng.lognormvariate(math.log(ratio), REQUEST_LOG_SD))
    )
    fitting = [size * GIB for size in SIZES_GIB if size * GIB >= wanted]
    return min(plan.device_bytes, fitting[0] if fitting else plan.device_bytes)
