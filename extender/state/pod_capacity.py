"""How many equal pods fit on a node now, by promising them to it: what is left is weighed with all
that were promised before, and nothing is divided.

They count as on their way, as in a burst. Promises to equal pods are equal, so that those before
the last may be made at once: the answer is found by halving what the replicas leave open. Where
the device is chosen for each pod, its promise hangs on the one before, and they are made one by
one.
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
    cluster: ClusterState, verdicts: Verdicts, among: Iterable[int]
) -> Iterator[tuple[int, int]]:
    """(place, pods that fit there), of each of these places of the verdicts, on which one fits."""
    for i in among:
        node = verdicts.snap.nodes[int(verdicts.rows[i])].name
        gpunode = cluster.gpunode(node)
        if gpunode is not None:
            most = _replicas(verdicts, i) // verdicts.asks[0].ask.count
            guess = _by_size(verdicts, i)
            yield i, count_on(cluster, gpunode, verdicts.request, most, verdicts.now_s, guess)


def count_on(
    cluster: ClusterState,
    gpunode: GPUNode,
    request: VramRequest,
    most: int,
    now_s: float,
    guess: int = 0,
) -> int:
    """How many pods fit on this very object; ``most``: no more than the free replicas allow;
    ``guess``: what is tried first."""
    held = gpunode
    reservation = _reserve(cluster, held, request, now_s)
    if reservation is None or most < 1:
        return 0
    if any(charge.choice or charge.by_environment for charge in reservation.charges):
        count = 0
        while reservation is not None and count < most:
            held, count = _with(held, [reservation], count), count + 1
            reservation = _reserve(cluster, held, request, now_s)
        return count
    fits, open_to = 1, most
    guesses = iter((min(guess, most), guess + 1))
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
    """What one more pod would be promised there; None where it does not fit."""
    snap = build([cluster.weighed(gpunode)])
    verdicts = fit(request, snap, _ONE, now_s)
    if not verdicts.fits[0]:
        return None
    charges = place(request, snap, verdicts, 0).charges
    return Reservation(request.namespace, request.name, list(charges))


def _with(gpunode: GPUNode, reservations: list[Reservation], named: int) -> GPUNode:
    """The node with these promises to pods numbered from ``named``."""
    more = {f"count-{named + n}": reservation for n, reservation in enumerate(reservations)}
    spec = msgspec.structs.replace(gpunode.spec, reservations={**gpunode.spec.reservations, **more})
    return msgspec.structs.replace(gpunode, spec=spec)


def _replicas(verdicts: Verdicts, i: int) -> int:
    """Replicas that the pod could be given there, of all devices together."""
    columns, row = verdicts.snap.columns, int(verdicts.rows[i])
    slots = columns.resource[row] == verdicts.snap.resources[verdicts.asks[0].ask.resource]
    free = columns.replicas_free[row][slots].sum(dtype=np.int64)
    return int(free - columns.replicas_unconfirmed[row][slots].max(initial=0))


def _by_size(verdicts: Verdicts, i: int) -> int:
    """What the rooms would hold if the devices could be chosen: mostly near, and no answer."""
    verdict, row = verdicts.asks[0], int(verdicts.rows[i])
    need, room = verdict.all_need_bytes[row], verdict.all_free_bytes[row]
    sizes = room[room >= need] // np.maximum(need[room >= need], 1)
    return int(np.minimum(sizes, MAX_REPLICAS).sum()) // verdict.ask.count
