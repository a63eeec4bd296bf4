"""Why pods wait, and what their authors are told of it.

kube-scheduler counts our constant reasons into the pod's condition; the numbers are told here, in
one Event for each pod, made of its last decision and of the newest snapshot.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from contract.kube import Pod
from contract.quantity import gib
from contract.reasons import Reason
from extender.placement.explain import Explanation, NodeExplanation, explain
from extender.placement.fit import Verdicts, fit
from extender.placement.request import Kind, VramRequest
from extender.placement.snapshot import Snapshot
from extender.state.cluster_state import ClusterState
from extender.state.explained_nodes import feasible
from extender.state.journal import Decision
from extender.state.notices import Notice, pod_subject
from extender.state.selectors import Eligible, eligible_nodes, sites

#: The code of who waits and was never refused by us: kube-scheduler has not asked about it.
NOT_ASKED = "not_asked"
#: Reasons that one message tells.
_MOST_REASONS = 3
#: As kube-scheduler counts them; the longest first, since some begin like others.
_COUNTED = re.compile(
    r"(\d+) ("
    + "|".join(sorted((re.escape(r.sentence) for r in Reason), key=len, reverse=True))
    + ")"
)
_REASON_OF = {reason.sentence: reason for reason in Reason}


@dataclass(slots=True)
class Pending:
    """Pods that no node has, by the code of the reason that most nodes were refused for."""

    pods: Counter[str] = field(default_factory=Counter)
    #: When the oldest of them was created, RFC 3339.
    oldest: dict[str, str] = field(default_factory=dict)

    def add(self, code: str, created: str) -> None:
        self.pods[code] += 1
        if created:  # else nobody knows its age
            self.oldest[code] = min(self.oldest.get(code, created), created)


def told_by_condition(pod: Pod) -> dict[Reason, int]:
    """Nodes by our reason, as kube-scheduler quotes it on the pod: what every replica can read."""
    found: Counter[Reason] = Counter()
    for condition in (pod.status and pod.status.conditions) or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            for count, sentence in _COUNTED.findall(condition.message):
                found[_REASON_OF[sentence]] += int(count[:9])
    return dict(found)


def main_reason(rejected: Mapping[Reason, int]) -> str:
    """The code of the reason for most nodes; ``NOT_ASKED`` where there is none."""
    if not rejected:
        return NOT_ASKED
    return min(rejected, key=lambda reason: (-rejected[reason], reason.code)).code


class Explaining:
    """One snapshot, and what was explained of it, since many pods ask for the same. On any thread,
    one at a time."""

    def __init__(self, state: ClusterState, snap: Snapshot, now_s: float) -> None:
        self._state, self._snap, self._now_s = state, snap, now_s
        self._eligible: dict[bytes, Eligible] = {}
        self._everywhere: dict[Kind, Verdicts] = {}
        #: By kind of request, where the pods may run, and the nodes that were offered.
        self._explanations: dict[tuple[Kind, bytes, bytes], Explanation] = {}

    def notice(self, pod: Pod, decision: Decision, again: bool = False) -> Notice | None:
        """What the pod's author is told; None where it would fit now and so is about to be tried
        again. ``again``: it was looked at before; then kube-scheduler does not offer that node."""
        found = self._explained(pod, decision)
        nearest = found.nearest[0] if found and found.nearest else None
        if nearest is not None and nearest.reason is None and not again:
            return None
        metadata = pod.metadata
        parts = [_counted(decision), _told(found, nearest) if found and nearest else ""]
        parts.append(f"More: kubectl headroom why -n {metadata.namespace} {metadata.name}")
        message = " ".join(filter(None, parts))
        which = decision.decision_id
        return Notice(pod_subject(pod), "NoGPUFits", message, "", follows=True, decision_id=which)

    def _explained(self, pod: Pod, decision: Decision) -> Explanation | None:
        """Explain the pod on the nodes that it may run on."""
        request, snap = self._state.understand(pod), self._snap
        if not isinstance(request, VramRequest):
            return None
        named = decision.offered_nodes
        key = request.kind, (where := sites(pod)), named.bits if named else b""
        if key in self._explanations:
            return self._explanations[key]
        if where not in self._eligible:
            self._eligible[where] = eligible_nodes(pod, snap, self._state.node)
        if request.kind not in self._everywhere:
            rows = np.arange(len(snap.nodes))
            self._everywhere[request.kind] = fit(request, snap, rows, self._now_s)
        everywhere, offered = self._everywhere[request.kind], named.names() if named else None
        rows = feasible(pod, self._eligible[where], everywhere, offered).rows
        verdicts = fit(request, snap, rows, self._now_s)
        found = explain(verdicts, self._state.rules.weights, nearest=1)
        self._explanations[key] = found
        return found


def _counted(decision: Decision) -> str:
    rejected = sorted(decision.rejected.items(), key=lambda each: (-each[1], each[0].code))
    told = [f"{count} {reason.sentence}" for reason, count in rejected[:_MOST_REASONS]]
    if more := sum(count for _, count in rejected[_MOST_REASONS:]):
        told.append(f"{more} for other reasons")
    return f"None of {decision.offered} nodes: {'; '.join(told)}."


def _told(found: Explanation, node: NodeExplanation) -> str:
    """The device that decides on the node that comes nearest."""
    if node.reason is None:
        return f"It would fit on {node.node}, which kube-scheduler does not offer."
    if found.too_large is not None:
        needs, has = found.too_large
        return f"It needs {gib(needs, up=True)}, larger than any GPU that it may use ({gib(has)})."
    if not node.short_bytes:
        return ""
    device = max(node.candidates, key=lambda each: each.short_bytes)
    seen, needs_there = device.terms.device, gib(device.need_bytes, up=True)
    short = gib(device.short_bytes, up=True)
    which = seen.uuid if seen.index < 0 else f"{seen.index} ({seen.uuid})"
    return f"Nearest: short by {short} of {needs_there} on GPU {which} of {node.node}."
