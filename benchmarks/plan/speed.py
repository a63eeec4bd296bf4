"""Measures time and memory of a plan with one configuration and one seed.

This includes all work from the CSV files to the figures: reading, recommendations, today's cluster,
the searches for the fewest nodes for sharing and exclusive pods, and the ranges. Each measurement
is a separate process."""

import multiprocessing
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.plan import generated
from headroom.planner.csv_source import read_history
from headroom.planner.recommended import with_recommendations
from headroom.planner.scenarios import (
    Configuration,
    answer,
    baseline,
    exclusive_pool,
    unshared_pool,
    variation_of,
)
from headroom.planner.workload import Vram, with_workloads

DAYS = 14
#: Generated pods for each unit of the scale, and nodes, which are about twice as many as needed.
_PODS_A_SCALE, _NODES_A_SCALE = 2010, 30
PEAKS = Vram("peaks", 0.1)


@dataclass(frozen=True, slots=True)
class Measured:
    pods: int
    nodes: int
    gpus: int | None
    wall_s: float
    cpu_s: float
    peak_bytes: int

    @property
    def row(self) -> str:
        cells = f"{self.pods:,}", f"{self.nodes:,}", f"{self.gpus:,}" if self.gpus else "-"
        times = f"{self.wall_s:.0f} s", f"{self.cpu_s:.0f} s"
        return " | ".join([*cells, *times, f"{self.peak_bytes / (1 << 20):.0f} MiB"])


def measure(pods: int, configuration: Configuration, seed: int) -> Measured:
    """Generate a history of about this many pods, and plan one configuration in a new process."""
    scale = pods / _PODS_A_SCALE
    nodes = max(1, round(_NODES_A_SCALE * scale))
    with tempfile.TemporaryDirectory() as folder:
        rows = generated.rows(DAYS, seed, scale)
        files = generated.write(Path(folder), rows, nodes)
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            return pool.apply(_plan, (*files, configuration))


def _plan(pods: Path, nodes: Path, configuration: Configuration) -> Measured:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    history = with_workloads(with_recommendations(read_history(pods, nodes)))
    today = baseline(history, history.lives, 0)
    if configuration.choice == "exclusive":
        pool = unshared_pool(history, history.lives, 0, today)
        gpus = None if pool is None else pool.gpus
    else:
        exclusive = exclusive_pool(history, history.lives, configuration, 0, today)
        gpus = answer(history, history.lives, configuration, 0, today, exclusive).gpus
    variation_of(history, configuration)
    return Measured(
        len(history.lives),
        len(history.machines),
        gpus,
        time.perf_counter() - wall_s,
        time.process_time() - cpu_s,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
