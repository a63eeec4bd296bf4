"""Generates other clusters with their pods, on which no setting of a policy was chosen.

Three fleets are named after their users. ``fleet-7`` also draws the nodes and all proportions; its
number is the seed. Numbers below 100 are for the development of policies, and numbers from 100 on
are for judging them.

Pods with whole devices need a minimum of memory, so they select the models that have it. As in
published traces, a few sizes are frequent, because replicas of one workload request the same."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.packing.workload import WHOLE_MILLI, Demand, Node, Pod, ask

#: Maps each model to the MiB of a device and to the usual nodes, as (devices, milli-CPU, MiB).
CATALOGUE: dict[str, tuple[int, tuple[tuple[int, int, int], ...]]] = {
    "H100": (81559, ((8, 192_000, 2_000_000),)),
    "A100-80": (81920, ((8, 128_000, 1_000_000), (4, 64_000, 500_000))),
    "A100-40": (40960, ((8, 96_000, 680_000), (1, 12_000, 85_000))),
    "L40S": (46068, ((8, 128_000, 768_000), (4, 64_000, 384_000))),
    "A10G": (23028, ((4, 48_000, 192_000), (1, 16_000, 64_000), (8, 192_000, 768_000))),
    "L4": (23034, ((4, 48_000, 192_000), (8, 96_000, 384_000), (1, 16_000, 64_000))),
    "V100": (32768, ((8, 96_000, 768_000), (4, 48_000, 384_000))),
    "T4": (15360, ((4, 48_000, 192_000), (1, 16_000, 64_000), (2, 32_000, 128_000))),
    "P100": (16280, ((2, 16_000, 122_880), (4, 32_000, 245_760))),
}


@dataclass(frozen=True, slots=True)
class Users:
    """The nodes of a fleet, and the proportions of its pods."""

    #: Maps each model to the number of nodes of each of its usual kinds.
    nodes: dict[str, tuple[int, ...]]
    #: Parts of all pods: without a GPU, with one whole device, with several devices.
    no_gpu: float
    whole: float
    several: float
    #: Part of the GPU pods that select one or two models.
    selecting: float
    #: Typical requests of pods that share a device, in GiB.
    shares_gib: tuple[float, ...]
    #: (number of devices, weight) of pods with several devices.
    devices: tuple[tuple[int, int], ...] = ((2, 3), (4, 2), (8, 2))


NAMED: dict[str, Users] = {
    # Inference of language models, with a few pods over several devices.
    "services": Users(
        {"H100": (4,), "A100-80": (5, 2), "L40S": (4, 6), "L4": (10, 4, 8), "T4": (8, 6)},
        *(0.15, 0.06, 0.05, 0.15),
        (2.5, 5, 8, 12, 16, 20, 36, 40),
    ),
    # Notebooks and small jobs beside training.
    "research": Users(
        {"A100-80": (6, 2), "V100": (10, 6), "T4": (10, 0, 6), "P100": (12, 3)},
        *(0.15, 0.2, 0.2, 0.25),
        (1.5, 3, 4, 6, 8, 10.5, 14),
    ),
    # Mostly training.
    "training": Users(
        {"H100": (12,), "A100-80": (12, 4), "A10G": (6, 4, 2)},
        *(0.1, 0.15, 0.45, 0.1),
        (4, 6, 10, 18, 30),
        ((2, 4), (4, 3), (8, 2)),
    ),
}
RANDOM = "fleet-"
#: The pods request this multiple of the capacity together.
REQUESTED = 1.0


def known(name: str) -> bool:
    return name in NAMED or (name.startswith(RANDOM) and name.removeprefix(RANDOM).isdecimal())


def fleet(name: str) -> tuple[list[Node], list[Pod]]:
    """Return the nodes and the pods, which depend only on the name."""
    lots = random.Random(name)
    users = NAMED.get(name) or _drawn(lots)
    nodes: list[Node] = []
    for model, counts in users.nodes.items():
        device_mib, shapes = CATALOGUE[model]
        for (gpus, cpu, memory), count in zip(shapes, counts, strict=False):
            for _ in range(count):
                nodes.append(Node(f"node-{len(nodes):04d}", cpu, memory, gpus, model, device_mib))
    return nodes, _pods(users, nodes, lots)


def _drawn(lots: random.Random) -> Users:
    nodes = {
        model: tuple(round(lots.uniform(1, 80 / shape[0])) for shape in CATALOGUE[model][1])
        for model in lots.sample(sorted(CATALOGUE), lots.randint(2, 5))
    }
    largest = max(CATALOGUE[model][0] for model in nodes) / 1024
    typical = lots.choice((4, 8, 14))
    sizes = [min(0.9 * largest, typical * lots.lognormvariate(0, 0.8)) for _ in range(9)]
    return Users(
        nodes,
        no_gpu=lots.uniform(0.05, 0.4),
        whole=lots.uniform(0.0, 0.3),
        several=lots.uniform(0.05, 0.5),
        selecting=lots.uniform(0.0, 0.4),
        shares_gib=tuple(sizes),
        devices=((2, lots.randint(1, 5)), (4, lots.randint(1, 4)), (8, lots.randint(0, 3))),
    )


def _pods(users: Users, nodes: list[Node], lots: random.Random) -> list[Pod]:
    sizes = {node.model: node.device_mib for node in nodes}
    most = {
        model: max(node.gpus for node in nodes if node.model == model) for model in sorted(sizes)
    }
    weights = (users.no_gpu, users.whole, users.several)
    makers: tuple[Callable[[], Pod | None], ...] = (
        lambda: _without_gpu(lots),
        lambda: _whole(1, users, sizes, most, lots),
        lambda: _whole(_one_of(users.devices, lots), users, sizes, most, lots),
        lambda: _sharing(users, sizes, lots),
    )
    # Replicas of one workload are equal. A few workloads have many of them.
    kinds: list[tuple[Pod, float]] = []
    counts = [round(60 * weight) + 1 for weight in weights]
    for make, weight, count in zip(
        makers, (*weights, 1 - sum(weights)), (*counts, 60 - sum(counts)), strict=True
    ):
        popular = [lots.paretovariate(2) for _ in range(max(3, count))]
        for each in popular:
            pod = make()
            if pod is not None:
                kinds.append((pod, weight * each / sum(popular)))
    demand, requested, pods = Demand(nodes, "vram"), 0.0, list[Pod]()
    while requested < REQUESTED * demand.capacity:
        (pod,) = lots.choices([pod for pod, _ in kinds], [weight for _, weight in kinds])
        requested += demand.of(ask(pod, "vram"))
        pods.append(replace(pod, name=f"pod-{len(pods):04d}"))
    return pods


def _without_gpu(lots: random.Random) -> Pod:
    cpu = lots.choice((500, 1000, 2000, 4000, 8000))
    return Pod("", cpu, cpu * lots.choice((2, 4)), 0, 0, frozenset(), 0)


def _whole(
    gpus: int, users: Users, sizes: dict[str, int], most: dict[str, int], lots: random.Random
) -> Pod | None:
    """Return a pod with whole devices of the models that have enough memory."""
    could = [model for model in most if most[model] >= gpus]
    if not could:
        return None
    needs = sizes[lots.choice(could)] * lots.uniform(0.5, 1.0)
    models = frozenset(model for model in could if sizes[model] >= needs)
    if lots.random() < users.selecting:
        models = frozenset(lots.sample(sorted(models), min(len(models), lots.randint(1, 2))))
    if len(models) == len(sizes):
        models = frozenset()
    cpu = gpus * lots.choice((2000, 4000, 6000, 8000))
    return Pod("", cpu, cpu * lots.choice((2, 4)), gpus, WHOLE_MILLI, models, -1)


def _sharing(users: Users, sizes: dict[str, int], lots: random.Random) -> Pod:
    """Return a pod that shares a device, and that fits on the models that it selects."""
    share = round(1024 * lots.choice(users.shares_gib) * lots.uniform(0.9, 1.1))
    share = min(share, max(sizes.values()))
    could = sorted(model for model in sizes if sizes[model] >= share)
    models: frozenset[str] = frozenset()
    if lots.random() < users.selecting:
        models = frozenset(lots.sample(could, min(len(could), lots.randint(1, 2))))
    cpu = lots.choice((500, 1000, 2000, 4000))
    return Pod("", cpu, cpu * lots.choice((2, 4)), 1, 500, models, share)


def _one_of(values: tuple[tuple[int, int], ...], lots: random.Random) -> int:
    (value,) = lots.choices([each for each, _ in values], [weight for _, weight in values])
    return value
