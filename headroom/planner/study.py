"""Runs all configurations of a plan with all seeds, in several processes, and keeps the figures."""

import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from headroom.errors import BadSettings
from headroom.planner.contention import NONE, Contention
from headroom.planner.misfits import misfits, too_large
from headroom.planner.resampling import resampled
from headroom.planner.rhythm import Variation
from headroom.planner.scenarios import (
    Answer,
    Baseline,
    Configuration,
    Pool,
    answer,
    baseline,
    exclusive_pool,
    unshared_pool,
    variation_of,
)
from headroom.planner.wording import first_few, need_ends, span
from headroom.planner.workload import History, Life, Machine, Vram, largest_bytes, stays_exclusive

#: If pods compete for more than this ratio of their running time, the study also tries limits of SM
#: activity: values of the annotation headroom.gpu/max-sm, in percent.
COMPETING = 0.01
LIMITS = (70, 40)
#: Device choices with which Headroom places the pods that share GPUs.
WITH_HEADROOM = ("predicted", "steered")
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one configuration with one seed."""

    #: GPUs and nodes that give the same waiting time as today's unshared GPUs; None if no number
    #: suffices.
    gpus: int | None
    nodes: int | None
    #: The number of GPUs of each model.
    models: Mapping[str, int]
    #: Mean waiting time in seconds with the needed nodes.
    wait_s: float
    #: Mean waiting time in seconds with today's nodes.
    today_wait_s: float | None
    #: Fraction of the GPU memory that is in use, and mean of the summed SM activity per GPU.
    memory_ratio: float
    sm_ratio: float
    #: Number of pods that run out of memory with the needed nodes.
    out_of_memory: int
    #: Number of pods that run out of memory with today's nodes.
    today_out_of_memory: int
    #: Contention of the pods that share GPUs, with the needed nodes.
    contention: Contention = NONE


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one configuration, in the order of the seeds."""

    configuration: Configuration
    figures: list[Figures]
    variation: Variation
    #: GPUs of the largest node. Needs are rounded up to whole nodes.
    node_gpus: int = 1

    @property
    def gpus_ends(self) -> tuple[int, int] | None:
        """Range of the GPUs that another history needs; None if no number suffices."""
        return need_ends(self.gpus, self.variation.reach, self.node_gpus)

    @property
    def gpus_text(self) -> str | None:
        """``gpus_ends`` as text."""
        return None if (ends := self.gpus_ends) is None else span(*ends)

    @property
    def gpus(self) -> list[int | None]:
        return [each.gpus for each in self.figures]

    @property
    def out_of_memory(self) -> list[int]:
        return [each.out_of_memory for each in self.figures if each.gpus is not None]

    @property
    def loses_pods(self) -> bool:
        """Whether pods run out of memory in a replay."""
        return any(self.out_of_memory)

    @property
    def rank(self) -> tuple[bool, int]:
        """Key that orders configurations from the best to the worst."""
        return self.loses_pods, max(gpus or 0 for gpus in self.gpus)


@dataclass(frozen=True, slots=True)
class Study:
    """The figures of all configurations."""

    history: History
    vram: Vram
    seeds: int
    unshared: Row
    rows: list[Row]
    #: The pods that fit on no node of the cluster.
    left_out: list[Life]


@dataclass(frozen=True, slots=True)
class _Seed:
    """Results that all configurations with the same seed share."""

    seed: int
    today: Baseline
    #: The nodes of the exclusive pool of each configuration, by ``_exclusive_key``.
    exclusive: Mapping[Configuration, Pool | None]


def run_study(
    history: History,
    configurations: Sequence[Configuration],
    vrams: Sequence[Vram],
    seeds: int,
    processes: int,
    progress: Callable[[str], None],
) -> Study:
    """Replay each configuration with each seed. Report each finished step to ``progress``.

    The first of ``vrams`` is the source of requests for all configurations. Only the best
    configuration is also replayed with the other sources. Raises ``BadSettings`` if no pod fits on
    a node of the cluster.
    """
    left_out = too_large(history)
    if len(left_out) == len(history.lives):
        raise BadSettings(
            f"no pod of the history fits on a node of the cluster: {first_few(misfits(history))}"
        )
    vram, *others = vrams
    kinds = [*configurations, *(replace(configurations[0], vram=other) for other in others)]
    exclusive = list(dict.fromkeys(map(_exclusive_key, kinds)))
    with _Workers(history, processes) as workers:
        bases: list[_Seed] = []
        for base in workers.each(_prepare, [(exclusive, seed) for seed in range(seeds)]):
            bases.append(base)
            progress(f"today, {len(bases)} of {seeds} replays")
        # Start with the search for unshared GPUs, because it takes longest.
        rows = _rows(
            history,
            workers,
            [Configuration("exclusive", 1, vram), *configurations],
            bases,
            progress,
        )
        unshared, *rows = rows
        best = best_row(rows)
        if best is not None:
            more = [replace(best.configuration, vram=other) for other in others]
            if _any_exclusive(history, vram):
                more.append(replace(best.configuration, choice="steered", one_pool=True))
            if any(each.contention.competing_ratio > COMPETING for each in best.figures):
                more += [replace(best.configuration, max_sm=max_sm) for max_sm in LIMITS]
            rows += _rows(history, workers, more, bases, progress)
    return Study(history, vram, seeds, unshared, rows, left_out)


