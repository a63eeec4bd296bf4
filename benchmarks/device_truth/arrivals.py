"""Generates the arrivals: which pods are created when, and how long they run."""

import csv
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30
MIB = 1 << 20
WARM_UP_LIVES = 3


@dataclass(frozen=True, slots=True)
class Job:
    """A pod with one GPU container."""

    name: str
    request_bytes: int
    at_s: float
    life_s: float
    #: Number of replicas that it requests.
    count: int = 1

    @property
    def selector(self) -> Mapping[str, str] | None:
        """The pod's node selector. There is none, because only matching nodes are offered."""
        return None

    @property
    def vram(self) -> str:
        """The pod's VRAM annotation."""
        return str(self.request_bytes)


Draw = Callable[[random.Random], int]
#: Mix -> a function that draws a request in bytes. ``openb`` is read from a trace instead.
MIXES: dict[str, Draw] = {
    "4-60": lambda lots: lots.randint(4, 60) * GIB,
    "8/64": lambda lots: (64 if lots.random() < 0.15 else 8) * GIB,
    "6/10": lambda lots: lots.choice([6, 10]) * GIB,
}


def openb(folder: Path) -> Draw:
    """Return a function that draws from the requests of the trace's pods that share a GPU."""
    with (folder / "pods.csv").open(newline="") as file:
        sizes = [int(row["vram_mib"]) * MIB for row in csv.DictReader(file)]
    sharing = [size for size in sizes if size > 0]
    return lambda lots: lots.choice(sharing)


def arrivals(
    draw: Draw, count: int, capacity_bytes: int, load_ratio: float, life_s: float, seed: int
) -> tuple[Sequence[Job], float]:
    """Return pods that arrive at random times, and the time at which the last ``count`` of them
    begin. Before that time, the nodes fill up for ``WARM_UP_LIVES``.

    Lives are random with mean ``life_s``. Together, the pods request ``load_ratio`` of the
    capacity.
    """
    lots = random.Random(seed)
    mean_bytes = sum(draw(lots) for _ in range(20_000)) / 20_000
    every_s = life_s * mean_bytes / (load_ratio * capacity_bytes)
    jobs, now_s = [], 0.0
    for number in range(count + round(WARM_UP_LIVES * life_s / every_s)):
        now_s += lots.expovariate(1 / every_s)
        jobs.append(Job(f"j{number}", draw(lots), now_s, lots.expovariate(1 / life_s)))
    return jobs, jobs[-count].at_s
