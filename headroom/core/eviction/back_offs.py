"""Tracks the backoff of nodes after an eviction.

During its backoff, a node accepts no pods, and no pod is evicted from it. Otherwise, if the device
plugin chooses devices that Headroom did not predict, the next pod would most likely be evicted too.
Every replica follows all eviction marks in the ledger, including the marks of other replicas. After
a restart, a replica begins with the shortest backoff.
"""

from collections.abc import Set

from headroom.contract.gpunode import EVICTED, GPUNode
from headroom.core.tracker import Tracker

#: Backoff in seconds after the first eviction from a node, and its maximum. Each later eviction
#: doubles the backoff.
FIRST_S, LONGEST_S = 10.0, 320.0
#: Seconds without an eviction after which the backoff starts from ``FIRST_S`` again.
FORGOTTEN_S = 900.0


class BackOffs(Tracker):
    """The nodes that back off, and the pods marked for eviction."""

    def __init__(self) -> None:
        #: Uids of the pods that the ledger of each node marks for eviction.
        self._marked: dict[str, Set[str]] = {}
        #: Length and start of each node's last backoff in seconds.
        self._last: dict[str, tuple[float, float]] = {}
        #: When each node takes pods again, on the receiver's monotonic clock.
        self._until_s: dict[str, float] = {}

    def gpunode_seen(self, gpunode: GPUNode, at_s: float) -> None:
        self.note(gpunode.name, marked(gpunode), at_s)

    def gpunode_gone(self, name: str) -> None:
        self._marked.pop(name, None)
        self._last.pop(name, None)
        self._until_s.pop(name, None)

    def note(self, node: str, marked: Set[str], at_s: float) -> None:
        """Record the node's pods that are marked for eviction. A new mark starts a backoff."""
        if marked - self._marked.get(node, set()):
            length_s, since_s = self._last.get(node, (0.0, at_s))
            again = length_s > 0 and at_s - since_s < FORGOTTEN_S
            length_s = min(2 * length_s, LONGEST_S) if again else FIRST_S
            self._last[node] = length_s, at_s
            self._until_s[node] = at_s + length_s
        if marked:
            self._marked[node] = marked
        else:
            self._marked.pop(node, None)

    def marks(self, node: str) -> bool:
        """Return whether the node's ledger marks any pod for eviction."""
        return node in self._marked

    def holds(self, node: str) -> bool:
        """Return whether the node backs off."""
        return node in self._until_s

    def holds_in(self, gpunode: GPUNode) -> bool:
        """Return whether the node backs off, or must back off according to this version of its
        GPUNode.

        The version may be newer than the last one from the watch, because another replica may just
        have marked a pod.
        """
        known = self._marked.get(gpunode.name, set())
        return self.holds(gpunode.name) or not marked(gpunode) <= known

    def over(self, now_s: float) -> list[str]:
        """Return the nodes whose backoff has ended."""
        return [node for node, until_s in self._until_s.items() if until_s <= now_s]

    def end(self, node: str) -> None:
        self._until_s.pop(node, None)


def marked(gpunode: GPUNode) -> set[str]:
    """Return the uids of the pods that the ledger marks for eviction."""
    return {uid for uid, held in gpunode.spec.reservations.items() if EVICTED in held.flags}
