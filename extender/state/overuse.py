"""Tracks pods that keep using more memory of a device than they requested.

Measured use is charged at once. Overuse is reported only after it has lasted for a while, because
many pods use more during their start than later.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from extender.placement.device_accounting import DeviceTerms
from extender.state.tracker import Tracker, WeighedNode


@dataclass(frozen=True, slots=True)
class Overuse:
    """One pod on one device of one node."""

    node: str
    device: str
    uid: str
    namespace: str
    name: str
    requested_bytes: int
    measured_bytes: int

    @property
    def beyond_bytes(self) -> int:
        return self.measured_bytes - self.requested_bytes

    @property
    def key(self) -> tuple[str, str]:
        return self.uid, self.device


class Overuses(Tracker):
    """Written by the thread that owns the cluster state; ``lasting`` may be read by any thread."""

    def __init__(self, lasting_s: float) -> None:
        #: Shorter overuse is not reported.
        self._lasting_s = lasting_s
        self._of_node: dict[str, tuple[Overuse, ...]] = {}
        #: (pod, device) -> when ``update`` first found it, on the monotonic clock.
        self._since_s: dict[tuple[str, str], float] = {}
        #: Overuse of at least ``lasting_s``; replaced, never changed in place.
        self.lasting: tuple[Overuse, ...] = ()

    def node_weighed(self, node: WeighedNode) -> None:
        if found := tuple(_overuses(node.name, node.written_devices)):
            self._of_node[node.name] = found
        else:
            self._of_node.pop(node.name, None)

    def update(self, now_s: float) -> None:
        """Update since when each overuse lasts, and ``lasting``."""
        found = [each for of_node in self._of_node.values() for each in of_node]
        self._since_s = {each.key: self._since_s.get(each.key, now_s) for each in found}
        self.lasting = tuple(
            each for each in found if now_s - self._since_s[each.key] >= self._lasting_s
        )


def first_of_each_memory(terms: Sequence[DeviceTerms]) -> Iterator[DeviceTerms]:
    """Yield one device for each memory: devices that share a memory have the same figures."""
    seen: set[tuple[str | None, int | None]] = set()
    for term in terms:
        if term.sharers > 1:
            memory = term.device.parent, term.device.gpu_instance
            if memory in seen:
                continue
            seen.add(memory)
        yield term


def _overuses(node: str, terms: Sequence[DeviceTerms]) -> Iterator[Overuse]:
    for term in first_of_each_memory(terms):
        for holder in term.holders:
            measured_bytes = holder.measured_bytes or 0
            if term.believed and measured_bytes > holder.requested_bytes:
                yield Overuse(
                    node,
                    term.device.uuid,
                    holder.uid,
                    holder.namespace,
                    holder.name,
                    holder.requested_bytes,
                    measured_bytes,
                )
