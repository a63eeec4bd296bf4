"""Measures the memory that defragmentation gains per eviction, and compares it with random moves.

    python -m benchmarks.defrag [--choice steered] [--seed 1 --seed 2 --seed 3] [--events 200]

The workload is the churn of ``benchmarks.packing``, with its pods of one GPU: they arrive and end.
After 80 % of the memory has been reserved, each pod that fits nowhere is an event, until there are
``--events`` of them. CPU and host memory are left out, because the advice does not count them. GPU
models are left out too, so pods may use any model. Pods are really moved: they are evicted from the
simulated nodes, and placed again with Headroom's own code, on any other node.
There are three ways, each with its own run:

* advice: the moves that ``console.facts.defrag`` advises, or nothing if it advises none.
* node: random pods of one random node that is large enough, until the waiting pod fits there.
* any: random pods of all nodes, until the waiting pod fits on some node.

For one event, at most as many pods are moved as the advice may name. The gain of an event is the
memory of the waiting pod if it is placed, minus the memory of moved pods that found no other node.
"""

import multiprocessing
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import typer

from benchmarks.packing import synthetic
from benchmarks.packing.__main__ import CHOICES, check, machine_line
from benchmarks.packing.judge import Judge
from benchmarks.packing.play import Filters, Placed, Play
from benchmarks.packing.product import Headroom
from benchmarks.packing.runs import places
from benchmarks.packing.workload import Ask, Demand, Node, ask, replicas
from headroom.console.facts.defrag import MOST_FOR_A_POD, Advice, Effort, for_pod
from headroom.console.facts.movable_pods import Movers

WAYS = ("advice", "node", "any")
SCHEDULER = "default-scheduler"
#: Ratio of the memory that is idle when the events begin.
IDLE = 0.2


@dataclass(slots=True)
class Event:
    """A pod that fitted nowhere, and what was done about it."""

    evictions: int = 0
    #: Gain in MiB.
    gain: float = 0.0
    placed: bool = False
    #: Number of successors on a node of the simulation, and of moved pods without any node.
    landed: int = 0
    lost: int = 0
    search_s: float = 0.0


class _Searched(Headroom):
    """The placement rule of Headroom, which can also advise on moves of pods."""

    def advice(self, name: str, ask: Ask) -> Advice:
        product = self._product
        product._catch_up()
        cluster = product._cluster
        movers = Movers(cluster, cluster.snapshot(), self._now_s, [SCHEDULER])
        return for_pod(movers, product._pod(self._job(name, ask)), Effort())


class Moving(Play):
    """Churn in which pods are moved for each pod that fits nowhere."""

    def __init__(
        self,
        filters: Filters,
        demand: Demand,
        judge: Judge,
        scheduler: _Searched,
        way: str,
        most: int,
        seed: int,
    ) -> None:
        super().__init__(filters, demand, judge, scheduler)
        self._searched, self._way, self._most = scheduler, way, most
        self._lots = random.Random(seed)
        self.events: list[Event] = []
        #: First name of a pod -> the name of its successor, or "" if it found no node.
        self._now_named: dict[str, str] = {}
        self._full = False

    def _place(self, name: str, ask: Ask) -> Placed | None:
        placed = super()._place(name, ask)
        self._full = self._full or self._judge.idle <= IDLE * self._demand.capacity
        full = self._full and len(self.events) < self._most
        if placed is not None or not full:
            return placed
        event = Event()
        self.events.append(event)
        began_s = time.perf_counter()
        if self._way == "advice":
            placed = self._advised(name, ask, event, began_s)
        else:
            placed = self._random(name, ask, event)
        event.placed = placed is not None
        event.gain += self._demand.of(ask) if placed else 0.0
        return placed

    def _end(self, name: str) -> None:
        while name in self._now_named:
            name = self._now_named.pop(name)
        if name:
            super()._end(name)

    def _advised(self, name: str, ask: Ask, event: Event, began_s: float) -> Placed | None:
        advice = self._searched.advice(name, ask)
        event.search_s = time.perf_counter() - began_s
        for move in advice.moves:
            node = self._move(move.pod.metadata.name, ask, event)
            event.landed += node is not None and f"node-{node:04d}" in move.places
        return super()._place(name, ask) if advice.moves else None

    def _random(self, name: str, ask: Ask, event: Event) -> Placed | None:
        offered = self._filters.offered(ask).tolist()
        nodes = [self._lots.choice(offered)] if self._way == "node" else offered
        for _ in range(MOST_FOR_A_POD):
            there = set(nodes)
            movable = sorted(n for n, (a, at) in self._running.items() if at in there and a.gpus)
            if not movable:
                return None
            self._move(self._lots.choice(movable), ask, event)
            if (placed := super()._place(name, ask)) is not None:
                return placed
        return None

    def _move(self, name: str, for_ask: Ask, event: Event) -> int | None:
        """Evict a pod and place its successor on another node. Return that node."""
        ask, here = self._running[name]
        super()._end(name)
        event.evictions += 1
        successor = f"{name}+"
        # The node is cordoned in the meantime.
        offered = self._filters.offered(ask)
        offered = offered[offered != here]
        placed = self._searched.choose(successor, ask, offered) if len(offered) else None
        if placed is None:
            event.lost += 1
            event.gain -= self._demand.of(ask)
            self._now_named[name] = ""
            return None
        assert self._judge.came(successor, ask, *placed)
        self._filters.take(ask, placed[0])
        self._running[successor] = ask, placed[0]
        self._now_named[name] = successor
        return placed[0]


