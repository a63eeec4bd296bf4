"""A model of the kubelet's topology manager with scope ``container``. It selects the NUMA nodes of
a container's devices, and admits or rejects the container.

The model follows pkg/kubelet/cm/topologymanager and devicemanager/topology_hints.go of v1.36. Only
the device manager provides hints, because the CPU manager and the memory manager have the policy
``none``. A mask is a set of NUMA nodes with one bit per node.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from tests.standin.plugin import Replica

TopologyPolicy = Literal["none", "best-effort", "restricted", "single-numa-node"]


@dataclass(frozen=True, slots=True)
class Hint:
    #: NUMA nodes, or None if any NUMA node is acceptable.
    mask: int | None
    preferred: bool


def mask_of(nodes: Iterable[int]) -> int:
    return sum(1 << node for node in nodes)


def hints(
    listed: Mapping[str, Replica],
    available: Collection[str],
    reusable: Collection[str],
    request: int,
    numa_nodes: Sequence[int],
) -> list[Hint] | None:
    """Return the hints of the device manager, or None if no device has a NUMA node."""
    if all(replica.numa is None for replica in listed.values()):
        return None
    if len({*available, *reusable}) < request:
        return []
    return allocation_hints(listed, available, reusable, request, numa_nodes)


def allocation_hints(
    listed: Mapping[str, Replica],
    available: Collection[str],
    reusable: Collection[str],
    request: int,
    numa_nodes: Sequence[int],
) -> list[Hint]:
    """Return the sets of NUMA nodes that have enough devices. A set is preferred if it is as small
    as the smallest possible set when all devices are free.
    """
    bearing = {replica.numa for replica in listed.values() if replica.numa is not None}
    nodes = sorted(bearing & set(numa_nodes)) or sorted(numa_nodes)
    smallest = len(nodes)
    masks = []
    for size in range(1, len(nodes) + 1):
        for mask in map(mask_of, combinations(nodes, size)):
            if sum(within(replica, mask) for replica in listed.values()) >= request:
                smallest = min(smallest, size)
            kept = [listed[each] for each in reusable if listed[each].numa is not None]
            if not all(within(each, mask) for each in kept):
                continue
            if len(kept) + sum(within(listed[each], mask) for each in available) >= request:
                masks.append(mask)
    return [Hint(mask, mask.bit_count() == smallest) for mask in masks]


def within(replica: Replica, mask: int) -> bool:
    return replica.numa is not None and bool(mask >> replica.numa & 1)


def merge(
    policy: TopologyPolicy, proposed: list[Hint] | None, numa_nodes: Sequence[int]
) -> tuple[Hint, bool]:
    """Return the merged hint, and whether the container is admitted."""
    everywhere = mask_of(numa_nodes)
    if proposed is None:
        proposed = [Hint(None, True)]
    elif not proposed:
        proposed = [Hint(None, False)]
    if policy == "single-numa-node":
        proposed = [
            hint
            for hint in proposed
            if hint.preferred and (hint.mask is None or hint.mask.bit_count() == 1)
        ]
    merged = [
        (not each.preferred, mask.bit_count(), mask)
        for each in proposed
        if (mask := everywhere if each.mask is None else each.mask & everywhere)
    ]
    spread, _, mask = min(merged, default=(True, 0, everywhere))
    best = Hint(mask, not spread)
    if policy == "single-numa-node" and best.mask == everywhere:
        best = Hint(None, best.preferred)
    return best, policy == "best-effort" or best.preferred
