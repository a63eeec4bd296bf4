"""On which nodes something changed for the better, and when: by the generation of the first
snapshot that shows it. Only the last time of each node is kept."""

from collections.abc import Iterator

from extender.placement.device_accounting import DeviceTerms
from extender.placement.snapshot import MOST_BYTES, NodeTerms
from extender.placement.snapshot_builder import reach

#: Less than any device has.
_NO_ROOM = (-1, -MOST_BYTES, -MOST_BYTES, -MOST_BYTES)


class HeadroomGains:
    def __init__(self) -> None:
        #: The latest comes last.
        self._in: dict[str, int] = {}

    def note(self, node: str, generation: int) -> None:
        self._in.pop(node, None)
        self._in[node] = generation

    def lose(self, node: str) -> None:
        self._in.pop(node, None)

    def of(self, node: str) -> int:
        return self._in.get(node, 0)

    @property
    def latest(self) -> int:
        return next(reversed(self._in.values()), 0)

    def since(self, generation: int) -> Iterator[str]:
        """The nodes on which it was later than that, the latest first."""
        for node in reversed(self._in):
            if self._in[node] <= generation:
                return
            yield node


def grew(before: NodeTerms | None, after: NodeTerms) -> bool:
    """Whether a pod could fit now that did not fit before, as far as room decides."""
    if after.reason is not None:
        return False
    if before is None or before.reason is not None:
        return True
    had = {terms.device.uuid: _room(terms) for terms in before.devices}
    return any(
        more > less
        for terms in after.devices
        for more, less in zip(_room(terms), had.get(terms.device.uuid, _NO_ROOM), strict=True)
    )


def _room(terms: DeviceTerms) -> tuple[int, int, int, int]:
    """Whether it takes pods, bytes left, replicas left, and how far it is from being given to the
    next pod: what cannot be given needs no room."""
    replicas = terms.device.replicas.free - terms.unconfirmed_replicas
    return int(terms.health_issue is None), terms.free_bytes, replicas, reach(terms)
