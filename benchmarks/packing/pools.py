"""Divides a cluster into two pools: unshared nodes for pods with several devices, and shared nodes.

With exact figures of the demand, an operator would size the pools like this. A factor shows the
cost of a wrong estimate."""

from collections import Counter
from collections.abc import Sequence

from benchmarks.packing.workload import Ask, Demand, Mode, Node, device_amount


def unshared(
    nodes: Sequence[Node], asks: Sequence[Ask], mode: Mode, times: float = 1.0
) -> list[int]:
    """Return the nodes that stay unshared, for pods that request several whole devices.

    In each model, the unshared nodes have the same part of the memory as these pods have of the
    requested memory, multiplied by ``times``. The demand of a pod is divided among the models that
    it may use, in proportion to their memory. Nodes with the most devices come first, because
    pods with fewer devices fit there too.
    """
    by_model: dict[str, list[int]] = {}
    for place, node in sorted(enumerate(nodes), key=lambda each: (-each[1].gpus, each[0])):
        if node.gpus > 1:
            by_model.setdefault(node.model, []).append(place)
    requested, several = _requested(nodes, asks, mode)
    found: list[int] = []
    for model, places in by_model.items():
        if several[model]:
            all_memory = sum(_memory(node, mode) for node in nodes if node.model == model)
            wanted = times * all_memory * several[model] / requested[model]
            sizes = [_memory(nodes[place], mode) for place in places]
            found += places[: _nearest(sizes, wanted)]
    if not found and several.total():
        found = [by_model[max(several, key=lambda model: several[model])][0]]
    return sorted(found)


def _memory(node: Node, mode: Mode) -> int:
    return node.gpus * device_amount(node, mode)


def _requested(
    nodes: Sequence[Node], asks: Sequence[Ask], mode: Mode
) -> tuple[Counter[str], Counter[str]]:
    """Return the memory requested of each model, by all pods and by pods with several devices."""
    demand, requested, several = Demand(nodes, mode), Counter[str](), Counter[str]()
    for each, times in Counter(asks).items():
        usable = Counter[str]()
        for node in nodes:
            if node.gpus >= max(1, each.gpus) and (not each.models or node.model in each.models):
                usable[node.model] += _memory(node, mode)
        for model, there in usable.items() if each.gpus else ():
            part = round(times * demand.of(each) * there / usable.total())
            requested[model] += part
            several[model] += part if each.gpus > 1 else 0
    return requested, several


def _nearest(sizes: Sequence[int], wanted: float) -> int:
    """Return how many of the first sizes have a sum that is nearest to ``wanted``."""
    count, total = 0, 0.0
    for size in sizes:
        if abs(total + size - wanted) >= abs(total - wanted):
            break
        total += size
        count += 1
    return count
