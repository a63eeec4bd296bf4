"""Records the generation of the snapshot in which each node last gained headroom."""

from collections.abc import Iterator

from headroom.core.placement.device_accounting import DeviceTerms
from headroom.core.placement.snapshot import MOST_BYTES, NodeTerms
from headroom.core.placement.snapshot_builder import reach

#: Figures that are lower than those of any device.
_LOWEST = (-1, -MOST_BYTES, -MOST_BYTES, -MOST_BYTES, -MOST_BYTES)


class HeadroomGains:
    """The last gain of each node."""

    def __init__(self) -> None:
        #: Generation of the last gain of each node, latest gain last.
        self._in: dict[str, int] = {}

    def note(self, node: str, generation: int) -> None:
        self._in.pop(node, None)
        self._in[node] = generation

    def lose(self, node: str) -> None:
        self._in.pop(node, None)

    def of(self, node: str) -> int:
        """Return the generation of the node's last gain, or 0 if there was none."""
        return self._in.get(node, 0)

    @property
    def latest(self) -> int:
        """The generation of the last gain of any node, or 0 if there was none."""
        return next(reversed(self._in.values()), 0)

    def since(self, generation: int) -> Iterator[str]:
        """Yield the nodes that gained headroom after this generation, latest gain first."""
        for node in reversed(self._in):
            if self._in[node] <= generation:
                return
            yield node


def grew(before: NodeTerms | None, after: NodeTerms) -> bool:
    """Return whether a pod may fit on the node now that did not fit before."""
    if after.by_dra - (before.by_dra if before else frozenset()):
        return True
    if after.reason is not None:
        return False
    if before is None or before.reason is not None:
        return True
    if _choosers(before) != _choosers(after):
        return True
    had = {terms.device.uuid: _figures(terms) for terms in before.devices}
    # A pod must fit on each device that the plugin could choose, so it may fit now because the
    # plugin can no longer choose one of them.
    if had.keys() - {terms.device.uuid for terms in after.devices}:
        return True
    return any(
        more > less
        for terms in after.devices
        for more, less in zip(_figures(terms), had.get(terms.device.uuid, _LOWEST), strict=True)
    )


def _choosers(node: NodeTerms) -> tuple[object, ...]:
    """Return the values that decide which devices of the node a pod could get, such as steering."""
    policies = {(terms.device.resource, terms.policy) for terms in node.devices}
    return node.gated, node.obeys_environment, policies


def _figures(terms: DeviceTerms) -> tuple[int, int, int, int, int]:
    """Return five values of a device. A pod that did not fit can fit now only if one of them grows.

    The values are the device's health, the free bytes, the free replicas, the number of replicas to
    request before the device plugin can choose the device, and how few new pods must wait for a pod
    that is starting alone.
    """
    replicas = terms.device.replicas.free - terms.unconfirmed_replicas
    healthy = int(terms.health_issue is None)
    return healthy, terms.free_bytes, replicas, reach(terms), -terms.starting
