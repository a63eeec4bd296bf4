"""What the pods of this cluster can use: learned from those that were seen, forgotten slowly.

Devices of one size are a *class*: drivers tell almost every model another size. Of each pod that
kube-scheduler asks about counts how much memory it wants, and on which classes it could have it:
those large enough of the nodes that were ever offered for pods with the same selectors. What keeps
the others away need not be understood; what is only full for now has been offered before. So all
that is remembered is the demand of each set of classes.

A class has a *price*: the demand of all who can use it, each shared out over all the memory that is
left and that it can use. It is 1 everywhere if every pod can use every device; a class is dear when
many depend on it who have little else, and dearer the less is left of it. Prices say nothing about
a single node, so that a new price weighs no node again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from contract.annotations import Amount, Bytes, ScoringPolicy, Share
from contract.kube import Pod
from extender.bounded import Bounded
from extender.placement.request import VramRequest
from extender.placement.snapshot import Rows, Snapshot

Prices = NDArray[np.float64]
Classes = tuple[int, ...]
MILLION = 1_000_000

#: Sizes closer than this are one class; twice as much, and so on, where there are too many.
CLASS_BYTES = 64 << 20
MOST_CLASSES = 64
#: Pods after which what was seen counts half.
HALF_LIFE_PODS = 2000
#: Sets of classes that are told apart; beyond them the one with the least demand is forgotten.
MOST_SETS = 32
#: Pods between two looks at what has changed, at most; among the first ones it is oftener.
EVERY_PODS = 64
#: Of the memory of a class, taken to be left even where all of it is promised: some pods leave.
LEFT_AT_LEAST = 0.05
#: By how much of itself a price must have changed for any to be changed.
MATERIAL = 0.1
#: Pods that are remembered, so that one that is asked about again counts once, and ways to select
#: nodes.
REMEMBERED, MOST_SELECTORS = 4096, 256
#: Steps in which what a pod costs is told apart, for each mean device at the price of 1: within
#: one the best fit decides. Finer ones order nodes by differences that mean nothing.
STEPS = 2.5
#: Steps at which a node is worth half as much.
HALF_AT_STEPS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Market:
    """The classes of a fleet and their prices; never changed after it was made."""

    #: Sizes that are one class.
    unit_bytes: int
    #: In units, ascending; and the price.
    sizes: Rows
    prices: Prices
    #: Of all devices.
    mean_bytes: float

    def classes(self, snap: Snapshot) -> Rows:
        """Of each row, that of its largest device: an index into the sizes, or one beyond them."""
        sizes = _sizes(snap, self.unit_bytes)
        places = np.searchsorted(self.sizes, sizes)
        known = self.sizes.take(places, mode="clip") == sizes if len(self.sizes) else False
        return np.where(known, places, len(self.sizes))

    def cheap(self, snap: Snapshot, rows: Rows, taken_bytes: Rows) -> Prices:
        """(rows,) 0..1: how little of what others need is lost where so much is taken."""
        # Only those asked about: a fleet has many more.
        largest = snap.columns.memory_bytes[rows].max(axis=1, initial=0) // self.unit_bytes
        places = np.searchsorted(self.sizes, largest)
        known = self.sizes.take(places, mode="clip") == largest
        price = np.where(known, self.prices.take(places, mode="clip"), 1.0)
        steps = np.floor(STEPS * price * np.maximum(taken_bytes, 0) / self.mean_bytes)
        found: Prices = HALF_AT_STEPS / (HALF_AT_STEPS + steps)
        return found


@dataclass(slots=True)
class Mix:
    """Demand by the classes that can serve it, in bytes of a class."""

    demand: dict[Classes, float] = field(default_factory=dict)
    #: What a newer pod's demand is multiplied by: an older one counts less by comparison.
    _gain: float = 1.0

    def add(self, classes: Classes, demand_bytes: float) -> None:
        self._gain *= 2 ** (1 / HALF_LIFE_PODS)
        if self._gain > 1e100:
            self.demand = {each: weight / self._gain for each, weight in self.demand.items()}
            self._gain = 1.0
        self.demand[classes] = self.demand.get(classes, 0.0) + demand_bytes * self._gain
        if len(self.demand) > MOST_SETS:
            del self.demand[min(self.demand, key=lambda each: (self.demand[each], each))]


def prices(demand: Mapping[Classes, float], sizes_bytes: Rows, left_bytes: Rows) -> Prices:
    """Of each class, of which so much is left."""
    whole, asked = float(left_bytes.sum()), sum(demand.values())
    if not asked or not whole:
        return np.ones(len(sizes_bytes))
    found = np.zeros(len(sizes_bytes))
    for classes, weight in sorted(demand.items()):
        can = np.isin(sizes_bytes, classes)
        supply = float(left_bytes[can].sum())
        if supply:
            found[can] += weight / asked * whole / supply
    return found


def market(snap: Snapshot, demand: Mapping[Classes, float]) -> Market | None:
    """Of the fleet as it is; None where it has no device."""
    unit = CLASS_BYTES
    sizes = _sizes(snap, unit)
    while len(np.unique(sizes)) > MOST_CLASSES:
        unit *= 2
        sizes = _sizes(snap, unit)
    allocatable = np.maximum(snap.columns.allocatable_bytes, 0)
    devices = int((snap.columns.memory_bytes > 0).sum())
    if not devices or not allocatable.any():
        return None
    known, places = np.unique(sizes, return_inverse=True)
    # Doubles hold what no int64 would: absurd reports add up, and shares of a sum are all we need.
    capacity = np.bincount(places, allocatable.sum(axis=1, dtype=np.float64), len(known))
    free = np.bincount(places, snap.node_headroom_bytes.astype(np.float64), len(known))
    mean = max(1.0, float(capacity.sum()) / devices)
    left = free + LEFT_AT_LEAST * capacity
    return Market(unit, known, prices(demand, known * unit, left), mean)


def _sizes(snap: Snapshot, unit_bytes: int) -> Rows:
    found: Rows = snap.columns.memory_bytes.max(axis=1, initial=0) // unit_bytes
    return found


class Usual:
    """Learns the mix from what kube-scheduler asks, and keeps the prices that follow from it."""

    def __init__(self, wanted: bool) -> None:
        #: None until a pod was seen.
        self.market: Market | None = None
        #: Nothing is learned before a pod's policy asks for it.
        self._wanted = wanted
        self._mix = Mix()
        self._seen: Bounded[str, None] = Bounded(REMEMBERED)
        self._pods = 0
        self._look_at = 1
        #: What a pod says of nodes -> sizes of classes that were offered for such pods.
        self._offered: Bounded[bytes, set[int]] = Bounded(MOST_SELECTORS)
        #: Class of each row, as of the last look.
        self._class_of: Rows = np.empty(0, np.int64)

    def see(self, request: VramRequest, pod: Pod, snap: Snapshot, offered: Rows) -> None:
        """A pod that asks for something, and the rows that it may go to (-1: none of ours)."""
        self._wanted = self._wanted or request.policy is ScoringPolicy.FRAGMENTATION
        if not self._wanted or request.uid in self._seen:
            return
        self._seen[request.uid] = None
        rows = offered[offered >= 0]
        if self.market is None or rows.max(initial=-1) >= len(self._class_of):
            self._look(snap)
        here = self.market
        if here is None or not len(rows):
            return
        there = np.bincount(self._class_of[rows], minlength=len(here.sizes) + 1)[:-1] > 0
        nodes = pod.spec.affinity and pod.spec.affinity.node_affinity
        said = f"{pod.spec.node_selector} {nodes} {pod.spec.tolerations}"
        key = blake2b(said.encode(), digest_size=16).digest()  # the text may be long
        sizes = self._offered[key] = self._offered.get(key, set())
        sizes.update((here.sizes[there] * here.unit_bytes).tolist())
        for ask in request.asks:
            amounts = [part.amount for phase in ask.phases for part in phase]
            fixed = max(
                (each.count_bytes for each in amounts if isinstance(each, Bytes)), default=0
            )
            # Sizes are rounded down, to the unit.
            can = tuple(sorted(size for size in sizes if size + here.unit_bytes > fixed))
            if can:
                worth = max((_worth(each, here) for each in amounts), default=0.0)
                self._mix.add(can, worth * ask.count)
        self._pods += 1
        if self._pods >= self._look_at:
            self._look_at = self._pods + min(self._pods, EVERY_PODS)
            self._look(snap)

    def _look(self, snap: Snapshot) -> None:
        now = market(snap, self._mix.demand)
        if now is None or self.market is None or _differs(now, self.market):
            self.market = now
        if self.market is not None:
            self._class_of = self.market.classes(snap)


def _differs(one: Market, other: Market) -> bool:
    if one.unit_bytes != other.unit_bytes or not np.array_equal(one.sizes, other.sizes):
        return True
    moved = np.abs(one.prices - other.prices) > MATERIAL * other.prices
    return bool(moved.any()) or abs(one.mean_bytes - other.mean_bytes) > MATERIAL * one.mean_bytes


def _worth(amount: Amount, here: Market) -> float:
    """Bytes of one device; what depends on the device, of a mean one."""
    match amount:
        case Bytes(count_bytes):
            return float(count_bytes)
        case Share(ppm):
            return here.mean_bytes * ppm / MILLION
        case _:
            return here.mean_bytes
