"""Describes kube-scheduler's attempts to place a pod, for the pod's explanation."""

from datetime import datetime, timedelta

from headroom.console.facts.scheduler_reports import MOST_QUOTED, reported
from headroom.console.responses import counted
from headroom.console.times import Time
from headroom.console.view import View
from headroom.console.views.decision_bodies import DecisionView, FilterView
from headroom.contract.annotations import PLACEMENT
from headroom.contract.kube import Pod
from headroom.contract.timestamps import age
from headroom.core.journal.journal import scheduler_of
from headroom.core.overuse.victims import moment

#: By default, kube-scheduler retries a pod after this time even if nothing requeued it.
FLUSHED_AFTER = timedelta(minutes=5)
#: Seconds within which kube-scheduler tries a pod for the first time, and by which a retry may be
#: late. After that, the scheduler may not be running.
TRIED_WITHIN_S, LATE_S = 15.0, 60.0


class AttemptsView(View):
    """The attempts of kube-scheduler to place the pod that any replica has on record."""

    first_at: Time | None
    last_at: Time | None
    times: int
    """Number of filter calls of the last decision."""
    offered_nodes: int | None
    """Number of nodes offered in the last attempt, and number of known nodes not offered."""
    not_offered_nodes: int | None
    again_by: str | None
    """Latest time at which kube-scheduler retries, with its default settings; null if it does not
    retry, or if the time is not known."""
    message: str


def attempts_of(
    pod: Pod, last: DecisionView | None, nodes: int, deleted: bool = False
) -> AttemptsView:
    """Return the attempts of the last decision. ``nodes`` is the number of known nodes.

    ``deleted`` is whether the pod no longer exists, so that no attempt follows.
    """
    filtered = last.filter if last else None
    if last is None or filtered is None:
        return AttemptsView(
            first_at=last.first_at if last else None,
            last_at=last.at if last else None,
            times=0,
            offered_nodes=None,
            not_offered_nodes=None,
            again_by=None,
            message=_placed(pod) if pod.node or deleted else _no_attempt(pod),
        )
    not_offered = max(0, nodes - filtered.offered)
    again_by = None
    if not pod.node and not filtered.fits and not filtered.observed_only and not deleted:
        flushed_at = datetime.fromisoformat(filtered.at) + FLUSHED_AFTER
        again_by = flushed_at.isoformat(timespec="milliseconds")
    return AttemptsView(
        first_at=last.first_at,
        last_at=filtered.at,
        times=filtered.times,
        offered_nodes=filtered.offered,
        not_offered_nodes=not_offered,
        again_by=again_by,
        message=_last_attempt(filtered, not_offered, again_by),
    )


def scheduler_silence(pod: Pod, asked_at_s: float | None, wall_s: float) -> str:
    """Return a sentence if the pod's scheduler should have tried the pod since, otherwise "".

    The pod fits on a node. ``asked_at_s`` is the time of its last filter call on record, or None if
    there is none, and ``wall_s`` the current time, both in Unix seconds.
    """
    scheduler = scheduler_of(pod)
    if asked_at_s is not None:
        if wall_s - asked_at_s < FLUSHED_AFTER.total_seconds() + LATE_S:
            return ""
        return f"scheduler {scheduler} has not tried the pod since {moment(asked_at_s)}"
    created_s = age(pod.metadata.creation_timestamp or "", wall_s)
    if created_s is None or created_s < TRIED_WITHIN_S or reported(pod):
        return ""
    return f"scheduler {scheduler} has not tried the pod since it was created at " + moment(
        wall_s - created_s
    )


def _placed(pod: Pod) -> str:
    """Return why no attempt is on record for a pod that was placed."""
    if pod.node and pod.annotation(PLACEMENT) is None:
        return "it was bound without Headroom: by spec.nodeName or by another scheduler"
    return "the attempt that placed it is no longer on record"


def _no_attempt(pod: Pod) -> str:
    """Return why no attempt is on record, and quote the scheduler's message in the pod's status."""
    if message := reported(pod):
        return (
            "its scheduler has not called Headroom for this pod lately. The scheduler reports: "
            f"{message[:MOST_QUOTED]}"
        )
    return (
        "its scheduler has not called Headroom for this pod lately, and has not reported why the "
        f"pod is pending: is scheduler {scheduler_of(pod)} running?"
    )


def _last_attempt(filtered: FilterView, not_offered: int, again_by: str | None) -> str:
    """Describe the last filter call: nodes offered, nodes that fit, and the next retry."""
    fits = f"{filtered.fits:,}" if filtered.fits else "none"
    message = f"kube-scheduler offered {counted(filtered.offered, 'node')}, of which "
    if filtered.observed_only and filtered.fits < filtered.offered:
        message += f"all passed, because Headroom only observes; mode enforce would pass {fits}"
    else:
        message += f"{fits} could take the pod"
    if not_offered:
        message += (
            f"; {counted(not_offered, 'node')} did not pass kube-scheduler's own checks "
            "(selectors, taints, CPU, replicas ...), or it had found enough nodes before"
        )
    if again_by:
        latest = f"{again_by[:19]}Z"
        message += f"; it retries when the pod fits on a node, at the latest at {latest}"
    return message
