"""Collects the DRA claims and devices that the watches deliver, for readers on other threads."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from headroom.contract.gpunode import GPUNodeStatus
from headroom.contract.watched import WatchEvent
from headroom.core.cluster.claimed_devices import ClaimedDevices, ClaimedUse, DraDevice


class Claims:
    """Follows ResourceSlices and ResourceClaims. Its methods may be called from any thread."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._devices = ClaimedDevices()
        self._now_s = now_s
        #: Number of changes so far, for ETags.
        self.version = 0

    def apply(self, events: Sequence[WatchEvent]) -> set[str]:
        """Apply the events of watches. Return the nodes whose devices or claims changed."""
        with self._lock:
            changed = self._devices.apply(events, self._now_s())
            self.version += bool(changed)
            return changed

    def nodes(self) -> list[str]:
        """Return the names of the nodes with devices of NVIDIA's DRA driver, sorted."""
        with self._lock:
            return self._devices.nodes()

    def devices(self, node: str) -> dict[str, DraDevice]:
        """Return the node's devices by UUID. See ``ClaimedDevices.devices``."""
        with self._lock:
            return self._devices.devices(node)

    def uses(self, reports: Iterable[tuple[str, GPUNodeStatus]]) -> list[ClaimedUse]:
        """Return the use and the claims of each claimed or used device of these nodes."""
        found: list[ClaimedUse] = []
        for node, status in reports:
            with self._lock:  # released after each node, so that watches do not wait long
                found += self._devices.uses(node, status, self._now_s())
        return found

    def sizes(self) -> dict[str, int]:
        """Return the number of entries of each collection."""
        with self._lock:
            return self._devices.sizes()
