"""Which devices are committed beyond what they have, and with whom.

Nothing we promise makes one; a pod that others bound does, a stranger that grows, or a device that
turns out smaller. The truth is charged, and told here until it is no more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from extender.placement.device_accounting import DeviceTerms
from extender.placement.occupancy import Holder


@dataclass(frozen=True, slots=True)
class Overcommit:
    """One device of one node."""

    node: str
    device: str
    #: Committed beyond the device's allocatable memory, in the worst case.
    beyond_bytes: int
    allocatable_bytes: int
    holders: tuple[Holder, ...]
    #: Used by pods to which nothing is promised there, and by nobody that is known to be a pod.
    unobserved_pods_bytes: int = 0
    unattributed_bytes: int = 0


class Overcommits:
    """Written by the thread that owns the cluster state; may be read by any."""

    def __init__(self) -> None:
        self._of_node: dict[str, tuple[Overcommit, ...]] = {}

    def weighed(self, node: str, terms: Sequence[DeviceTerms]) -> None:
        """What the node's devices hold now; promises that may never be made do not belong here."""
        if found := tuple(_overcommitted(node, terms)):
            self._of_node[node] = found
        else:
            self._of_node.pop(node, None)

    def __contains__(self, node: str) -> bool:
        return node in self._of_node

    def now(self) -> list[Overcommit]:
        return [each for of_node in list(self._of_node.values()) for each in of_node]


def any_overcommitted(terms: Sequence[DeviceTerms]) -> bool:
    return any(True for _ in _overcommitted("", terms))


def _overcommitted(node: str, terms: Sequence[DeviceTerms]) -> Iterator[Overcommit]:
    for term in terms:
        # Of figures that contradict one another, or are missing, nothing follows, least of all an
        # alarm.
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