def _rows(
    history: History,
    workers: "_Workers",
    configurations: Sequence[Configuration],
    bases: Sequence[_Seed],
    progress: Callable[[str], None],
) -> list[Row]:
    tasks = [(configuration, base) for configuration in configurations for base in bases]
    figures: list[Figures] = []
    for found in workers.each(_play, tasks):
        figures.append(found)
        progress(f"{tasks[len(figures) - 1][0].text}, {len(figures)} of {len(tasks)} replays")
    kinds = list(dict.fromkeys(map(_demand_key, configurations)))
    variations = dict(zip(kinds, workers.each(_vary, kinds), strict=True))
    size = len(bases)
    node_gpus = max(machine.gpus for machine in history.machines)
    return [
        Row(each, figures[at * size : (at + 1) * size], variations[_demand_key(each)], node_gpus)
        for at, each in enumerate(configurations)
    ]


def _any_exclusive(history: History, vram: Vram) -> bool:
    """Return whether a pod needs GPUs of its own."""
    sizes = largest_bytes(history.machines)
    return any(stays_exclusive(life, vram, sizes) for life in history.lives)


def best_row(rows: Sequence[Row]) -> Row | None:
    """Return the configuration with Headroom that needs the fewest GPUs in its worst replay.

    A configuration in which pods run out of memory wins only if they do in all others, too. Among
    equals, fewer replicas win. Configurations that limit SM activity, have one pool, or do not use
    the first source of requests, do not count.
    """
    known = [
        row
        for row in rows
        if row.configuration.choice in WITH_HEADROOM
        and row.configuration.max_sm is None
        and not row.configuration.one_pool
        and row.configuration.vram == rows[0].configuration.vram
        and all(gpus is not None for gpus in row.gpus)
    ]
    return min(known, key=lambda row: (*row.rank, row.configuration.replicas), default=None)


class _Workers:
    """Processes that have the history. If there is only one, everything runs in this process."""

    def __init__(self, history: History, processes: int) -> None:
        self._pool = None
        if processes > 1:
            # Spawn them, because a fork of a process with threads can hang.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(processes, context, _begin, (history,))
        else:
            _remember(history)

    def __enter__(self) -> "_Workers":
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def each(self, do: Callable[[T], R], tasks: Iterable[T]) -> Iterable[R]:
        """Yield the results in the order of the tasks."""
        return map(do, tasks) if self._pool is None else self._pool.map(do, tasks)


#: The history of this process. It is the same for all tasks, so it is not sent with each task.
_history: list[History] = []


def _begin(history: History) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _remember(history)


def _end_with_parent() -> None:
    """End this process when the command ends, even if the command is killed. Otherwise this process
    would wait for tasks forever."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _remember(history: History) -> None:
    _history[:] = [history]


def _exclusive_key(configuration: Configuration) -> Configuration:
    """Return a key that is equal for configurations which keep the same pods on unshared nodes."""
    return replace(configuration, choice="exclusive", replicas=1, max_sm=None)


def _demand_key(configuration: Configuration) -> Configuration:
    """Return a key that is equal for configurations in which pods take the same GPUs."""
    return replace(configuration, choice="", max_sm=None, one_pool=False)


def _prepare(task: tuple[Sequence[Configuration], int]) -> _Seed:
    exclusive, seed = task
    (history,) = _history
    lives = resampled(history, seed)
    today = baseline(history, lives, seed)
    pools = {each: exclusive_pool(history, lives, each, seed, today) for each in exclusive}
    return _Seed(seed, today, pools)


def _play(task: tuple[Configuration, _Seed]) -> Figures:
    configuration, base = task
    (history,) = _history
    lives = resampled(history, base.seed)
    if configuration.choice == "exclusive":
        pool = unshared_pool(history, lives, base.seed, base.today)
        return _unshared(base.today, pool)
    if configuration.one_pool:
        exclusive = exclusive_pool(history, lives, configuration, base.seed, base.today)
    else:
        exclusive = base.exclusive[_exclusive_key(configuration)]
    found = answer(history, lives, configuration, base.seed, base.today, exclusive)
    return _figures(found)


def _vary(configuration: Configuration) -> Variation:
    (history,) = _history
    return variation_of(history, configuration)


def _figures(found: Answer) -> Figures:
    return Figures(
        gpus=found.gpus,
        nodes=len(found.machines) if found.needed else None,
        models=models_of(found.machines),
        wait_s=found.ratio(lambda o: o.mean_wait_s, lambda m: m.gpus),
        today_wait_s=found.today_wait_s,
        memory_ratio=found.memory_ratio,
        sm_ratio=found.sm_ratio,
        out_of_memory=found.out_of_memory,
        today_out_of_memory=found.today_out_of_memory,
        contention=found.contention,
    )


def _unshared(today: Baseline, pool: Pool | None) -> Figures:
    outcome = pool.outcome if pool else None
    return Figures(
        gpus=pool.gpus if pool else None,
        nodes=len(pool.machines) if pool else None,
        models=models_of(pool.machines) if pool else {},
        wait_s=outcome.mean_wait_s if outcome else 0.0,
        today_wait_s=today.wait_s,
        memory_ratio=outcome.memory_ratio if outcome else 0.0,
        sm_ratio=outcome.sm_ratio if outcome else 0.0,
        out_of_memory=0,
        today_out_of_memory=0,
    )


def models_of(machines: Sequence[Machine]) -> dict[str, int]:
    """Return model -> number of GPUs."""
    found = Counter[str]()
    for machine in machines:
        found[machine.model] += machine.gpus
    return dict(sorted(found.items()))
