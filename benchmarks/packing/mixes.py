"""Derives other workloads from a given one, for example with another ratio of pods that share GPUs.

The recipes are the recipes of the published variants, in which pods are drawn again in other
proportions. They show how a policy performs on workloads for which it was not designed.
``random-7`` also draws the proportions; its number is the seed."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from benchmarks.packing.workload import WHOLE_MILLI, Node, Pod

#: Models that the published pods select -> number of pods. Some models are rare but often selected.
PUBLISHED: tuple[tuple[frozenset[str], int], ...] = tuple(
    (frozenset(models.split()), pods)
    for models, pods in (
        *(("T4", 355), ("G2", 120), ("P100", 100), ("V100M16 V100M32", 61), ("G3", 17)),
        *(("P100 V100M16 V100M32", 26), ("G2 P100 T4 V100M16 V100M32", 20)),
        *(("A10 G2 T4 V100M16 V100M32", 9), ("P100 V100M16", 6), ("P100 T4 V100M16 V100M32", 5)),
    )
)
#: (number of models that a pod names, weight), if models are requested as often as nodes have them.
NAMED = ((1, 85), (2, 8), (3, 7))
#: (number of devices of a pod with several devices, weight).
SEVERAL = ((2, 2), (4, 2), (8, 3))

T = TypeVar("T")
Recipe = Callable[[Sequence[Pod], Sequence[Node], random.Random], list[Pod]]


def selecting(share: float, even: bool = False) -> Recipe:
    """Return a recipe in which ``share`` of the GPU pods may run only on some models. These are the
    models that published pods name, or with ``even``, models in proportion to their nodes."""

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
            # The requested share refers to one of the models on which the pod may run.
            size = sizes[lots.choice(sorted(named))]
            vram = max(1, pod.gpu_milli * size // WHOLE_MILLI) if pod.vram_mib > 0 else -1
            made.append(replace(pod, models=named, vram_mib=vram))
        return made

    return make


def without_gpu(times: float) -> Recipe:
    """Return a recipe with ``times`` as many pods that request no GPU."""

    def make(pods: Sequence[Pod], nodes: Sequence[Node], lots: random.Random) -> list[Pod]:
        plain = [pod for pod in pods if not pod.gpus]
        wanted = round(times * len(plain))
        return [pod for pod in pods if pod.gpus] + lots.choices(plain, k=wanted if plain else 0)

    return make


def sharing(share: float) -> Recipe:
    """Return a recipe in which ``share`` of the GPU pods request a part of a GPU."""

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
    """Return a recipe in which pods with several devices request ``share`` of all devices."""

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


#: Names of the recipes, as the tables show them.
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
    """Return the mixed pods, which depend only on the given pods and the name. Each pod is named
    after its position."""
    recipe = MIXES.get(name, _any)
    made = recipe(sorted(pods, key=lambda pod: pod.name), nodes, random.Random(name))
    return [replace(pod, name=f"pod-{place:05d}") for place, pod in enumerate(made)]


def _drawn(values: Sequence[tuple[T, int]], lots: random.Random) -> T:
    (value,) = lots.choices([each for each, _ in values], [weight for _, weight in values])
    return value
