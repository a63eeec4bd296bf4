"""Published placement rules, small and vectorised, with which Headroom is compared.

Each rule sees the whole cluster, including CPU, and chooses the node as well as the devices. Scores
are coarse (0..100, truncated) or exact. As in the published experiments, BestFit or a given order
of the nodes decides ties. Otherwise, the published numbers could not be reproduced."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.packing.play import Placed, Rows
from benchmarks.packing.workload import SLOTS, Ask, Demand, Mode, Node, device_amount, replicas

Scores = NDArray[np.float64]

#: The most CPU of any node, to which BestFit scales.
CPU_MILLI = 128_000
#: Number of digits to which exact scores are compared. The order of sums changes further digits.
DIGITS = 6
#: The typical pods of FGD are the most frequent kinds that together make up this ratio of all pods.
TYPICAL = 0.95
NOWHERE = 1 << 60


class Fleet:
    """The free resources of all nodes, as columns."""

    def __init__(self, nodes: Sequence[Node], mode: Mode) -> None:
        def column(values: Sequence[int]) -> Rows:
            return np.array(values, np.int64)

        self.nodes = nodes
        self.cpu = column([node.cpu_milli for node in nodes])
        self.memory = column([node.memory_mib for node in nodes])
        self.device = column([device_amount(node, mode) for node in nodes])
        self.model = np.array([node.model for node in nodes])
        there = np.arange(SLOTS) < column([node.gpus for node in nodes])[:, None]
        self.size = np.where(there, self.device[:, None], 0)
        self.left = self.size.copy()
        self.replicas = np.where(there, replicas(mode), 0)
        #: Number of changes of each node. Cached values of a node are computed again after a
        #: change.
        self.version = np.zeros(len(nodes), np.int64)
        self._allowed: dict[frozenset[str], NDArray[np.bool_]] = {}

    def allowed(self, models: frozenset[str]) -> NDArray[np.bool_]:
        if models not in self._allowed:
            named = np.isin(self.model, sorted(models))
            self._allowed[models] = named if models else np.ones(len(self.nodes), np.bool_)
        return self._allowed[models]

    def candidates(self, ask: Ask) -> NDArray[np.bool_]:
        """Return (nodes, slots): devices that could take the pod, or one part of it."""
        empty = (self.left == self.size) & (self.size > 0)
        if ask.amount is None:
            return empty
        return (self.left >= ask.amount) & (self.replicas > 0)

    def fits(self, ask: Ask, rows: Rows) -> Rows:
        """Return the nodes on which enough devices fit."""
        return rows[self.candidates(ask)[rows].sum(axis=1) >= ask.gpus] if ask.gpus else rows

    def take(self, ask: Ask, row: int, devices: Sequence[int], sign: int = 1) -> None:
        """Take the request from the devices. With ``sign`` -1, give it back."""
        self.cpu[row] -= sign * ask.cpu_milli
        self.memory[row] -= sign * ask.memory_mib
        for device in devices:
            amount = self.size[row, device] if ask.amount is None else ask.amount
            self.left[row, device] -= sign * amount
            self.replicas[row, device] -= sign
        self.version[row] += 1


class Rule(ABC):
    """Scores nodes. Larger is better."""

    #: Number of score steps; 0 for exact scores.
    steps = 100
    best_fit_ties = False

    def __init__(self, fleet: Fleet, demand: Demand, kinds: Sequence[Ask], ranks: Rows) -> None:
        self.fleet, self.demand, self.ranks = fleet, demand, ranks
        self._placed: dict[str, tuple[Ask, Placed]] = {}

    def choose(self, name: str, ask: Ask, offered: Rows) -> Placed | None:
        rows = self.fleet.fits(ask, offered)
        if not len(rows):
            return None
        row = self.pick(ask, rows)
        placed = row, self.devices(ask, row) if ask.gpus else ()
        self.note(name, ask, placed)
        return placed

    def note(self, name: str, ask: Ask, placed: Placed) -> None:
        """Record a pod that this or another scheduler placed."""
        self.fleet.take(ask, *placed)
        self._placed[name] = ask, placed

    def ended(self, name: str) -> None:
        self.gone(name)

    def gone(self, name: str) -> tuple[Ask, Placed]:
        ask, placed = self._placed.pop(name)
        self.fleet.take(ask, *placed, sign=-1)
        return ask, placed

    def pick(self, ask: Ask, rows: Rows) -> int:
        """Return the best of the nodes on which it fits."""
        scores = self.scores(ask, rows)
        scores = np.floor(scores * self.steps) if self.steps else np.round(scores, DIGITS)
        top = rows[scores == scores.max()]
        if self.best_fit_ties and len(top) > 1:
            fit = best_fit(self.fleet, self.demand, ask, top)
            top = top[fit == fit.max()]
        return int(top[self.ranks[top].argmin()])

    @abstractmethod
    def scores(self, ask: Ask, rows: Rows) -> Scores:
        """Return the scores, (rows,), of nodes on which it fits."""

    def devices(self, ask: Ask, row: int) -> tuple[int, ...]:
        """Return the fullest devices that suffice. For whole devices, return the first ones."""
        return tuple(self._in_order(ask, row, self.fleet.left[row])[: ask.gpus])

    def _in_order(self, ask: Ask, row: int, key: Rows) -> list[int]:
        could = self.fleet.candidates(ask)[row]
        return [int(i) for i in np.argsort(key, kind="stable") if could[i]]


def best_fit(fleet: Fleet, demand: Demand, ask: Ask, rows: Rows) -> Scores:
    """Return 1 minus the free ratios of CPU and devices, as in the published BestFit.

    A pod that requests whole devices is charged their average amount, wherever it goes.
    """
    cpu = (fleet.cpu[rows] - ask.cpu_milli) / CPU_MILLI
    left = fleet.left[rows].sum(axis=1) - (demand.of(ask) if ask.gpus else 0)
    scores: Scores = 1 - (0.5 * cpu + 0.5 * (left / (SLOTS * demand.mean())))
    return scores


class BestFit(Rule):
    def scores(self, ask: Ask, rows: Rows) -> Scores:
        return best_fit(self.fleet, self.demand, ask, rows)


class WorstFit(Rule):
    """The opposite of BestFit, for nodes and devices."""

    def scores(self, ask: Ask, rows: Rows) -> Scores:
        return 1 - best_fit(self.fleet, self.demand, ask, rows)

    def devices(self, ask: Ask, row: int) -> tuple[int, ...]:
        return tuple(self._in_order(ask, row, -self.fleet.left[row])[: ask.gpus])


class GpuBest(Rule):
    """Leaves the least on the chosen device. Pods that request no share are placed by BestFit."""

    steps = 0
    best_fit_ties = True

    def scores(self, ask: Ask, rows: Rows) -> Scores:
        fleet = self.fleet
        if not ask.gpus:
            return best_fit(fleet, self.demand, ask, rows)
        if ask.amount is None:
            return -fleet.device[rows].astype(np.float64)
        could = fleet.candidates(ask)[rows]
        return -np.where(could, fleet.left[rows], NOWHERE).min(axis=1).astype(np.float64)


class Random(Rule):
    """Chooses any node. The same order of nodes and pods gives the same choices."""

    def __init__(self, fleet: Fleet, demand: Demand, kinds: Sequence[Ask], ranks: Rows) -> None:
        super().__init__(fleet, demand, kinds, ranks)
        self._lots = np.random.default_rng([int(rank) for rank in ranks])

    def pick(self, ask: Ask, rows: Rows) -> int:
        return int(self._lots.choice(rows))

    def scores(self, ask: Ask, rows: Rows) -> Scores:
        """Return equal scores for all nodes."""
        return np.zeros(len(rows))


@dataclass(slots=True)
class _Kept:
    """The effect of pods of one kind on each node. It is outdated for rows that changed since."""

    version: Rows
    change: Scores
    device: Rows


class Fgd(Rule):
    """Fragmentation gradient descent: chooses the node where the pods of a given mix lose least.

    Capacity that no pod of a kind could use on a node is fragmented for that kind. This is all free
    capacity if the node lacks the CPU, the model or the devices for the kind, and otherwise the
    free capacity on devices that are too small for it.
    """

    charged = False

    def __init__(self, fleet: Fleet, demand: Demand, kinds: Sequence[Ask], ranks: Rows) -> None:
        super().__init__(fleet, demand, kinds, ranks)
        typical = _typical(kinds)
        total = sum(typical.values())
        found = [(kind, count / total) for kind, count in typical.items() if kind.gpus]
        shares = sorted((each for each in found if each[0].shares), key=lambda e: e[0].amount or 0)
        self._shares = _Kinds(fleet, shares)
        self._wholes = _Kinds(fleet, [each for each in found if not each[0].shares])
        self._unit = demand.mean()
        self._kept: dict[Ask, _Kept] = {}

    def scores(self, ask: Ask, rows: Rows) -> Scores:
        change = self._changes(ask, rows).change[rows]
        return change if not self.steps else _sigmoid(change / self._unit)

    def devices(self, ask: Ask, row: int) -> tuple[int, ...]:
        if ask.amount is None:
            return super().devices(ask, row)
        return (int(self._changes(ask, np.array([row])).device[row]),)

    def _changes(self, ask: Ask, rows: Rows) -> _Kept:
        count = len(self.fleet.nodes)
        if ask not in self._kept:
            nothing = np.full(count, -1), np.zeros(count), np.zeros(count, np.int64)
            self._kept[ask] = _Kept(*nothing)
        kept = self._kept[ask]
        old = rows[kept.version[rows] != self.fleet.version[rows]]
        if len(old):
            kept.change[old], kept.device[old] = self._change(ask, old)
            kept.version[old] = self.fleet.version[old]
        return kept

    def _change(self, ask: Ask, rows: Rows) -> tuple[Scores, Rows]:
        """Return by how much usable memory grows, and the device on which it grows most."""
        fleet = self.fleet
        cpu, left, free = fleet.cpu[rows], fleet.left[rows], fleet.replicas[rows] > 0
        size = fleet.size[rows]
        before = self._usable(rows, cpu, left, free, size)
        cpu = cpu - ask.cpu_milli
        could = fleet.candidates(ask)[rows]
        each = np.arange(len(rows))
        if ask.amount is None or not ask.gpus:
            taken = could & (could.cumsum(axis=1) <= ask.gpus)
            after = self._usable(rows, cpu, np.where(taken, 0, left), free, size)
            gained = after - before
            amount = np.where(taken, left, 0).sum(axis=1)
            return gained if self.charged else gained + amount, np.zeros(len(rows), np.int64)
        gains = np.full((SLOTS, len(rows)), -np.inf)
        for device in range(SLOTS):
            then, still = left.copy(), free.copy()
            then[:, device] -= ask.amount
            still[:, device] = fleet.replicas[rows, device] > 1
            gains[device] = self._usable(rows, cpu, then, still, size) - before
            gains[device][~could[:, device]] = -np.inf
        if not self.charged:
            gains += ask.amount
        compared = np.floor(100 * _sigmoid(gains / self._unit)) if self.steps else gains
        best = np.round(compared, DIGITS).argmax(axis=0)
        return gains[best, each], best

    def _usable(
        self, rows: Rows, cpu: Rows, left: Rows, free: NDArray[np.bool_], size: Rows
    ) -> Scores:
        """Return the capacity of each node that a pod could use, as the mean over the mix."""
        shares, wholes = self._shares, self._wholes
        hosted = shares.hosted(rows, cpu)
        up_to = np.concatenate([np.zeros((len(rows), 1)), hosted.cumsum(axis=1)], axis=1)
        small = np.searchsorted(shares.amount, left, side="right")
        usable = (left * free * np.take_along_axis(up_to, small, axis=1)).sum(axis=1)
        empty = (left == size) & (size > 0)
        enough = empty.sum(axis=1)[:, None] >= wholes.gpus
        share = (wholes.hosted(rows, cpu) * enough).sum(axis=1)
        found: Scores = usable + share * np.where(empty, left, 0).sum(axis=1)
        return found


class _Kinds:
    """The kinds of a mix, as columns."""

    def __init__(self, fleet: Fleet, kinds: Sequence[tuple[Ask, float]]) -> None:
        self.amount = np.array([kind.amount or 0 for kind, _ in kinds], np.int64)
        self.gpus = np.array([kind.gpus for kind, _ in kinds], np.int64)
        self._cpu = np.array([kind.cpu_milli for kind, _ in kinds], np.int64)
        weights = np.array([weight for _, weight in kinds])
        allowed = [fleet.allowed(kind.models) for kind, _ in kinds]
        nodes = len(fleet.nodes)
        self._weights = np.array(allowed, np.float64).reshape(-1, nodes).T * weights

    def hosted(self, rows: Rows, cpu: Rows) -> Scores:
        """Return (rows, kinds): the kind's weight if the node has its model and CPU, otherwise
        0."""
        found: Scores = self._weights[rows] * (cpu[:, None] >= self._cpu)
        return found


class Fgdu(Fgd):
    """Like FGD, but the pod's own use counts too: keeps the most usable memory."""

    charged = True
    steps = 0
    best_fit_ties = True


