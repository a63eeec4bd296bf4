"""What would help a pod that no node takes: asking for less, waiting for a pod, looking after a
node, more replicas. Each is tried before it is said, by what decides."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np

from contract.annotations import VRAM
from contract.kube import Pod
from contract.quantity import format_bytes, gib
from contract.reasons import Reason
from extender.cluster.holders import Held, holders
from extender.cluster.state import ClusterState
from extender.cluster.vacating import fits_after_eviction
from extender.placement.comparison import failing
from extender.placement.explain import Explanation, NodeExplanation
from extender.placement.fit import Verdicts
from extender.placement.snapshot import CODE_OF

Kind = Literal["lower", "wait", "mend", "replicas"]
#: What is the matter with a node or one of its devices, and can be mended.
_MENDABLE = (
    Reason.STALE_REPORT,
    Reason.UNHEALTHY_DEVICE,
    Reason.CONTRADICTORY_REPORT,
    Reason.MEMORY_UNKNOWN,
    Reason.NO_REPORT,
)
#: Nodes to be mended that are named.
_MOST_NAMED = 3
#: Pods whose end is tried: each takes a millisecond.
_MOST_TRIED = 8


@dataclass(frozen=True, slots=True)
class Advice:
    kind: Kind
    sentence: str
    #: The node that is meant; empty where it is none alone.
    node: str = ""
    #: For whose end to wait.
    held: Held | None = None
    #: What to ask for at most, per device; None where that is not the advice.
    lower_to_bytes: int | None = None
    #: How many nodes it is true of.
    nodes: int = 1


def advice(
    cluster: ClusterState,
    pod: Pod,
    verdicts: Verdicts,
    explanation: Explanation,
    holding: Sequence[Sequence[Held]],
) -> list[Advice]:
    """Nothing where some node takes the pod; ``holding``: the blockers of each of the nearest."""
    if explanation.fits or not verdicts.asks:
        return []
    return [
        *_lower(explanation.largest_fitting_bytes),
        *_wait(cluster, pod, verdicts.now_s, explanation, holding),
        *_mend(verdicts),
        *_more_replicas(verdicts),
    ]


def blockers(cluster: ClusterState, verdicts: Verdicts, node: NodeExplanation) -> list[Held]:
    """Who holds the devices of a node that keep the pod out, those with the most first."""
    if node.reason is None or not node.reason.evictable:
        return []
    asked = {verdict.ask.resource for verdict in verdicts.asks}
    terms = verdicts.snap.nodes[verdicts.snap.row_of[node.node]].devices
    short = {each.terms.device.uuid for each in node.candidates if each.short_bytes}
    found: dict[str, Held] = {}
    for each in terms:
        if each.device.uuid in short or (not short and each.device.resource in asked):
            for held in holders(cluster, node.node, each):
                found.setdefault(held.uid, held)
    return sorted(found.values(), key=lambda held: -held.charged_bytes)


def _lower(largest_bytes: int | None) -> Iterator[Advice]:
    whole_mib = (largest_bytes or 0) >> 20
    if whole_mib:
        sentence = f"lower {VRAM} to {format_bytes(whole_mib << 20)} or less: that fits now"
        yield Advice("lower", sentence, lower_to_bytes=whole_mib << 20)


def _wait(
    cluster: ClusterState,
    pod: Pod,
    now_s: float,
    explanation: Explanation,
    holding: Sequence[Sequence[Held]],
) -> Iterator[Advice]:
    """For the smallest pod whose end makes room on one of the nearest nodes."""
    could = [
        (held.charged_bytes, node.node, held)
        for node, there in zip(explanation.nearest, holding, strict=True)
        for held in there
        # Less than is lacking makes no room; of a replica nobody can say by its size.
        if held.charged_bytes >= (node.short_bytes or 0)
    ]
    could.sort(key=lambda each: (each[0], each[1], each[2].uid))
    for _, node, held in islice(could, _MOST_TRIED):
        if fits_after_eviction(cluster, pod, node, {held.uid}, now_s):
            who, size = f"{held.namespace}/{held.name}", gib(held.charged_bytes)
            since = f" since {held.since[:19]}Z" if held.since else ""
            sentence = (
                f"wait for pod {who}, which holds {size} on node {node}{since}: when it ends there "
                "is room"
            )
            yield Advice("wait", sentence, node, held)
            return


def _mend(verdicts: Verdicts) -> Iterator[Advice]:
    """Nodes that one thing alone keeps from taking the pod, which is none of memory or replicas."""
    named = 0
    codes = [CODE_OF[reason] for reason in _MENDABLE]
    for i in np.flatnonzero(np.isin(verdicts.codes, codes)).tolist():
        (first, *others) = failing(verdicts, i)
        if others or first not in _MENDABLE:
            continue
        node = verdicts.snap.nodes[int(verdicts.rows[i])]
        details = (t.fence_detail and f"{t.device.uuid}: {t.fence_detail}" for t in node.devices)
        detail = (
            next((each for each in details if each), "") if first.code != "stale_report" else ""
        )
        what = f"{first.sentence} ({detail})" if detail else first.sentence
        yield Advice("mend", f"node {node.name} might take it, but: {what}", node.name)
        named += 1
        if named == _MOST_NAMED:
            return


def _more_replicas(verdicts: Verdicts) -> Iterator[Advice]:
    """Nodes that have the memory on some device, and no replica to give."""
    lacks = verdicts.codes == CODE_OF[Reason.NO_REPLICA]
    for verdict in verdicts.asks:
        lacks &= ~verdict.all_refused[Reason.MEMORY_ON_ANY][verdicts.rows]
    if count := int(lacks.sum()):
        name = verdicts.snap.nodes[int(verdicts.rows[np.flatnonzero(lacks)[0]])].name
        which = f"node {name} has" if count == 1 else f"{count} nodes, as {name}, have"
        sentence = (
            f"{which} the memory and no free replica: raise the replicas that the device plugin "
            "advertises there"
        )
        yield Advice("replicas", sentence, name if count == 1 else "", nodes=count)
