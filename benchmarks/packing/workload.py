"""Reads nodes, pods and the arrival order of pods from files, and validates every cell.

The columns are the columns of the published trace with which results are compared (``nodes.csv``,
``pods.csv``, ``arrivals.csv``). Columns that are not used here are optional.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headroom.errors import BadSettings
from headroom.planner.csv_rows import read_rows

Mode = Literal["milli", "vram"]
#: Thousandths of a GPU that make up a whole device.
WHOLE_MILLI = 1000
#: Number of replicas of each shared device, and so the maximum number of its pods.
REPLICAS = 10
#: Maximum number of devices of a node.
SLOTS = 8


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    model: str
    #: Memory of each device in MiB.
    device_mib: int


@dataclass(frozen=True, slots=True)
class Pod:
    name: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    #: Thousandths of each device; 1000 means the whole device.
    gpu_milli: int
    #: GPU models that the pod may use. If empty, it may use any model.
    models: frozenset[str]
    #: MiB on one device; -1 means all memory of each of its devices, 0 means no GPU.
    vram_mib: int


@dataclass(frozen=True, slots=True)
class Ask:
    """The request of a pod, in the unit of the mode: MiB of memory, or thousandths of a device."""

    cpu_milli: int
    memory_mib: int
    gpus: int
    #: Amount on one device; None means ``gpus`` empty devices.
    amount: int | None
    models: frozenset[str]

    @property
    def shares(self) -> bool:
        return self.amount is not None


def ask(pod: Pod, mode: Mode) -> Ask:
    if not pod.gpus:
        return Ask(pod.cpu_milli, pod.memory_mib, 0, 0, frozenset())
    whole = pod.gpu_milli >= WHOLE_MILLI if mode == "milli" else pod.vram_mib < 0
    share = pod.gpu_milli if mode == "milli" else pod.vram_mib
    return Ask(pod.cpu_milli, pod.memory_mib, pod.gpus, None if whole else share, pod.models)


def device_amount(node: Node, mode: Mode) -> int:
    return WHOLE_MILLI if mode == "milli" else node.device_mib


def replicas(mode: Mode) -> int:
    """Return the replicas of a device. A device shared by thousandths cannot run out of
    replicas."""
    return REPLICAS if mode == "vram" else 1 << 20


class Demand:
    """The value of a pod regardless of its node: its own amount, or the mean of its devices."""

    def __init__(self, nodes: Sequence[Node], mode: Mode) -> None:
        self._of_model: dict[str, tuple[int, int]] = {}
        for node in nodes:
            amount, gpus = self._of_model.get(node.model, (0, 0))
            more = node.gpus * device_amount(node, mode)
            self._of_model[node.model] = amount + more, gpus + node.gpus

    @property
    def capacity(self) -> int:
        return sum(amount for amount, _ in self._of_model.values())

    def mean(self, models: frozenset[str] = frozenset()) -> float:
        """Return the mean amount of a device of one of the models."""
        allowed = [figures for model, figures in self._of_model.items() if model in models]
        found = allowed if models and allowed else list(self._of_model.values())
        return sum(amount for amount, _ in found) / max(1, sum(gpus for _, gpus in found))

    def of(self, ask: Ask) -> float:
        return ask.gpus * self.mean(ask.models) if ask.amount is None else float(ask.amount)


def read_nodes(path: Path) -> list[Node]:
    """Return the nodes in the order of the file."""
    nodes = []
    needed = ("name", "cpu_milli", "memory_mib", "gpu", "model", "gpu_mem_mib")
    for cells in read_rows(path, needed):
        number = cells.number
        gpus = number("gpu", "8", 0, SLOTS)
        nodes.append(
            Node(
                cells.text("name", "node-1"),
                number("cpu_milli", "96000"),
                number("memory_mib", "393216"),
                gpus,
                cells.text("model", "T4") if gpus else cells.values.get("model", ""),
                number("gpu_mem_mib", "15109", 1 if gpus else 0),
            )
        )
    return nodes


def read_pods(path: Path) -> list[Pod]:
    """Return the pods in the order of their names, to which the arrivals refer."""
    pods = []
    needed = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "gpu_spec", "vram_mib")
    for cells in read_rows(path, needed):
        number = cells.number
        gpus = number("num_gpu", "1", 0, SLOTS)
        milli = number("gpu_milli", "460, or 1000 for a whole GPU", 1 if gpus else 0, WHOLE_MILLI)
        vram = number("vram_mib", "10456, or -1 for a whole GPU", -1)
        if gpus and not vram:
            raise cells.wrong("vram_mib", "more than 0 for a pod with a GPU", "10456, or -1")
        if gpus > 1 and (vram > 0 or milli < WHOLE_MILLI):
            raise cells.wrong("vram_mib", "-1 for a pod with several GPUs", "-1, gpu_milli 1000")
        models = frozenset(filter(None, cells.values["gpu_spec"].split("|")))
        cpu = number("cpu_milli", "12000")
        memory = number("memory_mib", "16384")
        name = cells.text("name", "pod-1")
        pods.append(Pod(name, cpu, memory, gpus, milli, models, vram))
    return sorted(pods, key=lambda pod: pod.name)


def read_arrivals(
    path: Path, pods: int, mode: Mode, cluster: str, seeds: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Return seed -> order. If the file has several modes or clusters, only the rows of the given
    mode and cluster count. If no seeds are given, return all seeds."""
    found: dict[int, list[tuple[int, int]]] = {}
    at = 0
    for cells in read_rows(path, ("pod",)):
        others = (("mode", mode), ("cluster", cluster))
        if any(cells.values.get(key, right) != right for key, right in others):
            continue
        seed = cells.number("seed", "42") if "seed" in cells.values else 0
        at += 1
        k = cells.number("k", "0") if "k" in cells.values else at
        example = "0 (the first pod in the order of names)"
        found.setdefault(seed, []).append((k, cells.number("pod", example, 0, pods - 1)))
    wrong = [seed for seed in seeds if seed not in found]
    if wrong or not found:
        there = ", ".join(map(str, sorted(found))) or "none"
        wanted = f"seed {wrong[0]} of " if wrong else ""
        raise BadSettings(
            f"{path}: has no arrivals of {wanted}mode {mode}, cluster {cluster} (seeds there: "
            f"{there}). Example of a row: cluster={cluster}, mode={mode}, seed=42, k=0, pod=7"
        )
    return {
        seed: tuple(pod for _, pod in sorted(rows))
        for seed, rows in found.items()
        if not seeds or seed in seeds
    }


def read_ranks(path: Path, nodes: Sequence[Node]) -> dict[int, tuple[int, ...]]:
    """Return seed -> ranks. Seeds that do not name every node are left out."""
    found: dict[int, dict[str, int]] = {}
    for cells in read_rows(path, ("seed", "node", "rank")):
        seed = cells.number("seed", "42")
        found.setdefault(seed, {})[cells.values["node"]] = cells.number("rank", "7")
    return {
        seed: tuple(ranks[node.name] for node in nodes)
        for seed, ranks in found.items()
        if all(node.name in ranks for node in nodes)
    }
