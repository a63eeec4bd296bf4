"""Finds the devices on which a container may end, by trying every choice of kubelet and plugin.

It uses brute force over the model that the tests compare with the real components. It shares no
code with the extender, because it judges the extender's prediction for the same node.
"""

from collections.abc import Sequence
from functools import partial
from itertools import combinations, permutations

from tests.standin.allocations import Lots, Pod
from tests.standin.devices import DeviceManager
from tests.standin.lots import every_way
from tests.standin.plugin import Counts, by_device

#: Number of replicas by device for each container of a pod, in order.
Placement = tuple[Counts, ...]


def possible_placements(
    node: DeviceManager,
    pod: Pod,
    active: Sequence[str],
    unobserved: Sequence[Pod] = (),
    ending: Sequence[str] = (),
) -> set[Placement]:
    """Return the possible devices of the pod on the node, which does not change. A rejected pod has
    none.

    ``active`` are the uids that the kubelet counts. Any of the ``unobserved`` pods may be admitted
    before the pod, in any order, and any of the ``ending`` pods may already be gone.
    """
    found: set[Placement] = set()
    for before in _orders(unobserved):
        for gone in _subsets(ending):
            counted = [uid for uid in active if uid not in gone]
            run = partial(_end, node, pod, counted, before)
            found |= {end for end in every_way(run) if end is not None}
    return found


def possible_devices(
    node: DeviceManager,
    pod: Pod,
    active: Sequence[str],
    unobserved: Sequence[Pod] = (),
    ending: Sequence[str] = (),
) -> set[str]:
    """Return the devices on which any container of the pod may end."""
    placements = possible_placements(node, pod, active, unobserved, ending)
    return {device for each in placements for counts in each for device, _ in counts}


def _end(
    node: DeviceManager, pod: Pod, active: Sequence[str], before: Sequence[Pod], lots: Lots
) -> Placement | None:
    """Return the devices of the pod after the others with these random choices, or None if
    rejected.
    """
    twin, counted = node.copy(), list(active)
    for each in before:
        if twin.admit(each, [*counted, each.uid], lots).admitted:
            counted.append(each.uid)
    if not twin.admit(pod, [*counted, pod.uid], lots).admitted:
        return None
    entries = [twin.given(pod.uid, each.name) for each in pod.containers]
    return tuple(by_device(entry.replicas) if entry else () for entry in entries)


def _orders(pods: Sequence[Pod]) -> list[tuple[Pod, ...]]:
    return [order for size in range(len(pods) + 1) for order in permutations(pods, size)]


def _subsets(uids: Sequence[str]) -> list[tuple[str, ...]]:
    return [each for size in range(len(uids) + 1) for each in combinations(uids, size)]
