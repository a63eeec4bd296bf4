"""Draws the random choices of the kubelet and the plugin."""

import random

from tests.standin.allocations import Ids, Preferred
from tests.standin.plugin import Counts, Plugin, device_of


class Drawn:
    """Draws the choices from a random number generator."""

    def __init__(self, lots: random.Random) -> None:
        self._lots = lots

    def preferred(self, plugin: Plugin, call: Preferred) -> Ids:
        return plugin.prefer(call.available, call.must_include, call.size, self._lots)

    def some(self, replicas: Ids, count: int) -> Ids:
        return frozenset(self._lots.sample(sorted(replicas), count))


def first(replicas: Ids, chosen: Counts) -> Ids:
    """Return the first replicas of each device, as many as ``chosen`` requests."""
    return frozenset(
        each
        for device, count in chosen
        for each in sorted(replica for replica in replicas if device_of(replica) == device)[:count]
    )
