"""Enumerates all ways in which a kubelet and NVIDIA's plugin can allocate replicas.

It is written from the source of the kubelet and of the plugin (``distributed`` as in v0.19.3, and
``packed`` transcribed from v0.20.0, which cannot be built here). It shares no code with Headroom.
Instead of a formula, it visits all states that a small node can reach.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations


@dataclass(frozen=True)
class Gpu:
    """A GPU. Ending pods hold ``leaving`` of its allocated replicas, one replica each."""

    total: int
    allocated: int = 0
    unhealthy: int = 0
    leaving: int = 0
    numa: int = 0


@dataclass(frozen=True)
class Node:
    gpus: tuple[Gpu, ...]
    policy: str = "distributed"
    aligned: bool = False


@dataclass(frozen=True)
class State:
    #: Number of ended pods on each GPU.
    gone: tuple[int, ...]
    #: The replicas of each pod, GPU by GPU in the given order, or None before admission.
    where: tuple[tuple[int, ...] | None, ...] = field(default=())

    def available(self, node: Node) -> list[int]:
        given = [index for place in self.where if place for index in place]
        return [
            gpu.total - gpu.allocated - gpu.unhealthy + self.gone[index] - given.count(index)
            for index, gpu in enumerate(node.gpus)
        ]


def answers(totals: Sequence[int], available: Sequence[int], policy: str) -> set[int]:
    """Return the GPUs whose replica the plugin could allocate next.

    ``sort.Slice`` is not stable: each candidate that can be first after sorting is included.
    """
    candidates = [index for index, count in enumerate(available) if count > 0]
    if policy == "unknown":
        return set(candidates)
    allocated = {index: totals[index] - available[index] for index in candidates}
    best = (max if policy == "packed" else min)(allocated.values(), default=0)
    return {index for index in candidates if allocated[index] == best}


def offers(node: Node, available: Sequence[int]) -> Iterator[list[int]]:
    """Yield the replicas that the kubelet can offer: all replicas, or with alignment the replicas
    of some NUMA nodes.
    """
    numas = sorted({gpu.numa for gpu in node.gpus})
    for size in range(1, len(numas) + 1) if node.aligned else [len(numas)]:
        for some in combinations(numas, size):
            yield [
                count if gpu.numa in some else 0
                for gpu, count in zip(node.gpus, available, strict=True)
            ]


def admissions(node: Node, state: State, pod: int, count: int) -> set[State]:
    """Return all states after the pod got ``count`` replicas, one after the other."""
    places: set[tuple[int, ...]] = {()}
    for _ in range(count):
        longer: set[tuple[int, ...]] = set()
        for place in places:
            simulation = State(state.gone, (*state.where, place))
            for offer in offers(node, simulation.available(node)):
                totals = [gpu.total for gpu in node.gpus]
                longer |= {(*place, index) for index in answers(totals, offer, node.policy)}
        places = longer
    return {
        State(state.gone, (*state.where[:pod], place, *state.where[pod + 1 :])) for place in places
    }


def states(node: Node, counts: Sequence[int]) -> set[State]:
    """Return all states of the node that unconfirmed pods with these requests can lead to."""
    start = State((0,) * len(node.gpus), (None,) * len(counts))
    found, fresh = {start}, [start]
    while fresh:
        state = fresh.pop()
        after: set[State] = set()
        for index, gpu in enumerate(node.gpus):
            if state.gone[index] < gpu.leaving:
                gone = list(state.gone)
                gone[index] += 1
                after.add(State(tuple(gone), state.where))
        for pod, count in enumerate(counts):
            if state.where[pod] is None:
                after |= admissions(node, state, pod, count)
        fresh += after - found
        found |= after
    return found


def could_get(node: Node, waiting: Sequence[int], count: int = 1) -> set[int]:
    """Return the GPUs that a new pod could get, in any state after the unconfirmed pods."""
    return {index for state in states(node, [*waiting, count]) for index in state.where[-1] or ()}


def most_on(node: Node, waiting: Sequence[int]) -> list[int]:
    """Return for each GPU the maximum number of its replicas that unconfirmed pods can get."""
    most = [0] * len(node.gpus)
    for state in states(node, waiting):
        given = [index for place in state.where if place for index in place]
        most = [max(so_far, given.count(index)) for index, so_far in enumerate(most)]
    return most
