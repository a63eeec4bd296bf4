"""The overview: devices at risk, pods that wait, and what is broken, most urgent first."""

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from headroom.console.responses import Body, encoded
from headroom.console.view import View
from headroom.console.view_context import Context, InContext, Newest, shared
from headroom.console.views.broken import BrokenView, broken
from headroom.console.views.pending_by_cause import WaitingGroups, WaitingView
from headroom.console.views.risks import RiskView, risks
from headroom.core.placement.snapshot import Snapshot

Limit = Annotated[
    int, Query(ge=1, le=1000, description="Maximum length of each list.", examples=[10])
]


class TotalsView(View):
    """Length of each list without the limit. ``waiting_pods`` counts the pods of all groups."""

    at_risk: int
    waiting: int
    waiting_pods: int
    broken: int


class OverviewBody(Body):
    totals: TotalsView
    at_risk: list[RiskView]
    waiting: list[WaitingView]
    broken: list[BrokenView]


routes = APIRouter()


@routes.get("/v1/overview", response_model=OverviewBody)
def overview(context: InContext, request: Request, snap: Newest, limit: Limit = 10) -> Response:
    """Return devices at risk, waiting pods and what is broken, most urgent first. At most 10 groups
    of waiting pods are listed, because each is tried on a copy of the cluster."""
    groups = shared(request, WaitingGroups)
    return context.answers.of(
        request, context.monotonic_s(), lambda: _answer(context, snap, groups, limit)
    )


def _answer(context: Context, snap: Snapshot, groups: WaitingGroups, limit: int) -> Response:
    waiting, waiting_count = groups.of(context, snap)
    (at_risk, risk_count), faults = risks(context, snap, limit), broken(context, snap)
    totals = TotalsView(
        at_risk=risk_count,
        waiting=waiting_count,
        waiting_pods=len(context.cluster.unbound()),
        broken=len(faults),
    )
    return encoded(
        OverviewBody(
            **context.head(snap),
            totals=totals,
            at_risk=at_risk,
            waiting=waiting[:limit],
            broken=faults[:limit],
        )
    )
