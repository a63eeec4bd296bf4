"""Nodes from which a pod was sent away: for a while they take no other, and send no other away.

Where the plugin does what nobody expects, the next pod would most likely fare no better. What every
replica goes by is the mark in the ledger, so that all know of it whichever of them made it; one
that was started anew has forgotten, and counts from one.
"""

from collections.abc import Set

from contract.gpunode import EVICTED, GPUNode

#: Seconds after the first eviction from a node; doubled with every further one, up to the longest.
FIRST_S, LONGEST_S = 10.0, 320.0
#: Seconds without an eviction after which a node counts as good as new.
FORGOTTEN_S = 900.0


class BackOffs:
    def __init__(self) -> None:
        #: Node -> uids that were seen to be marked.
        self._marked: dict[str, Set[str]] = {}
        #: Node -> how long it was backed off the last time, and since when.
        self._last: dict[str, tuple[float, float]] = {}
        #: Node -> when it takes pods again, on the receiver's monotonic clock.
        self._until_s: dict[str, float] = {}

    def note(self, node: str, marked: Set[str], at_s: float) -> None:
        """The ledger of the node says that these are to leave."""
        if marked - self._marked.get(node, set()):
            long_s, since_s = self._last.get(node, (0.0, at_s))
            again = long_s > 0 and at_s - since_s < FORGOTTEN_S
            long_s = min(2 * long_s, LONGEST_S) if again else FIRST_S
            self._last[node] = long_s, at_s
            self._until_s[node] = at_s + long_s
        if marked:
            self._marked[node] = marked
        else:
            self._marked.pop(node, None)

    def is_news(self, node: str, marked: Set[str]) -> bool:
        """Whether an object of the node, read ahead of the watch, marks pods not noted yet."""
        return not marked <= self._marked.get(node, set())

    def marks(self, node: str) -> bool:
        """Whether the ledger of the node says of any pod that it is to leave."""
        return node in self._marked

    def holds(self, node: str) -> bool:
        return node in self._until_s

    def holds_as_told(self, gpunode: GPUNode) -> bool:
        """Whether a pod was sent away from there lately, as far as this very object tells too:
        another replica may have marked it a moment ago."""
        return self.holds(gpunode.name) or self.is_news(gpunode.name, marked(gpunode))

    def over(self, now_s: float) -> list[str]:
        """The nodes that may take pods again."""
        return [node for node, until_s in self._until_s.items() if until_s <= now_s]

    def end(self, node: str) -> None:
        self._until_s.pop(node, None)

    def forget(self, node: str) -> None:
        """The node is gone."""
        self._marked.pop(node, None)
        self._last.pop(node, None)
        self._until_s.pop(node, None)


def marked(gpunode: GPUNode) -> set[str]:
    """Uids of those that are to leave the node."""
    return {uid for uid, held in gpunode.spec.reservations.items() if EVICTED in held.flags}
