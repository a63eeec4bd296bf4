"""Reads nodes.csv and pods.csv, which have the columns of Alibaba's openb trace."""

import csv
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.demo.fleet import Shape
from benchmarks.demo.workload import Workload, in_random_order

#: Column -> an example of a value.
_NODE_COLUMNS = {"gpu": "8", "model": "T4", "gpu_mem_mib": "15109"}
_POD_COLUMNS = {"num_gpu": "1", "vram_mib": "10456"}


class BadTrace(ValueError):
    """A file that is not a valid trace. The message names the file and column, with an example."""


def read_shapes(folder: Path) -> tuple[Shape, ...]:
    """Read the nodes that have a GPU. Equal nodes become one shape. Raises ``BadTrace``."""
    nodes: Counter[tuple[str, int, int]] = Counter()
    for where, row in _rows(folder / "nodes.csv", _NODE_COLUMNS):
        gpus = _number(where, row, "gpu", _NODE_COLUMNS, at_least=0)
        if not gpus:
            continue
        memory_mib = _number(where, row, "gpu_mem_mib", _NODE_COLUMNS, at_least=1)
        model = row["model"].strip()
        if not model:
            raise BadTrace(f"{where}: column 'model' is empty. Example: T4")
        nodes[model, gpus, memory_mib] += 1
    if not nodes:
        raise BadTrace(f"{folder / 'nodes.csv'}: no node has a GPU (column gpu)")
    return tuple(Shape(*key, nodes=count) for key, count in nodes.items())


def read_workload(folder: Path) -> Workload:
    """Read the pods that have a GPU. Raises ``BadTrace``.

    A ``vram_mib`` of -1 requests whole GPUs. A positive ``vram_mib`` requests memory of one shared
    GPU, in MiB.
    """
    requests: list[tuple[int, int | None]] = []
    for where, row in _rows(folder / "pods.csv", _POD_COLUMNS):
        gpus = _number(where, row, "num_gpu", _POD_COLUMNS, at_least=0)
        vram_mib = _number(where, row, "vram_mib", _POD_COLUMNS, at_least=-1)
        if vram_mib > 0 and gpus != 1:
            raise BadTrace(
                f"{where}: columns 'num_gpu' and 'vram_mib' are {gpus} and {vram_mib}, but a pod "
                "that shares a GPU has one. Example: 1 and 10456, or 2 and -1"
            )
        if gpus and vram_mib:
            requests.append((gpus, vram_mib if vram_mib > 0 else None))
    if not requests:
        raise BadTrace(f"{folder / 'pods.csv'}: no pod requests a GPU (columns num_gpu, vram_mib)")
    return in_random_order(requests)


def _rows(path: Path, columns: Mapping[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each row with its file and line for error messages. Raises ``BadTrace``."""
    try:
        file = path.open(newline="", encoding="utf-8")
    except OSError as err:
        raise BadTrace(f"{path}: {err.strerror}; it needs columns {', '.join(columns)}") from err
    with file:
        reader = csv.DictReader(file)
        for column, example in columns.items():
            if column not in (reader.fieldnames or ()):
                raise BadTrace(f"{path}: no column {column!r}. Example of a value: {example}")
        for row in reader:
            # DictReader sets the missing columns of a short row to None.
            yield f"{path} line {reader.line_num}", {c: row[c] or "" for c in columns}


def _number(
    where: str, row: Mapping[str, str], column: str, columns: Mapping[str, str], at_least: int
) -> int:
    """Parse an integer that is at least ``at_least``. Raises ``BadTrace``."""
    text = row[column].strip()
    try:
        number = int(text)
    except ValueError:
        number = at_least - 1
    if number < at_least:
        raise BadTrace(
            f"{where}: column {column!r} is {text!r:.40}, but must be an integer of at least "
            f"{at_least}. Example: {columns[column]}"
        )
    return number
