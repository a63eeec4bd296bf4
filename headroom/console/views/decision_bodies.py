"""Bodies of decisions. A decision is one attempt to place a pod, merged over all replicas."""

from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from pydantic import ConfigDict, Field

from headroom.console.responses import AskView, Body, ReasonView, reason_view, stamp
from headroom.console.times import Time
from headroom.console.view import View
from headroom.contract.reasons import Reason
from headroom.core.journal.decision_records import (
    BindTried,
    Candidates,
    Filtered,
    Preempted,
    Ranked,
    Record,
)
from headroom.core.placement.snapshot import REASONS
from headroom.core.preemption.report import sentences
from headroom.runtime.server.auth import Sees, everything

#: Maximum number of best nodes in the view of a decision.
MOST_SHOWN = 5


class PhaseView(View):
    """The last call of one verb."""

    replica: str
    """The replica that served it."""
    at: Time
    took_ms: float
    times: int
    """Number of calls of the verb for this version of the pod."""


class FilterView(PhaseView):
    snapshot_generation: int
    offered: int
    """Number of nodes that kube-scheduler offered, and how many of them can take the pod."""
    fits: int
    reasons: list[ReasonView]
    observed_only: bool = False
    """Whether all nodes passed regardless of ``reasons``, because the mode is observe."""
    offered_nodes: list[str] | None = None
    """Known nodes that kube-scheduler offered. Null unless ``offered_nodes=true`` is requested, or
    if they are no longer on record."""


class ContenderView(View):
    node: str
    score_ratio: float
    """Score from 0 to 1: the weighted mean of ``score_terms`` (setting score_weights)."""
    score_terms: dict[str, float]


class PrioritizeView(PhaseView):
    snapshot_generation: int
    offered: int
    """Number of ranked nodes."""
    winner: str | None
    """Null if all nodes are equally good."""
    by_filter: bool = False
    """Whether filter ranked the nodes and returned only the winner (setting filter_best_only).
    Then kube-scheduler did not call prioritize, and ``took_ms`` is the duration of filter."""
    candidates: list[ContenderView]
    """The best nodes, winner first, at most 5; empty if they were not recorded.
    /v1/score?decision= returns all that are on record."""


class VictimView(View):
    namespace: str
    name: str
    uid: str
    priority: int
    leaving: bool
    """Whether the pod was already terminating."""


class LoserView(View):
    """A node that was not chosen, on which other pods would have been evicted."""

    node: str
    victims: int
    lost_by: str
    """The first criterion by which the chosen node is better than this node."""


class PreemptView(PhaseView):
    offered: int
    """Number of nodes for which kube-scheduler proposed victims, and of nodes in the answer."""
    kept: int
    node: str | None
    """The best node with its victims; null if no pod is to be evicted."""
    victims: list[VictimView]
    hidden_victims: int = 0
    """Number of other victims, which the caller is not authorized to get."""
    others: int
    """Number of victims that use no managed GPU. kube-scheduler proposed them to free other
    resources."""
    pdb_violations: int
    choice: str | None
    """How the victims were chosen. "proposed": kube-scheduler proposed them. "corrected": Headroom
    replaced victims that kube-scheduler proposed. "added": kube-scheduler proposed none on this
    node. "controller": kube-scheduler did not call preempt. Null if no pod is to be evicted."""
    alternatives: list[LoserView]
    helpless: int
    """Number of nodes on which no eviction helps, as far as the search found."""
    soon: bool
    """Whether the pod fits without any eviction as soon as terminating pods have ended."""
    cut_short: bool
    """Whether a node was examined in part or not at all, to limit the time of the search."""
    lines: list[str]
    """The same facts as lines of text."""


class BindView(PhaseView):
    node: str
    outcome: str
    """bound, declined (the pod did not fit any more) or failed."""
    reason: str | None
    """Code of the reason why it was declined. For a pod that was bound in mode observe, the reason
    why Headroom would have declined it."""
    message: str | None
    """The reason in words, or the error of a failed bind."""


Rejects = Literal["filter", "bind"]


