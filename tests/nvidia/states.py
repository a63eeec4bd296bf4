"""Compares our prediction for nodes in random states with the plugin's answer."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from headroom.contract import gpunode
from headroom.contract.annotations import VRAM
from headroom.contract.gpunode import PodUse, Replicas, Reservation
from headroom.core.placement.snapshot import NodeTerms
from tests import driver
from tests.builders import FRESH_S, container, device, judged, pod, reservation, shared, terms
from tests.nvidia.stock import StockPlugin
from tests.standin.plugin import Plugin, Settings

#: Number of identical requests after which a device that was never chosen counts as impossible.
ENOUGH = 600
AT_ONCE = 30


@dataclass(frozen=True)
class Gpu:
    """A GPU with the indices of its free replicas. Its other replicas are allocated or
    unhealthy.
    """

    free: tuple[int, ...]
    unhealthy: int = 0
    numa: int = 0


@dataclass(frozen=True)
class State:
    replicas: int
    gpus: tuple[Gpu, ...]
    aligned: bool
    #: Number of replicas that the next container requests.
    size: int
    #: Number of unconfirmed pods that need one replica each. They may be admitted in any order.
    waiting: int = 0

    def ids(self, numas: Sequence[int]) -> list[str]:
        """Return the IDs of the free replicas on these NUMA nodes, as the kubelet offers them."""
        return [
            f"GPU-{index}::{number}" if self.replicas > 1 else f"GPU-{index}"
            for index, gpu in enumerate(self.gpus)
            if gpu.numa in numas
            for number in gpu.free
        ]

    def offers(self) -> Iterator[list[str]]:
        """Yield each set of replicas that the topology manager could allow. Without a policy, yield
        only the set of all replicas.
        """
        numas = sorted({gpu.numa for gpu in self.gpus})
        for count in range(1, len(numas) + 1) if self.aligned else [len(numas)]:
            for some in combinations(numas, count):
                if ids := self.ids(some):
                    yield ids

    def predicted(self) -> set[int]:
        """Return the devices that Headroom predicts for the pod from a report of this node."""
        devices = []
        rows = []
        for index, gpu in enumerate(self.gpus):
            allocated = self.replicas - len(gpu.free) - gpu.unhealthy
            counts = Replicas(free=len(gpu.free), allocated=allocated, unhealthy=gpu.unhealthy)
            make = shared if self.replicas > 1 else device
            devices.append(make(f"GPU-{index}", numa_node=gpu.numa, replicas=counts))
            rows += [
                PodUse(uid=f"s{index}.{number}", device=f"GPU-{index}", replica=str(number))
                for number in range(allocated)
            ]
        reservations: dict[str, Reservation] = {
            f"u{number}": reservation({}) for number in range(self.waiting)
        }
        policy = "restricted" if self.aligned else "none"
        plugin = gpunode.Plugin(allocation_policy="distributed", topology_manager_policy=policy)
        weighed = terms(*devices, pods=rows, reservations=reservations, plugin=plugin)
        asked = pod(None, container(gpus=self.size), annotations={VRAM: "1M"})
        _, verdicts = judged(asked, NodeTerms("n", None, FRESH_S, weighed))
        return {index for index, could in enumerate(verdicts.asks[0].candidates[0]) if could}


def states(replicas: int, gpus: int, seed: int, count: int) -> Iterator[State]:
    """Yield random states, from empty to nearly full."""
    draw = random.Random(seed)
    while count:
        crowd = draw.choice([0.0, 0.3, 0.6, 0.9])
        level = draw.randint(0, replicas)
        some: list[Gpu] = []
        for _ in range(gpus):
            if draw.random() < 0.5:  # Spread the allocations evenly, as the plugin would.
                taken = min(replicas, max(0, level + draw.choice([-1, 0, 0, 1])))
            else:
                taken = sum(draw.random() < crowd for _ in range(replicas))
            numbers = draw.sample(range(replicas), replicas)
            unhealthy = int(taken > 0 and draw.random() < 0.2)
            some.append(Gpu(tuple(sorted(numbers[taken:])), unhealthy, draw.randint(0, 1)))
        free = sum(len(gpu.free) for gpu in some)
        size = draw.choice([1, 1, 1, 1, 2, 3])
        if free < size:
            continue
        waiting = draw.choice([0, 0, 0, 1, 2, 5]) if size == 1 else 0
        yield State(replicas, tuple(some), draw.random() < 0.3, size, min(waiting, free - size))
        count -= 1


def devices_of(answer: Sequence[str]) -> list[int]:
    return [int(replica.removeprefix("GPU-").partition("::")[0]) for replica in answer]


def answered(plugin: StockPlugin, state: State, expected: set[int]) -> Counter[int]:
    """Count how often each device is given to the next container. Stop when all expected devices
    were given, or after ``ENOUGH`` requests.
    """
    seen = Counter[int]()
    for offer in state.offers():
        here = set(devices_of(offer))
        asked = 0
        while asked < ENOUGH and (not asked or not expected & here <= seen.keys()):
            for answer in _asked(plugin, state, offer):
                seen.update(devices_of(answer))
            asked += AT_ONCE
            if len(state.gpus) > 1 and len(list(state.offers())) > 1 and asked >= 2 * AT_ONCE:
                break  # A union of NUMA nodes yields fewer devices than each node alone.
    return seen


def _asked(plugin: StockPlugin, state: State, offer: Sequence[str]) -> list[list[str]]:
    if state.size < len(offer):
        return plugin.prefer(offer, [], state.size, AT_ONCE)
    # The kubelet takes all aligned replicas without a call, and then calls the plugin for the
    # missing replicas.
    every = state.ids([gpu.numa for gpu in state.gpus])
    return plugin.prefer(every, offer[: state.size], state.size)


def modelled(state: State, release: int) -> set[int]:
    """Return the devices that a plugin may give to the next container, according to the model in
    ``tests/standin``. ``release`` is 19 or 20.
    """
    gpus = [driver.Gpu(f"GPU-{index}") for index in range(len(state.gpus))]
    plugin = Plugin(gpus, Settings(state.replicas, release=release))
    every = state.ids([gpu.numa for gpu in state.gpus])
    found: set[int] = set()
    for offer in state.offers():
        # This is the same request as in ``_asked``.
        rest = state.size < len(offer)
        available, must = (offer, []) if rest else (every, offer[: state.size])
        found.update(devices_of(must))
        for picked in plugin.options(available, must, state.size):
            found.update(devices_of([device for device, _ in picked]))
    return found


def walked(plugin: StockPlugin, state: State, draw: random.Random) -> int:
    """Admit some waiting pods one by one, and then return the device of the new pod."""
    left = {f"GPU-{i}::{number}" for i, gpu in enumerate(state.gpus) for number in gpu.free}
    for _ in range(draw.randint(0, state.waiting)):
        left -= set(_one(plugin, state, left, draw))
    return devices_of(_one(plugin, state, left, draw))[0]


def _one(plugin: StockPlugin, state: State, left: set[str], draw: random.Random) -> Sequence[str]:
    offers = [sorted(left & set(offer)) for offer in state.offers()]
    return plugin.prefer(draw.choice([offer for offer in offers if offer]), [], 1)[0]
