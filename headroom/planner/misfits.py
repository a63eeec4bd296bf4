"""Finds the pods of a history that fit on no node, and what makes them too large."""

from collections.abc import Sequence

from headroom.planner.scenarios import has_machine, shapes_of
from headroom.planner.workload import GIB, History, Life, Machine


def too_large(history: History) -> list[Life]:
    """Return the pods that fit on no node of the cluster, even if it is idle."""
    shapes = shapes_of(history.machines)
    return [life for life in history.lives if not has_machine(life, None, shapes)]


def misfits(history: History) -> list[str]:
    """Return the names of the pods that fit on no node, each with what is too large."""
    return [f"{life.name} {_misfit(life, history.machines)}" for life in too_large(history)]


def _misfit(life: Life, machines: Sequence[Machine]) -> str:
    """Return what makes a pod fit on no machine."""
    allowed = [each for each in machines if not life.models or each.model in life.models]
    if not allowed:
        return f"(no node has a GPU of model {' or '.join(sorted(life.models))})"
    gpus = max(each.gpus for each in allowed)
    most_bytes = max(each.memory_bytes for each in allowed)
    if life.gpus > gpus:
        return f"({life.gpus} GPUs, but no such node has more than {gpus})"
    if (life.known_bytes or 0) > most_bytes:
        return (
            f"({(life.known_bytes or 0) / GIB:,.1f} GiB on a GPU, but the largest has "
            f"{most_bytes / GIB:.1f} GiB)"
        )
    return "(no single node has its GPUs, GPU memory, CPU and host memory)"
