"""What speaks for a node, and by how much: named terms, each 0..1, of one request on every node.

A term is of the devices that the pod could end on, and of the worst of them. None depends on who
else is offered, so that two nodes compare the same in every call.

=================  =============================================================================
packing            by policy: how full the pod leaves its device and its node, or how empty
prediction         how sure it is that all goes as promised where the plugin chooses: neighbours
                   of like size, one candidate, room on every device that there is
sm_activity        how idle the SMs are; 0.5 where nobody knows
slack              how little the neighbours use beyond what they asked for
smallest_device    how small the device is that will do; 0.5 where prices say it
report             how whole and how young what is known of the node is
=================  =============================================================================
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contract.annotations import ScoringPolicy
from contract.gpunode import MAX_DEVICE_BYTES
from extender.placement.candidate_devices import Mask, slots_of
from extender.placement.fit import AskVerdict, Verdicts
from extender.placement.snapshot import Rows, Snapshot
from extender.placement.stranded_memory import more_wasted
from extender.placement.visible_devices_env import Nodes

Scores = NDArray[np.float64]
MILLION = 1_000_000
#: All but ``report``, which ages while nothing changes.
KEPT = ("packing", "prediction", "sm_activity", "slack", "smallest_device")
#: What prices make up of ``packing`` where a request goes by them (``placement.mix``): it is added
#: when nodes are ranked, so that another price weighs no node again.
CHEAP = 0.9


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """Of each of the rows asked about, (n,) each."""

    #: Each of ``KEPT`` -> 0..1, without prices.
    values: Mapping[str, Scores]
    #: Left on the fullest device that it could end on; what settles equal scores.
    device_left_bytes: Rows
    node_left_bytes: Rows


def terms(verdicts: Verdicts) -> Terms:
    """Only those of nodes on which the request fits mean anything."""
    snap, asks = verdicts.snap, verdicts.asks
    spreads = verdicts.request.policy is ScoringPolicy.SPREAD
    priced = verdicts.request.by_prices
    # For a few nodes the number of numpy's calls is what counts.
    device_left, taken = _left(asks[0]), _taken(asks[0])
    worst, prediction = _worst(asks[0], snap), _prediction(asks[0], snap, spreads)
    for verdict in asks[1:]:
        device_left = np.minimum(device_left, _left(verdict))
        taken = taken + _taken(verdict)
        worst = np.maximum(worst, _worst(verdict, snap))
        prediction = np.minimum(prediction, _prediction(verdict, snap, spreads))
    node_left = np.maximum(snap.node_headroom_bytes - taken, 0)
    busiest, exceeded, largest = worst
    device_empty = _within_0_and_1(device_left / snap.largest_device_bytes)
    node_empty = node_left / snap.largest_node_bytes
    if spreads:
        packing = (device_empty + node_empty) / 2
    else:
        packing = 1 - (4 * device_empty + node_empty) / 5
        if priced:
            packing = (1 - CHEAP) * packing
    smallest = 1 - _within_0_and_1(largest / snap.largest_device_bytes)
    if priced:
        # Prices know what this guesses at; beside them it costs two percent of a cluster's memory.
        smallest = np.full(len(smallest), 0.5)
    values = {
        "packing": packing,
        "prediction": prediction,
        "sm_activity": np.where(busiest < 0, 0.5, 1 - busiest / MILLION),
        "slack": 1 - _within_0_and_1(exceeded / MILLION),
        "smallest_device": smallest,
    }
    rows = verdicts.rows
    return Terms(
        {name: value[rows] for name, value in values.items()}, device_left[rows], node_left[rows]
    )


def report(snap: Snapshot, rows: Rows, now_s: float) -> Scores | float:
    """How whole and how young what is known of each row is; one figure where all are alike."""
    whole: Scores | float = 1.0
    if snap.degraded.any():
        whole = np.where(snap.degraded, 0.5, 1.0).take(rows)
    if snap.ageing_from_s.min(initial=np.inf) >= now_s:
        return whole
    until_s, from_s = snap.fresh_until_s.take(rows), snap.ageing_from_s.take(rows)
    ageing = from_s < now_s
    young = np.ones(len(rows))
    # Never those of labels, which are fresh without end, nor those that nobody has heard of.
    late = np.flatnonzero(ageing & np.isfinite(until_s))
    lasts_s = np.maximum(until_s[late] - from_s[late], 1e-9)
    young[late] = _within_0_and_1((until_s[late] - now_s) / lasts_s)
    aged: Scores = whole * young
    return aged


def _within_0_and_1(values: Scores) -> Scores:
    """As ``np.clip``, which takes several times as long for few values."""
    return np.minimum(np.maximum(values, 0.0), 1.0)


def _left(verdict: AskVerdict) -> Rows:
    after = np.where(
        verdict.all_candidates, verdict.all_free_bytes - verdict.all_need_bytes, MAX_DEVICE_BYTES
    )
    left: Rows = after.min(axis=1, initial=MAX_DEVICE_BYTES)
    return left


def _taken(verdict: AskVerdict) -> Rows:
    # Beyond any memory it fits nowhere, and counts for nothing.
    need = np.minimum(verdict.all_need_bytes, MAX_DEVICE_BYTES)
    taken: Rows = np.where(verdict.all_candidates, need, 0).max(axis=1, initial=0)
    return taken * verdict.ask.count


def _worst(verdict: AskVerdict, snap: Snapshot) -> NDArray[np.int64]:
    """(3, nodes) of the candidates the busiest, the one whose pods exceed their requests most, the
    largest: parts per million twice, and bytes; -1 where there is none."""
    columns = snap.columns
    figures = np.array([columns.sm_ppm, columns.exceeded_ppm, columns.memory_bytes])
    worst: NDArray[np.int64] = np.where(verdict.all_candidates, figures, -1).max(axis=2, initial=-1)
    return worst


def _prediction(verdict: AskVerdict, snap: Snapshot, spreads: bool) -> Scores:
    """Above all that the pod makes its device look like those with as many pods, and a little that
    the device is certain; who wants spreading asks for neither. And that no surprise could hurt,
    because each device of its resource has room."""
    even: Scores | float = 0.5
    certain: Scores | float = 1.0
    if not spreads:
        uneven = more_wasted(verdict, snap) / (2 * snap.largest_device_bytes)
        even = _within_0_and_1(0.5 - uneven)
        could = np.maximum(verdict.all_candidates.sum(axis=1), 1)
        certain = np.minimum(verdict.ask.count / could, 1)
    ours: Nodes = verdict.all_ours
    value: Scores = 8 * even + np.where(ours, 2, certain + _roomy(verdict, snap))
    return value / 10


def _roomy(verdict: AskVerdict, snap: Snapshot) -> Nodes:
    short: Mask = verdict.all_free_bytes < verdict.all_need_bytes
    # An unshared device that is held is given to nobody; and to keep off nodes with such ones
    # would leave none empty for pods that want all of a node's devices.
    short = short & (snap.columns.replicas > 1)
    return ~np.asarray((slots_of(verdict.ask.resource, snap) & short).any(axis=1))
