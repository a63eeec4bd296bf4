"""The recorded events in the life of a pod: created, tried, bound, confirmed, evicted."""

from collections.abc import Iterator, Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException
from starlette.responses import Response

from headroom.console.feed.feed import FeedEvent
from headroom.console.responses import UNKNOWN, Body, OfPod, counted, encoded, stamp, stamp_again
from headroom.console.times import Time
from headroom.console.view import View
from headroom.console.view_context import Context, InContext, Newest, Visible
from headroom.console.views.decision_bodies import DecisionView, Unanswered
from headroom.console.views.decisions import Sought, decisions
from headroom.console.views.history import SeriesView, pod_series
from headroom.console.views.overcommitted import failed_container_views
from headroom.contract.kube import Pod
from headroom.contract.quantity import gib
from headroom.core.cluster.crowded_pods import crowdings_of
from headroom.runtime.server.auth import Sees

#: Maximum number of entries from decisions, from changes, and from each device's growth. The latest
#: are kept.
MOST_DECISIONS, MOST_CHANGES, MOST_GROWTH = 50, 50, 10
#: A new highest use becomes an entry if it exceeds the last such entry by this ratio of the
#: request, and by at least this many bytes.
GROWTH_RATIO, GROWTH_BYTES = 0.1, 1 << 29
KEPT = (
    "The timeline has the decisions in the journals of the extenders (setting journal_decisions, "
    "at most a day), the last 4,096 changes that this console saw since it started, and an hour "
    "of use. Earlier entries are missing."
)


class EntryView(View):
    at: Time
    kind: str
    """created; filtered, requeued (tried again after a rejection), preempting; bound, declined
    or failed (a bind); reserved, confirmed (a report shows it on its device), missed (on another
    device), grew, fell, overusing (uses more than it reserved), within (no longer), overcommitted
    (its device), relieved (its device is no longer overcommitted), crashed (a container ended with
    an error), evicting (marked for eviction), staying (no longer marked), removed (its reservation
    was removed)."""
    message: str
    """One sentence."""


class TimelineBody(Body):
    entries: list[EntryView]
    """Oldest first."""
    kept: str
    """Which entries are kept, and for how long."""
    unanswered: list[Unanswered]


#: Kind of a change, or its kind and cause -> kind of the entry, and the default sentence.
_CHANGES = {
    "reservation_made": ("reserved", "memory is reserved on node {node}"),
    "reservation_removed": ("removed", "its reservation on node {node} was removed"),
    "reservation_changed is_to_leave": ("evicting", "it is marked for eviction"),
    "reservation_changed may_stay": ("staying", "it is no longer marked for eviction"),
    "pod_observed": ("confirmed", "a report shows it on device {device}"),
    "overuse_began": ("overusing", "it uses more than it reserved on device {device}"),
    "overuse_ended": ("within", "it no longer uses more than it reserved on device {device}"),
    "prediction_missed": ("missed", "it is on another device than predicted"),
}

routes = APIRouter()


async def _grown(context: InContext, of_pod: OfPod) -> list[EntryView]:
    """Return the growth of the pod. Runs on the event loop, because only it may read the
    history."""
    at_s, series = pod_series(context, *of_pod)
    uses = [each for each in series if each.kind == "pod"]
    return [entry for each in uses for entry in growth(at_s, each)[-MOST_GROWTH:]]


@routes.get("/v1/timeline", response_model=TimelineBody, responses=UNKNOWN)
def timeline(
    context: InContext,
    of_pod: OfPod,
    snap: Newest,
    sees: Visible,
    grown: Annotated[list[EntryView], Depends(_grown)],
) -> Response:
    """Return what happened to the pod, oldest first. Each caller that may ``get`` the pod may read
    it."""
    namespace, name = of_pod
    pod = context.cluster.pod_named(namespace, name)
    sought = Sought(pod=(namespace, name), uid=pod.metadata.uid if pod else None)
    found, unanswered = decisions(context, sought, MOST_DECISIONS, sees)
    uids = {pod.metadata.uid} if pod else {each.uid for each in found}
    changes = [
        each
        for each in context.feed.past()
        if each.uid in uids or (not uids and (each.namespace, each.name) == (namespace, name))
    ]
    entries = [*_of_decisions(found), *grown]
    entries += [entry for each in changes[-MOST_CHANGES:] for entry in _of_change(each)]
    for uid in uids:
        entries += _crowded(context, uid, sees)
    if pod is not None:
        entries += _crashed(context, pod)
    if pod is None and not entries:
        raise HTTPException(404, f"pod {namespace}/{name} is not known, and nothing is on record")
    if pod is not None and (at := stamp_again(pod.metadata.creation_timestamp or "")):
        entries.append(EntryView(at=at, kind="created", message="the pod was created"))
    entries += _reserved(context, entries, pod.metadata.uid, pod.node) if pod else ()
    entries.sort(key=lambda each: each.at)
    return encoded(
        TimelineBody(**context.head(snap), entries=entries, kept=KEPT, unanswered=unanswered)
    )


