"""Prices device classes by the demand of recent pods, for the scoring policy fragmentation.

Devices of one memory size form a *class*, because almost every GPU model has its own size. Nodes
with more devices have classes of their own, because pods with several devices depend on them. Each
pod in a filter call adds its memory to the demand for the set of classes that it can use. It can
use the classes that are large enough and that kube-scheduler has offered for pods with equal
selectors. So Headroom need not evaluate the selectors, and classes that are full now still count.
Older pods count less than newer pods.

A class has a *price*. The demand of each set is divided by the free memory of all its classes, and
the price of a class is the sum over the sets that include it. All prices are 1 if every pod can use
every device. A price rises if many pods depend on the class, or if its free memory shrinks. Prices
do not depend on single nodes, so a new price does not change the cached fit of any node.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from operator import is_not

import msgspec
import numpy as np
from numpy.typing import NDArray

from headroom.bounded_dict import Bounded
from headroom.contract.annotations import Amount, Bytes, ScoringPolicy, Share
from headroom.contract.kube import Pod
from headroom.core.placement.request import Ask, VramRequest
from headroom.core.placement.snapshot import Mask, Rows, Snapshot

Prices = NDArray[np.float64]
Classes = tuple[int, ...]
MILLION = 1_000_000

#: Memory sizes are rounded down to a multiple of this number. It is doubled until there are at most
#: MOST_CLASSES classes.
CLASS_BYTES = 64 << 20
MOST_CLASSES = 64
#: A node with 1, 2 to 3, 4 to 7, ... devices has width 1, 2, 3, .... More devices than MOST_DEVICES
#: do not increase the width. Widths are less than WIDTHS, so they fit below CLASS_BYTES.
MOST_DEVICES, WIDTHS = 127, 8
WIDTH_OF = np.array([devices.bit_length() for devices in range(MOST_DEVICES + 1)], np.int64)
#: Number of later pods after which the demand of a pod has half of its weight.
HALF_LIFE_PODS = 2000
#: Number of pods after which recorded demand counts half. With fewer pods, prices are nearer to 1,
#: because a few pods are a small sample of the demand.
HALF_KNOWN_PODS = 20
#: Maximum number of sets of classes for which demand is recorded. If there are more, the set with
#: the least demand is dropped.
MOST_SETS = 32
#: Maximum number of pods between two updates of the prices. The first updates have shorter
#: intervals.
EVERY_PODS = 64
#: Fraction of a class's memory that is added to its free memory, because some pods end soon.
LEFT_AT_LEAST = 0.05
#: Prices are replaced if any price has changed by more than this fraction. Prices influence the
#: choice of a node only if they differ from each other by more than this fraction.
MATERIAL = 0.1
#: Maximum number of recorded pods and of recorded selectors. Pods are recorded so that each of them
#: counts only once.
REMEMBERED, MOST_SELECTORS = 4096, 256
#: Costs are rounded down to steps, and the best fit decides between nodes with equal costs, because
#: finer steps would rank nodes by noise. Costs up to the whole memory of an average device divided
#: by SMALL are in the first step. Larger costs differ by a step if one is about sqrt(2) times the
#: other, whether the pod is small or large.
STEPS_PER_DOUBLING, SMALL = 2, 16
#: Cost, in steps, at which the price term is one half.
HALF_AT_STEPS = 8


@dataclass(eq=False)
class Market:
    """The device classes of a cluster and their prices. Its values never change."""

    #: Memory sizes are rounded down to a multiple of this.
    unit_bytes: int
    #: (classes,) each class as the memory of a device, rounded down, plus the width of the node,
    #: ascending.
    sizes: Rows
    #: (classes,) 1 if each pod can use every device.
    prices: Prices
    #: Mean allocatable memory of a device.
    mean_bytes: float
    #: The last columns of largest devices and of numbers of devices, the class of each of their
    #: rows, and the number of rows of each class.
    _classes: tuple[tuple[Rows, Rows], Rows, Rows] | None = None

    @cached_property
    def uniform(self) -> bool:
        """Whether all prices are about equal, so that they prefer no class.

        Size 0 does not count, because it stands for nodes without devices, such as nodes without a
        report.
        """
        priced = self.prices[self.sizes > 0]
        return not len(priced) or float(priced.max()) <= (1 + MATERIAL) * float(priced.min())

    def classes(self, snap: Snapshot, rows: Rows) -> Rows:
        """Return the index in ``sizes`` of the class of each row's largest device.

        The index of a class that is not in ``sizes`` is the length of ``sizes``.
        """
        return self._of_all(snap)[0].take(rows)

    def counts(self, snap: Snapshot, rows: Rows) -> Rows:
        """Return the number of the rows in each class, and at last of the rows in no class.

        ``rows`` contains each row at most once, and -1 for nodes outside the snapshot.
        """
        classes, counts = self._of_all(snap)
        if len(rows) == len(classes) and rows.min(initial=0) >= 0:
            return counts
        return np.bincount(classes.take(rows[rows >= 0]), minlength=len(counts))

    def _of_all(self, snap: Snapshot) -> tuple[Rows, Rows]:
        """Return the class of each row of the snapshot, and the number of rows in each class."""
        # Snapshots share these columns until a device changes.
        columns = snap.node_largest_device_bytes, snap.node_devices
        if self._classes is None or any(map(is_not, self._classes[0], columns)):
            sizes = _sizes(snap, self.unit_bytes)
            indices = np.searchsorted(self.sizes, sizes)
            found = self.sizes.take(indices, mode="clip") == sizes
            classes = np.where(found, indices, len(self.sizes))
            counts = np.bincount(classes, minlength=len(self.sizes) + 1)
            self._classes = columns, classes, counts
        return self._classes[1:]

    def cheap(self, snap: Snapshot, rows: Rows, taken_bytes: Rows) -> Prices:
        """Compute the price term of each row, 0..1, from the bytes that the pod takes on the node.

        The term is 1 if these bytes cost less than one step.
        """
        price = np.append(self.prices, 1.0)[self.classes(snap, rows)]
        # Computing in place takes two thirds of the time for 5,000 nodes.
        steps = price * np.maximum(taken_bytes, 0)
        steps *= SMALL / self.mean_bytes
        steps += 1
        np.log2(steps, out=steps)
        steps *= STEPS_PER_DOUBLING
        np.floor(steps, out=steps)
        term: Prices = HALF_AT_STEPS / (HALF_AT_STEPS + steps)
        return term


@dataclass(slots=True)
class DemandMix:
    """Demand in weighted bytes for each set of classes that can serve it."""

    demand: dict[Classes, float] = field(default_factory=dict)
    #: Factor by which a new pod's demand is multiplied. It grows with each pod, so older demand
    #: counts less in comparison.
    _gain: float = 1.0

    def add(self, classes: Classes, demand_bytes: float) -> None:
        """Add the demand of one pod. All earlier demand loses weight (``HALF_LIFE_PODS``)."""
        self._gain *= 2 ** (1 / HALF_LIFE_PODS)
        if self._gain > 1e100:
            self.demand = {each: weight / self._gain for each, weight in self.demand.items()}
            self._gain = 1.0
        self.demand[classes] = self.demand.get(classes, 0.0) + demand_bytes * self._gain
        if len(self.demand) > MOST_SETS:
            del self.demand[min(self.demand, key=lambda each: (self.demand[each], each))]


def prices(demand: Mapping[Classes, float], sizes: Rows, left_bytes: Rows) -> Prices:
    """Return the price of each class. All prices are 1 if there is no demand or no free memory.

    ``demand`` identifies classes like ``sizes``. ``left_bytes`` is the free memory of each class.
    """
    total_left_bytes, total_demand = float(left_bytes.sum()), sum(demand.values())
    if not total_demand or not total_left_bytes:
        return np.ones(len(sizes))
    found = np.zeros(len(sizes))
    for classes, weight in sorted(demand.items()):
        usable = np.isin(sizes, classes)
        supply_bytes = float(left_bytes[usable].sum())
        if supply_bytes:
            found[usable] += weight / total_demand * total_left_bytes / supply_bytes
    return found


def market(snap: Snapshot, demand: Mapping[Classes, float], pods: int) -> Market | None:
    """Return the classes and prices of the snapshot's nodes, or None if there is no allocatable
    memory. ``pods`` is the number of pods in ``demand``."""
    unit_bytes = CLASS_BYTES
    sizes = _sizes(snap, unit_bytes)
    while len(np.unique(sizes)) > MOST_CLASSES:
        unit_bytes *= 2
        sizes = _sizes(snap, unit_bytes)
    # Devices that share a memory all have the values of the whole memory, so divide them.
    sharers = np.maximum(snap.columns.sharers, 1)
    allocatable_bytes = np.maximum(snap.columns.allocatable_bytes, 0) // sharers
    memories = float(((snap.columns.memory_bytes > 0) / sharers).sum())
    if not memories or not allocatable_bytes.any():
        return None
    classes, indices = np.unique(sizes, return_inverse=True)
    # Use floats, because sums of absurd reports would overflow int64 and only ratios matter.
    capacity_bytes = np.bincount(
        indices, allocatable_bytes.sum(axis=1, dtype=np.float64), len(classes)
    )
    free_bytes = np.bincount(indices, snap.node_headroom_bytes.astype(np.float64), len(classes))
    mean_bytes = max(1.0, float(capacity_bytes.sum()) / memories)
    left_bytes = free_bytes + LEFT_AT_LEAST * capacity_bytes
    known = pods / (pods + HALF_KNOWN_PODS)
    by_demand = 1 + known * (prices(demand, classes, left_bytes) - 1)
    return Market(unit_bytes, classes, by_demand, mean_bytes)


def _sizes(snap: Snapshot, unit_bytes: int) -> Rows:
    """Return the class of each node as in ``Market.sizes``, (rows,)."""
    largest_bytes = snap.node_largest_device_bytes
    widths = WIDTH_OF.take(np.minimum(snap.node_devices, MOST_DEVICES))
    found: Rows = largest_bytes - largest_bytes % unit_bytes + widths
    return found


def _usable(sizes: Iterable[int], ask: Ask, unit_bytes: int) -> Classes:
    """Return the classes with large enough devices, on nodes with enough of them."""
    amounts = [part.amount for phase in ask.phases for part in phase]
    fixed_bytes = max((each.count_bytes for each in amounts if isinstance(each, Bytes)), default=0)
    width = int(WIDTH_OF[min(ask.count, MOST_DEVICES)])
    # Sizes are rounded down to the unit, so a class can be larger than its size.
    return tuple(
        sorted(
            size
            for size in sizes
            if size % WIDTHS >= width and size - size % WIDTHS + unit_bytes > fixed_bytes
        )
    )


class DemandTracker:
    """Tracks the demand of the pods in filter calls, and the resulting prices.

    If ``wanted`` is set, tracking starts immediately. Otherwise it starts with the first pod that
    has the policy fragmentation.
    """

    def __init__(self, wanted: bool) -> None:
        #: None before the first tracked pod, or if no node has allocatable memory.
        self.market: Market | None = None
        self._wanted = wanted
        self.mix = DemandMix()
        self._seen: Bounded[str, None] = Bounded(REMEMBERED)
        self._pods = 0
        self._update_at = 1
        #: The classes that were offered for pods with the same node constraints, by the digest of
        #: the constraints.
        self.offered: Bounded[bytes, set[int]] = Bounded(MOST_SELECTORS)

    def prepare(self, request: VramRequest, snap: Snapshot) -> None:
        """Update the prices if they are due, before nodes are ranked for a pod.

        Prices change only when a new pod arrives, so filter and prioritize use the same prices to
        rank the nodes for a pod.
        """
        self._wanted = self._wanted or request.policy is ScoringPolicy.FRAGMENTATION
        if not self._wanted or request.uid in self._seen:
            return
        if self.market is None or self._pods >= self._update_at:
            self._update_at = self._pods + min(self._pods, EVERY_PODS)
            self._update_prices(snap)

    def see(self, request: VramRequest, pod: Pod, snap: Snapshot, offered: Rows) -> None:
        """Add the demand of a pod that requests GPUs. Each pod is added only once.

        ``offered`` contains the rows that kube-scheduler offers, and -1 for nodes outside the
        snapshot.
        """
        if not self._wanted or request.uid in self._seen:
            return
        self._seen[request.uid] = None
        has_class = self._has_class(snap, offered)
        if has_class is None:
            self._update_prices(snap)
            has_class = self._has_class(snap, offered)
        market = self.market
        if market is None or has_class is None or not has_class.any():
            return
        affinity = pod.spec.affinity and pod.spec.affinity.node_affinity
        constraints = msgspec.msgpack.encode(
            (pod.spec.node_selector, affinity, pod.spec.tolerations)
        )
        key = blake2b(constraints, digest_size=16).digest()  # the text may be long
        sizes = self.offered[key] = self.offered.get(key, set())
        sizes.update(market.sizes[has_class].tolist())
        for ask in request.asks:
            classes = _usable(sizes, ask, market.unit_bytes)
            if classes:
                amounts = (part.amount for phase in ask.phases for part in phase)
                worth = max((_worth(each, market) for each in amounts), default=0.0)
                self.mix.add(classes, worth * ask.count)
        self._pods += 1

    def _has_class(self, snap: Snapshot, offered: Rows) -> Mask | None:
        """Return whether each class of the market occurs in one of the offered rows, as an array
        (classes,).

        Return None if there is no market, or if a row has a class that is not in the market.
        """
        if self.market is None:
            return None
        counts = self.market.counts(snap, offered)
        return None if counts[-1] else counts[:-1] > 0

    def _update_prices(self, snap: Snapshot) -> None:
        now = market(snap, self.mix.demand, self._pods)
        if now is None or self.market is None or _differs(now, self.market):
            self.market = now


def _differs(one: Market, other: Market) -> bool:
    """Return whether the classes differ, or whether a price or the mean memory differs by more than
    MATERIAL."""
    if one.unit_bytes != other.unit_bytes or not np.array_equal(one.sizes, other.sizes):
        return True
    moved = np.abs(one.prices - other.prices) > MATERIAL * other.prices
    return bool(moved.any()) or abs(one.mean_bytes - other.mean_bytes) > MATERIAL * one.mean_bytes


def _worth(amount: Amount, market: Market) -> float:
    """Return the bytes of the amount on a device of average size. A replica's share counts as the
    whole device."""
    match amount:
        case Bytes(count_bytes):
            return float(count_bytes)
        case Share(ppm):
            return market.mean_bytes * ppm / MILLION
        case _:
            return market.mean_bytes
