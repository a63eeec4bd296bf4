"""Bodies of the score of one pod on one node, and the view of a node for a pod."""

from collections.abc import Iterator, Sequence

from headroom.console.facts.device_occupants import Held
from headroom.console.responses import Body, Recomputed, stamp
from headroom.console.times import Time
from headroom.console.view import View
from headroom.console.views.decision_bodies import DecisionView, Unanswered
from headroom.console.views.devices import Aged, DeviceView, HeldView, device_view, held_view
from headroom.contract.quantity import gib
from headroom.core.cluster.holds import Hold
from headroom.core.placement.explain import NodeExplanation
from headroom.core.placement.explanation_text import explanation_lines
from headroom.runtime.server.auth import Sees, everything

#: Maximum number of blocking pods shown for a node. The largest are shown.
MOST_BLOCKERS = 10


class CandidateView(View):
    device: DeviceView
    need_bytes: int
    free_for_pod_bytes: int
    short_bytes: int


class HoldView(View):
    """A pod that has precedence. Memory of the node is held for it, but it is not bound yet."""

    namespace: str
    name: str
    uid: str
    until: Time | None
    """Latest time at which the hold ends, or null if the time is unknown."""


class NearestView(View):
    node: str
    fits: bool
    reason: str | None
    message: str | None
    detail: str | None
    """Evidence for the message, if the message does not include any."""
    unmeasured: str | None
    """"not measured" and the source of the capacity; null if an agent reports the node."""
    short_bytes: int | None
    """Memory that the pod lacks on its fullest candidate device; null if memory is not the
    reason."""
    candidates: list[CandidateView]
    score_ratio: float | None
    """Score from 0 to 1, highest wins: the weighted mean of ``score_terms`` (setting
    score_weights). If the pod does not fit, it is null and there are no terms."""
    score_terms: dict[str, float]
    holds: list[HoldView]
    """Pods with precedence on the node, at most 10. Pods that the caller is not authorized to get
    are left out."""
    blockers: list[HeldView]
    """Pods that hold the memory or the replicas that the pod needs, largest first, at most 10."""
    hidden_blockers: int
    """Number of such pods that the caller is not authorized to get, and the memory that they hold
    in total."""
    hidden_blockers_bytes: int
    lines: list[str]
    """The same facts as lines of text."""


class CheckView(View):
    reason: str
    message: str
    evictable: bool


class TermView(View):
    name: str
    value_ratio: float
    """0 to 1; higher is better."""
    weight: float
    """Weight in the settings (score_weights), and its share of the sum of all weights."""
    part_ratio: float
    contribution_ratio: float
    """value_ratio times part_ratio. The sum over all terms is the score."""


class LiveScoreView(Recomputed):
    """The answer that filter and prioritize would give now if all eligible nodes were offered."""

    node: NearestView
    eligible: bool
    """Whether the node is eligible by selector, affinity, taints and cordon."""
    not_tried: str | None
    """Why no scheduler that calls Headroom tries the pod: scheduling gates or another scheduler;
    null if one does."""
    not_checked: list[str]
    """Checks of kube-scheduler that this answer does not include."""
    failing: list[CheckView]
    """All failed checks, starting with the reason that filter returns; empty if the pod fits."""
    score_ratio: float | None
    terms: list[TermView]
    fits: int
    """Number of eligible nodes on which the pod fits."""
    rank: int | None
    """1 plus the number of nodes with a higher score; null if the node is not eligible or the
    pod does not fit."""
    tied: int
    """Number of other nodes with the same score. Among equal scores, the node with the least free
    memory wins, or with policy spread the node with the most."""
    wins: bool
    """Whether this node is the winner and a scheduler tries the pod."""
    winner: str | None
    """The best eligible node. It and its score are null if the pod fits on no node, or if ``node``
    is not eligible."""
    winner_score_ratio: float | None
    difference: str | None
    """Which terms decide between this node and ``against``, the winner or the second; null if there
    is no other node."""


class ScoreBody(Body):
    namespace: str
    name: str
    uid: str
    bound_to: str | None
    taken_back: bool
    """Whether the pod is bound. It is then scored as if its memory were free again."""
    live: LiveScoreView
    stored: DecisionView | None
    """The last attempt to place the pod, with its best nodes; null if none is on record."""
    unanswered: list[Unanswered]


def nearest_view(
    node: NodeExplanation,
    aged: Aged,
    blockers: Sequence[Held] = (),
    sees: Sees = everything,
    holds: Sequence[Hold] = (),
) -> NearestView:
    """Return the view of one node. ``holds`` are the pods that have precedence on it."""
    shown, hidden = list[Held](), list[Held]()
    for held in blockers:
        (shown if sees(held.namespace, held.name) else hidden).append(held)
    shown = shown[:MOST_BLOCKERS]
    return NearestView(
        node=node.node,
        fits=node.reason is None,
        reason=node.reason.code if node.reason else None,
        message=node.reason.sentence if node.reason else None,
        detail=node.detail or None,
        unmeasured=node.unmeasured or None,
        short_bytes=node.short_bytes,
        score_ratio=node.score,
        score_terms=dict(node.terms),
        candidates=[
            CandidateView(
                device=device_view(device.terms, aged, sees),
                need_bytes=device.need_bytes,
                free_for_pod_bytes=device.free_bytes,
                short_bytes=device.short_bytes,
            )
            for device in node.candidates
        ],
        holds=[
            _hold_view(hold)
            for hold in holds[:MOST_BLOCKERS]
            if sees(hold.pod.metadata.namespace, hold.pod.metadata.name)
        ],
        blockers=[held_view(held) for held in shown],
        hidden_blockers=len(hidden),
        hidden_blockers_bytes=sum(held.charged_bytes for held in hidden),
        lines=[
            *explanation_lines(node),
            *_hold_lines(holds, sees),
            *map(_blocker_line, shown),
            *_hidden_blocker_lines(hidden),
        ],
    )


def _hold_lines(holds: Sequence[Hold], sees: Sees) -> Iterator[str]:
    for hold in holds[:MOST_BLOCKERS]:
        metadata = hold.pod.metadata
        shown = sees(metadata.namespace, metadata.name)
        name = f"pod {metadata.namespace}/{metadata.name}" if shown else "a pod you may not read"
        yield f"  memory is held for {name} {hold.until_text}"


def _hold_view(hold: Hold) -> HoldView:
    metadata, until_s = hold.pod.metadata, hold.until_s
    return HoldView(
        namespace=metadata.namespace,
        name=metadata.name,
        uid=metadata.uid,
        until=None if until_s is None else stamp(until_s),
    )


def _blocker_line(held: Held) -> str:
    since = f" since {held.since[:19]}Z" if held.since else ""
    holds = f"holds {gib(held.charged_bytes)}{since}, {held.phase}"
    return f"  pod {held.namespace}/{held.name} {holds}"


def _hidden_blocker_lines(hidden: Sequence[Held]) -> list[str]:
    if not hidden:
        return []
    pods_hold = "1 pod that you may not read holds"
    if len(hidden) > 1:
        pods_hold = f"{len(hidden)} pods that you may not read hold"
    return [f"  {pods_hold} {gib(sum(held.charged_bytes for held in hidden))}"]
