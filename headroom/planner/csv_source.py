"""Reads a history from two CSV files in the form of a published trace: pods, and nodes with GPUs.

The files have the columns of Alibaba's cluster-trace-gpu-v2023, and more for GPU memory and use.
The file of pods has the columns ``name``, ``num_gpu``, ``creation_time``, ``deletion_time`` and
``scheduled_time`` (seconds). Optional columns are ``cpu_milli``, ``memory_mib`` (host memory),
``gpu_spec`` (allowed models, separated by ``|``), ``vram_mib`` (requested GPU memory; -1 for all of
each GPU), ``peak_mib`` (the most GPU memory used on one GPU), ``sm_ratio`` (mean SM activity,
0..1), ``utilization_ratio`` (mean GPU utilization, 0..1) and ``workload``. The file of nodes has
the columns ``name``, ``gpu`` (number of GPUs), ``model``, ``gpu_mem_mib`` (memory of each GPU), and
optionally ``cpu_milli`` and ``memory_mib``."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from headroom.errors import BadSettings
from headroom.planner.csv_rows import Row, read_rows
from headroom.planner.wording import plural
from headroom.planner.workload import History, Life, Machine

MIB = 1 << 20
_PODS = ("name", "num_gpu", "creation_time", "deletion_time", "scheduled_time")
_NODES = ("name", "gpu", "model", "gpu_mem_mib")


def read_history(pods: Path, nodes: Path) -> History:
    """Return the history in the files. Raises ``BadSettings`` with file, line and column."""
    machines = tuple(_machines(nodes))
    if not machines:
        raise BadSettings(
            f"{nodes}: has no node with a GPU. Example of a row: node-1,4,L40S,46068, for the "
            f"columns {','.join(_NODES)}"
        )
    lives: list[Life] = []
    counts = {"without": 0, "never": 0, "unmeasured": 0}
    for row in read_rows(pods, _PODS):
        if not (gpus := row.number("num_gpu", "1")):
            counts["without"] += 1
        elif not row.values["scheduled_time"] or not row.values["deletion_time"]:
            counts["never"] += 1
        else:
            lives.append(_life(row, gpus))
            counts["unmeasured"] += lives[-1].peak_bytes is None
    if not lives:
        raise BadSettings(
            f"{pods}: has no pod with a GPU that ran. Example of a row: trainer-1,1,0,3600,5, for "
            f"the columns {','.join(_PODS)}"
        )
    lives.sort(key=lambda life: life.created_s)
    start_s = lives[0].created_s
    lives = [replace(life, created_s=life.created_s - start_s) for life in lives]
    return History(machines, tuple(lives), tuple(_assumptions(counts, len(lives))))


def _machines(path: Path) -> Iterator[Machine]:
    names: set[str] = set()
    for row in read_rows(path, _NODES):
        if not (gpus := row.number("gpu", "8")):
            continue
        memory_mib = row.number("gpu_mem_mib", "46068")
        if not memory_mib:
            raise row.wrong("gpu_mem_mib", "more than 0 on a node with GPUs", "46068")
        if row.text("name", "node-1") in names:
            raise row.wrong("name", "a unique name, because an earlier row has it", "node-2")
        names.add(row.values["name"])
        host_mib = row.optional("memory_mib", "393216")
        yield Machine(
            row.text("name", "node-1"),
            row.text("model", "L40S"),
            gpus,
            memory_mib * MIB,
            row.optional("cpu_milli", "96000"),
            None if host_mib is None else host_mib * MIB,
        )


def _life(row: Row, gpus: int) -> Life:
    created_s = row.number("creation_time", "0")
    scheduled_s = row.number("scheduled_time", "5")
    ended_s = row.number("deletion_time", "3600")
    if not created_s <= scheduled_s <= ended_s:
        raise row.wrong("scheduled_time", "between creation_time and deletion_time", "5")
    name = row.text("name", "trainer-1")
    request_mib = row.optional("vram_mib", "8192, or -1 for a whole GPU", least=-1)
    peak_mib = row.optional("peak_mib", "6144")
    return Life(
        name=name,
        workload=row.values.get("workload") or name,
        created_s=float(created_s),
        run_s=float(ended_s - scheduled_s),
        gpus=gpus,
        request_bytes=request_mib * MIB if request_mib and request_mib > 0 else None,
        peak_bytes=None if peak_mib is None else peak_mib * MIB,
        sm_ratio=_ratio(row, "sm_ratio"),
        utilization_ratio=_ratio(row, "utilization_ratio"),
        cpu_milli=row.optional("cpu_milli", "8000") or 0,
        host_bytes=(row.optional("memory_mib", "16384") or 0) * MIB,
        models=frozenset(filter(None, row.values.get("gpu_spec", "").split("|"))),
    )


def _ratio(row: Row, column: str) -> float | None:
    return row.ratio(column) if row.values.get(column, "") else None


def _assumptions(counts: Mapping[str, int], lives: int) -> Iterator[str]:
    if counts["without"]:
        yield (
            f"Skipped {plural(counts['without'], 'pod')} without a GPU. The CPU and host "
            "memory that they used count as free."
        )
    if counts["never"]:
        yield f"Skipped {plural(counts['never'], 'pod')} without a start time or an end time."
    if counts["unmeasured"] == lives:
        yield "No pod has a measured peak, so the request is taken as the peak."
    elif counts["unmeasured"]:
        yield (
            f"{counts['unmeasured']:,} of {lives:,} pods have no measured peak, so their request "
            "is taken as their peak."
        )
