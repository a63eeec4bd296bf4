"""Tracks overcommitted devices and the pods on them.

Headroom's own reservations never overcommit a device. An unreserved pod can, as can an unattributed
process that grows, or a device that turns out to be smaller. The actual use is charged, and the
device is reported here until it is no longer overcommitted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from extender.placement.device_accounting import DeviceTerms
from extender.placement.occupancy import Holder
from extender.state.tracker import Tracker, WeighedNode


@dataclass(frozen=True, slots=True)
class Overcommit:
    """One device of one node."""

    node: str
    device: str
    #: How far the worst-case use exceeds the device's allocatable memory.
    beyond_bytes: int
    allocatable_bytes: int
    holders: tuple[Holder, ...]
    #: Memory used by pods without a reservation there, and by processes of no known pod.
    unobserved_pods_bytes: int = 0
    unattributed_bytes: int = 0


class Overcommits(Tracker):
    """Written by the thread that owns the cluster state; may be read by any thread."""

    def __init__(self) -> None:
        self._of_node: dict[str, tuple[Overcommit, ...]] = {}

    def node_weighed(self, node: WeighedNode) -> None:
        if found := tuple(_overcommitted(node.name, node.written_devices)):
            self._of_node[node.name] = found
        else:
            self._of_node.pop(node.name, None)

    def __contains__(self, node: str) -> bool:
        return node in self._of_node

    def now(self) -> list[Overcommit]:
        return [each for of_node in list(self._of_node.values()) for each in of_node]


def any_overcommitted(terms: Sequence[DeviceTerms]) -> bool:
    return any(True for _ in _overcommitted("", terms))


def _overcommitted(node: str, terms: Sequence[DeviceTerms]) -> Iterator[Overcommit]:
    for term in terms:
        # Contradictory or missing figures prove nothing and must not raise an alarm.
        if term.headroom_bytes < 0 and term.believed:
            yield Overcommit(
                node,
                term.device.uuid,
                -term.headroom_bytes,
                term.allocatable_bytes,
                term.holders,
                term.unobserved_pods_bytes,
                term.unattributed_bytes,
            )
