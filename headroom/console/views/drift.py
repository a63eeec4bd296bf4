"""The drift of every pod: reserved against measured memory, predicted against actual devices."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from headroom.console.responses import (
    TAGGED,
    Body,
    IfNoneMatch,
    is_current,
    listed,
    stamp,
    unchanged,
)
from headroom.console.times import Time
from headroom.console.view import View
from headroom.console.view_context import Context, InContext, Newest
from headroom.contract.gpunode import ADOPTED, GPUNode, Reservation
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.readers import PredictionTracker
from headroom.core.cluster.trackers.prediction_tracker import Outcome
from headroom.core.placement.prediction_outcome import Result, chosen, observed, predicted


class PodOnDeviceView(View):
    uuid: str
    reserved_bytes: int | None
    """Memory that the pod reserved on the device; null if it has no reservation there."""
    measured_bytes: int | None
    """Null if the use of some container was not measured."""
    peak_bytes: int | None
    """Sum over the containers of the maximum use since the container started; null if any has no
    maximum. The maxima can be at different times."""


class DriftView(View):
    namespace: str
    name: str
    uid: str
    node: str
    result: str | None
    """hit; shifted (pods that were bound later could move it to this device, and it fit there);
    miss; unseen (no report showed the pod, or too much changed before one did); "waiting" until a
    report shows the pod; "adopted" if Headroom did not bind it; null if it was observed before this
    replica started."""
    predicted: list[str]
    """The candidate devices at the time of the bind."""
    choice: list[str]
    """The devices that the ledger chose on a steered node; empty on other nodes."""
    observed: list[PodOnDeviceView]
    surprise: str | None
    """Why the prediction was missed, as a code and as a sentence; null if it was not missed."""
    message: str | None
    since: Time | None
    """When the reservation was made."""
    window_s: float | None
    """Seconds from the reservation to the report that showed the pod."""
    overuse_bytes: int
    """Use above the request."""
    overcommitted_bytes: int
    """By how much its device is overcommitted; the maximum if it has several devices. 0 if none
    is."""


class ClaimView(View):
    """The use of a device of a DRA driver by one pod, or by processes of no known pod if ``uid`` is
    empty."""

    node: str
    uuid: str
    pool: str
    """The device's pool, and its name in the ResourceSlice."""
    device: str
    namespace: str
    name: str
    uid: str
    claims: list[str]
    """Names of the pod's ResourceClaims on the device; empty if it has none there."""
    claimed_bytes: int
    """Sum of their consumedCapacity, or the device's memory if a claim holds the whole device."""
    measured_bytes: int | None
    """Null if the use of some container was not measured."""
    excess_bytes: int
    """Use that no claim accounts for."""


class MissView(View):
    """A missed prediction that this replica observed. The pod may have ended meanwhile."""

    namespace: str
    name: str
    uid: str
    node: str
    at: Time
    predicted: list[str]
    choice: list[str]
    observed: list[str]
    surprise: str
    message: str
    window_s: float
    overcommitted_bytes: int
    """By how much its device was overcommitted when the pod was observed there; the maximum if it
    has several devices."""


class DriftBody(Body):
    pods: list[DriftView]
    claims: list[ClaimView]
    """Sorted by node, device and pod."""
    results: dict[str, int]
    """Number of pods by result, over all placements that this replica observed since it started."""
    misses: list[MissView]
    """Latest first."""


Pods = Annotated[
    bool,
    Query(
        description="false: return only the counts, the misses and the claims, not the pods.",
        examples=["false"],
    ),
]
Claims = Annotated[bool, Query(description="false: leave out the claims.", examples=["false"])]

routes = APIRouter()


@routes.get("/v1/drift", response_model=DriftBody, responses=TAGGED)
def drift(
    context: InContext,
    snap: Newest,
    pods: Pods = True,
    claims: Claims = True,
    etag: IfNoneMatch = None,
) -> Response:
    """List each pod that has a reservation, with its reserved and used memory and its predicted and
    actual devices. Count the predictions by result, and list the misses."""
    tracker = context.cluster.observations
    figures = (*dict(tracker.totals).values(), len(tracker.misses), context.claims.version)
    tag = context.tag(snap, *figures)
    if is_current(etag, tag):
        return unchanged(tag)
    # Copy both first, because the event loop adds to them while this thread reads.
    misses, totals = list(tracker.misses), dict(tracker.totals)
    epoch_s = context.wall_s() - context.monotonic_s()
    body = DriftBody(
        **context.head(snap),
        pods=[],
        claims=list(claim_views(context)) if claims else [],
        results={result.value: totals.get(result, 0) for result in Result},
        misses=[_miss(each, epoch_s) for each in reversed(misses)],
    )
    views = drift_views(context.cluster) if pods else iter(())
    return listed(body, "pods", views, tag)


