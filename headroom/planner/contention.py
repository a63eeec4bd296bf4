"""Finds pods that compete for a GPU, from the part of the time in which they run kernels.

Pods on one GPU *compete* while their parts of the time add up to more than 1. They are then assumed
to be slowed down in proportion: with a sum of 1.5, all of them lose a third of their speed. Real
GPUs with time-slicing do this (docs/design/gpu-check.md, line contention). A MIG instance has a
part of the SMs, and slows a pod down that used a larger part before.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from headroom.planner.placers import Spot
from headroom.planner.workload import Life

#: Maximum number of pairs of workloads that are counted, and that are returned.
_MOST_PAIRS, _MOST_RETURNED = 10_000, 10


@dataclass(frozen=True, slots=True)
class Contention:
    """The contention of one replay; times are summed over pods."""

    run_s: float
    competing_s: float
    #: Part of the running time that is lost to slower progress.
    lost_s: float
    #: Pairs of workloads with the time for which two of their pods competed, longest first.
    pairs: tuple[tuple[str, str, float], ...]

    @property
    def competing_ratio(self) -> float:
        return self.competing_s / self.run_s if self.run_s else 0.0

    @property
    def lost_ratio(self) -> float:
        return self.lost_s / self.run_s if self.run_s else 0.0


NONE = Contention(0.0, 0.0, 0.0, ())


class Contentions:
    """Counts the contention during a replay."""

    def __init__(self, sm_shares: Sequence[float]) -> None:
        """``sm_shares`` has, for each machine, the part of a GPU's SMs that each device has."""
        self._sm_shares = sm_shares
        #: Machine and device -> index of a pod there -> its workload, and its part of the time.
        self._there: dict[tuple[int, int], dict[int, tuple[str, float]]] = defaultdict(dict)
        #: Machine and device -> when a pod last came or left.
        self._since_s: dict[tuple[int, int], float] = {}
        self._run_s = self._competing_s = self._lost_s = 0.0
        self._pairs: dict[tuple[str, str], float] = {}

    def start(self, index: int, life: Life, spot: Spot, now_s: float) -> None:
        for device in set(spot.devices):
            self._advance((spot.machine, device), now_s)
            share = self._sm_shares[spot.machine]
            by_sm = share < 1.0 and life.sm_ratio is not None
            part = (life.sm_ratio or 0.0) / share if by_sm else life.busy_ratio
            self._there[spot.machine, device][index] = life.workload, part

    def end(self, index: int, spot: Spot, now_s: float) -> None:
        for device in set(spot.devices):
            self._advance((spot.machine, device), now_s)
            del self._there[spot.machine, device][index]

    def result(self) -> Contention:
        longest = sorted(self._pairs.items(), key=lambda pair: (-pair[1], pair[0]))
        pairs = tuple((*names, seconds) for names, seconds in longest[:_MOST_RETURNED])
        return Contention(self._run_s, self._competing_s, self._lost_s, pairs)

    def _advance(self, place: tuple[int, int], now_s: float) -> None:
        there = self._there[place].values()
        elapsed_s = now_s - self._since_s.get(place, now_s)
        self._since_s[place] = now_s
        if not there or not elapsed_s:
            return
        self._run_s += elapsed_s * len(there)
        total = sum(part for _, part in there)
        if total <= 1.0:
            return
        self._competing_s += elapsed_s * len(there)
        self._lost_s += elapsed_s * len(there) * (1 - 1 / total)
        for pair in combinations(sorted(name for name, part in there if part), 2):
            if pair in self._pairs or len(self._pairs) < _MOST_PAIRS:
                self._pairs[pair] = self._pairs.get(pair, 0.0) + elapsed_s
