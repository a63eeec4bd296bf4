"""A model of NVIDIA's device plugin. It returns which replicas the plugin may prefer, or draws a
preference.

The model follows internal/rm/allocate.go and nvml_manager.go of v0.19.3, and the tests compare it
with this version. It also follows allocate.go of v0.20.0, which was not available for a comparison.
``release`` 20 has the policy ``packed``, and breaks ties by the fewest picks of the same request. A
choice is a number of replicas for each device, because all replicas of a device are equivalent. The
replicas themselves are chosen at random.
"""

import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, Protocol

Policy = Literal["distributed", "packed"]
#: Number of replicas of each device. The tuple is hashable and ordered by device.
Counts = tuple[tuple[str, int], ...]


#: Maximum number of elements that Go's ``sort.Slice`` sorts by insertion. Only an insertion sort
#: keeps the order of equal elements.
STABLE = 12


class PluginRefused(Exception):
    """The plugin answered a call with an error. The message is the text of the error."""


@dataclass(frozen=True, slots=True)
class Replica:
    id: str
    device: str
    #: The NUMA node of the device, or None if the plugin does not report it.
    numa: int | None = None
    healthy: bool = True


class Device(Protocol):
    """The plugin's view of a GPU. ``tests.driver.Gpu`` implements it."""

    @property
    def uuid(self) -> str: ...
    @property
    def numa(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Settings:
    replicas: int = 1
    policy: Policy = "distributed"
    #: The minor of the plugin's version, 19 or 20.
    release: int = 19
    fail_requests_greater_than_one: bool = False

    def __post_init__(self) -> None:
        if self.policy == "packed" and self.release < 20:
            raise ValueError(
                "policy packed came with plugin v0.20.0. Example: "
                "Settings(replicas=4, policy='packed', release=20)"
            )


class Plugin:
    """One process of the plugin. A restart loses its state."""

    def __init__(self, devices: Sequence[Device], settings: Settings) -> None:
        self.settings = settings
        self._replicas = {
            replica.id: replica for device in devices for replica in replicas_of(device, settings)
        }

    def listed(self) -> list[Replica]:
        """Return the replicas that ListAndWatch sends to the kubelet."""
        return list(self._replicas.values())

    def fail(self, replica: str) -> None:
        """Report this replica as unhealthy until the plugin restarts.

        After an XID, the real plugin (up to v0.20.0) does this for one random replica of the
        device.
        """
        known = self._replicas[replica]
        self._replicas[replica] = Replica(known.id, known.device, known.numa, healthy=False)

    def options(self, available: Collection[str], must: Collection[str], size: int) -> set[Counts]:
        """Return every possible choice in addition to ``must``. Raise ``PluginRefused`` if the
        plugin would return an error.
        """
        if not any(is_shared(each) for each in available):
            return self._aligned(available, must, size)
        lines: set[tuple[_Line, Counts]] = {(self._line(available, must, size), ())}
        for _ in range(size - len(must)):
            lines = {
                (line.without(device), counts(Counter(dict(picked)) + Counter([device])))
                for line, picked in lines
                for device in line.first()
            }
        return {picked for _, picked in lines}

    def prefer(
        self,
        available: Collection[str],
        must: Collection[str],
        size: int,
        lots: random.Random,
    ) -> frozenset[str]:
        """Return one answer to GetPreferredAllocation. Raise ``PluginRefused`` if the plugin would
        return an error.
        """
        candidates = sorted(self._candidates(available, must))
        if not any(is_shared(each) for each in available):
            if len(available) < size:
                return frozenset()  # not an error
            return frozenset(must) | frozenset(lots.sample(candidates, size - len(must)))
        line = self._line(available, must, size)
        chosen = set(must)
        for _ in range(size - len(must)):
            first = line.first()
            pick = lots.choice([each for each in candidates if device_of(each) in first])
            candidates.remove(pick)
            chosen.add(pick)
            line = line.without(device_of(pick))
        return frozenset(chosen)

    def allows(
        self, answer: Collection[str], available: Collection[str], must: Collection[str], size: int
    ) -> bool:
        """Return whether the plugin may give this answer to GetPreferredAllocation."""
        picks = set(answer) - set(must)
        return (
            set(must) <= set(answer)
            and picks <= self._candidates(available, must)
            and by_device(picks) in self.options(available, must, size)
        )

    def allocate(self, replicas: Collection[str]) -> dict[str, str]:
        """Return the environment that the plugin sets in the container. Raise ``PluginRefused`` if
        the plugin would return an error.
        """
        for replica in replicas:
            if replica not in self._replicas:
                raise PluginRefused(self._invalid(f"unknown device: {replica}"))
        if (
            self.settings.fail_requests_greater_than_one
            and self.settings.replicas > 1
            and len(replicas) > 1
        ):
            reason = f"maximum request size for shared resources is 1; found {len(replicas)}"
            raise PluginRefused(self._invalid(reason))
        return {"NVIDIA_VISIBLE_DEVICES": ",".join(sorted({device_of(each) for each in replicas}))}

    def _invalid(self, reason: str) -> str:
        return f'invalid allocation request for "nvidia.com/gpu": invalid request: {reason}'

    def _aligned(self, available: Collection[str], must: Collection[str], size: int) -> set[Counts]:
        """Return all choices of unshared devices. The plugin prefers the best links, but all links
        are equal in this model.
        """
        if len(available) < size:
            return {()}  # an empty answer, not an error
        others = sorted(self._candidates(available, must))
        return {by_device(each) for each in combinations(others, size - len(must))}

    def _candidates(self, available: Collection[str], must: Collection[str]) -> set[str]:
        return set(available) & self._replicas.keys() - set(must)

    def _line(self, available: Collection[str], must: Collection[str], size: int) -> "_Line":
        free = Counter(device_of(each) for each in self._candidates(available, must))
        if free.total() < size - len(must):
            raise PluginRefused(
                "error getting list of preferred allocation devices: "
                "not enough available devices to satisfy allocation"
            )
        # The total includes unhealthy replicas.
        total = Counter(device_of(each) for each in self._replicas)
        groups: dict[int, dict[str, int]] = {}
        for device, count in free.items():
            groups.setdefault(total[device] - count, {})[device] = count
        sign = -1 if self.settings.policy == "packed" else 1
        blocks = (
            _Block((sign * allocated, 0), tuple(sorted(group.items())))
            for allocated, group in groups.items()
        )
        return _Line(self.settings, tuple(sorted(blocks, key=lambda block: block.rank)))


@dataclass(frozen=True, slots=True)
class _Block:
    """Adjacent devices in the plugin's list, in any order. ``free`` counts the free replicas of
    each device.
    """

    #: Number of allocated replicas (negative for ``packed``) and, in v0.20.0, of picks for this
    #: request.
    rank: tuple[int, int]
    free: Counts


@dataclass(frozen=True, slots=True)
class _Line:
    """The plugin's list of candidates. For each pick, the plugin sorts the list again and uses the
    first candidate.

    The initial order is random, because it comes from a Go map. Go's ``sort.Slice`` keeps the order
    of equal elements in lists of at most twelve elements and in longer lists that are already
    sorted, so a device that becomes equal to the next devices stays before them. In a longer list
    that is not sorted, any of the equal elements can be first.
    """

    settings: Settings
    blocks: tuple[_Block, ...]
    #: Whether the list is already in order.
    in_order: bool = False

    def first(self) -> list[str]:
        """Return the devices that can be picked next."""
        return [device for device, _ in self._sorted()[0].free]

    def without(self, device: str) -> "_Line":
        """Return the list after this device was picked. The device must be in ``first``."""
        block, *rest = self._sorted()
        left = dict(block.free)
        remaining = left.pop(device) - 1
        # If both remain, the rest of the device is mixed with its neighbors.
        in_order = not (left and remaining)
        if left:
            rest.insert(0, _Block(block.rank, counts(left)))
        if remaining:
            sign = -1 if self.settings.policy == "packed" else 1
            rank = block.rank[0] + sign, block.rank[1] + (self.settings.release >= 20)
            place = sum(each.rank < rank for each in rest)
            in_order = in_order and place == 0
            rest.insert(place, _Block(rank, ((device, remaining),)))
        return _Line(self.settings, tuple(rest), in_order)

    def _sorted(self) -> list[_Block]:
        free = sum(count for block in self.blocks for _, count in block.free)
        if self.in_order or free <= STABLE:
            return list(self.blocks)
        ranks = sorted({block.rank for block in self.blocks})
        return [
            _Block(rank, counts(dict(d for b in self.blocks if b.rank == rank for d in b.free)))
            for rank in ranks
        ]


def replicas_of(device: Device, settings: Settings) -> Iterator[Replica]:
    if settings.replicas == 1:
        yield Replica(device.uuid, device.uuid, device.numa)
    for number in range(settings.replicas if settings.replicas > 1 else 0):
        yield Replica(f"{device.uuid}::{number}", device.uuid, device.numa)


def is_shared(replica: str) -> bool:
    return "::" in replica


def device_of(replica: str) -> str:
    return replica.partition("::")[0]


def by_device(replicas: Iterable[str]) -> Counts:
    return counts(Counter(device_of(each) for each in replicas))


def counts(counter: Mapping[str, int]) -> Counts:
    return tuple(sorted(counter.items()))
