"""The GPU hours and the memory that namespaces held in a range of time, and what they cost."""

from collections import defaultdict
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from headroom.console.history.history import KEPT_S
from headroom.console.history.holdings import HeldMinutes, Holdings, summed
from headroom.console.history.ranges import PrometheusRanges, Range, of_holdings
from headroom.console.responses import Body, encoded
from headroom.console.view import View
from headroom.console.view_context import InContext, Newest
from headroom.console.views.decisions import moment_s
from headroom.console.views.history import MOST_S, ranges_of
from headroom.errors import PrometheusUnreadable

_HOUR_S, _DAY_S, _GIB = 3600.0, 86_400.0, float(1 << 30)


class CostsView(View):
    """GPU hours and memory of pods. A pod holds the share of a GPU that no other pod can use."""

    held_gpu_hours: float
    """The sum of the used, idle and unmeasured GPU hours."""
    used_gpu_hours: float
    """GPU hours in which the pod used an SM of the GPU."""
    idle_gpu_hours: float
    unmeasured_gpu_hours: float
    """GPU hours in which it was not known whether the pod used an SM."""
    held_gib_days: float
    unused_gib_days: float
    """Memory that was reserved and not in use."""
    unmeasured_gib_days: float
    """Memory reserved by pods whose use was not measured."""
    cost: float | None
    """Cost of the held and of the idle GPU hours, in the currency of setting gpu_hour_price; null
    if it is not set."""
    idle_cost: float | None


class NamespaceCostsView(CostsView):
    namespace: str
    """Namespace. "(others)" sums all namespaces beyond the 200 that held most."""


class CostsBody(Body):
    source: str = Field(description="console: its own records; prometheus: read from Prometheus")
    from_s: float
    """Start and end, as Unix times."""
    to_s: float
    covered_s: float
    """Seconds of this time for which there are records. The sums cover only these seconds."""
    gpu_hour_price: float | None
    """Setting gpu_hour_price; null if it is not set."""
    namespaces: list[NamespaceCostsView]
    """Sorted by idle GPU hours, most first."""
    total: CostsView


Since = Annotated[
    str,
    Query(
        description="A time, or an age such as 30d. Ranges of more than an hour are read from "
        "Prometheus "
        "(setting prometheus_url).",
        examples=["1h"],
    ),
]
InNamespace = Annotated[
    str, Query(max_length=253, description="Only this namespace.", examples=["ml"])
]

routes = APIRouter()


@routes.get(
    "/v1/costs",
    response_model=CostsBody,
    responses={
        503: {"description": "Prometheus does not answer, or prometheus_url is not set"},
    },
)
async def costs(
    context: InContext, snap: Newest, since: Since = "1h", namespace: InNamespace = ""
) -> Response:
    """Return the GPU hours and the memory that the pods of each namespace held in the last hour or
    since a time, how much of them was used, and what they cost."""
    now_s = context.wall_s()
    within = Range(max(moment_s(since, now_s), now_s - MOST_S), now_s)
    if within.begin_s >= now_s:
        raise HTTPException(422, "query since: the time must be in the past. Example: since=30d")
    if in_console := now_s - within.begin_s <= KEPT_S:
        covered_s, sums = _recorded(context.history.held, within)
    else:
        ranges = ranges_of(context)
        try:
            covered_s, sums = await run_in_threadpool(_read, ranges, within)
        except PrometheusUnreadable as err:
            raise HTTPException(503, f"Prometheus cannot be read: {err}") from err
    price = context.gpu_hour_price()
    chosen = {name: held for name, held in sums.items() if namespace in ("", name)}
    total = Holdings()
    for held in chosen.values():
        total = total.plus(held)
    return encoded(
        CostsBody(
            **context.head(snap),
            source="console" if in_console else "prometheus",
            from_s=within.begin_s,
            to_s=within.end_s,
            covered_s=round(covered_s, 1),
            gpu_hour_price=price,
            namespaces=[
                NamespaceCostsView(namespace=name, **_view(held, price).model_dump())
                for name, held in sorted(
                    chosen.items(), key=lambda each: (-each[1].idle_gpus, -each[1].gpus, each[0])
                )
            ],
            total=_view(total, price),
        )
    )


def _recorded(held: HeldMinutes, within: Range) -> tuple[float, dict[str, Holdings]]:
    """Return the recorded seconds, and the GPU seconds and byte seconds of each namespace."""
    minutes = held.since(within.begin_s)
    return sum(each.covered_s for each in minutes), dict(summed(each.held for each in minutes))


def _read(ranges: PrometheusRanges, within: Range) -> tuple[float, dict[str, Holdings]]:
    """Return what ``_recorded`` returns, but read it from Prometheus.

    Blocks. Raises ``PrometheusUnreadable``.
    """
    fields: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    covered_s = 0.0
    for each in ranges.read(of_holdings(ranges.queries, within), within):
        # Each value is the sum over the step before it, so the first value is about the time before
        # the range.
        seconds = sum(value for value in each.values[1:] if value is not None)
        if each.kind == "covered":
            covered_s = max(covered_s, seconds)
        else:
            # Several servers behind one address can return a series twice, with other labels.
            of = fields[each.labels.get("namespace", "")]
            name = f"{each.labels.get('state', '')}_{each.kind}"
            of[name] = max(of[name], seconds)
    return covered_s, {
        name: Holdings(*(sums.get(field, 0.0) for field in Holdings._fields))
        for name, sums in fields.items()
    }


def _view(held: Holdings, price: float | None) -> CostsView:
    """Return the costs of ``held``, which is in GPU seconds and byte seconds."""

    def days(byte_s: float) -> float:
        return round(byte_s / _GIB / _DAY_S, 4)

    def cost(gpu_s: float) -> float | None:
        return None if price is None else round(gpu_s / _HOUR_S * price, 2)

    return CostsView(
        held_gpu_hours=round(held.gpus / _HOUR_S, 4),
        used_gpu_hours=round(held.active_gpus / _HOUR_S, 4),
        idle_gpu_hours=round(held.idle_gpus / _HOUR_S, 4),
        unmeasured_gpu_hours=round(held.unmeasured_gpus / _HOUR_S, 4),
        held_gib_days=days(held.held_bytes),
        unused_gib_days=days(held.unused_bytes),
        unmeasured_gib_days=days(held.unmeasured_bytes),
        cost=cost(held.gpus),
        idle_cost=cost(held.idle_gpus),
    )
