"""Finds the nodes that changed since the last round, without running Python code for each node.

A large fleet has thousands of nodes, of which few change between two rounds.
"""

from collections.abc import Iterator
from math import inf

import numpy as np

from headroom.core.placement.snapshot import Snapshot


class UpdatedNodes:
    """Remembers the snapshot of the last round. Only one thread at a time may use it."""

    def __init__(self) -> None:
        self._generation = 0
        #: Whether the report was fresh, by row.
        self._fresh = np.empty(0, bool)

    def since_last(self, snap: Snapshot, now_s: float = -inf) -> Iterator[int]:
        """Yield the row of each node that has changed since the last round whose rows were all
        consumed.

        A node has changed if it was added or updated, or if its report became fresh or stale.
        ``now_s`` is the time of the monotonic clock, and without it all reports count as fresh. If
        threads take turns, ``snap`` may be older than the snapshot of the last round.
        """
        fresh = snap.fresh_until_s >= now_s
        changed = snap.updated_in > self._generation
        # A node that moved to another row counts as updated.
        same = min(len(fresh), len(self._fresh))
        changed[:same] |= fresh[:same] != self._fresh[:same]
        yield from np.flatnonzero(changed).tolist()
        self._generation, self._fresh = snap.generation, fresh
