"""Explains verdicts as data, computed from the arrays on which filter based its decision."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256

import numpy as np

from headroom.contract.gate import GATE
from headroom.contract.reasons import Reason
from headroom.core.placement.capacity import (
    INT64_MAX,
    MEMORY_CODES,
    decisive,
    larger_than_any,
    largest_fitting,
)
from headroom.core.placement.chosen_device import by_environment
from headroom.core.placement.demand_pricing import Market
from headroom.core.placement.device_accounting import DeviceTerms
from headroom.core.placement.fit import AskVerdict, Verdicts
from headroom.core.placement.policy import Weights
from headroom.core.placement.request import VramRequest
from headroom.core.placement.score import Ranking, rank
from headroom.core.placement.snapshot import CODE_OF, REASONS, NodeTerms

#: Why a pod that chooses its devices itself could get a device.
_BECAUSE_OF_POD = "the pod sets NVIDIA_VISIBLE_DEVICES itself and may use this device"
_NEXT_CHOICE = "the device plugin's next choice"
#: Reasons that are decided before any device is examined.
_CLOSING = (Reason.STALE_REPORT, Reason.CHOOSES_DEVICES, Reason.NO_GATE)
#: Detail for a pod without a gate on a node for gated pods.
_NO_GATE = (
    f"make {GATE} its first init container, without a GPU, because only the gate can stop the pod"
    " on a device without enough free memory"
)
#: Text of a verdict in the digest, by its code.
_WORDS = [reason.code if reason else "fits" for reason in REASONS]
#: For each reason, the less specific reasons that always hold together with it. They are not
#: listed.
_IMPLIED = {
    Reason.NO_SUCH_RESOURCE: {Reason.NO_REPLICA, Reason.MEMORY_ON_ANY, Reason.MEMORY_ON_SOME},
    Reason.MEMORY_ON_ANY: {Reason.TOO_FEW_DEVICES, Reason.MEMORY_ON_SOME},
    Reason.TOO_FEW_DEVICES: {Reason.MEMORY_ON_SOME},
}


@dataclass(frozen=True, slots=True)
class DeviceExplanation:
    """A candidate device with the bytes that the pod needs there and the free bytes."""

    terms: DeviceTerms
    need_bytes: int
    #: Free memory for this pod if the pod gets the device.
    free_bytes: int
    #: Why the pod could get this device, as a phrase.
    because: str

    @property
    def short_bytes(self) -> int:
        return max(0, self.need_bytes - self.free_bytes)


@dataclass(frozen=True, slots=True)
class NodeExplanation:
    node: str
    #: None if the pod fits.
    reason: Reason | None
    #: Number of bytes that the pod lacks, or None if the reason is not memory. If the plugin
    #: chooses, the candidate that lacks the most decides. If Headroom chooses, the best devices do.
    short_bytes: int | None
    candidates: tuple[DeviceExplanation, ...]
    #: The source of the capacity, such as labels, if no agent measured it. Otherwise empty.
    unmeasured: str
    #: Details of a reason that concerns the whole node. Usually empty.
    detail: str
    #: Whether the node rejects this pod or every pod before any device is examined.
    closed: bool
    #: Whether the pod chooses its devices by its own NVIDIA_VISIBLE_DEVICES.
    chosen_by_pod: bool
    #: Whether Headroom chooses all devices of the pod. If the pod fits, it gets all candidates.
    chosen_by_headroom: bool
    #: Whether the node is for gated pods only.
    gated: bool
    #: Whether kube-scheduler allocates the pod's GPUs there by DRA.
    by_dra: bool
    #: The weighted mean of ``terms``, 0..1. If the pod does not fit, requests no GPU or gets its
    #: GPUs by DRA, it is None and there are no terms.
    score: float | None
    terms: Mapping[str, float]
    #: Limit of SM activity for each candidate in parts per million, or None if there is no limit.
    max_sm_ppm: int | None


@dataclass(frozen=True, slots=True)
class Explanation:
    #: Number of nodes on which the pod fits.
    fits: int
    #: Number of nodes by reason, most frequent reason first.
    reasons: tuple[tuple[Reason, int], ...]
    #: The winning node, then other nodes that fit, then the nodes that lack the least memory.
    nearest: tuple[NodeExplanation, ...]
    #: The largest request per device that would fit on some node now, all else equal. None if all
    #: nodes reject the pod for reasons other than memory, or if the pod requests no GPU.
    largest_fitting_bytes: int | None
    #: If no device could ever hold the pod, the minimum number of bytes that it needs on a device
    #: and the allocatable bytes of the largest device. Otherwise None.
    too_large: tuple[int, int] | None = None


def because(terms: DeviceTerms) -> str:
    """Return a phrase that states why the plugin could give the device to the next pod, or why it
    cannot."""
    first, unconfirmed = terms.first, terms.unconfirmed_replicas
    if terms.policy == "steered" and terms.device.replicas.free > 0:
        if first is None:
            return "unconfirmed pods on the node must get their device first"
        return "Headroom chooses: the agent makes the kubelet allocate the reserved device"
    if first is None:
        return "it has no free replica"
    ending = ", if terminating pods have released theirs" if terms.leaving else ""
    if terms.policy == "unknown":
        return f"it has a free replica, and the device plugin's policy is unknown{ending}"
    if not terms.shared:
        return f"it is free{ending}" if terms.device.replicas.free else f"it is free next{ending}"
    order = "fewest" if terms.policy == "distributed" else "most"
    if first == 0:
        return f"{_NEXT_CHOICE} ({order} replicas in use){ending}"
    if first <= unconfirmed:
        picks = _replicas(first)
        return f"{_NEXT_CHOICE} after {picks} for unconfirmed pods{ending}"
    return f"the device plugin allocates {_replicas(first - unconfirmed)} of other devices first"


def _because(node: NodeTerms, terms: DeviceTerms) -> str:
    """Return the same phrase as ``because``, unless the node has no other device to choose."""
    found = because(terms)
    mates = [each for each in node.devices if each.device.resource == terms.device.resource]
    if len(mates) > 1 or not found.startswith(_NEXT_CHOICE):
        return found
    _, comma, ending = found.partition(",")
    return f"the node's only device of {terms.device.resource}{comma}{ending}"


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"


def certainty(node: NodeTerms) -> str:
    """Return how certain it is which device the next pod that requests one replica gets.

    * ``exact``: every resource has at most one candidate device.
    * ``slot-safe``: there are several candidates, but no pod needs more than one replica's share,
      so no choice of the plugin overcommits a device.
    * ``predicted``: there are several candidates, each of which must have enough free memory.
    * ``steered``: Headroom chooses the device.
    """
    if any(terms.policy == "steered" for terms in node.devices):
        return "steered"
    candidates_of = Counter(
        terms.device.resource
        for terms in node.devices
        if terms.first is not None and terms.first <= terms.unconfirmed_replicas
    )
    if max(candidates_of.values(), default=0) <= 1:
        return "exact"
    return "slot-safe" if all(terms.slot_safe for terms in node.devices) else "predicted"


def explain(
    verdicts: Verdicts, weights: Weights, nearest: int = 5, market: Market | None = None
) -> Explanation:
    """Explain the verdicts of one request as a whole, and at most ``nearest`` nodes in detail."""
    request, snap = verdicts.request, verdicts.snap
    ranking = rank(verdicts, weights, market)
    won = np.arange(len(verdicts.rows)) == ranking.winner
    counts = Counter(verdicts.reason(i) for i in range(len(verdicts.rows)))
    missing_bytes = _missing_bytes(verdicts)
    order = np.lexsort(
        (snap.name_rank[verdicts.rows], missing_bytes, -ranking.scores, ~won, ~verdicts.fits)
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
    """Explain the i-th node of ``verdicts``, device by device."""
    node = verdicts.snap.nodes[int(verdicts.rows[i])]
    chosen_by_pod = by_environment(verdicts.request, node)
    devices = tuple(
        DeviceExplanation(
            node.devices[slot],
            int(verdict.need_bytes[i, slot]),
            int(verdict.free_bytes[i, slot]),
            _BECAUSE_OF_POD if chosen_by_pod else _because(node, node.devices[slot]),
        )
        for verdict in verdicts.asks
        for slot in np.flatnonzero(verdict.candidates[i]).tolist()
    )
    reason, by_dra = verdicts.reason(i), bool(verdicts.by_dra[i])
    scored = reason is None and not by_dra
    by_memory = verdicts.codes[i] in MEMORY_CODES
    short_bytes = max((_short_bytes(verdict, i) for verdict in verdicts.asks), default=0)
    return NodeExplanation(
        node.name,
        reason,
        short_bytes if by_memory and (short_bytes or reason is not Reason.HELD) else None,
        devices,
        node.unmeasured,
        _detail(verdicts.request, node, reason),
        closed=reason is node.reason is not None or reason in _CLOSING,
        chosen_by_pod=chosen_by_pod,
        chosen_by_headroom=all(each.all_ours[verdicts.rows[i]] for each in verdicts.asks),
        gated=node.gated and not by_dra,
        by_dra=by_dra,
        score=float(ranking.scores[i]) if ranking.terms and scored else None,
        terms={name: float(term[i]) for name, term in ranking.terms.items() if scored},
        max_sm_ppm=verdicts.request.max_sm_ppm,
    )


def _short_bytes(verdict: AskVerdict, i: int) -> int:
    """Return the bytes that the pod lacks on the i-th node for one ask."""
    rows = replace(verdict, rows=verdict.rows[i : i + 1])
    return max(0, int(decisive(rows, rows.need_bytes - rows.free_bytes)[0]))


def _detail(request: VramRequest, node: NodeTerms, reason: Reason | None) -> str:
    """Return the details of a reason that concerns the whole node. They are usually empty."""
    if reason is Reason.NO_GATE:
        return _NO_GATE
    if reason is Reason.NO_SUCH_RESOURCE and node.reason is Reason.DRA_MANAGES:
        missing = next(ask.resource for ask in request.asks if ask.resource not in node.by_dra)
        return f"no DeviceClass has extendedResourceName: {missing}"
    if reason is Reason.NO_SUCH_RESOURCE:
        offered = sorted({terms.device.resource for terms in node.devices if terms.device.resource})
        return f"the node offers {', '.join(offered)}" if offered else ""
    if reason is Reason.NO_REPLICA:
        for ask in request.asks:
            of_resource = [t for t in node.devices if t.device.resource == ask.resource]
            total = sum(t.device.replicas.total for t in of_resource)
            if ask.count > total:
                return f"the pod requests {ask.count} {ask.resource}; the node has {total} in total"
            steered = any(t.policy == "steered" for t in of_resource)
            if steered and ask.takes_whole_devices:
                empty = sum(t.device.replicas.free == t.device.replicas.total for t in of_resource)
                return (
                    "the pod takes whole GPUs, on which no other pod may hold a replica; "
                    f"{empty} of {len(of_resource)} GPUs {'is' if empty == 1 else 'are'} empty"
                )
            if steered and ask.widest > len(of_resource):
                return (
                    f"a container requests {ask.widest} {ask.resource}, each on a GPU of its own; "
                    f"the node has {len(of_resource)}"
                )
    if reason in (None, Reason.MEMORY_ON_ANY, Reason.MEMORY_ON_SOME) and node.reason is None:
        for ask in request.asks:
            if ask.widest > 1 and any(
                t.shared and t.policy != "steered"
                for t in node.devices
                if t.device.resource == ask.resource
            ):
                return (
                    f"a container requests {ask.widest} {ask.resource}, which the device plugin "
                    "can allocate on one GPU; on a steered node, each is on a GPU of its own"
                )
    return node.detail if node.reason is None or reason is node.reason else ""


def _missing_bytes(verdicts: Verdicts) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the bytes that the decisive candidate of each node lacks, (n,), or 0 if the pod fits.

    The value is ``INT64_MAX`` for nodes that reject the pod for reasons other than memory. If the
    reason is that another pod is starting, no memory is missing and the value is 0.
    """
    missing_bytes = np.zeros(len(verdicts.rows), np.int64)
    for verdict in verdicts.asks:
        short_bytes = decisive(verdict, verdict.need_bytes - verdict.free_bytes)
        missing_bytes = np.maximum(missing_bytes, short_bytes)
    by_memory = np.isin(verdicts.codes, [*MEMORY_CODES, CODE_OF[Reason.OTHER_STARTING]])
    return np.where(by_memory, missing_bytes, INT64_MAX)


