"""Converts a preemption to the response to kube-scheduler, a record, and sentences for users."""

from collections.abc import Iterator

import msgspec

from headroom.contract.kube import Pod
from headroom.core.journal.decision_records import Loser, Preempted, Victim
from headroom.core.preemption.victim_search import Preemption, Victims

#: The criteria that decide between two nodes, in this order.
LOST_BY = (
    "more violations of disruption budgets",
    "a victim of higher priority",
    "a larger sum of priorities",
    "more victims",
    "a victim that has run for longer",
)
#: The text if no criterion decides.
EQUAL = "equal; another node was chosen"
#: Maximum number of losing nodes in a record.
MAX_LOSERS = 8


def answered(found: Preemption) -> list[Victims]:
    """Return the nodes for the response to kube-scheduler, which chooses the best by the same
    order.

    The response contains no node that kube-scheduler could consider equal to the best node, so that
    kube-scheduler is certain to choose the best node. If its ranking cannot be predicted, the
    response contains only the best node. A node that was not offered is returned only if it is the
    best.
    """
    best = found.best
    if best is None:
        return []
    if best.listed is None or best.leaving_anyway:
        return [best]
    return [
        best,
        *(
            other
            for other in found.others
            if other.offered and other.listed is not None and other.listed > best.listed
        ),
    ]


def lost_by(loser: Victims, winner: Victims) -> str:
    """Return the criterion by which the loser is worse than the winner."""
    pairs = zip(LOST_BY, loser.rank, winner.rank, strict=True)
    return next((text for text, one, other in pairs if one != other), EQUAL)


def recorded(
    found: Preemption, at_s: float, took_us: int, offered: int, kept: int, source: str = ""
) -> Preempted:
    """Build the record of a preemption. ``at_s`` is the Unix time in seconds."""
    part = Preempted(
        at_s,
        took_us,
        offered,
        kept,
        helpless=found.helpless,
        soon=found.soon,
        cut_short=found.cut_short,
    )
    best = found.best
    if best is None:
        return part
    losers = (
        Loser(each.node, len(each.uids), lost_by(each, best)) for each in found.others[:MAX_LOSERS]
    )
    kind = "proposed" if best.as_offered else "corrected" if best.offered else "added"
    return msgspec.structs.replace(
        part,
        node=best.node,
        victims=tuple(map(_victim, best.pods)),
        others=len(best.others),
        pdb_violations=best.pdb_violations,
        source=source or kind,
        losers=tuple(losers),
    )


def _victim(pod: Pod) -> Victim:
    metadata, leaving = pod.metadata, pod.metadata.deletion_timestamp is not None
    return Victim(metadata.namespace, metadata.name, metadata.uid, pod.priority, leaving)


_CHOICES = {
    "proposed": "kube-scheduler proposed these victims",
    "corrected": "kube-scheduler proposed other victims, whose eviction is not enough or frees "
    "more than needed",
    "added": "kube-scheduler proposed no victims there, because only GPU memory is short",
    "controller": "kube-scheduler did not ask, because only GPU memory is short",
}


def summary(part: Preempted) -> str:
    """Summarize a preemption in one sentence that names no victims."""
    leave = _leave(len(part.victims) + part.others)
    return f"{leave} node {part.node} for this pod: {_CHOICES.get(part.source, part.source)}."


def sentences(part: Preempted, hidden: int = 0) -> Iterator[str]:
    """Yield a sentence for each pod that leaves and for the reasons. ``hidden`` victims are
    omitted."""
    if not part.node:
        if part.soon:
            yield "no pod is evicted, because the pod fits as soon as terminating pods have ended"
        elif part.helpless:
            nodes = "1 node" if part.helpless == 1 else f"{part.helpless} nodes"
            yield f"no pod is evicted, because eviction would help on 0 of {nodes}"
        else:
            yield "no pod is evicted"
        return
    for victim in part.victims:
        leaves = "is leaving" if victim.leaving else "leaves"
        pod = f"{victim.namespace}/{victim.name}"
        yield f"{pod} (priority {victim.priority}) {leaves} node {part.node}"
    if hidden:
        yield f"{_leave(hidden, ' that you may not read')} node {part.node}"
    if part.others:
        leave = _leave(part.others, " without a GPU")
        yield f"{leave} node {part.node}, as kube-scheduler proposed"
    if part.pdb_violations:
        yield f"evictions that violate a disruption budget: {part.pdb_violations}"
    yield _CHOICES.get(part.source, part.source)
    for loser in part.losers:
        would_leave = "1 pod" if loser.victims == 1 else f"{loser.victims} pods"
        yield f"not node {loser.node}, where {would_leave} would leave: {loser.lost_by}"
    if part.helpless:
        yield f"nodes on which no helpful eviction was found: {part.helpless}"
    if part.cut_short:
        yield "not all nodes were examined completely, because the search reached its limit"


def _leave(count: int, which: str = "") -> str:
    return f"1 pod{which} leaves" if count == 1 else f"{count} pods{which} leave"