@dataclass(frozen=True, slots=True)
class Case:
    way: str
    choice: str
    seed: int
    events: int
    part: int


def play(case: Case) -> list[Event]:
    """Return the events of one run."""
    nodes: Sequence[Node] = synthetic.nodes(case.part)
    asks = [
        replace(ask(pod, "vram"), models=frozenset(), cpu_milli=0, memory_mib=0)
        for pod in synthetic.pods()
        if pod.gpus == 1
    ]
    demand = Demand(nodes, "vram")
    judge = Judge(places(nodes, "vram", replicas("vram")))
    headroom = _Searched(nodes, "vram", "fragmentation", case.choice, case.seed, [])
    moving = Moving(Filters(nodes), demand, judge, headroom, case.way, case.events, case.seed)
    moving.churn(asks, case.seed)
    assert not judge.overcommits, f"{judge.overcommits} overcommits"
    return moving.events


def main(
    choice: Annotated[str, typer.Option(help="predicted or steered.")] = "predicted",
    seed: Annotated[list[int] | None, typer.Option(help="Can be repeated.")] = None,
    events: Annotated[int, typer.Option(help="Maximum number of events of a run.")] = 200,
    part: Annotated[
        int, typer.Option(help="Use one of this many nodes of the published fleet.")
    ] = 16,
) -> None:
    """Print a table of the three ways, for each seed and for all seeds."""
    check("choice", choice, CHOICES[1:])
    seeds = seed or [1, 2, 3]
    cases = [Case(way, choice, each, events, part) for each in seeds for way in WAYS]
    with multiprocessing.Pool(min(len(cases), os.cpu_count() or 1)) as pool:
        found = dict(zip(cases, pool.map(play, cases, chunksize=1), strict=True))
    typer.echo(f"{len(synthetic.nodes(part))} nodes, {choice}; {machine_line()}")
    titles = "seed", "way", "events", "moved", "placed", "evictions", "landed", "lost"
    gains = "GiB/eviction", "p50", "p99", "search ms p50", "p99"
    typer.echo(f"| {' | '.join((*titles, *gains))} |\n{'|---' * (len(titles) + len(gains))}|")
    for number in [*seeds, 0]:
        for way in WAYS:
            chosen = [
                event
                for case, some in found.items()
                if case.way == way and number in (0, case.seed)
                for event in some
            ]
            typer.echo(f"| {number or 'all'} | {way} | {' | '.join(_row(chosen))} |")


def _row(events: Sequence[Event]) -> Iterator[str]:
    moved = [event for event in events if event.evictions]
    evictions = sum(event.evictions for event in moved)
    yield str(len(events))
    yield str(len(moved))
    yield str(sum(event.placed for event in moved))
    yield str(evictions)
    yield str(sum(event.landed for event in moved))
    yield str(sum(event.lost for event in moved))
    yield f"{sum(event.gain for event in moved) / 1024 / max(1, evictions):.2f}"
    each = [event.gain / 1024 / event.evictions for event in moved] or [0.0]
    yield from (f"{value:.1f}" for value in np.percentile(each, [50, 99]))
    searched_ms = [1000 * event.search_s for event in events] or [0.0]
    yield from (f"{value:.0f}" for value in np.percentile(searched_ms, [50, 99]))


if __name__ == "__main__":
    typer.run(main)
