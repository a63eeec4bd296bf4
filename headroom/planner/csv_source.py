"""Reads a history from two CSV files in the form of a published trace: pods, and nodes with GPUs.

The files have the columns of Alibaba's cluster-trace-gpu-v2023, and more for GPU memory and use.
The file of pods has the columns ``name``, ``num_gpu``, ``creation_time``, ``deletion_time`` and
``scheduled_time`` (seconds, or RFC 3339 times). Optional columns are ``cpu_milli``, ``memory_mib``
(host memory), ``gpu_spec`` (allowed models, separated by ``|``), ``vram_mib`` (requested GPU
memory; -1 for all of each GPU), ``peak_mib`` (the most GPU memory used on one GPU), ``sm_ratio``
(mean SM activity, 0..1), ``utilization_ratio`` (mean GPU utilization, 0..1) and ``workload``. The
file of nodes has the columns ``name``, ``gpu`` (number of GPUs), ``model``, ``gpu_mem_mib`` (memory
of each GPU), and optionally ``cpu_milli`` and ``memory_mib``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path

from headroom.errors import BadSettings
from headroom.planner.csv_rows import Row, read_rows
from headroom.planner.wording import skipped
from headroom.planner.workload import History, Life, Machine

MIB = 1 << 20
_PODS = ("name", "num_gpu", "creation_time", "deletion_time", "scheduled_time")
_NODES = ("name", "gpu", "model", "gpu_mem_mib")
_HOST = ("cpu_milli", "memory_mib")
_OPTIONAL_OF_PODS = (
    *("peak_mib", "vram_mib", "sm_ratio", "utilization_ratio", "workload", "gpu_spec"),
    *_HOST,
)
#: Columns of the published trace that a plan does not need.
_UNUSED = ("sn", "gpu_milli", "qos", "pod_phase")


@dataclass(slots=True)
class _Skipped:
    """The rows that a plan does not use, by the reason."""

    nodes: list[str] = field(default_factory=list)
    without_gpu: list[str] = field(default_factory=list)
    without_start: list[str] = field(default_factory=list)
    without_end: list[str] = field(default_factory=list)
    columns: dict[str, str] = field(default_factory=dict)

    def note_columns(self, row: Row, known: Sequence[str]) -> None:
        """Note the columns of the row's file that a plan does not read."""
        if row.path.name in self.columns:
            return
        missing = [each for each in known if each not in row.values]
        names = []
        for name in row.values:
            if name and name not in known and name not in _UNUSED:
                close = get_close_matches(name.lower().replace(" ", "_"), missing, 1)
                names.append(repr(name[:40]) + (f" (did you mean {close[0]}?)" if close else ""))
        found = skipped("column", f"of {row.path.name}", names)
        absent = f" Columns that it lacks: {', '.join(missing)}." if missing else ""
        self.columns[row.path.name] = "".join(each + absent for each in found)

    def sentences(self) -> Iterator[str]:
        """Yield sentences about columns and about pods with a GPU that do not count."""
        yield from filter(None, self.columns.values())
        yield from skipped("pod", "that never started", self.without_start)
        if self.without_end:
            yield from skipped("pod", "without an end time", self.without_end)
            yield (
                "To count a pod that still runs, write the time at which you made the file into "
                "deletion_time."
            )

    def assumptions(self) -> Iterator[str]:
        if self.without_gpu:
            yield from skipped("pod", "without a GPU", self.without_gpu)
            yield "The CPU and host memory that skipped pods used count as free."
        yield from skipped("node", "without a GPU", self.nodes)


def read_history(pods: Path, nodes: Path) -> History:
    """Return the history in the files. Raises ``BadSettings`` with file, line and column."""
    rows = _Skipped()
    machines = tuple(_machines(nodes, rows))
    if not machines:
        raise BadSettings(
            f"{nodes}: has no node with a GPU. Example of a row: node-1,4,L40S,46068, for the "
            f"columns {','.join(_NODES)}"
        )
    lives: list[Life] = []
    unmeasured = 0
    for row in read_rows(pods, _PODS):
        rows.note_columns(row, (*_PODS, *_OPTIONAL_OF_PODS))
        name = f"{row.values['name']} (line {row.line})"
        if not (gpus := row.number("num_gpu", "1")):
            rows.without_gpu.append(name)
        elif not row.values["scheduled_time"]:
            rows.without_start.append(name)
        elif not row.values["deletion_time"]:
            rows.without_end.append(name)
        else:
            lives.append(_life(row, gpus))
            unmeasured += lives[-1].peak_bytes is None
    if not lives:
        why = "".join(f" {each}" for each in (*rows.sentences(), *rows.assumptions()))
        raise BadSettings(
            f"{pods}: has no pod with a GPU that ran and ended.{why} Example of a row: "
            f"trainer-1,1,0,3600,5, for the columns {','.join(_PODS)}"
        )
    lives.sort(key=lambda life: life.created_s)
    start_s = lives[0].created_s
    lives = [replace(life, created_s=life.created_s - start_s) for life in lives]
    assumptions = (*rows.assumptions(), *_peaks(unmeasured, len(lives)))
    return History(machines, tuple(lives), assumptions, skipped=tuple(rows.sentences()))


def _machines(path: Path, rows: _Skipped) -> Iterator[Machine]:
    names: set[str] = set()
    for row in read_rows(path, _NODES):
        rows.note_columns(row, (*_NODES, *_HOST))
        if not (gpus := row.number("gpu", "8")):
            rows.nodes.append(f"{row.values['name']} (line {row.line})")
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
    created_s = row.seconds("creation_time", "0")
    scheduled_s = row.seconds("scheduled_time", "5")
    ended_s = row.seconds("deletion_time", "3600")
    if not created_s <= scheduled_s <= ended_s:
        times = ("creation_time", "scheduled_time", "deletion_time")
        given = ", ".join(f"{each} is {row.values[each][:40]!r}" for each in times)
        raise BadSettings(
            f"{row.path}, line {row.line}: the times are not in this order: {given}. Example: 0, "
            "5, 3600"
        )
    name = row.text("name", "trainer-1")
    request_mib = row.optional("vram_mib", "8192, or -1 for a whole GPU", least=-1)
    peak_mib = row.optional("peak_mib", "6144")
    return Life(
        name=name,
        workload=row.values.get("workload") or name,
        created_s=created_s,
        run_s=ended_s - scheduled_s,
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


def _peaks(unmeasured: int, lives: int) -> Iterator[str]:
    if unmeasured == lives:
        yield "No pod has a measured peak, so the request is taken as the peak."
    elif unmeasured:
        yield (
            f"{unmeasured:,} of {lives:,} pods have no measured peak, so their request is taken as "
            "their peak."
        )
