"""Explains why pods are pending, in metrics and Events.

kube-scheduler counts Headroom's constant reasons in the pod's condition. This module adds the
figures in one Event for each pod, built from the pod's last decision and the newest snapshot.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from headroom.contract.annotations import VRAM, ReplicaShare
from headroom.contract.commands import command
from headroom.contract.event_reasons import EventReason
from headroom.contract.kube import Pod
from headroom.contract.quantity import gib
from headroom.contract.reasons import Reason
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.notices import Notice, pod_subject
from headroom.core.journal.journal import Decision
from headroom.core.placement.explain import Explanation, NodeExplanation, explain
from headroom.core.placement.fit import Verdicts
from headroom.core.placement.request import Kind, VramRequest
from headroom.core.placement.snapshot import Snapshot
from headroom.core.rules.eligible_nodes import Eligible, eligibility_key, eligible_nodes, feasible
from headroom.core.whatif.held_memory import seen_by, verdicts_on
from headroom.core.whatif.steering_whatif import (
    Helped,
    choice_text,
    helped_by_steering,
    nodes_text,
)

#: Code of pending pods for which kube-scheduler has not called Headroom.
NOT_ASKED = "not_asked"
#: Maximum number of reasons in one message.
_MAX_REASONS = 3
#: Matches counted reasons in kube-scheduler's message. The longest come first, because some are
#: prefixes of others.
_COUNTED = re.compile(
    r"(\d+) ("
    + "|".join(sorted((re.escape(r.sentence) for r in Reason), key=len, reverse=True))
    + ")"
)
_REASON_OF = {reason.sentence: reason for reason in Reason}


@dataclass(slots=True)
class Pending:
    """Unbound pods, by the code of the reason for which most nodes were rejected."""

    pods: Counter[str] = field(default_factory=Counter)
    #: When the oldest pod of each code was created (RFC 3339).
    oldest: dict[str, str] = field(default_factory=dict)

    def add(self, code: str, created: str) -> None:
        self.pods[code] += 1
        if created:  # otherwise its age is unknown
            self.oldest[code] = min(self.oldest.get(code, created), created)


def rejections_in_condition(pod: Pod) -> dict[Reason, int]:
    """Return Headroom's reasons with the numbers of nodes, parsed from the pod's condition.

    Every replica can read the condition, even for decisions of another replica.
    """
    found: Counter[Reason] = Counter()
    for condition in (pod.status and pod.status.conditions) or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            for count, sentence in _COUNTED.findall(condition.message):
                found[_REASON_OF[sentence]] += int(count[:9])
    return dict(found)


def main_reason(rejected: Mapping[Reason, int]) -> str:
    """Return the code of the reason that applies to most nodes, or ``NOT_ASKED`` if there is
    none."""
    if not rejected:
        return NOT_ASKED
    return min(rejected, key=lambda reason: (-rejected[reason], reason.code)).code


class Explaining:
    """Explains pods on one snapshot, and caches explanations because many pods have equal requests.

    Any thread may use it, but only one at a time.
    """

    def __init__(self, state: Cluster, snap: Snapshot, now_s: float) -> None:
        self._state, self._snap, self._now_s = state, snap, now_s
        self._eligible: dict[bytes, Eligible] = {}
        self._everywhere: dict[Kind, Verdicts] = {}
        #: Explanations by kind of request, eligibility key of the pod, and offered nodes.
        self._explanations: dict[tuple[Kind, bytes, bytes], tuple[Explanation, str]] = {}

    def notice(self, pod: Pod, decision: Decision, again: bool = False) -> Notice | None:
        """Return the notice for the pod's author, or None if the pod fits now and is retried soon.

        ``again`` states whether the pod was explained before. If it still fits, kube-scheduler does
        not offer the node on which it fits, and the notice reports this.
        """
        found, steering = self._explained(pod, decision)
        nearest = found.nearest[0] if found and found.nearest else None
        if nearest is not None and nearest.reason is None and not again:
            return None
        metadata = pod.metadata
        parts = [_nearest(found, nearest, decision) if found and nearest else "", steering]
        if not any(parts):
            parts = [_counted(decision)]
        parts.append(self._forgotten(pod))
        why = command("kubectl", "headroom", "why", "-n", metadata.namespace, metadata.name)
        parts.append(f"More: {why}")
        message = " ".join(filter(None, parts))
        which = decision.decision_id
        return Notice(
            pod_subject(pod), EventReason.NO_GPU_FITS, message, "", follows=True, decision_id=which
        )

    def _forgotten(self, pod: Pod) -> str:
        """Mention that the pod has no amount, because its author may never see a warning of the
        webhook."""
        request = self._state.understand(pod)
        asks = request.containers if isinstance(request, VramRequest) else ()
        if not any(isinstance(ask.amount, ReplicaShare) for ask in asks):
            return ""
        return f"Annotation {VRAM} is missing, so the pod requests the share of one replica."

    def _explained(self, pod: Pod, decision: Decision) -> tuple[Explanation | None, str]:
        """Explain the pod on its eligible nodes, and describe what steering would change."""
        request = self._state.understand(pod)
        if not isinstance(request, VramRequest):
            return None, ""
        if (snap := seen_by(self._state, pod, self._snap, self._now_s)) is not self._snap:
            return Explaining(self._state, snap, self._now_s)._explained_on(pod, request, decision)
        return self._explained_on(pod, request, decision)

    def _explained_on(
        self, pod: Pod, request: VramRequest, decision: Decision
    ) -> tuple[Explanation | None, str]:
        """Explain the pod on this snapshot, without checking for held memory."""
        snap = self._snap
        named = decision.offered_nodes
        key = request.kind, (where := eligibility_key(pod)), named.bits if named else b""
        if key in self._explanations:
            return self._explanations[key]
        if where not in self._eligible:
            self._eligible[where] = eligible_nodes(pod, snap, self._state.node)
        if request.kind not in self._everywhere:
            rows = np.arange(len(snap.nodes))
            self._everywhere[request.kind] = verdicts_on(
                self._state, request, snap, rows, self._now_s
            )
        everywhere, offered = self._everywhere[request.kind], named.names() if named else None
        rows = feasible(pod, self._eligible[where], everywhere, offered).rows
        verdicts = verdicts_on(self._state, request, snap, rows, self._now_s)
        found = explain(verdicts, self._state.rules.weights, nearest=1)
        steering = "" if found.fits else _if_steered(helped_by_steering(self._state, verdicts))
        self._explanations[key] = found, steering
        return found, steering


def _counted(decision: Decision) -> str:
    """Repeat the reasons of FailedScheduling, the Event of kube-scheduler."""
    rejected = sorted(decision.rejected.items(), key=lambda each: (-each[1], each[0].code))
    reasons = [f"{count} {reason.sentence}" for reason, count in rejected[:_MAX_REASONS]]
    if more := sum(count for _, count in rejected[_MAX_REASONS:]):
        reasons.append(f"{more} for other reasons")
    return f"0 of {_nodes(decision)} can take the pod: {'; '.join(reasons)}."


def _nodes(decision: Decision) -> str:
    return "1 node" if decision.offered == 1 else f"{decision.offered} nodes"


def _if_steered(helped: Sequence[Helped]) -> str:
    """Describe how to steer a node on which the pod would then fit, or return an empty string if
    there is none."""
    if not helped:
        return ""
    chosen, to_do = choice_text(helped), helped[0].node.to_do
    return f"If {chosen}, it would fit on {nodes_text(helped)}: {to_do}."


def _nearest(found: Explanation, node: NodeExplanation, decision: Decision) -> str:
    """Describe how much memory the pod lacks on the nearest node, on the device that lacks the
    most."""
    if node.reason is None:
        return f"The pod would fit on {node.node}, which kube-scheduler does not offer."
    if found.too_large is not None:
        needs, has = found.too_large
        needs_text = f"The pod needs {gib(needs, up=True)}"
        return f"{needs_text}, larger than any GPU that it may use ({gib(has)})."
    if not node.short_bytes:
        return ""
    #: If Headroom chooses, devices that lack more memory than the best set do not matter.
    decisive = [each for each in node.candidates if each.short_bytes <= node.short_bytes]
    device = max(decisive, key=lambda each: each.short_bytes)
    seen, needs_there = device.terms.device, gib(device.need_bytes, up=True)
    short = gib(device.short_bytes, up=True)
    which = seen.uuid if seen.index < 0 else f"{seen.index} ({seen.uuid})"
    nearest = f"Nearest of {_nodes(decision)}" if decision.offered > 1 else "Nearest"
    return f"{nearest}: short by {short} of {needs_there} on GPU {which} of {node.node}."
