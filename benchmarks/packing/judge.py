"""Judges placements. Its only input is which pod was where; it keeps its own accounts.

A pod that comes to a node or a device with too little free capacity counts as an *overcommit*, and
is not admitted."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.packing.workload import Ask


@dataclass(slots=True)
class Device:
    size: int
    left: int
    replicas: int


@dataclass(slots=True)
class Place:
    """A node in the judge's own accounts."""

    cpu_milli: int
    memory_mib: int
    model: str
    devices: list[Device]


@dataclass(slots=True)
class Judge:
    nodes: list[Place]
    #: Amount of all devices that is not in use.
    idle: int = 0
    overcommits: int = 0
    #: Pod -> its place, and what it took of each device.
    _sits: dict[str, tuple[int, Ask, dict[int, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.idle = sum(device.left for node in self.nodes for device in node.devices)

    def came(self, pod: str, ask: Ask, node: int, devices: Sequence[int]) -> bool:
        """Record the pod. Return whether it got what it requested."""
        there = self.nodes[node]
        on = [there.devices[each] for each in devices]
        right = (
            there.cpu_milli >= ask.cpu_milli
            and there.memory_mib >= ask.memory_mib
            and len(set(devices)) == len(devices) == ask.gpus
            and (not ask.models or there.model in ask.models or not ask.gpus)
            and all(each.replicas > 0 for each in on)
            and all(
                each.left == each.size if ask.amount is None else each.left >= ask.amount
                for each in on
            )
        )
        if not right:
            self.overcommits += 1
            return False
        there.cpu_milli -= ask.cpu_milli
        there.memory_mib -= ask.memory_mib
        taken = {}
        for index, each in zip(devices, on, strict=True):
            taken[index] = each.left if ask.amount is None else ask.amount
            each.left -= taken[index]
            self.idle -= taken[index]
            each.replicas -= 1
        self._sits[pod] = node, ask, taken
        return True

    def went(self, pod: str) -> None:
        node, ask, taken = self._sits.pop(pod)
        there = self.nodes[node]
        there.cpu_milli += ask.cpu_milli
        there.memory_mib += ask.memory_mib
        for index, amount in taken.items():
            there.devices[index].left += amount
            self.idle += amount
            there.devices[index].replicas += 1