def drift_views(cluster: Cluster) -> Iterator[DriftView]:
    """Yield a view of every pod with a reservation, by node name."""
    overuse_bytes, overcommitted_bytes = Counter[str](), dict[str, int]()
    for each in cluster.overuses.now():
        overuse_bytes[each.uid] += each.excess_bytes
    for over in cluster.overcommits.now():
        for holder in over.holders:
            most = max(over.excess_bytes, overcommitted_bytes.get(holder.uid, 0))
            overcommitted_bytes[holder.uid] = most
    for gpunode in sorted(cluster.gpunodes(), key=lambda gpunode: gpunode.name):
        yield from _pods(gpunode, cluster.observations, overuse_bytes, overcommitted_bytes)


def claim_views(context: Context) -> Iterator[ClaimView]:
    """Yield the use of each device that a DRA driver allocates, with the claims on it."""
    reports = (
        (node, gpunode.status)
        for node in context.claims.nodes()
        if (gpunode := context.cluster.gpunode(node)) is not None and gpunode.status is not None
    )
    for use in context.claims.uses(reports):
        yield ClaimView.of(
            use, pool=use.device.pool, device=use.device.name, measured_bytes=use.used_bytes
        )


def _pods(
    gpunode: GPUNode,
    tracker: PredictionTracker,
    overuse_bytes: Mapping[str, int],
    overcommitted_bytes: Mapping[str, int],
) -> Iterator[DriftView]:
    """Yield the pods of one node. Both mappings are from uids to bytes."""
    for uid, reservation in gpunode.spec.reservations.items():
        outcome = tracker.of_pod(gpunode.name, uid)
        surprise = outcome.surprise if outcome else None
        adopted = ADOPTED in reservation.flags
        yield DriftView(
            namespace=reservation.namespace,
            name=reservation.name,
            uid=uid,
            node=gpunode.name,
            result="adopted" if adopted else _result(gpunode, uid, outcome, tracker),
            predicted=[] if adopted else list(predicted(reservation)),
            choice=list(chosen(reservation)),
            observed=list(_devices(gpunode, uid, reservation)),
            surprise=surprise.value if surprise else None,
            message=surprise.sentence if surprise else None,
            since=reservation.since or None,
            window_s=round(outcome.window_s, 3) if outcome else None,
            overuse_bytes=overuse_bytes.get(uid, 0),
            overcommitted_bytes=overcommitted_bytes.get(uid, 0),
        )


def _result(
    gpunode: GPUNode, uid: str, outcome: Outcome | None, tracker: PredictionTracker
) -> str | None:
    if outcome is not None:
        return outcome.result.value
    return "waiting" if tracker.is_pending(gpunode.name, uid) else None


def _devices(gpunode: GPUNode, uid: str, reservation: Reservation) -> Iterator[PodOnDeviceView]:
    status = gpunode.status
    if status is None:
        return
    rows = [use for use in status.pods if use.uid == uid]
    for uuid in observed(status, uid):
        charged = [each for each in reservation.charges if uuid in each.candidates]
        uses = [use for use in rows if use.device == uuid]
        yield PodOnDeviceView(
            uuid=uuid,
            reserved_bytes=sum(each.bytes_on(uuid, rows) for each in charged) if charged else None,
            measured_bytes=_sum(use.used_bytes for use in uses),
            peak_bytes=_sum(use.peak_bytes for use in uses),
        )


def _sum(counts: Iterable[int | None]) -> int | None:
    """Return the sum, or None if a part is unknown."""
    known = list(counts)
    return None if None in known else sum(each or 0 for each in known)


def _miss(outcome: Outcome, epoch_s: float) -> MissView:
    assert outcome.surprise is not None
    return MissView(
        namespace=outcome.reservation.namespace,
        name=outcome.reservation.name,
        uid=outcome.uid,
        node=outcome.node,
        at=stamp(epoch_s + outcome.at_s),
        predicted=list(outcome.predicted),
        choice=list(chosen(outcome.reservation)),
        observed=list(outcome.observed),
        surprise=outcome.surprise.value,
        message=outcome.surprise.sentence,
        window_s=round(outcome.window_s, 3),
        overcommitted_bytes=outcome.overcommitted_bytes,
    )
