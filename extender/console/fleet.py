"""Totals of the fleet by GPU model, and the reasons why nodes take no pods."""

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass

import numpy as np
from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import Response

from contract.reasons import Reason
from extender.console.responses import (
    TAGGED,
    Body,
    IfNoneMatch,
    ReasonView,
    is_current,
    listed,
    reason_view,
    unchanged,
)
from extender.console.view_context import InContext, Newest
from extender.placement.device_accounting import DeviceTerms
from extender.placement.snapshot import REASONS, Snapshot
from extender.state.overuse import first_of_each_memory


class ModelView(BaseModel):
    """All devices of one model. Reservations include unconfirmed pods in the worst case.

    Sums in bytes count memory that several devices share once, for the model of the first device.
    """

    model: str
    devices: int
    allocatable_bytes: int
    reservation_bytes: int
    #: Use by no known pod, and by pods without a reservation.
    unattributed_bytes: int
    used_bytes: int
    #: On devices that take pods. Overcommitted devices count as 0, not as negative.
    headroom_bytes: int
    replicas_free: int
    unhealthy: int
    cordoned: int
    overcommitted: int


class FleetBody(Body):
    nodes: int
    #: Why nodes take no pods, with the number of nodes; the most frequent first.
    closed: list[ReasonView]
    #: The largest first.
    models: list[ModelView]
    overcommitted_bytes: int


routes = APIRouter()


@routes.get("/v1/fleet", response_model=FleetBody, responses=TAGGED)
def fleet(context: InContext, snap: Newest, etag: IfNoneMatch = None) -> Response:
    """Return totals over all devices by GPU model, and the nodes that take no pods."""
    tag = context.tag(snap)
    if is_current(etag, tag):
        return unchanged(tag)
    now_s = context.monotonic_s()
    body = FleetBody(
        **context.head(snap),
        nodes=len(snap.nodes),
        closed=[reason_view(*each) for each in _closed(snap, now_s).most_common()],
        models=[],
        overcommitted_bytes=context.overcommitted_bytes(),
    )
    return listed(body, "models", _models(snap, now_s), tag)


@dataclass(slots=True)
class _Sums:
    devices: int = 0
    allocatable_bytes: int = 0
    reservation_bytes: int = 0
    unattributed_bytes: int = 0
    used_bytes: int = 0
    unhealthy: int = 0
    cordoned: int = 0
    overcommitted: int = 0
    #: Only devices that take pods.
    headroom_bytes: int = 0
    replicas_free: int = 0

    def count(self, terms: DeviceTerms, is_open: bool) -> None:
        """Count a device, without its memory."""
        self.devices += 1
        self.unhealthy += terms.unhealthy is not None
        self.cordoned += terms.cordoned
        self.overcommitted += terms.headroom_bytes < 0
        if is_open and terms.health_issue is None:
            self.replicas_free += terms.device.replicas.free

    def add_memory(self, terms: DeviceTerms) -> None:
        self.allocatable_bytes += terms.allocatable_bytes
        self.reservation_bytes += terms.reservation_bytes + terms.unconfirmed_bytes
        self.unattributed_bytes += terms.unattributed_bytes + terms.unreserved_pods_bytes
        self.used_bytes += max(0, terms.device.used_bytes)


def _models(snap: Snapshot, now_s: float) -> list[ModelView]:
    sums = defaultdict[str, _Sums](_Sums)
    are_open = (snap.node_reason == 0) & (snap.fresh_until_s >= now_s)
    for node, is_open in zip(snap.nodes, are_open.tolist(), strict=True):
        for terms in node.devices:
            sums[terms.device.model].count(terms, is_open)
        for terms in first_of_each_memory(node.devices):
            sums[terms.device.model].add_memory(terms)
        taking_pods = [each for each in node.devices if is_open and each.health_issue is None]
        for terms in first_of_each_memory(taking_pods):
            sums[terms.device.model].headroom_bytes += max(0, terms.headroom_bytes)
    models = [ModelView(model=model, **asdict(each)) for model, each in sums.items()]
    return sorted(models, key=lambda each: (-each.allocatable_bytes, each.model))


def _closed(snap: Snapshot, now_s: float) -> Counter[Reason]:
    """Count the nodes that take no pods by reason."""
    counts = np.bincount(snap.node_reason, minlength=len(REASONS)).tolist()
    closed = Counter({why: n for why, n in zip(REASONS, counts, strict=True) if why and n})
    stale = (snap.node_reason == 0) & (snap.fresh_until_s < now_s)
    return closed + Counter({Reason.STALE_REPORT: int(stale.sum())})