def _crowded(context: Context, uid: str, sees: Sees) -> Iterator[EntryView]:
    """Yield when the devices of the pod became overcommitted, and when this ended."""
    found = crowdings_of(context.cluster, uid)
    began = {(*each.over.key, each.began_s) for each in found}
    ended = {(*each.over.key, each.ended_s) for each in found}
    for crowding in found:
        each = crowding.at_worst()
        where = f"{each.gpu} of node {each.over.node}"
        excess = gib(each.over.excess_bytes, up=True)
        is_same = (*each.over.key, each.began_s) in ended
        became = "is still overcommitted" if is_same else "became overcommitted"
        message = f"{where} {became}, by up to {excess}: {each.causes(sees)}"
        yield EntryView(at=stamp(each.began_s), kind="overcommitted", message=message)
        if each.ended_s is not None and (*each.over.key, each.ended_s) not in began:
            message = f"{where} is no longer overcommitted"
            yield EntryView(at=stamp(each.ended_s), kind="relieved", message=message)


def _crashed(context: Context, pod: Pod) -> Iterator[EntryView]:
    """Yield the last end of each container that failed."""
    for each in failed_container_views(context.cluster, pod):
        if each.at is not None:
            yield EntryView(at=each.at, kind="crashed", message=each.message)


def growth(at_s: Sequence[float], use: SeriesView) -> list[EntryView]:
    """Return an entry for each new highest use of a device, and for each fall to less than a tenth
    of it, after which the next use counts as new. ``at_s`` has the Unix times of the values."""
    step_bytes = max(GROWTH_BYTES, GROWTH_RATIO * (use.requested_bytes or 0))
    found: list[EntryView] = []
    highest: float | None = None
    for when_s, value in zip(at_s, use.values, strict=True):
        if value is None:
            continue
        if highest is not None and value >= highest + step_bytes:
            message = (
                f"its use of device {use.device} grew from {gib(int(highest))} to {gib(int(value))}"
            )
            if use.requested_bytes is not None and value > use.requested_bytes:
                message += (
                    f", {gib(int(value) - use.requested_bytes, up=True)} more than it reserved"
                )
            found.append(EntryView(at=stamp(when_s), kind="grew", message=message))
            highest = value
        elif highest is not None and highest - value >= step_bytes and value < highest / 10:
            message = (
                f"its use of device {use.device} fell from {gib(int(highest))} to {gib(int(value))}"
            )
            found.append(EntryView(at=stamp(when_s), kind="fell", message=message))
            highest = value
        highest = value if highest is None else highest
    return found


def _of_decisions(found: Sequence[DecisionView]) -> Iterator[EntryView]:
    """Yield the calls of the verbs. ``found`` has the newest decision first."""
    was_rejected = False
    for each in reversed(found):
        if tried := each.filter:
            offered = f"{counted(tried.offered, 'node')} offered"
            fits = f"{tried.fits:,}" if tried.fits else "none"
            message = f"kube-scheduler tried it: {offered}, {fits} could take it"
            if tried.observed_only and tried.fits < tried.offered:
                message = (
                    f"kube-scheduler tried it: {offered}, all passed in mode observe; mode enforce "
                    f"would pass {fits}"
                )
            if not tried.fits and tried.reasons:
                most = max(tried.reasons, key=lambda reason: reason.nodes)
                message += f"; {counted(most.nodes, 'node')}: {most.message}"
            if tried.times > 1:
                message += f" ({tried.times:,} attempts since {each.first_at[:19]}Z)"
            kind = "requeued" if was_rejected else "filtered"
            yield EntryView(at=tried.at, kind=kind, message=message)
            was_rejected = not tried.fits and not tried.observed_only
        if each.preempt:
            message = "; ".join(each.preempt.lines)
            yield EntryView(at=each.preempt.at, kind="preempting", message=message)
        if bind := each.bind:
            why = f": {bind.message}" if bind.message else ""
            message = f"bind to node {bind.node}: {bind.outcome}{why}"
            yield EntryView(at=bind.at, kind=bind.outcome, message=message)


def _of_change(change: FeedEvent) -> Iterator[EntryView]:
    found = _CHANGES.get(f"{change.kind} {change.cause}") or _CHANGES.get(change.kind)
    if found is not None:
        kind, sentence = found
        message = sentence.format(node=change.node, device=change.device)
        if change.message:
            message += f": {change.message}"
        yield EntryView(at=stamp(change.at_s), kind=kind, message=message)


def _reserved(
    context: Context, entries: Sequence[EntryView], uid: str, node: str
) -> Iterator[EntryView]:
    """Yield the reservation in the ledger, unless the entries already contain its bind."""
    gpunode = context.cluster.gpunode(node) if node else None
    reservation = gpunode.spec.reservations.get(uid) if gpunode else None
    at = stamp_again(reservation.since) if reservation else None
    if at and not {"bound", "reserved"} & {e.kind for e in entries}:
        message = f"memory is reserved on node {node}"
        yield EntryView(at=at, kind="reserved", message=message)
