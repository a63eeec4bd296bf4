"""Computes the terms of the score, each 0..1, for one request on every node.

A term concerns the worst candidate device of the node. No term depends on another node. Bytes are
relative to the node's own devices, because any agent could report a device of any size. So the
comparison of two nodes has the same result in every call. ``placement.score`` replaces ``packing``
and ``smallest_device`` if prices decide (policy fragmentation).

* ``packing``: how full the pod leaves its device and its node, or how empty with policy spread.
* ``prediction``: how certain the prediction is if the plugin chooses, which depends on neighbours
  of similar size, a single candidate, and enough free memory on every device.
* ``sm_activity``: how idle the SMs are, or 0.5 if this is unknown.
* ``slack``: how little the neighbours use above their requests.
* ``smallest_device``: how small the candidate device is, 0.5 for a device with ``MIDDLE_BYTES``.
* ``report``: how complete and how recent the report of the node is.

Free memory is *stranded* if the plugin's choice makes it unusable. The policy ``distributed`` fills
devices level by level, where the level of a device is its number of allocated replicas. The plugin
may choose any device at the lowest level, so a pod must fit on the fullest of them. The additional
free memory of the other devices at this level is stranded. If all devices at each level are equally
full, no memory is stranded. A large pod among small pods makes its node unusable for all large
pods. So the best node for a pod is one on which its device becomes about as full as the other
devices at its new level, without making this level fuller than it was.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headroom.contract.annotations import ScoringPolicy
from headroom.contract.quantity import MAX_DEVICE_BYTES
from headroom.core.placement.chosen_device import Nodes
from headroom.core.placement.fit import AskVerdict, Verdicts
from headroom.core.placement.snapshot import MOST_BYTES, Mask, Rows, Snapshot

Scores = NDArray[np.float64]
MILLION = 1_000_000
#: Memory of a device at which the term ``smallest_device`` is one half.
MIDDLE_BYTES = 24 << 30
#: The cached terms. Only ``report`` is not cached, because it decreases with the age of the report.
KEPT = ("packing", "prediction", "sm_activity", "slack", "smallest_device")


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """Terms and tie-breakers of each node of a snapshot."""

    #: (nodes, terms) 0..1 in the order of ``KEPT``, without prices.
    values: Scores
    #: (nodes,) free bytes on the fullest candidate and on the node after placement, which break
    #: ties.
    device_left_bytes: Rows
    node_left_bytes: Rows


def terms(verdicts: Verdicts) -> Terms:
    """Compute the terms. They are meaningful only for nodes on which the request fits."""
    snap, asks = verdicts.snap, verdicts.asks
    spreads = verdicts.request.policy is ScoringPolicy.SPREAD
    # With few nodes the number of numpy calls dominates the cost.
    device_left, taken = _device_left_bytes(asks[0]), _taken_bytes(asks[0])
    worst, prediction = _worst(asks[0], snap), _prediction(asks[0], snap, spreads)
    for verdict in asks[1:]:
        device_left = np.minimum(device_left, _device_left_bytes(verdict))
        taken = taken + _taken_bytes(verdict)
        worst = np.maximum(worst, _worst(verdict, snap))
        prediction = np.minimum(prediction, _prediction(verdict, snap, spreads))
    node_left = np.maximum(snap.node_headroom_bytes - taken, 0)
    idle, slack = 1 - _within_0_and_1(worst[:2] / MILLION)
    small = MIDDLE_BYTES / (MIDDLE_BYTES + np.maximum(worst[2], 0))
    device_empty = _within_0_and_1(device_left / _largest_device_bytes(snap))
    node_empty = _within_0_and_1(node_left / np.maximum(snap.node_memory_bytes, 1))
    if spreads:
        packing = (device_empty + node_empty) / 2
    else:
        packing = 1 - (4 * device_empty + node_empty) / 5
    sm_activity = np.where(worst[0] < 0, 0.5, idle)
    values = np.array([packing, prediction, sm_activity, slack, small])
    return Terms(values.T, device_left, node_left)


def report(snap: Snapshot, rows: Rows, now_s: float) -> Scores | float:
    """Return how complete and recent each row's report is, 0..1.

    Return a single number for all rows if all reports are complete and recent.
    """
    complete: Scores | float = 1.0
    if snap.degraded.any():
        complete = np.where(snap.degraded, 0.5, 1.0).take(rows)
    if snap.ageing_from_s.min(initial=np.inf) >= now_s:
        return complete
    until_s, from_s = snap.fresh_until_s.take(rows), snap.ageing_from_s.take(rows)
    ageing = from_s < now_s
    recent = np.ones(len(rows))
    # Nodes that are known only from labels never become stale, and nodes without a report have no
    # age.
    old = np.flatnonzero(ageing & np.isfinite(until_s))
    lasts_s = np.maximum(until_s[old] - from_s[old], 1e-9)
    recent[old] = _within_0_and_1((until_s[old] - now_s) / lasts_s)
    aged: Scores = complete * recent
    return aged


def _within_0_and_1(values: Scores) -> Scores:
    """Clip the values. ``np.clip`` takes several times as long for few values."""
    return np.minimum(np.maximum(values, 0.0), 1.0)


def _largest_device_bytes(snap: Snapshot) -> Rows:
    """Return the memory of each node's largest device as an array (nodes,). Each value is at least
    1."""
    return np.maximum(snap.node_largest_device_bytes, 1)


def _device_left_bytes(verdict: AskVerdict) -> Rows:
    """Return the free bytes on the fullest candidate after placement, (nodes,)."""
    left_bytes = np.where(
        verdict.all_candidates, verdict.all_free_bytes - verdict.all_need_bytes, MAX_DEVICE_BYTES
    )
    least_bytes: Rows = left_bytes.min(axis=1, initial=MAX_DEVICE_BYTES)
    return least_bytes


def _taken_bytes(verdict: AskVerdict) -> Rows:
    """Return the maximum number of bytes that the ask takes on each node, (nodes,)."""
    # A larger need fits on no device, so its score does not matter.
    need = np.minimum(verdict.all_need_bytes, MAX_DEVICE_BYTES)
    taken: Rows = np.where(verdict.all_candidates, need, 0).max(axis=1, initial=0)
    return taken * verdict.ask.count


def _worst(verdict: AskVerdict, snap: Snapshot) -> NDArray[np.int64]:
    """Return three maxima over the candidates of each node as an array (3, nodes).

    The maxima are the SM activity and the use above requests, in parts per million, and the memory
    in bytes. They are -1 if there is no candidate.
    """
    columns = snap.columns
    values = np.array([columns.sm_ppm, columns.exceeded_ppm, columns.memory_bytes])
    worst: NDArray[np.int64] = np.where(verdict.all_candidates, values, -1).max(axis=2, initial=-1)
    return worst


def _prediction(verdict: AskVerdict, snap: Snapshot, spreads: bool) -> Scores:
    """Return how certain the prediction is for each node.

    80 % of the value depends on how few bytes the pod strands (``newly_stranded``), 10 % on how few
    candidates there are, and 10 % on whether every shared device has enough free memory, because
    then even a miss would do no harm. With the policy spread, the first two parts are constant. If
    Headroom chooses the device, the last two parts have their maximum.
    """
    even: Scores | float = 0.5
    certain: Scores | float = 1.0
    if not spreads:
        uneven = newly_stranded(verdict, snap) / (2 * _largest_device_bytes(snap))
        even = _within_0_and_1(0.5 - uneven)
        candidates = np.maximum(verdict.all_candidates.sum(axis=1), 1)
        certain = np.minimum(verdict.ask.count / candidates, 1)
    chosen_by_headroom: Nodes = verdict.all_ours
    value: Scores = 8 * even + np.where(
        chosen_by_headroom, 2, certain + _fits_on_every_device(verdict, snap)
    )
    return value / 10


def _fits_on_every_device(verdict: AskVerdict, snap: Snapshot) -> Nodes:
    """Return whether each shared device of the resource has enough free memory, (nodes,)."""
    short: Mask = verdict.all_free_bytes < verdict.all_need_bytes
    # The plugin gives an allocated unshared device to no other pod. Avoiding nodes with such
    # devices would leave no empty node for pods that request all devices of a node.
    short = short & (snap.columns.replicas > 1)
    return ~np.asarray((verdict.all_slots & short).any(axis=1))


def newly_stranded(verdict: AskVerdict, snap: Snapshot) -> Rows:
    """Estimate how many more bytes are stranded with the pod, as an array (nodes,). A value is
    negative if fewer bytes are stranded.

    The pod is assumed to get the fullest of its candidates, on which it must fit in any case. A
    quarter of the bytes by which the device becomes fuller than all others at its new level is
    added, because they are stranded on each device that reaches the level later. The estimate is 0
    if the plugin does not choose by levels, because Headroom chooses or because the pod requests
    several replicas. The estimate is only a preference, so errors in it cost density but never
    safety.
    """
    candidates, columns = verdict.all_candidates, snap.columns
    if verdict.ask.count > 1 or not candidates.size:
        return np.zeros(len(candidates), np.int64)
    # With few nodes the number of numpy calls dominates the cost.
    headroom_bytes, level = columns.headroom_bytes, columns.replicas - columns.replicas_free
    device_at = (
        np.arange(len(candidates)),
        np.where(candidates, headroom_bytes, MOST_BYTES).argmin(axis=1),
    )
    level_before = level[device_at]
    alike = columns.resource == columns.resource[device_at][:, None]
    alike[device_at] = False
    # Other devices at the level of the device before and after placement, (2, nodes, slots).
    others = alike & (level == np.array([level_before, level_before + 1])[:, :, None])
    before_bytes = headroom_bytes[device_at]
    own_bytes = np.array([before_bytes, before_bytes - verdict.all_need_bytes[device_at]])
    least_bytes = np.where(others, headroom_bytes, MOST_BYTES).min(axis=2)
    # Clamped, because products of absurd values would overflow.
    difference_bytes = np.maximum(
        np.minimum(own_bytes - least_bytes, MAX_DEVICE_BYTES), -MAX_DEVICE_BYTES
    )
    # If the device is not the fullest at the level, it strands its difference to the fullest
    # device. If it is the fullest, each of the others strands its difference to this device.
    stranded_before, stranded_after = np.where(
        difference_bytes >= 0, difference_bytes, -difference_bytes * others.sum(axis=2)
    )
    # A level without a device counts as an empty device. If there is no other device, no device can
    # reach the level later.
    next_bytes = np.minimum(least_bytes[1], columns.memory_bytes[device_at])
    lowered_bytes = np.minimum(np.maximum(next_bytes - own_bytes[1], 0), MAX_DEVICE_BYTES)
    lowered_bytes *= alike.any(axis=1)
    applies = candidates[device_at] & (columns.replicas[device_at] > 1) & ~verdict.all_ours
    change_bytes: Rows = (stranded_after - stranded_before + lowered_bytes // 4) * applies
    return change_bytes
