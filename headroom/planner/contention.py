"""Finds pods that compete for a GPU, from the fraction of time in which each pod runs kernels.

Pods on one GPU *compete* while these fractions add up to more than 1. The model assumes that they
then slow down in proportion: with a sum of 1.5, each pod loses a third of its speed. Real GPUs with
time-slicing behave like this (docs/design/gpu-check.md, line contention). A MIG instance has only a
part of the SMs, so it slows down a pod that used more of them before.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from headroom.planner.placers import Spot
from headroom.planner.workload import Life

#: Maximum numbers of pairs of workloads that are counted and returned.
_MOST_PAIRS, _MOST_RETURNED = 10_000, 10


@dataclass(frozen=True, slots=True)
class Contention:
    """The contention of one replay. Times are summed over pods."""

    run_s: float
    competing_s: float
    #: Running time that is lost because pods slow each other down.
    lost_s: float
    #: Pairs of workloads, and the time for which two of their pods competed, longest first.
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
        """``sm_shares`` has, for each machine, the fraction of a GPU's SMs that each of its devices
        has."""
        self._sm_shares = sm_shares
        #: The pods on each (machine, device), by index, with their workload and fraction of time.
        self._there: dict[tuple[int, int], dict[int, tuple[str, float]]] = defaultdict(dict)
        #: When a pod last started or ended on each (machine, device).
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
