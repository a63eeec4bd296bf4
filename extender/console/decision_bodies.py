"""The bodies that tell of decisions: an attempt to place a pod, verb by verb, whichever replica
served it."""

from collections.abc import Iterable
from typing import Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from extender.console.bodies import AskView, Body, ReasonView, reason_view, stamp
from extender.console.visible_pods import Sees, everything
from extender.placement.snapshot import REASONS
from extender.state.decision_records import (
    BindTried,
    Candidates,
    Filtered,
    Preempted,
    Ranked,
    Record,
)
from extender.state.preemption_report import sentences


class PhaseView(BaseModel):
    """The last call of one verb."""

    #: The replica that served it.
    replica: str
    at: str
    took_ms: float
    #: How often the verb was called for the same version of the pod.
    times: int


class FilterView(PhaseView):
    snapshot_generation: int
    #: Nodes that kube-scheduler asked about, and those that can take the pod.
    offered: int
    fits: int
    reasons: list[ReasonView]
    #: Whether all were let pass all the same (mode observe).
    observed_only: bool = False
    #: The nodes that kube-scheduler asked about and that are known here; null unless the query says
    #: ``offered_nodes=true``, and once they are forgotten.
    offered_nodes: list[str] | None = None


class ContenderView(BaseModel):
    node: str
    #: 0..1, and the named terms of which it is the weighted mean (setting score_weights).
    score_ratio: float
    score_terms: dict[str, float]


class PrioritizeView(PhaseView):
    snapshot_generation: int
    #: Nodes that were ranked.
    offered: int
    #: Null where any would do.
    winner: str | None
    #: The best of them, the winner first; empty where there was no time to keep them.
    candidates: list[ContenderView]


class VictimView(BaseModel):
    namespace: str
    name: str
    uid: str
    priority: int
    #: Whether it was leaving already.
    leaving: bool


class LoserView(BaseModel):
    """A node on which others would have had to leave."""

    node: str
    victims: int
    lost_by: str


class PreemptView(PhaseView):
    #: Nodes for which kube-scheduler proposed victims, and those that it was told.
    offered: int
    kept: int
    #: The best of them and who leaves it; null where nobody is to leave.
    node: str | None
    victims: list[VictimView]
    #: Other victims, which the reader may not get.
    hidden_victims: int = 0
    #: Victims without a GPU of ours, which kube-scheduler needs.
    others: int
    pdb_violations: int
    #: "proposed" by kube-scheduler, "corrected", "added" (it proposed nothing there), "controller"
    #: (it did not ask); null where nobody is to leave.
    choice: str | None
    alternatives: list[LoserView]
    #: Nodes on which no removal was found to help.
    helpless: int
    #: Whether there is room as soon as those have left who are leaving already.
    soon: bool
    #: Whether some node was not looked at to the end, as that would have taken too long.
    cut_short: bool
    #: All of it, to be read.
    told: list[str]


class BindView(PhaseView):
    node: str
    #: bound, declined (no room any more) or failed.
    outcome: str
    #: Why it was declined, as a code; why it was declined or failed, in words. Of a pod that is
    #: bound: why it would have been declined, had we not only observed.
    reason: str | None
    message: str | None


class DecisionView(BaseModel):
    """What was decided about one version of a pod."""

    #: The record of the extenders that decided; nothing in it was computed again.
    source: Literal["decision"] = "decision"
    decision_id: str
    namespace: str
    name: str
    uid: str
    #: Of the first call and of the last.
    first_at: str
    at: str
    #: Where it was bound to, or the winner; null for none.
    node: str | None
    request: list[AskView]
    filter: FilterView | None
    prioritize: PrioritizeView | None
    preempt: PreemptView | None
    bind: BindView | None


class Unanswered(BaseModel):
    """A peer that was asked and did not answer: what it knows is missing here."""

    peer: str
    message: str


class DecisionsBody(Body):
    # What a peer answers is read by this too.
    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    #: The newest first.
    decisions: list[DecisionView]
    #: To be given as ``continue`` for the next page; null where this is the last one.
    continue_: str | None = Field(serialization_alias="continue", validation_alias="continue")
    unanswered: list[Unanswered]


class DecisionBody(Body):
    decision: DecisionView
    unanswered: list[Unanswered]