class DecisionView(View):
    """The decision about one version of a pod."""

    source: Literal["decision"] = "decision"
    """Recorded by the extenders that decided. Nothing is recomputed."""
    decision_id: str
    filter_decision_id: str | None = None
    """Id of the filter call, if the pod changed between filter and bind; otherwise null. ``filter``
    and ``prioritize`` are from this decision."""
    namespace: str
    name: str
    uid: str
    first_at: Time
    """Times of the first and of the last call."""
    at: Time
    node: str | None
    """The node that the pod was bound to, otherwise the winner of prioritize, otherwise the only
    node that filter returned; null if there is none."""
    request: list[AskView]
    filter: FilterView | None
    prioritize: PrioritizeView | None
    preempt: PreemptView | None
    bind: BindView | None
    would_reject: Rejects | None = None
    """The verb that would have rejected the pod in mode enforce. filter: the pod would have waited,
    because it fits on no offered node. bind: it was bound to a node on which it does not fit. Null
    if Headroom enforced, or had no objection."""


class WouldRejectView(View):
    verb: Rejects
    """As in ``decisions[].would_reject``."""
    reason: str
    """Code of the reason; for filter, of the reason that applies to most nodes."""
    message: str
    pods: int
    """Number of pods. A pod that was decided several times counts once for each reason."""


class Unanswered(View):
    """An extender whose journal cannot be read now. Its decisions may be missing here."""

    peer: str
    message: str


class DecisionsBody(Body):
    # The model also accepts the JSON names of fields, so that Python clients can parse an answer.
    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    decisions: list[DecisionView]
    """Newest first."""
    would_reject: list[WouldRejectView] | None = None
    """How many pods mode enforce would have rejected, in all matching decisions, most pods first;
    null unless ``would_reject=true`` is requested."""
    on_record_since: Time | None = None
    """Time of the oldest decision on record (setting journal_age_s); null if there is none."""
    continue_: str | None = Field(serialization_alias="continue", validation_alias="continue")
    """Value of the query parameter ``continue`` for the next page; null on the last page."""
    unanswered: list[Unanswered]


class DecisionBody(Body):
    decision: DecisionView
    unanswered: list[Unanswered]


def decision_view(
    record: Record, replica: str, sees: Sees = everything, offered_nodes: list[str] | None = None
) -> DecisionView:
    """Return the part of a decision that this replica served.

    ``offered_nodes`` are the nodes to list for its filter call, or None to list none.
    """
    filtered = record.part(Filtered)
    rejected = would_reject(record)
    return DecisionView.of(
        record,
        first_at=stamp(record.first_at_s),
        at=stamp(record.at_s),
        request=[AskView.of(ask) for ask in (filtered.asked if filtered else ())],
        filter=_filter_view(record, replica, filtered, offered_nodes) if filtered else None,
        prioritize=_prioritize_view(record, replica),
        preempt=_preempt_view(record, replica, sees),
        bind=_bind_view(record, replica),
        would_reject=rejected[0] if rejected else None,
    )


def would_reject(record: Record) -> tuple[Rejects, Reason] | None:
    """Return the verb that would have rejected the pod in mode enforce, and the reason.

    Return None if Headroom enforced, or had no objection.
    """
    filtered, bound = record.part(Filtered), record.part(BindTried)
    if filtered and filtered.observed and not filtered.fits and filtered.rejected:
        most = min(filtered.rejected.items(), key=lambda each: (-each[1], each[0]))[0]
        return ("filter", reason) if (reason := REASONS[most]) else None
    if bound and bound.outcome == "bound" and (reason := REASONS[bound.reason]):
        return "bind", reason
    return None


def _phase_fields(
    record: Record, part: Filtered | Ranked | Preempted | BindTried, replica: str
) -> dict[str, Any]:
    """Return the values of the fields of ``PhaseView``."""
    return {
        "replica": replica,
        "at": stamp(part.at_s),
        "took_ms": part.took_us / 1000,
        "times": record.times(type(part)),
    }


def _filter_view(
    record: Record, replica: str, part: Filtered, offered_nodes: list[str] | None
) -> FilterView:
    return FilterView(
        **_phase_fields(record, part, replica),
        snapshot_generation=part.generation,
        offered=part.offered,
        fits=part.fits,
        reasons=[
            reason_view(reason, nodes)
            for code, nodes in part.rejected.items()
            if (reason := REASONS[code])
        ],
        observed_only=part.observed,
        offered_nodes=offered_nodes,
    )


