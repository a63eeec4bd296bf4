"""Derives other workloads from one, with other shares of pods that share, select models, and so on.

The recipes are those of the published variants (pods drawn again in other proportions). They show
how a policy performs on workloads that it was not designed for. ``random-7`` draws the proportions
as well; its number is the seed.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from benchmarks.packing.workload import WHOLE_MILLI, Node, Pod

#: Models that the published pods select, and how many pods do: some have little, and are asked for.
PUBLISHED: tuple[tuple[frozenset[str], int], ...] = tuple(
    (frozenset(models.split()), pods)
    for models, pods in (
        *(("T4", 355), ("G2", 120), ("P100", 100), ("V100M16 V100M32", 61), ("G3", 17)),
        *(("P100 V100M16 V100M32", 26), ("G2 P100 T4 V100M16 V100M32", 20)),
        *(("A10 G2 T4 V100M16 V100M32", 9), ("P100 V100M16", 6), ("P100 T4 V100M16 V100M32", 5)),
    )
)
#: (number of models that a pod names, weight), if models are requested as often as nodes have
#: them.
NAMED = ((1, 85), (2, 8), (3, 7))
#: (devices of a pod with several devices, weight).
SEVERAL = ((2, 2), (4, 2), (8, 3))

T = TypeVar("T")
Recipe = Callable[[Sequence[Pod], Sequence[Node], random.Random], list[Pod]]


def selecting(share: float, even: bool = False) -> Recipe:
    """So many of the pods with a GPU may run on few models only: those that the published pods
    name, or ``even``, as many as there are nodes of them."""

    def make(pods: Sequence[Pod], nodes: Sequence[Node], lots: random.Random) -> list[Pod]:
        sizes = {node.model: node.device_mib for node in nodes if node.gpus}
        there = sorted(sizes)
        counts = [sum(node.model == model for node in nodes) for model in there]
        published = [(models.intersection(sizes), count) for models, count in PUBLISHED]
        made = []
        for pod in pods:
            if not pod.gpus or lots.random() >= share:
                made.append(pod)
                continue
            if even:
                named = frozenset(lots.choices(there, counts, k=_drawn(NAMED, lots)))
            else:
                named = _drawn([each for each in published if each[0]], lots)
            # A share was sized on one of the models that it may run on.
            size = sizes[lots.choice(sorted(named))]
            vram = max(1, pod.gpu_milli * size // WHOLE_MILLI) if pod.vram_mib > 0 else -1
            made.append(replace(pod, models=named, vram_mib=vram))
        return made

    return make


def without_gpu(times: float) -> Recipe:
    """So many times as many pods that ask for no GPU."""

    def make(pods: Sequence[Pod], nodes: Sequence[Node], lots: random.Random) -> list[Pod]:
        plain = [pod for pod in pods if not pod.gpus]
        wanted = round(times * len(plain))
        return [pod for pod in pods if pod.gpus] + lots.choices(plain, k=wanted if plain else 0)

    return make


def sharing(share: float) -> Recipe:
    """So many of the pods with a GPU ask for a part of one."""

    def make(pods: Sequence[Pod], nodes: Sequence[Node], lots: random.Random) -> list[Pod]:
        parts = [pod for pod in pods if pod.vram_mib > 0]
        wholes = [pod for pod in pods if pod.vram_mib < 0]
        if not parts or not wholes:
            return list(pods)
        of_parts = round(share * (len(parts) + len(wholes)))
        drawn = lots.choices(parts, k=of_parts)
        drawn += lots.choices(wholes, k=len(parts) + len(wholes) - of_parts)
        return [pod for pod in pods if not pod.gpus] + drawn

    return make


def several(share: float) -> Recipe:
    """So much of what is asked for, in devices, is asked for by pods that want several."""

    def make(pods: Sequence[Pod], nodes: Sequence[Node], lots: random.Random) -> list[Pod]:
        wholes = [pod for pod in pods if pod.vram_mib < 0]
        made = [pod for pod in pods if pod.gpus < 2]
        devices = sum(pod.gpu_milli / WHOLE_MILLI for pod in made if pod.gpus)
        left = devices * share / (1 - share)
        while left > 0 and wholes:
            gpus, pod = _drawn(SEVERAL, lots), lots.choice(wholes)
            each = pod.cpu_milli // pod.gpus, pod.memory_mib // pod.gpus
            made.append(
                replace(pod, gpus=gpus, cpu_milli=each[0] * gpus, memory_mib=each[1] * gpus)
            )
            left -= gpus
        return made

    return make


def _any(pods: Sequence[Pod], nodes: Sequence[Node], lots: random.Random) -> list[Pod]:
    made = list(pods)
    for recipe in (
        sharing(lots.uniform(0.2, 0.9)),
        several(lots.uniform(0.05, 0.5)),
        selecting(lots.uniform(0.0, 0.4), even=lots.random() < 0.5),
        without_gpu(lots.uniform(0.3, 3.0)),
    ):
        made = recipe(made, nodes, lots)
    return made


#: The names as the tables have them.
MIXES: dict[str, Recipe] = {
    "default": lambda pods, nodes, lots: list(pods),
    "select-10": selecting(0.10),
    "select-33": selecting(0.33),
    "select-33-even": selecting(0.33, even=True),
    "share-all": sharing(1.0),
    "cpu-only": without_gpu(2.5),
    "several-50": several(0.5),
}
RANDOM = "random-"


def known(name: str) -> bool:
    return name in MIXES or (name.startswith(RANDOM) and name.removeprefix(RANDOM).isdecimal())


def mix(name: str, pods: Sequence[Pod], nodes: Sequence[Node]) -> list[Pod]:
    """The same for the same pods and name; the names of the pods are their places."""
    recipe = MIXES.get(name, _any)
    made = recipe(sorted(pods, key=lambda pod: pod.name), nodes, random.Random(name))
    return [replace(pod, name=f"pod-{place:05d}") for place, pod in enumerate(made)]


def _drawn(values: Sequence[tuple[T, int]], lots: random.Random) -> T:
    (value,) = lots.choices([each for each, _ in values], [weight for _, weight in values])
    return value
