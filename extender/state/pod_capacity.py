"""Counts how many equal pods fit on a node now, by making reservations for them on a copy.

Dividing the free memory would ignore which devices the pods get. So each count is checked with the
reservations of all previous pods in place. The pods count as unconfirmed, as in a burst.
Reservations of equal pods are equal, so many can be made at once, and binary search between 1 and
the free replicas finds the answer. If a device is chosen for each pod, its reservation depends on
the previous one, and reservations are made one by one.
"""

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from contract.gpunode import MAX_REPLICAS, GPUNode, Reservation
from extender.placement.fit import Verdicts, fit
from extender.placement.placement_record import place
from extender.placement.request import VramRequest
from extender.placement.snapshot_builder import build
from extender.state.cluster_state import ClusterState

_ONE = np.zeros(1, np.int64)


def counted(
    cluster: ClusterState, verdicts: Verdicts, positions: Iterable[int]
) -> Iterator[tuple[int, int]]:
    """Yield (position, number of pods that fit) for these positions in the verdicts.

    At least one pod must fit at each position.
    """
    for i in positions:
        node = verdicts.snap.nodes[int(verdicts.rows[i])].name
        gpunode = cluster.gpunode(node)
        if gpunode is not None:
            limit = _replicas(verdicts, i) // verdicts.asks[0].ask.count
            guess = _guess(verdicts, i)
            yield i, count_on(cluster, gpunode, verdicts.request, limit, verdicts.now_s, guess)


def count_on(
    cluster: ClusterState,
    gpunode: GPUNode,
    request: VramRequest,
    limit: int,
    now_s: float,
    guess: int = 0,
) -> int:
    """Return how many pods fit on this version of the GPUNode.

    ``limit``: the maximum that the free replicas allow; ``guess``: the number to try first.
    """
    current = gpunode
    reservation = _reserve(cluster, current, request, now_s)
    if reservation is None or limit < 1:
        return 0
    if any(charge.choice or charge.by_environment for charge in reservation.charges):
        count = 0
        while reservation is not None and count < limit:
            current, count = _with(current, [reservation], count), count + 1
            reservation = _reserve(cluster, current, request, now_s)
        return count
    fits, open_to = 1, limit
    guesses = iter((min(guess, limit), guess + 1))
    while fits < open_to:
        probe = next(guesses, 0)
        if not fits < probe <= open_to:
            probe = (fits + open_to + 1) // 2
        before = _with(gpunode, [reservation] * (probe - 1), 0)
        if _reserve(cluster, before, request, now_s) is not None:
            fits = probe
        else:
            open_to = probe - 1
    return fits


def _reserve(
    cluster: ClusterState, gpunode: GPUNode, request: VramRequest, now_s: float
) -> Reservation | None:
    """Return the reservation that one more pod would get; None if it does not fit."""
    snap = build([cluster.weighed(gpunode)])
    verdicts = fit(request, snap, _ONE, now_s)
    if not verdicts.fits[0]:
        return None
    charges = place(request, snap, verdicts, 0).charges
    return Reservation(request.namespace, request.name, list(charges))


def _with(gpunode: GPUNode, reservations: list[Reservation], first: int) -> GPUNode:
    """Return the GPUNode with more reservations, for pods numbered from ``first``."""
    more = {f"count-{first + n}": reservation for n, reservation in enumerate(reservations)}
    spec = msgspec.structs.replace(gpunode.spec, reservations={**gpunode.spec.reservations, **more})
    return msgspec.structs.replace(gpunode, spec=spec)


def _replicas(verdicts: Verdicts, i: int) -> int:
    """Return the number of replicas that pods could get on the node, over all devices."""
    columns, row = verdicts.snap.columns, int(verdicts.rows[i])
    slots = columns.resource[row] == verdicts.snap.resources[verdicts.asks[0].ask.resource]
    free = columns.replicas_free[row][slots].sum(dtype=np.int64)
    return int(free - columns.replicas_unconfirmed[row][slots].max(initial=0))


def _guess(verdicts: Verdicts, i: int) -> int:
    """Return how many pods would fit if their devices could be chosen: a close first guess."""
    verdict, row = verdicts.asks[0], int(verdicts.rows[i])
    need_bytes, free_bytes = verdict.all_need_bytes[row], verdict.all_free_bytes[row]
    sizes = free_bytes[free_bytes >= need_bytes] // np.maximum(
        need_bytes[free_bytes >= need_bytes], 1
    )
    return int(np.minimum(sizes, MAX_REPLICAS).sum()) // verdict.ask.count
