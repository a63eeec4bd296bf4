"""Generates a workload from the counts of a published cluster, if its files are not available.

The counts come from Alibaba's cluster-trace-gpu-v2023, as papers print them: nodes of each shape
and pods of each size. No data of single pods is copied. CPU and memory are drawn at random."""

import random

from benchmarks.packing.workload import WHOLE_MILLI, Node, Pod

#: Model, MiB of a device, and shapes: (devices, milli-CPU, MiB, nodes in the whole cluster).
SHAPES: tuple[tuple[str, int, tuple[tuple[int, int, int, int], ...]], ...] = (
    ("G2", 22731, ((8, 96000, 393216, 549),)),
    ("T4", 15109, ((2, 104000, 524288, 387), (4, 96000, 393216, 17))),
    ("G3", 81251, ((8, 128000, 786432, 39),)),
    ("P100", 16280, ((2, 16000, 122880, 107), (2, 64000, 262144, 22), (2, 8000, 61440, 5))),
    ("V100M32", 32510, ((8, 96000, 786432, 21), (4, 48000, 376832, 9))),
    ("V100M16", 16160, ((4, 32000, 131072, 28), (1, 8000, 32768, 19), (8, 64000, 262144, 8))),
    ("A10", 22731, ((1, 128000, 1048576, 2),)),
)
#: Numbers of pods, of 8152 in total, that request no GPU, and that request 1, 2, 4 or 8 whole GPUs.
NO_GPU, WHOLES = 1088, ((1, 3911), (2, 16), (4, 15), (8, 44))
#: Thousandths of one GPU -> number of pods. The two most frequent values are published.
SHARES = (
    *((810, 1078), (470, 750), (50, 60), (100, 120), (190, 46), (250, 200)),
    *((300, 180), (400, 160), (500, 200), (600, 144), (720, 80), (900, 60)),
)
CPU_MILLI = (1000, 2000, 4000, 6000, 8000, 12000, 16000)
MIB_OF_CPU = (2, 4, 8)


def nodes(part: int = 16) -> list[Node]:
    """Return one of ``part`` nodes of each shape, but at least one of each."""
    found: list[Node] = []
    for model, device_mib, shapes in SHAPES:
        for gpus, cpu, memory, count in shapes:
            for _ in range(max(1, round(count / part))):
                name = f"node-{len(found):04d}"
                found.append(Node(name, cpu, memory, gpus, model, device_mib))
    return found


def pods(seed: int = 0) -> list[Pod]:
    """Return pods in the published proportions. The device for which a share was sized is drawn at
    random."""
    lots = random.Random(seed)
    sizes = [(device_mib, sum(g * n for g, _, _, n in shapes)) for _, device_mib, shapes in SHAPES]
    kinds = [(0, 0)] * NO_GPU + [(gpus, WHOLE_MILLI) for gpus, n in WHOLES for _ in range(n)]
    kinds += [(1, milli) for milli, count in SHARES for _ in range(count)]
    found = []
    for number, (gpus, milli) in enumerate(kinds):
        cpu = lots.choice(CPU_MILLI) * max(1, gpus)
        cpu = min(cpu, 90_000)
        memory = min(cpu * lots.choice(MIB_OF_CPU), 360_000)
        (sized_on,) = lots.choices([mib for mib, _ in sizes], [count for _, count in sizes])
        vram = 0 if not gpus else -1 if milli == WHOLE_MILLI else milli * sized_on // WHOLE_MILLI
        found.append(Pod(f"pod-{number:04d}", cpu, memory, gpus, milli, frozenset(), vram))
    return found
