"""Generates the history of a cluster with daily and weekly rhythm, and optionally with drift.

The workloads are made up: notebooks that hold a GPU during office hours, inference servers that
follow the day's traffic, batch jobs, and trainings with several GPUs. None of them was measured on
a real cluster."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HOUR_S, DAY_S = 3600, 86_400
MODEL, GPU_MIB, GPUS_OF_NODE = "L40S", 46_068, 4


@dataclass(frozen=True, slots=True)
class Kind:
    """One workload. Times are in hours, sizes in MiB."""

    name: str
    #: Number of pods on a working day, and the ratio of it that arrives on a weekend day.
    a_day: float
    weekend: float
    mean_h: float
    peak_mib: tuple[int, int]
    sm: tuple[float, float]
    gpus: int = 1
    #: Whether pods arrive only by day.
    office: bool = True


KINDS = (
    Kind("notebook", 45, 0.15, 6.0, (1_500, 9_000), (0.01, 0.10)),
    Kind("embedder", 30, 0.7, 5.0, (5_000, 7_000), (0.20, 0.45), office=False),
    Kind("ranker", 24, 0.7, 6.0, (9_000, 12_000), (0.15, 0.35), office=False),
    Kind("batch", 60, 0.5, 1.5, (6_000, 22_000), (0.50, 0.95)),
    Kind("chat-70b", 3, 1.0, 20.0, (41_000, 44_000), (0.30, 0.60), office=False),
    Kind("trainer", 3, 0.4, 9.0, (30_000, 44_000), (0.80, 0.99), gpus=4),
)
_PODS = (
    *("name", "workload", "num_gpu", "cpu_milli", "memory_mib", "vram_mib", "peak_mib"),
    *("sm_ratio", "creation_time", "scheduled_time", "deletion_time"),
)
_NODES = ("name", "gpu", "model", "gpu_mem_mib", "cpu_milli", "memory_mib")


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    workload: str
    gpus: int
    peak_mib: int
    sm_ratio: float
    created_s: int
    ended_s: int


def rows(days: int, seed: int, scale: float = 1.0, drift_a_week: float = 0.0) -> list[Row]:
    """Return the pods of ``days`` days that begin on a Monday, in the order of their creation.

    ``scale`` multiplies the number of pods. ``drift_a_week`` is the ratio by which the number grows
    each week.
    """
    lots = np.random.default_rng(seed)
    found = [
        Row(f"{kind.name}-{number}", kind.name, kind.gpus, *each)
        for kind in KINDS
        for number, each in enumerate(_pods(kind, days, scale, drift_a_week, lots))
    ]
    return sorted(found, key=lambda row: (row.created_s, row.name))


def _pods(
    kind: Kind, days: int, scale: float, drift_a_week: float, lots: np.random.Generator
) -> Iterator[tuple[int, float, int, int]]:
    for day in range(days):
        weekend = kind.weekend if day % 7 >= 5 else 1.0
        grown = (1 + drift_a_week) ** (day / 7)
        # Days differ more than by chance alone.
        busy = float(lots.lognormal(0.0, 0.12))
        for _ in range(lots.poisson(kind.a_day * weekend * scale * grown * busy)):
            hour = lots.triangular(7, 10.5, 20) if kind.office else lots.triangular(0, 14, 24)
            created_s = day * DAY_S + int(hour * HOUR_S)
            life_s = max(60, int(lots.gamma(2.0, kind.mean_h / 2) * HOUR_S))
            peak_mib = int(lots.integers(*kind.peak_mib, endpoint=True))
            yield peak_mib, round(float(lots.uniform(*kind.sm)), 3), created_s, created_s + life_s


def write(folder: Path, found: list[Row], nodes: int) -> tuple[Path, Path]:
    """Write the pods and ``nodes`` nodes of 4 GPUs as CSV. Return both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    pods_path, nodes_path = folder / "pods.csv", folder / "nodes.csv"
    with pods_path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(_PODS)
        for row in found:
            asked = (row.gpus, 4000 * row.gpus, 16_384 * row.gpus, -1, row.peak_mib, row.sm_ratio)
            times = row.created_s, row.created_s, row.ended_s
            writer.writerow((row.name, row.workload, *asked, *times))
    with nodes_path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(_NODES)
        writer.writerows(
            (f"node-{number:02d}", GPUS_OF_NODE, MODEL, GPU_MIB, 64_000, 524_288)
            for number in range(nodes)
        )
    return pods_path, nodes_path