@dataclass(frozen=True, slots=True)
class Term:
    """One term of the score, which is the weighted mean of all terms."""

    name: str
    #: 0..1
    value: float
    #: The weight in the settings.
    weight: float
    #: The weight divided by the sum of all weights, 0..1.
    part: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One node compared with all other nodes of the verdicts."""

    node: NodeExplanation
    #: All reasons why the pod does not fit on the node, starting with filter's reason. Empty if it
    #: fits.
    failing: tuple[Reason, ...]
    #: Terms of the score. Empty if the pod does not fit.
    terms: tuple[Term, ...]
    #: Nodes on which the pod fits.
    fits: int
    #: One plus the number of fitting nodes with a higher score, or None if the pod does not fit.
    rank: int | None
    #: Number of other fitting nodes with an equal score. ``score`` describes how ties are broken.
    tied: int
    #: Name of the node that wins. Empty if the pod fits on no node.
    winner: str
    winner_score: float | None


def compare(verdicts: Verdicts, i: int, weights: Weights, market: Market | None) -> Comparison:
    """Compare the i-th node of ``verdicts`` with the others. The pod must request a GPU."""
    ranking = rank(verdicts, weights, market)
    node = explain_node(verdicts, ranking, i)
    scores, fits = ranking.scores, verdicts.fits
    fitting = bool(fits[i])
    winner = ranking.winner
    return Comparison(
        node=node,
        failing=tuple(failing(verdicts, i)),
        terms=tuple(
            Term(name, node.terms[name], weight, weights.parts[name])
            for name, weight in asdict(weights).items()
            if name in node.terms
        ),
        fits=int(fits.sum()),
        rank=1 + int((scores[fits] > scores[i]).sum()) if fitting else None,
        tied=int(np.count_nonzero(scores[fits] == scores[i])) - 1 if fitting else 0,
        winner="" if winner is None else verdicts.snap.nodes[int(verdicts.rows[winner])].name,
        winner_score=None if winner is None else float(scores[winner]),
    )


def verdict_digest(verdicts: Verdicts) -> str:
    """Return a digest of the verdicts of all nodes with 16 hexadecimal digits.

    Processes with equal state return equal digests. Names determine only the order of the nodes.
    """
    order = np.argsort(verdicts.snap.name_rank[verdicts.rows], kind="stable")
    words = (_WORDS[code] for code in verdicts.codes[order].tolist())
    return sha256("\n".join(words).encode()).hexdigest()[:16]


def failing(verdicts: Verdicts, i: int) -> Iterator[Reason]:
    """Yield all reasons why the pod does not fit on the i-th node, starting with filter's reason.

    For a node without devices, only reasons that concern the whole node are yielded.
    """
    if (first := verdicts.reason(i)) is Reason.HELD or verdicts.by_dra[i]:
        # If no memory is held, no reason rejects the pod.
        if first is not None:
            yield first
        return
    row = int(verdicts.rows[i])
    node = verdicts.snap.nodes[row]
    found: dict[Reason | None, None] = {verdicts.reason(i): None, node.reason: None}
    for reason, holds in verdicts.closed.items():
        # A node that has never reported has no stale report.
        if holds[i] and (node.devices or reason is not Reason.STALE_REPORT):
            found[reason] = None
    for verdict in verdicts.asks if node.devices else ():
        of_ask = [reason for reason, holds in verdict.all_rejected.items() if holds[row]]
        implied = {each for reason in of_ask for each in _IMPLIED.get(reason, ())}
        found |= dict.fromkeys(reason for reason in of_ask if reason not in implied)
    yield from (reason for reason in found if reason is not None)
