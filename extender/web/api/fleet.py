"""The fleet in sums, model by model: are we full, and what is in the way?"""

from collections import Counter
from dataclasses import asdict, astuple, dataclass, fields
from operator import sub
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Depends
from pydantic import BaseModel
from starlette.responses import Response

from contract.reasons import Reason
from extender.cluster.sums import RunningSums
from extender.placement.equation import DeviceTerms
from extender.placement.snapshot import REASONS, NodeTerms, Snapshot
from extender.web.api.answers import (
    TAGGED,
    Held,
    holds,
    listed,
    unchanged,
)
from extender.web.api.context import Context
from extender.web.bodies import Body, ReasonView, reason_view, stamp


class ModelView(BaseModel):
    """All devices of one model. Promised includes what pods on their way add at the worst."""

    model: str
    devices: int
    allocatable_bytes: int
    promised_bytes: int
    #: Of strangers, and of pods beyond their requests.
    unowned_bytes: int
    used_bytes: int
    #: Of those that take pods; what is overcommitted elsewhere does not lessen it.
    headroom_bytes: int
    replicas_free: int
    fenced: int
    overcommitted: int


class FleetBody(Body):
    nodes: int
    #: Of nodes that take nothing, why; the most frequent first.
    closed: list[ReasonView]
    #: The largest first.
    models: list[ModelView]
    overcommitted_bytes: int


def router(context: Context) -> APIRouter:
    routes = APIRouter()
    running = RunningSums(_by_model, context.calls.give_way)
    Newest = Annotated[Snapshot, Depends(context.newest)]

    @routes.get("/v1/fleet", response_model=FleetBody, responses=TAGGED)
    def fleet(snap: Newest, held: Held = None) -> Response:
        """What all devices have, model by model, and how many nodes take nothing."""
        tag = context.tag(snap)
        if holds(held, tag):
            return unchanged(tag)
        closed, stale = _closed(snap, context.monotonic_s())
        with context.computes:
            found = dict(running.of(snap.nodes))
            for of_node in running.parts(stale):
                for model, sums in of_node.items():
                    found[model] = _without_room(found[model], sums)
                context.calls.give_way()
        models = [_Sums(*sums).view(model) for model, sums in found.items()]
        models.sort(key=lambda each: (-each.allocatable_bytes, each.model))
        body = FleetBody(
            generatedAt=stamp(context.wall_s()),
            snapshot_generation=snap.generation,
            nodes=len(snap.nodes),
            closed=[reason_view(*each) for each in closed.most_common()],
            models=[],
            overcommitted_bytes=context.overcommitted_bytes(),
        )
        return listed(context, body, "models", models, tag)

    return routes


@dataclass(slots=True)
class _Sums:
    devices: int = 0
    allocatable_bytes: int = 0
    promised_bytes: int = 0
    unowned_bytes: int = 0
    used_bytes: int = 0
    fenced: int = 0
    overcommitted: int = 0
    #: What pods can be given, where the node takes any.
    headroom_bytes: int = 0
    replicas_free: int = 0

    def add(self, terms: DeviceTerms) -> None:
        self.devices += 1
        self.allocatable_bytes += terms.allocatable_bytes
        self.promised_bytes += terms.promised_bytes + terms.awaited_bytes
        self.unowned_bytes += terms.unowned_bytes + terms.strays_bytes
        self.used_bytes += terms.device.used_bytes
        self.fenced += terms.fence is not None
        self.overcommitted += terms.headroom_bytes < 0
        if terms.fence is None:
            self.headroom_bytes += max(0, terms.headroom_bytes)
            self.replicas_free += terms.device.replicas.free

    def view(self, model: str) -> ModelView:
        return ModelView(model=model, **asdict(self))


#: Only nodes that take pods add to the fields from here on.
_FOR_PODS = [each.name for each in fields(_Sums)].index("headroom_bytes")


def _by_model(node: NodeTerms) -> dict[str, tuple[int, ...]]:
    sums: dict[str, _Sums] = {}
    for terms in node.devices:
        sums.setdefault(terms.device.model, _Sums()).add(terms)
    found = {model: astuple(of_model) for model, of_model in sums.items()}
    if node.reason is None:
        return found
    return {model: _without_room(each, each) for model, each in found.items()}


def _without_room(sums: tuple[int, ...], taken: tuple[int, ...]) -> tuple[int, ...]:
    """The sums without what these have for pods."""
    return *sums[:_FOR_PODS], *map(sub, sums[_FOR_PODS:], taken[_FOR_PODS:])


def _closed(snap: Snapshot, now_s: float) -> tuple[Counter[Reason], list[int]]:
    """Why nodes take nothing, and the rows of those of which that is only their report's age."""
    counts = np.bincount(snap.node_reason, minlength=len(REASONS)).tolist()
    closed = Counter({why: n for why, n in zip(REASONS, counts, strict=True) if why and n})
    stale = np.flatnonzero((snap.node_reason == 0) & (snap.fresh_until_s < now_s)).tolist()
    if stale:
        closed[Reason.STALE_REPORT] += len(stale)
    return closed, stale
