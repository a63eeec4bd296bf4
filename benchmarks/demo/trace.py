"""Reads a fleet and a workload from the columns of the openb files: nodes.csv and pods.csv."""

import csv
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.demo.fleet import Shape
from benchmarks.demo.workload import Workload, in_random_order

#: Column -> an example of what it holds.
_NODE_COLUMNS = {"gpu": "8", "model": "T4", "gpu_mem_mib": "15109"}
_POD_COLUMNS = {"num_gpu": "1", "vram_mib": "10456"}


class BadTrace(ValueError):
    """A file that cannot be read as a trace; the text names file, column and a right example."""


def read_shapes(folder: Path) -> tuple[Shape, ...]:
    """Equal nodes counted together, in the order in which the file first names them."""
    nodes: Counter[tuple[str, int, int]] = Counter()
    for where, row in _rows(folder / "nodes.csv", _NODE_COLUMNS):
        gpus = _number(where, row, "gpu", _NODE_COLUMNS, at_least=0)
        if not gpus:
            continue
        memory_mib = _number(where, row, "gpu_mem_mib", _NODE_COLUMNS, at_least=1)
        model = row["model"].strip()
        if not model:
            raise BadTrace(f"{where}: column 'model' is empty; right is, for example, 'T4'")
        nodes[model, gpus, memory_mib] += 1
    if not nodes:
        raise BadTrace(f"{folder / 'nodes.csv'}: no node has a GPU (column gpu)")
    return tuple(Shape(*key, nodes=count) for key, count in nodes.items())


def read_workload(folder: Path) -> Workload:
    """Pods with a GPU: vram_mib is -1 for whole GPUs, and their share of one GPU otherwise."""
    asks: list[tuple[int, int | None]] = []
    for where, row in _rows(folder / "pods.csv", _POD_COLUMNS):
        gpus = _number(where, row, "num_gpu", _POD_COLUMNS, at_least=0)
        vram_mib = _number(where, row, "vram_mib", _POD_COLUMNS, at_least=-1)
        if vram_mib > 0 and gpus != 1:
            raise BadTrace(
                f"{where}: columns 'num_gpu' and 'vram_mib' are {gpus} and {vram_mib}, but a pod "
                "that shares has one GPU; right is, for example, 1 and 10456, or 2 and -1"
            )
        if gpus and vram_mib:
            asks.append((gpus, vram_mib if vram_mib > 0 else None))
    if not asks:
        raise BadTrace(f"{folder / 'pods.csv'}: no pod asks for a GPU (columns num_gpu, vram_mib)")
    return in_random_order(asks)


def _rows(path: Path, columns: Mapping[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Each row of the file with the place to name in a complaint."""
    try:
        file = path.open(newline="", encoding="utf-8")
    except OSError as err:
        raise BadTrace(f"{path}: {err.strerror}; columns {', '.join(columns)} are needed") from err
    with file:
        reader = csv.DictReader(file)
        for column, example in columns.items():
            if column not in (reader.fieldnames or ()):
                raise BadTrace(
                    f"{path}: no column {column!r}; it would hold, for example, {example}"
                )
        for row in reader:
            # A short row leaves columns None.
            yield f"{path} line {reader.line_num}", {c: row[c] or "" for c in columns}


def _number(
    where: str, row: Mapping[str, str], column: str, columns: Mapping[str, str], at_least: int
) -> int:
    text = row[column].strip()
    try:
        number = int(text)
    except ValueError:
        number = at_least - 1
    if number < at_least:
        raise BadTrace(
            f"{where}: column {column!r} is {text!r:.40}, not a whole number from {at_least}; "
            f"right is, for example, {columns[column]}"
        )
    return number
