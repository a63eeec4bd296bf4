"""Why: the verdicts of a decision turned into something to read, from the very same arrays."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from contract.gate import GATE
from contract.reasons import Reason
from extender.placement.candidate_devices import slots_of
from extender.placement.demand_pricing import Market
from extender.placement.device_accounting import DeviceTerms
from extender.placement.fit import Verdicts
from extender.placement.policy import Weights
from extender.placement.request import VramRequest
from extender.placement.score import Ranking, rank
from extender.placement.snapshot import CODE_OF, NodeTerms, Rows
from extender.placement.visible_devices import Visible
from extender.placement.visible_devices_env import by_environment

INT64_MAX = int(np.iinfo(np.int64).max)
_BY_ITSELF = {
    "placement": "the variable of the pod follows the placement, so it is not the plugin's choice",
    "pod": "the pod says itself which devices it sees, and this may be one of them",
}
_NOBODY_SHARES = (
    "none of its {resource} devices is shared: each is one pod's, and whoever chose another than "
    "its own would meet that pod there"
)
#: Reasons that come before any device is looked at.
_CLOSING = (Reason.STALE_REPORT, Reason.CHOOSES_DEVICES, Reason.NO_GATE)
#: Of a pod without its gate where only gated ones go.
_NO_GATE = (
    f"right is {GATE} as its first init container, without a GPU: nobody else could hold it back"
    " from a device without room"
)
#: Verdicts in which memory, and nothing else, decided.
_MEMORY_CODES = [CODE_OF[r] for r in (None, Reason.MEMORY_ON_ANY, Reason.MEMORY_ON_SOME)]


@dataclass(frozen=True, slots=True)
class DeviceExplanation:
    """One device that the pod could end on, with what it needs there and what it lacks."""

    terms: DeviceTerms
    need_bytes: int
    #: What the newcomer may count on here.
    free_bytes: int
    #: Why it could be given this device.
    because: str

    @property
    def short_bytes(self) -> int:
        return max(0, self.need_bytes - self.free_bytes)


@dataclass(frozen=True, slots=True)
class NodeExplanation:
    node: str
    #: None when the pod fits.
    reason: Reason | None
    #: The most that any candidate lacks; None when not memory decides.
    short_bytes: int | None
    candidates: tuple[DeviceExplanation, ...]
    #: Where its capacity was learned, if no agent measured it; else empty.
    unmeasured: str = ""
    #: The particulars of a reason that is not one of single devices; mostly empty.
    detail: str = ""
    #: Whether the node takes nothing, whatever its devices are.
    closed: bool = False
    #: Who chooses the device: the plugin, our placement, or the pod by its own variable.
    chosen_by: Literal["plugin", "placement", "pod"] = "plugin"
    #: Whether it is for gated pods only.
    gated: bool = False
    #: 0..1, and the named terms that it is the weighted mean of; None and nothing where the pod
    #: does not fit, or asks for no GPU.
    score: float | None = None
    terms: Mapping[str, float] = field(default_factory=dict)
    #: Parts per million of SM activity that each candidate must stay below; None: any will do.
    max_sm_ppm: int | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    fits: int
    #: Reason -> number of nodes, most frequent first.
    reasons: tuple[tuple[Reason, int], ...]
    #: Nodes that fit first, the one that would win before all; then those that lack least.
    nearest: tuple[NodeExplanation, ...]
    #: The largest request per device that would fit on some node now, everything else equal;
    #: None where more than memory is in the way everywhere.
    largest_fitting_bytes: int | None
    #: The bytes that the pod needs on a device at least, and those of the largest device, if no
    #: device could ever hold the pod; else None.
    too_large: tuple[int, int] | None = None


def because(terms: DeviceTerms) -> str:
    """Why the plugin could give the device to the next pod, or why it cannot."""
    first, coming = terms.first, terms.unconfirmed_replicas
    if terms.policy == "steered" and terms.device.replicas.free > 0:
        if first is None:
            return "pods on their way are promised another device, and until then all are"
        return "we choose: the agent makes the kubelet take the device that was promised"
    if first is None:
        return "no replica of it is free"
    if terms.policy == "any":
        return "every device counts: annotation headroom.gpu/device-choice of the node is any"
    ending = ", if pods that are ending have let go of theirs" if terms.leaving else ""
    if terms.policy == "unknown":
        return f"it has a free replica, and how the plugin chooses is not known{ending}"
    if not terms.shared:
        return f"it is free{ending}" if terms.device.replicas.free else f"it is free next{ending}"
    order = "fewest" if terms.policy == "distributed" else "most"
    if first == 0:
        return f"it has the {order} replicas taken of those with a free one{ending}"
    if first <= coming:
        return f"it is next when {first} of {coming} replicas on their way are given out{ending}"
    return f"{first - coming} more replicas are given out before one of it"


def certainty(node: NodeTerms) -> str:
    """What is known of the device that the next pod for one replica gets.

    ``exact``: of every resource there is one candidate at most. ``slot-safe``: nobody asks for
    more than a replica is worth, so that nothing the plugin can do overcommits. Else the device is
    ``predicted``: a set of candidates, each with room; or ``any``: so the node wishes; or
    ``pinned``: the device that we choose, for pods that let their variable follow the placement; or
    ``steered``: the device that we choose, for all.
    """
    if any(terms.policy == "any" for terms in node.devices):
        return "any"
    if node.pins and any(terms.shared for terms in node.devices):
        return "pinned"
    if any(terms.policy == "steered" for terms in node.devices):
        return "steered"
    next_ones = Counter(
        terms.device.resource
        for terms in node.devices
        if terms.first is not None and terms.first <= terms.unconfirmed_replicas
    )
    if max(next_ones.values(), default=0) <= 1:
        return "exact"
    return "slot-safe" if all(terms.slot_safe for terms in node.devices) else "predicted"


def explain(
    verdicts: Verdicts, weights: Weights, nearest: int = 5, market: Market | None = None
) -> Explanation:
    """Explain one request against the rows of ``verdicts``; at most ``nearest`` nodes in detail."""
    request, snap = verdicts.request, verdicts.snap
    ranking = rank(verdicts, weights, market)
    won = np.arange(len(verdicts.rows)) == ranking.winner
    counts = Counter(verdicts.reason(i) for i in range(len(verdicts.rows)))
    lacking = _lacking(verdicts)
    order = np.lexsort(
        (snap.name_rank[verdicts.rows], lacking, -ranking.scores, ~won, ~verdicts.fits)
    )
    largest = largest_fitting(verdicts)
    return Explanation(
        fits=counts.pop(None, 0),
        reasons=tuple((reason, n) for reason, n in counts.most_common() if reason is not None),
        nearest=tuple(explain_node(verdicts, ranking, i) for i in order[:nearest].tolist()),
        largest_fitting_bytes=largest if request.asks else None,
        too_large=larger_than_any(verdicts),
    )


def explain_node(verdicts: Verdicts, ranking: Ranking, i: int) -> NodeExplanation:
    """The i-th node of ``verdicts``, device by device."""
    node = verdicts.snap.nodes[int(verdicts.rows[i])]
    chosen_by = _chooser(verdicts.request, node)
    devices = tuple(
        DeviceExplanation(
            node.devices[slot],
            int(verdict.need_bytes[i, slot]),
            int(verdict.free_bytes[i, slot]),
            _BY_ITSELF.get(chosen_by) or because(node.devices[slot]),
        )
        for verdict in verdicts.asks
        for slot in np.flatnonzero(verdict.candidates[i]).tolist()
    )
    reason = verdicts.reason(i)
    by_memory = verdicts.codes[i] in _MEMORY_CODES
    short = max((device.short_bytes for device in devices), default=0)
    return NodeExplanation(
        node.name,
        reason,
        short if by_memory else None,
        devices,
        node.unmeasured,
        _detail(verdicts.request, node, reason),
        closed=reason is node.reason is not None or reason in _CLOSING,
        chosen_by=chosen_by,
        gated=node.gated,
        score=float(ranking.scores[i]) if ranking.terms and reason is None else None,
        terms={name: float(term[i]) for name, term in ranking.terms.items() if reason is None},
        max_sm_ppm=verdicts.request.max_sm_ppm,
    )


def _detail(request: VramRequest, node: NodeTerms, reason: Reason | None) -> str:
    if reason is Reason.NO_GATE:
        return _NO_GATE
    if reason is Reason.NOT_PINNED and node.pins:
        return _NOBODY_SHARES.format(resource=request.asks[0].resource)
    return node.detail if node.reason is None or reason is node.reason else ""


def _chooser(request: VramRequest, node: NodeTerms) -> Literal["plugin", "placement", "pod"]:
    if not by_environment(request, node):
        return "plugin"
    return "placement" if request.visible is Visible.BY_PLACEMENT else "pod"


def _lacking(verdicts: Verdicts) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """(n,) bytes that the worst candidate lacks; the largest int64 where memory does not decide."""
    lacking = np.zeros(len(verdicts.rows), np.int64)
    for verdict in verdicts.asks:
        short = np.where(verdict.candidates, verdict.need_bytes - verdict.free_bytes, 0)
        lacking = np.maximum(lacking, short.max(axis=1, initial=0))
    by_memory = np.isin(verdicts.codes, _MEMORY_CODES)
    return np.where(by_memory, lacking, INT64_MAX)


def larger_than_any(verdicts: Verdicts) -> tuple[int, int] | None:
    """The bytes that the pod needs at least and the bytes of the largest device of that resource,
    when no device could ever hold the pod; else None."""
    for verdict in verdicts.asks:
        slots = slots_of(verdict.ask.resource, verdicts.snap)[verdicts.rows]
        has = verdicts.snap.columns.allocatable_bytes[verdicts.rows][slots]
        needs = verdict.need_bytes[slots]
        if has.any() and (needs > has).all():
            return int(needs.min()), int(has.max())
    return None


def largest_fitting(verdicts: Verdicts, among: Rows | None = None) -> int | None:
    """The most bytes per device that fit on some node where memory alone is in the way; None where
    more is, everywhere. ``among``: only on these places of the verdicts."""
    by_memory = np.isin(verdicts.codes, _MEMORY_CODES)
    if among is not None:
        by_memory &= np.isin(np.arange(len(verdicts.rows)), among)
    if not verdicts.asks or not by_memory.any():
        return None
    least = np.full(len(verdicts.rows), INT64_MAX)
    for verdict in verdicts.asks:
        room = np.where(verdict.candidates, verdict.free_bytes, INT64_MAX)
        least = np.minimum(least, room.min(axis=1, initial=INT64_MAX))
    return max(0, int(least[by_memory].max()))
