"""Computes how many GPUs pods use at a time if none of them waits and packing is perfect.

This is much faster than a replay, so the search for the fewest nodes begins at this number.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headroom.planner.workload import Life, Machine, Vram


def mean_gpu_bytes(machines: Sequence[Machine]) -> float:
    """Return the mean memory of a GPU of these machines."""
    gpus = sum(machine.gpus for machine in machines)
    return sum(machine.gpus * machine.memory_bytes for machine in machines) / gpus


def demand(
    lives: Sequence[Life], replicas: int, vram: Vram, mean_bytes: float
) -> tuple[float, float]:
    """Return the most GPUs that the pods use at a time, and the mean over time, if none of them
    waits and packing is perfect.

    ``mean_bytes`` is the mean memory of a GPU.
    """
    if not lives:
        return 0.0, 0.0
    created_s = np.array([life.created_s for life in lives])
    run_s = np.array([life.run_s for life in lives])
    gpus = np.array([gpus_of(life, vram, replicas, mean_bytes) for life in lives])
    most = _most_at_once(created_s, run_s, gpus)
    span_s = max(1.0, float((created_s + run_s).max() - created_s[0]))
    return most, min(float(run_s @ gpus) / span_s, most)


def gpus_of(life: Life, vram: Vram, replicas: int, mean_bytes: float) -> float:
    """Return the number of GPUs that a pod uses. For a shared GPU, return the pod's fraction, which
    is at least one replica."""
    need_bytes = vram.need_bytes(life)
    if replicas == 1 or need_bytes is None:
        return float(life.gpus)
    return max(1 / replicas, need_bytes / mean_bytes)


def _most_at_once(
    created_s: NDArray[np.float64], run_s: NDArray[np.float64], gpus: NDArray[np.float64]
) -> float:
    times = np.concatenate([created_s, created_s + run_s])
    changes = np.concatenate([gpus, -gpus])
    # If pods end and start at the same time, the ends come first.
    return float(np.cumsum(changes[np.lexsort((changes, times))]).max(initial=0.0))