def decision_view(
    record: Record, replica: str, sees: Sees = everything, offered_nodes: list[str] | None = None
) -> DecisionView:
    """As far as this replica served its calls; ``offered_nodes``: those of its filter call."""
    filtered = record.part(Filtered)
    return DecisionView(
        decision_id=record.decision_id,
        namespace=record.namespace,
        name=record.name,
        uid=record.uid,
        first_at=stamp(record.first_at_s),
        at=stamp(record.at_s),
        node=record.node or None,
        request=[
            AskView(
                container=ask.container,
                resource=ask.resource,
                count=ask.count,
                amount=ask.amount,
                source=ask.source,
            )
            for ask in (filtered.asked if filtered else ())
        ],
        filter=_filter_view(record, replica, filtered, offered_nodes) if filtered else None,
        prioritize=_prioritize_view(record, replica),
        preempt=_preempt_view(record, replica, sees),
        bind=_bind_view(record, replica),
    )


def _filter_view(
    record: Record, replica: str, part: Filtered, offered_nodes: list[str] | None
) -> FilterView:
    return FilterView(
        replica=replica,
        at=stamp(part.at_s),
        took_ms=part.took_us / 1000,
        times=record.times(Filtered),
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
        replica=replica,
        at=stamp(part.at_s),
        took_ms=part.took_us / 1000,
        times=record.times(Ranked),
        snapshot_generation=part.generation,
        offered=part.offered,
        winner=part.winner or None,
        candidates=[
            ContenderView(
                node=each.node, score_ratio=each.score_ratio, score_terms=dict(each.score_terms)
            )
            for each in (best.best if best else ())
        ],
    )


def _preempt_view(record: Record, replica: str, sees: Sees) -> PreemptView | None:
    part = record.part(Preempted)
    if part is None:
        return None
    seen = tuple(each for each in part.victims if sees(each.namespace, each.name))
    hidden = len(part.victims) - len(seen)
    return PreemptView(
        replica=replica,
        at=stamp(part.at_s),
        took_ms=part.took_us / 1000,
        times=record.times(Preempted),
        offered=part.offered,
        kept=part.kept,
        node=part.node or None,
        victims=[
            VictimView(
                namespace=each.namespace,
                name=each.name,
                uid=each.uid,
                priority=each.priority,
                leaving=each.leaving,
            )
            for each in seen
        ],
        hidden_victims=hidden,
        others=part.others,
        pdb_violations=part.pdb_violations,
        choice=part.source or None,
        alternatives=[
            LoserView(node=each.node, victims=each.victims, lost_by=each.lost_by)
            for each in part.losers
        ],
        helpless=part.helpless,
        soon=part.soon,
        cut_short=part.cut_short,
        told=list(sentences(msgspec.structs.replace(part, victims=seen), hidden)),
    )


def _bind_view(record: Record, replica: str) -> BindView | None:
    part = record.part(BindTried)
    if part is None:
        return None
    reason = REASONS[part.reason]
    return BindView(
        replica=replica,
        at=stamp(part.at_s),
        took_ms=part.took_us / 1000,
        times=record.times(BindTried),
        node=part.node,
        outcome=part.outcome,
        reason=reason.code if reason else None,
        message=part.message or (reason.sentence if reason else None),
    )


def merged(views: Iterable[DecisionView]) -> list[DecisionView]:
    """One view of each decision, of all replicas that served a part of it; the newest first."""
    whole: dict[str, DecisionView] = {}
    for view in views:
        known = whole.get(view.decision_id)
        whole[view.decision_id] = view if known is None else _joined(known, view)
    return sorted(whole.values(), key=position, reverse=True)


def position(view: DecisionView) -> tuple[str, str]:
    """Its place in the order of time; stamps are of one length and one zone."""
    return view.at, view.decision_id


def _joined(one: DecisionView, two: DecisionView) -> DecisionView:
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
        }
    )


def _later(one: PhaseView | None, two: PhaseView | None) -> PhaseView | None:
    """The later call, counted with those that another replica served."""
    if one is None or two is None:
        return one or two
    later = max(one, two, key=lambda phase: phase.at)
    return later.model_copy(update={"times": one.times + two.times})
