"""Reads why kube-scheduler could not place a pod from the condition PodScheduled of the pod."""

import re
from dataclasses import dataclass

from headroom.contract.kube import Pod
from headroom.contract.reasons import Reason

#: Maximum number of characters quoted from a scheduler's message.
MOST_QUOTED = 500
#: The form of the message is "0/3 nodes are available: REASONS. preemption: ...". Newer schedulers
#: write "no new claims to deallocate" before "preemption".
_NODES = re.compile(r"\d+/\d+ nodes are available: (?P<reasons>.*)", re.DOTALL)
_REST = re.compile(
    r"[,.;]? *(no new claims to deallocate|preemption:|still not schedulable).*", re.S
)
_COUNTED = re.compile(r"(?P<nodes>\d+) (?P<reason>.+)", re.DOTALL)
_OURS = frozenset(reason.sentence for reason in Reason)
#: Maps reasons of kube-scheduler to what the pod waits for.
_WAITS_FOR = {
    "Insufficient cpu": "CPU",
    "Insufficient memory": "memory",
    "Insufficient ephemeral-storage": "ephemeral storage",
    "Too many pods": "room for one more pod",
}


@dataclass(frozen=True, slots=True)
class Report:
    """The reasons of kube-scheduler's last attempt, except Headroom's reasons."""

    #: One part of kube-scheduler's message, such as "3 Insufficient cpu".
    reasons: tuple[str, ...]
    #: Whether Headroom rejected a node in this attempt.
    has_ours: bool

    @property
    def waits_for(self) -> str:
        """Return what the pod lacks, such as "CPU and memory"; "" if that is not a resource."""
        found = [_WAITS_FOR.get(each.split(" ", 1)[1], "") for each in self.reasons]
        return " and ".join(dict.fromkeys(found)) if found and all(found) else ""


def reported(pod: Pod) -> str:
    """Return the message with which a scheduler reported that it could not place the pod, or ""."""
    conditions = (pod.status and pod.status.conditions) or ()
    return next(
        (
            each.message
            for each in conditions
            if each.type == "PodScheduled" and each.status == "False" and each.message
        ),
        "",
    )


def report_of(pod: Pod) -> Report | None:
    """Return kube-scheduler's reasons for the pod, or None if it reported none that can be read."""
    found = _NODES.search(reported(pod)[: 4 * MOST_QUOTED])
    if found is None:
        return None
    parts = _REST.sub("", found["reasons"]).rstrip(". ").split(", ")
    reasons, has_ours = list[str](), False
    for part in parts:
        counted = _COUNTED.fullmatch(part)
        if counted is None:
            if reasons:  # a reason that contains a comma
                reasons[-1] += f", {part}"
            continue
        if counted["reason"] in _OURS:
            has_ours = True
        else:
            reasons.append(part)
    return Report(tuple(reasons), has_ours) if reasons or has_ours else None


def waits_elsewhere(pod: Pod) -> str:
    """Return why the pod waits if the last attempt failed before it reached Headroom, otherwise
    ""."""
    report = report_of(pod)
    if report is None or report.has_ours or not report.reasons:
        return ""
    reasons = ", ".join(report.reasons)[:MOST_QUOTED]
    if waits_for := report.waits_for:
        return f"waits for {waits_for} (kube-scheduler: {reasons})"
    return f"kube-scheduler found no node for it ({reasons})"