def _prioritize_view(record: Record, replica: str) -> PrioritizeView | None:
    part, best = record.part(Ranked), record.part(Candidates)
    if part is None:
        return None
    return PrioritizeView(
        **_phase_fields(record, part, replica),
        snapshot_generation=part.generation,
        offered=part.offered,
        winner=part.winner or None,
        by_filter=part.by_filter,
        candidates=[ContenderView.of(each) for each in (best.first(MOST_SHOWN) if best else ())],
    )


def _preempt_view(record: Record, replica: str, sees: Sees) -> PreemptView | None:
    part = record.part(Preempted)
    if part is None:
        return None
    seen = tuple(each for each in part.victims if sees(each.namespace, each.name))
    hidden = len(part.victims) - len(seen)
    return PreemptView.of(
        part,
        **_phase_fields(record, part, replica),
        victims=[VictimView.of(each) for each in seen],
        hidden_victims=hidden,
        choice=part.source or None,
        alternatives=[LoserView.of(each) for each in part.losers],
        lines=list(sentences(msgspec.structs.replace(part, victims=seen), hidden)),
    )


def _bind_view(record: Record, replica: str) -> BindView | None:
    part = record.part(BindTried)
    if part is None:
        return None
    reason = REASONS[part.reason]
    return BindView(
        **_phase_fields(record, part, replica),
        node=part.node,
        outcome=part.outcome,
        reason=reason.code if reason else None,
        message=part.message or (reason.sentence if reason else None),
    )


def merged(views: Iterable[DecisionView]) -> list[DecisionView]:
    """Return one view for each decision, merged over all replicas, newest first."""
    by_id: dict[str, DecisionView] = {}
    for view in views:
        other = by_id.get(view.decision_id)
        by_id[view.decision_id] = view if other is None else _joined(other, view)
    return sorted(by_id.values(), key=position, reverse=True)


def joined_by_pod(
    views: Iterable[DecisionView], filtered: Iterable[DecisionView]
) -> list[DecisionView]:
    """Join each bind that has no filter call with the last filter call of the pod before it.

    The id of a decision has the version of the pod, which can change between filter and bind, for
    example when a condition of its status is written. ``filtered`` are the decisions of these pods
    that have a filter call and no bind. A joined decision is not listed by itself.
    """
    of_pod: dict[str, list[DecisionView]] = {}
    for each in sorted(filtered, key=position):
        of_pod.setdefault(each.uid, []).append(each)
    found, gone = list[DecisionView](), set[str]()
    for view in views:
        before = None
        if view.bind is not None and view.filter is None:
            earlier = (each for each in of_pod.get(view.uid, ()) if led_to(each, view))
            before = max(earlier, key=position, default=None)
        if before is not None:
            gone.add(before.decision_id)
            view = _joined(before, view).model_copy(
                update={"filter_decision_id": before.decision_id}
            )
        found.append(view)
    return [each for each in found if each.decision_id not in gone]


def led_to(filtered: DecisionView, bound: DecisionView) -> bool:
    """Return whether the bind can be the result of the filter call."""
    call, bind = filtered.filter, bound.bind
    if call is None or bind is None or filtered.bind is not None:
        return False
    return call.at <= bind.at and (call.fits > 0 or call.observed_only)


def position(view: DecisionView) -> tuple[str, str]:
    """Return a sort key by time. Timestamps sort as text, because all have the same length and
    time zone."""
    return view.at, view.decision_id


def _joined(one: DecisionView, two: DecisionView) -> DecisionView:
    """Merge the two parts of a decision that two replicas served."""
    older, newer = sorted((one, two), key=position)
    phases = {
        name: _later(getattr(older, name), getattr(newer, name))
        for name in ("filter", "prioritize", "preempt", "bind")
    }
    return newer.model_copy(
        update={
            **phases,
            "first_at": min(one.first_at, two.first_at),
            "node": newer.node or older.node,
            "request": newer.request or older.request,
            # Filter precedes bind: a pod that would have waited would not have been bound.
            "would_reject": max(filter(None, (one.would_reject, two.would_reject)), default=None),
        }
    )


def _later(one: PhaseView | None, two: PhaseView | None) -> PhaseView | None:
    """Return the later of two calls of a verb. Its number of calls is the sum of both."""
    if one is None or two is None:
        return one or two
    later = max(one, two, key=lambda phase: phase.at)
    return later.model_copy(update={"times": one.times + two.times})
