"""Shows what is possible @100: what packers admit that see all pods in advance, and a bound.

The packers place the pods that arrive until 100 % of the capacity is requested, in an order of
their own choice: pods with many devices, and pods that can use little of the cluster, come first.
The best of several orders and rules counts, also if it is the order of arrival.

The bound is a Lagrangian bound of a relaxed problem, in which pods of one kind can be divided and
the nodes of a model are one node. It takes into account that devices cannot be divided at will, for
example that no device of 22 GiB holds two pods of 12 GiB, by rounding the requests of a model
(dual feasible functions). It is valid for any prices. A search improves the prices."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.packing.judge import Judge
from benchmarks.packing.play import Filters, Play, shuffled
from benchmarks.packing.rules import RULES, Fleet
from benchmarks.packing.runs import places
from benchmarks.packing.workload import Ask, Demand, Node, replicas

Floats = NDArray[np.float64]
#: The rules that place pods in hindsight.
BY = ("bestfit", "gpubest")
#: Requests of a model are rounded to multiples of the device divided by these numbers.
PARTS = (1, 2, 3, 4, 5, 7, 9)
ROUNDS = 400


def hindsight(nodes: Sequence[Node], asks: Sequence[Ask], seed: int) -> tuple[float, float]:
    """Return the percentage that the best packer admits in hindsight, and the bound."""
    demand = Demand(nodes, "vram")
    arrived = list(_arrived(asks, demand, seed))
    reached = 0.0
    for rule in BY:
        for key in [lambda ask: (), *_orders(nodes, demand)]:
            fleet, ranks = Fleet(nodes, "vram"), np.arange(len(nodes))
            scheduler = RULES[rule](fleet, demand, asks, ranks)
            judge = Judge(places(nodes, "vram", replicas("vram")))
            play = Play(Filters(nodes), demand, judge, scheduler)
            found = play.inflate(
                arrived, sorted(range(len(arrived)), key=lambda i: key(arrived[i]))
            )
            assert not found.overcommits
            reached = max(reached, found.admitted(100))
    return reached, 100 * bound(nodes, arrived) / demand.capacity


def _arrived(asks: Sequence[Ask], demand: Demand, seed: int) -> Iterator[Ask]:
    """Yield the pods up to the last arrival at which the rounded percentage is 100."""
    requested = 0.0
    for index in shuffled([demand.of(each) for each in asks], demand.capacity, seed):
        requested += demand.of(asks[index])
        if round(100 * requested / demand.capacity) > 100:
            return
        yield asks[index]


def _orders(nodes: Sequence[Node], demand: Demand) -> list[Callable[[Ask], tuple[float, ...]]]:
    """Return sort keys. Pods that are difficult to place come first."""

    def usable(ask: Ask) -> float:
        return sum(
            node.gpus * node.device_mib
            for node in nodes
            if node.gpus >= ask.gpus
            and node.device_mib >= (ask.amount or 0)
            and (not ask.models or node.model in ask.models)
        )

    cached: dict[Ask, float] = {}

    def choice(ask: Ask) -> float:
        if ask not in cached:
            cached[ask] = usable(ask)
        return cached[ask]

    return [
        lambda ask: (not ask.gpus, choice(ask), -demand.of(ask)),
        lambda ask: (not ask.gpus, -ask.gpus, choice(ask), -demand.of(ask)),
        lambda ask: (not ask.gpus, -ask.gpus, -demand.of(ask), choice(ask)),
        lambda ask: (not ask.gpus, -ask.gpus, ask.shares, choice(ask), -demand.of(ask)),
    ]


def bound(nodes: Sequence[Node], arrived: Sequence[Ask]) -> float:
    """Return an amount that no placement of these pods can exceed."""
    demand = Demand(nodes, "vram")
    counted = [(ask, count) for ask, count in Counter(arrived).items() if ask.gpus]
    models = sorted({node.model for node in nodes if node.gpus})
    sizes = {node.model: node.device_mib for node in nodes if node.gpus}
    most = {model: max(n.gpus for n in nodes if n.model == model) for model in models}
    # Constraints of each model: its memory by each rounding, its CPU and its host memory.
    limits = [
        [float(sum(n.gpus * n.device_mib for n in nodes if n.model == model))] * (1 + len(PARTS))
        + [float(sum(getattr(n, what) for n in nodes if n.model == model)) for what in HOST]
        for model in models
    ]
    limit = np.array(limits)
    worth = np.array([demand.of(ask) for ask, _ in counted])
    count = np.array([number for _, number in counted], np.float64)
    use = np.full((len(counted), len(models), limit.shape[1]), np.inf)
    for i, (ask, _) in enumerate(counted):
        for j, model in enumerate(models):
            size, amount = sizes[model], ask.amount
            if (ask.models and model not in ask.models) or most[model] < ask.gpus:
                continue
            if amount is None:
                memory = [float(ask.gpus * size)] * (1 + len(PARTS))
            elif amount > size:
                continue
            else:
                memory = [float(amount), *(_rounded(amount, size, parts) for parts in PARTS)]
            use[i, j] = [*memory, *(float(getattr(ask, what)) for what in HOST)]
    return _least(worth, count, use, limit)


HOST = ("cpu_milli", "memory_mib")


def _rounded(amount: int, size: int, parts: int) -> float:
    """Return the request as the dual feasible function of Fekete and Schepers rounds it.

    The rounded requests of pods that fit on one device together fit there, too.
    """
    times = (parts + 1) * amount
    return float(amount) if times % size == 0 else times // size * size / parts


def _least(worth: Floats, count: Floats, use: Floats, limit: Floats) -> float:
    """Return the least Lagrangian bound that subgradient steps find.

    One search starts at the best prices of a single constraint of each model, and another one at
    the memory of each model.
    """
    use = use / np.maximum(limit, 1.0)
    there = limit > 0
    each = np.arange(len(worth))

    def evaluate(prices: Floats) -> tuple[float, Floats]:
        with np.errstate(invalid="ignore"):
            cost = np.where(np.isinf(use), np.inf, use * prices).sum(axis=2)
        gain = worth[:, None] - cost
        where = gain.argmax(axis=1)
        taken = np.maximum(gain[each, where], 0.0)
        placed = np.zeros(limit.shape)
        chosen = taken > 0
        np.add.at(placed, where[chosen], count[chosen, None] * use[chosen, where[chosen]])
        return float(prices[there].sum() + (count * taken).sum()), there - placed

    starts = []
    for column, part in itertools.product(range(1 + len(PARTS)), np.linspace(0.3, 1.0, 15)):
        prices = np.zeros(limit.shape)
        prices[:, column] = part * limit[:, 0]
        starts.append(prices)
    whole = np.zeros(limit.shape)
    whole[:, 0] = limit[:, 0]
    best = float((worth * count).sum())
    for prices in (min(starts, key=lambda start: evaluate(start)[0]), whole):
        for step in range(ROUNDS):
            value, direction = evaluate(prices)
            best = min(best, value)
            length = float((direction**2).sum())
            if not length:
                break
            target = best * (1 - 0.02 / (1 + step / 30))
            prices = np.maximum(prices - (value - target) / length * direction, 0.0)
    return best
