"""Adds nodes to a history, or removes nodes from it, for ``--nodes``."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

from headroom.contract.errors import BadQuantity
from headroom.contract.quantity import gib, parse_bytes
from headroom.core.cluster.instance_types import nominal_gb
from headroom.errors import BadSettings
from headroom.planner.wording import plural
from headroom.planner.workload import GIB, History, Machine, model_named

_ADDED = re.compile(
    r"\+(?P<nodes>\d{1,4})x(?:(?P<gpus>\d{1,4})x)?(?P<model>[^:]*\w[^:]*)(?::(?P<memory>.*))?",
    re.ASCII,
)
_MOST_GPUS, _MOST_BYTES = 64, 4096 * GIB
_MOST_LISTED = 10
_ENOUGH = "New nodes have enough CPU and host memory for all pods."


def with_changes(history: History, given: Sequence[str]) -> History:
    """Return the history after these changes, in the given order: ``+4x8xL40S:45Gi`` and
    ``+4xL40S`` add nodes, and ``-gpu-a`` removes a node. Raises ``BadSettings``."""
    if not given:
        return history
    before = history.machines
    for each in given:
        history = (_with_more if each.startswith("+") else _without)(history, each)
    return replace(history, before=before)


def _without(history: History, given: str) -> History:
    name = given.removeprefix("-")
    kept = tuple(machine for machine in history.machines if machine.name != name)
    if len(kept) == len(history.machines):
        names = [machine.name for machine in kept]
        listed = ", ".join(names[:_MOST_LISTED])
        if len(names) > _MOST_LISTED:
            listed += f" and {len(names) - _MOST_LISTED:,} more"
        raise BadSettings(
            f"--nodes {given}: the history has no node {name!r} with GPUs. Its nodes: {listed}. "
            f"Example: --nodes -{names[0]}"
        )
    if not kept:
        raise BadSettings(f"--nodes {given}: no node with GPUs would be left")
    note = f"Removed: node {name}."
    return replace(history, machines=kept, assumptions=(*history.assumptions, note))


def _with_more(history: History, given: str) -> History:
    found = _ADDED.fullmatch(given)
    if found is None or not (count := int(found["nodes"])):
        raise BadSettings(
            f"--nodes {given} is not a number of nodes and a GPU model. Example: --nodes "
            f"+4x{history.machines[0].model}"
        )
    new, notes = _like(history, given, found)
    names = {machine.name for machine in history.machines}
    free = (name for number in itertools.count(1) if (name := f"+{number}") not in names)
    more = [replace(new, name=name) for name in itertools.islice(free, count)]
    added = f"Added: {plural(count, 'node')} with {new.gpus} {new.model} each."
    assumptions = (*history.assumptions, " ".join([added, *notes]))
    return replace(history, machines=(*history.machines, *more), assumptions=assumptions)


def _like(history: History, given: str, found: re.Match[str]) -> tuple[Machine, list[str]]:
    """Return the node to add, without a name, and the assumptions about it.

    Values that are not given come from the cluster's first node with this model. If no node has the
    model, the number of GPUs comes from the largest node, and their memory from the lists of
    instance types.
    """
    name = found["model"].strip()
    models = sorted({machine.model for machine in history.machines})
    named = [name] if name in models else [each for each in models if model_named([each], name)]
    if len(named) > 1:
        raise BadSettings(
            f"--nodes {given}: {len(named)} GPU models of the cluster have this name: "
            f"{', '.join(named)}. Example: --nodes '+4x{named[0]}'"
        )
    gpus, memory_bytes = _gpus(given, found["gpus"]), _memory(given, name, found["memory"])
    if named:
        like = next(machine for machine in history.machines if machine.model == named[0])
        if gpus in (None, like.gpus):
            return replace(like, memory_bytes=memory_bytes or like.memory_bytes), []
        return Machine("", like.model, gpus, memory_bytes or like.memory_bytes), [_ENOUGH]
    notes = ["No node of the cluster has this model.", _ENOUGH]
    if memory_bytes is None:
        name, gb = _listed(given, name, models)
        memory_bytes = gb * 10**9
        notes.append(f"Each GPU has {gib(memory_bytes)}, its nominal {gb} GB.")
    if gpus is None:
        gpus = max(machine.gpus for machine in history.machines)
        notes.append("A node has as many GPUs as the largest node of the cluster.")
    notes.append("Pods run as long and use as much on these GPUs as on the cluster's own GPUs.")
    barred = sum(bool(life.models) and name not in life.models for life in history.lives)
    if barred:
        notes.append(f"{plural(barred, 'pod')} may use only other models.")
    return Machine("", name, gpus, memory_bytes), notes


def _gpus(given: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not 1 <= int(text) <= _MOST_GPUS:
        raise BadSettings(
            f"--nodes {given}: {text} GPUs of a node are not from 1 to {_MOST_GPUS}. Example: "
            "--nodes +4x8xL40S"
        )
    return int(text)


def _memory(given: str, name: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        memory_bytes = parse_bytes(text)
    except BadQuantity:
        memory_bytes = 0
    if not GIB <= memory_bytes <= _MOST_BYTES:
        raise BadSettings(
            f"--nodes {given}: {text!r} is not a memory of a GPU from 1Gi to 4Ti. Example: "
            f"--nodes +4x{name}:80Gi"
        )
    return memory_bytes


def _listed(given: str, name: str, models: Sequence[str]) -> tuple[str, int]:
    """Return the name of a GPU model and its memory in GB, from the lists of instance types."""
    model = name.upper().removeprefix("NVIDIA").strip(" -")
    sizes = nominal_gb(model)
    if len(sizes) == 1:
        return model, sizes[0]
    why = f"it exists with {' and '.join(map(str, sizes))} GB" if sizes else "its memory is unknown"
    raise BadSettings(
        f"--nodes {given}: no node of the cluster has the GPU model {name}, and {why}. Add the "
        f"memory of a GPU. Example: --nodes +4x{name}:{sizes[-1] if sizes else 80}G. Models of the "
        f"cluster: {', '.join(models)}"
    )