def _typical(kinds: Sequence[Ask]) -> dict[Ask, int]:
    """Return the most frequent kinds that together make up most pods. Host memory is ignored."""
    counts: dict[Ask, int] = {}
    for kind in kinds:
        plain = Ask(kind.cpu_milli, 0, kind.gpus, kind.amount, kind.models)
        counts[plain] = counts.get(plain, 0) + 1

    def order(kind: Ask) -> tuple[Any, ...]:
        whole = NOWHERE if kind.amount is None else kind.amount
        return counts[kind], kind.cpu_milli, whole, kind.gpus, sorted(kind.models)

    typical: dict[Ask, int] = {}
    for kind in sorted(counts, key=order, reverse=True):
        if sum(typical.values()) >= TYPICAL * len(kinds):
            break
        typical[kind] = counts[kind]
    return typical


def _sigmoid(x: Scores) -> Scores:
    with np.errstate(over="ignore"):
        found: Scores = 1 / (1 + np.exp(-x))
    return found


#: The rules by the names that papers give them.
RULES: dict[str, Callable[[Fleet, Demand, Sequence[Ask], Rows], Rule]] = {
    "bestfit": BestFit,
    "worstfit": WorstFit,
    "random": Random,
    "gpubest": GpuBest,
    "fgd": Fgd,
    "fgdu": Fgdu,
}
