"""Runs one experiment with a workload, an order of its pods, and a placement policy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.packing.judge import Device, Judge, Place
from benchmarks.packing.play import (
    READ_AT,
    Churn,
    Filters,
    Inflation,
    Placed,
    Play,
    Rows,
    Scheduler,
    shuffled,
)
from benchmarks.packing.pools import unshared
from benchmarks.packing.product import Headroom
from benchmarks.packing.rules import RULES, BestFit, Fleet, Rule
from benchmarks.packing.workload import Ask, Demand, Mode, Node, device_amount, replicas

#: Choices without separate nodes for pods with several devices.
ONE_POOL = ("mixed", "one-pool")


@dataclass(frozen=True, slots=True)
class Run:
    nodes: tuple[Node, ...]
    asks: tuple[Ask, ...]
    mode: Mode
    policy: str
    #: "mixed" means one pool in which a published rule chooses the devices, and "one-pool" means
    #: one pool of steered nodes for Headroom. Otherwise, the device choice of Headroom's nodes,
    #: beside which unshared nodes serve pods with several devices.
    choice: str
    #: The rule that places pods without a GPU: "own", "bestfit" or "aside".
    others: str
    seed: int
    #: Indices in ``asks`` in the order of arrival. If it is empty, the seed decides the order.
    order: tuple[int, ...] = ()
    #: Ranks that decide between equal nodes. If it is empty, the order of the nodes decides.
    ranks: tuple[int, ...] = ()
    churn: bool = False
    #: The memory of the unshared nodes, as a multiple of the demand of the pods that need them.
    pool_size: float = 1.0
    #: In the churn, let more pods arrive by day than by night.
    daily: bool = False


def play(run: Run) -> dict[str, Any]:
    """Return the results of the run. Percentages refer to the capacity."""
    demand = Demand(run.nodes, run.mode)
    pools = []
    if run.choice not in ONE_POOL:
        pools = unshared(run.nodes, run.asks, run.mode, run.pool_size)
    judge = Judge(places(run.nodes, run.mode, replicas(run.mode)))
    order = run.order or tuple(
        shuffled([demand.of(ask) for ask in run.asks], demand.capacity, run.seed)
    )
    scheduler = _scheduler(run, demand, pools)
    scene = Play(Filters(run.nodes, pools), demand, judge, scheduler)
    told: dict[str, Any] = {
        "policy": run.policy,
        "mode": run.mode,
        "choice": run.choice,
        "others": run.others,
        "seed": run.seed,
        "pool_size": run.pool_size,
        "unshared_nodes": len(pools),
    }
    if run.churn:
        return told | _churned(scene.churn(run.asks, run.seed, run.daily))
    return told | _inflated(scene.inflate(run.asks, order))


def places(nodes: Sequence[Node], mode: Mode, most: int) -> list[Place]:
    """Return the nodes for a judge, with nothing on them. A device takes at most ``most`` pods."""
    found = []
    for node in nodes:
        size = device_amount(node, mode)
        devices = [Device(size, size, most) for _ in range(node.gpus)]
        found.append(Place(node.cpu_milli, node.memory_mib, node.model, devices))
    return found


class _Others(Scheduler):
    """Places pods without a GPU by another rule."""

    def __init__(self, inner: Scheduler, others: Rule, inner_sees_all: Fleet | None) -> None:
        self._inner, self._others, self._theirs = inner, others, inner_sees_all
        self._by_rule: set[str] = set()

    def choose(self, name: str, ask: Ask, offered: Rows) -> Placed | None:
        if ask.gpus:
            placed = self._inner.choose(name, ask, offered)
            if placed is not None:
                self._others.note(name, ask, placed)
            return placed
        placed = self._others.choose(name, ask, offered)
        if placed is not None:
            self._by_rule.add(name)
            if self._theirs is not None:
                self._theirs.take(ask, *placed)
        return placed

    def ended(self, name: str) -> None:
        ask, placed = self._others.gone(name)
        if name not in self._by_rule:
            self._inner.ended(name)
        elif self._theirs is not None:
            self._theirs.take(ask, *placed, sign=-1)


class Aside(BestFit):
    """Places pods on the node with the least free memory on its devices, out of the way."""

    def scores(self, ask: Ask, rows: Rows) -> Any:
        left = self.fleet.left[rows].sum(axis=1)
        return 1 - left / max(1, int(self.fleet.size.sum(axis=1).max()))


OTHERS: dict[str, Callable[..., Rule]] = {"bestfit": BestFit, "aside": Aside}


def _scheduler(run: Run, demand: Demand, pools: Sequence[int]) -> Scheduler:
    ranks = np.array(run.ranks or range(len(run.nodes)), np.int64)
    fleet = Fleet(run.nodes, run.mode)
    if run.policy in RULES:
        rule = RULES[run.policy](fleet, demand, run.asks, ranks)
        if run.others == "own":
            return rule
        return _Others(rule, _others(run, demand, ranks), fleet)
    ours = Headroom(run.nodes, run.mode, run.policy, run.choice, run.seed, pools)
    if run.others == "own":
        return ours
    return _Others(ours, _others(run, demand, ranks), None)


def _others(run: Run, demand: Demand, ranks: Rows) -> Rule:
    return OTHERS[run.others](Fleet(run.nodes, run.mode), demand, run.asks, ranks)


def _inflated(found: Inflation) -> dict[str, Any]:
    return {
        "admitted_pct": {str(at): round(found.admitted(at), 2) for at in READ_AT},
        "idle_pct_at_100": round(found.idle(100), 2),
        "rejected": dict(sorted(found.rejected.items())),
        "overcommits": found.overcommits,
    }


def _churned(found: Churn) -> dict[str, Any]:
    return {
        "running_pct": round(found.running, 2),
        "rejected_pct": round(found.rejected, 2),
        "rejected_pct_by_class": {
            which: round(100 * rejected / came, 2)
            for which, (came, rejected) in sorted(found.by_class.items())
        },
        "overcommits": found.overcommits,
    }
