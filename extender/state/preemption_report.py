"""Who leaves for whom, why these, and what other nodes lost by: for the record, in sentences."""

from collections.abc import Iterator

from extender.state.decision_records import Loser, Preempted, Victim
from extender.state.nominations import priority
from extender.state.preemption import Preemption, Victims

#: What decides between two nodes, in this order.
LOST_BY = (
    "more violations of disruption budgets",
    "a victim of higher priority",
    "a larger sum of priorities",
    "more victims",
    "a victim that has run for longer",
)
#: Where none of it does.
EQUAL = "equal; another node was taken"
#: On record.
MOST_LOSERS = 8


def lost_by(loser: Victims, winner: Victims) -> str:
    pairs = zip(LOST_BY, loser.rank, winner.rank, strict=True)
    return next((text for text, one, other in pairs if one != other), EQUAL)


def recorded(
    found: Preemption, at_s: float, took_us: int, offered: int, kept: int, source: str = ""
) -> Preempted:
    """As it goes on record; ``at_s`` in Unix time."""
    best = found.best
    if best is None:
        return Preempted(
            at_s,
            took_us,
            offered,
            kept,
            helpless=found.helpless,
            soon=found.soon,
            cut_short=found.cut_short,
        )
    kinds = "proposed" if best.as_offered else "corrected" if best.offered else "added"
    return Preempted(
        at_s,
        took_us,
        offered,
        kept,
        best.node,
        tuple(
            Victim(
                pod.metadata.namespace,
                pod.metadata.name,
                pod.metadata.uid,
                priority(pod),
                pod.metadata.deletion_timestamp is not None,
            )
            for pod in best.pods
        ),
        len(best.others),
        best.pdb_violations,
        source or kinds,
        tuple(
            Loser(each.node, len(each.uids), lost_by(each, best))
            for each in found.others[:MOST_LOSERS]
        ),
        found.helpless,
        found.soon,
        found.cut_short,
    )


_CHOICES = {
    "proposed": "kube-scheduler proposed these victims",
    "corrected": "kube-scheduler proposed others, with which the pod would not have fitted, or more"
    " than it takes",
    "added": "kube-scheduler proposed nothing there, because only GPU memory is short",
    "controller": "kube-scheduler did not ask, because only GPU memory is short",
}


def summary(part: Preempted) -> str:
    """In one sentence, without what the reader may not know of other pods."""
    count = len(part.victims) + part.others
    who = "1 pod leaves" if count == 1 else f"{count} pods leave"
    return f"{who} node {part.node} for this pod: {_CHOICES.get(part.source, part.source)}."


def told(part: Preempted, hidden: int = 0) -> Iterator[str]:
    """Who leaves for whom and why these, in sentences; ``hidden``: victims that are left out."""
    if not part.node:
        if part.soon:
            yield "nobody has to leave: there is room as soon as those have left who are leaving"
        elif part.helpless:
            yield f"nobody has to leave: it would help on none of {part.helpless} nodes"
        else:
            yield "nobody has to leave"
        return
    for victim in part.victims:
        leaves = "is leaving" if victim.leaving else "leaves"
        who = f"{victim.namespace}/{victim.name}"
        yield f"{who} (priority {victim.priority}) {leaves} node {part.node}"
    if hidden:
        who = "1 pod that you may not read leaves"
        if hidden > 1:
            who = f"{hidden} pods that you may not read leave"
        yield f"{who} node {part.node}"
    if part.others:
        yield f"{part.others} pods without a GPU leave node {part.node}, as kube-scheduler proposed"
    if part.pdb_violations:
        yield f"evictions that violate a disruption budget: {part.pdb_violations}"
    yield _CHOICES.get(part.source, part.source)
    for loser in part.losers:
        yield f"not {loser.node}, where {loser.victims} would leave: {loser.lost_by}"
    if part.helpless:
        yield f"nodes on which no removal was found to help: {part.helpless}"
    if part.cut_short:
        yield "not all nodes were looked at to the end: that would have taken too long"
