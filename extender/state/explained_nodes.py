"""The nodes that an explanation of a pod covers, and the checks that are missing on them."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from contract.kube import Pod
from contract.reasons import Reason
from extender.placement.fit import Verdicts
from extender.placement.snapshot import CODE_OF, Rows
from extender.state.selectors import Eligible, Obstacle, not_modeled

#: The check that every node in a filter call has passed.
AMOUNTS = "CPU, memory and other resources"


@dataclass(frozen=True, slots=True)
class Feasible:
    """Eligible nodes without those that kube-scheduler left out of the pod's last filter call."""

    #: (n,) rows of the snapshot.
    rows: Rows
    eligible: Eligible
    #: Rows in the last filter call; None when it is not known.
    offered: frozenset[int] | None
    #: Number of eligible nodes that kube-scheduler left out for reasons unknown to Headroom.
    left_out: int
    #: Checks that kube-scheduler makes for this pod and Headroom does not.
    not_modeled: tuple[str, ...]

    @property
    def obstacles(self) -> list[tuple[Obstacle, int]]:
        return self.eligible.counts()

    def not_checked(self, row: int | None = None) -> tuple[str, ...]:
        """Return the checks that are missing on this node; without ``row``, on all nodes here."""
        known = self.offered is not None if row is None else row in (self.offered or ())
        return tuple(check for check in self.not_modeled if check != AMOUNTS or not known)


def feasible(
    pod: Pod, found: Eligible, verdicts: Verdicts, offered: Collection[str] | None
) -> Feasible:
    """Return the eligible nodes that kube-scheduler did not leave out.

    ``found``: the nodes eligible for the pod. ``verdicts``: the fit on all nodes. ``offered``: the
    names of the nodes in the last filter call for this pod; None if unknown.

    A node in a filter call has enough CPU and memory for the pod. A node without a free replica is
    in no filter call; it is kept, because Headroom can explain it. Checks of volumes, topology
    spread and affinity between pods can differ for the pod that replaces this one. They always
    count as unchecked.
    """
    snap = verdicts.snap
    unmodeled = (AMOUNTS, *not_modeled(pod))
    if offered is None:
        return Feasible(found.rows, found, None, 0, unmodeled)
    known = frozenset(snap.row_of[name] for name in offered if name in snap.row_of)
    kept = verdicts.codes[found.rows] == CODE_OF[Reason.NO_REPLICA]
    kept |= np.isin(found.rows, np.array(sorted(known), np.int64))
    rows = found.rows[kept]
    return Feasible(rows, found, known, len(found.rows) - len(rows), unmodeled)
