"""On which devices a container may end: every way that kubelet and plugin can go, tried.

Brute force over the model that the tests hold against the real ones, and nothing of the extender's:
it judges what the extender says of the same node.
"""

from collections.abc import Sequence
from itertools import combinations, permutations

from tests.standin.devices import DeviceManager, Pod, Verdict
from tests.standin.lots import every_way
from tests.standin.plugin import Counts, by_device

#: For each container of a pod, in its order, how many replicas of which devices it holds.
Placement = tuple[Counts, ...]


def possible_placements(
    node: DeviceManager,
    pod: Pod,
    active: Sequence[str],
    unobserved: Sequence[Pod] = (),
    ending: Sequence[str] = (),
) -> set[Placement]:
    """Where the pod may end on the node, which stays as it is; a rejected pod ends nowhere.

    ``active`` are the uids that the kubelet counts. Any of the ``unobserved`` pods may be admitted
    before it, in any order, and any of the ``ending`` ones may be gone by then.
    """
    found: set[Placement] = set()
    for before in _orders(unobserved):
        for gone in _subsets(ending):

            def admit(lots: object, before=before, gone=gone) -> Placement | None:  # type: ignore[no-untyped-def]
                twin = node.copy()
                counted = [uid for uid in active if uid not in gone]
                for each in before:
                    counted.append(each.uid)
                    if not twin.admit(each, counted, lots).admitted:  # type: ignore[arg-type]
                        counted.remove(each.uid)
                return _ends(twin, pod, twin.admit(pod, [*counted, pod.uid], lots))  # type: ignore[arg-type]

            found |= {end for end in every_way(admit) if end is not None}
    return found


def possible_devices(
    node: DeviceManager,
    pod: Pod,
    active: Sequence[str],
    unobserved: Sequence[Pod] = (),
    ending: Sequence[str] = (),
) -> set[str]:
    """The devices that any container of the pod may end on."""
    placements = possible_placements(node, pod, active, unobserved, ending)
    return {device for each in placements for counts in each for device, _ in counts}


def _ends(node: DeviceManager, pod: Pod, verdict: Verdict) -> Placement | None:
    if not verdict.admitted:
        return None
    entries = [node.given(pod.uid, each.name) for each in pod.containers]
    return tuple(by_device(entry.replicas) if entry else () for entry in entries)


def _orders(pods: Sequence[Pod]) -> list[tuple[Pod, ...]]:
    return [order for size in range(len(pods) + 1) for order in permutations(pods, size)]


def _subsets(uids: Sequence[str]) -> list[tuple[str, ...]]:
    return [each for size in range(len(uids) + 1) for each in combinations(uids, size)]
