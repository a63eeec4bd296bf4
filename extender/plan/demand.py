"""Computes how many GPUs pods use at once if none waits, packed without loss.

This is much faster than a replay. The search for the fewest nodes begins at this number, and its
spread over drawn histories shows how much the need varies.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from extender.plan.intervals import need_half
from extender.plan.resampling import Days
from extender.plan.rhythm import rhythm
from extender.plan.wording import plural
from extender.plan.workload import History, Life, Machine, Vram

#: Number of drawn histories from which the spread is computed.
DRAWS = 40
#: Shorter histories, and those with fewer new pods, have no ranges.
LEAST_DAYS, LEAST_PODS = 7, 40
#: A history has no ranges if a campaign needs more than this part of the largest demand.
MOST_CAMPAIGN = 0.3


def mean_gpu_bytes(machines: Sequence[Machine]) -> float:
    """Return the mean memory of a GPU of these machines."""
    gpus = sum(machine.gpus for machine in machines)
    return sum(machine.gpus * machine.memory_bytes for machine in machines) / gpus


def demand(
    lives: Sequence[Life], replicas: int, vram: Vram, mean_bytes: float
) -> tuple[float, float]:
    """Return the most GPUs that the pods use at once if none waits, and the mean of it over time,
    as if they were packed without loss.

    ``mean_bytes``: the mean memory of a GPU.
    """
    if not lives:
        return 0.0, 0.0
    created_s = np.array([life.created_s for life in lives])
    run_s = np.array([life.run_s for life in lives])
    gpus = np.array([gpus_of(life, vram, replicas, mean_bytes) for life in lives])
    most = _most_at_once(created_s, run_s, gpus)
    span_s = max(1.0, float((created_s + run_s).max() - created_s[0]))
    return most, min(float(run_s @ gpus) / span_s, most)


@dataclass(frozen=True, slots=True)
class Demands:
    """How much the largest demand of histories like a given one varies."""

    #: The most GPUs at once of each drawn history; empty if there is no range.
    drawn: tuple[float, ...] = ()
    swing_ratio: float = 0.0
    #: Why no range can be had, as a sentence; empty if it can.
    missing: str = ""

    @property
    def half_ratio(self) -> float | None:
        """Return half of the width of a need's range, as a natural logarithm; None without one."""
        return need_half(self.drawn, self.swing_ratio) if self.drawn else None


def demands_of(history: History, gpus: Sequence[float], share: Sequence[bool]) -> Demands:
    """Return the demands of a history whose pods take these GPUs.

    ``gpus`` and ``share``: for each pod, the GPUs that it takes, and whether it shares them. The
    demands of pods that share and of pods that do not are added.
    """
    created = sum(life.created_s > 0 for life in history.lives)
    if history.days < LEAST_DAYS or created < LEAST_PODS:
        return Demands(
            missing=f"Figures have no ranges, because ranges need {LEAST_DAYS} days and "
            f"{LEAST_PODS} pods that were created in them: the history has "
            f"{plural(history.days, 'day')} and {plural(created, 'such pod')}."
        )
    taken, shared = np.array(gpus), np.array(share)
    run_s = np.array([life.run_s for life in history.lives])

    def largest(pods: NDArray[np.int64], created_s: NDArray[np.float64]) -> float:
        selected = shared[pods]
        return sum(
            _most_at_once(created_s[pool], run_s[pods[pool]], taken[pods[pool]])
            for pool in (selected, ~selected)
        )

    every = np.arange(len(history.lives))
    given = largest(every, np.array([life.created_s for life in history.lives]))
    found = rhythm(history, gpus, given)
    if found.campaign_ratio > MOST_CAMPAIGN:
        return Demands(
            missing=f"Figures have no ranges, because the next campaign cannot be predicted: "
            f"{found.campaign} needs up to {100 * found.campaign_ratio:.0f} % of all GPUs in use, "
            "and hardly runs on most days. Another week may need far less, or several times more."
        )
    days = Days(history)
    draws = (days.draw(seed) for seed in range(1, DRAWS + 1))
    drawn = tuple(largest(each.indices, each.created_s) for each in draws)
    return Demands(drawn, found.swing_ratio)


def gpus_of(life: Life, vram: Vram, replicas: int, mean_bytes: float) -> float:
    """Return how many GPUs a pod takes; if it shares one, the part of it, at least a replica."""
    need_bytes = vram.need_bytes(life)
    if replicas == 1 or need_bytes is None:
        return float(life.gpus)
    return max(1 / replicas, need_bytes / mean_bytes)


def _most_at_once(
    created_s: NDArray[np.float64], run_s: NDArray[np.float64], gpus: NDArray[np.float64]
) -> float:
    times = np.concatenate([created_s, created_s + run_s])
    changes = np.concatenate([gpus, -gpus])
    # At one time, ends come before starts.
    return float(np.cumsum(changes[np.lexsort((changes, times))]).max(initial=0.0))
