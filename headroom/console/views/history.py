"""The last hour of a device, a pod and the fleet, and longer ranges from Prometheus."""

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, HTTPException, Query
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from headroom.console.history.history import (
    DEVICE_COLUMNS,
    KEPT_S,
    RESERVED,
    RESOLUTION_S,
    SM,
    UNIT_BYTES,
    UNIT_RATIO,
    UNKNOWN,
    USED,
    Layout,
    PodOn,
    Steps,
    Totals,
    Values,
)
from headroom.console.history.ranges import PrometheusRanges, Range
from headroom.console.responses import UNKNOWN as NOT_KNOWN
from headroom.console.responses import Body, OfPod, encoded, unknown_node
from headroom.console.view import View
from headroom.console.view_context import Context, InContext, Newest
from headroom.console.views.decisions import moment_s
from headroom.console.views.devices import NodeName, Uuid
from headroom.core.placement.snapshot import Snapshot
from headroom.errors import PrometheusUnreadable
from headroom.runtime.promql import RangeQuery

Parts = Sequence[tuple[Layout, Steps, Values]]


class SeriesView(View):
    kind: str
    """reserved, used, sm or pod (use of the device by a pod). The history of the fleet has the
    names of fields of ``/v1/fleet`` instead."""
    unit: str
    """bytes, ratio or count."""
    device: str | None = None
    namespace: str | None = None
    name: str | None = None
    uid: str | None = None
    requested_bytes: int | None = None
    """The request of a pod; null if it has no reservation."""
    values: list[float | None]
    """One value for each time in ``at_s``. A value holds until the next. It is null if it was not
    measured, or if the report was stale."""


class HistoryBody(Body):
    source: str
    """"console" if this console recorded it, otherwise "prometheus"."""
    resolution_s: float
    """Shortest time between two values. Memory is rounded to ``resolution_bytes``."""
    resolution_bytes: int
    from_s: float = Field(description="Unix time of the earliest value that could be on record.")
    at_s: list[float]
    """Unix times, ascending, at which a value of the series changed. The last is now. Empty if
    there are no values."""
    series: list[SeriesView]


Since = Annotated[
    str | None,
    Query(
        description="A time, or an age such as 6h. Ranges of more than an hour are read from "
        "Prometheus "
        "(setting prometheus_url).",
        examples=["30m"],
    ),
]
_UNANSWERED: dict[int | str, dict[str, Any]] = {
    503: {"description": "Prometheus does not answer, or the setting prometheus_url is missing"}
}
#: The longest range in seconds: a year.
MOST_S = 366 * 86_400.0

routes = APIRouter()


@routes.get("/v1/history/fleet", response_model=HistoryBody, responses=_UNANSWERED)
async def fleet(context: InContext, snap: Newest, since: Since = None) -> Response:
    """Return the sums over all devices and the number of pending pods, for the last hour or since a
    time."""
    if within := _range(context, since):
        return await _from_prometheus(context, snap, ranges_of(context).queries.fleet(), within)
    found = context.history.totals()
    series = [
        SeriesView(kind=kind, unit=unit, values=[getattr(each, field) for each in found])
        for kind, unit, field in (
            *((name, "bytes", f"{name}_bytes") for name in _FLEET_BYTES),
            ("overcommitted_devices", "count", "overcommitted_devices"),
            ("pending_pods", "count", "pending_pods"),
        )
    ]
    at_s = [float(each.step * RESOLUTION_S) for each in found]
    return encoded(_body(context.head(snap), context.history.first_step, at_s, series))


_FLEET_BYTES = tuple(
    name.removesuffix("_bytes") for name in Totals.__struct_fields__ if name.endswith("_bytes")
)


@routes.get(
    "/v1/history/nodes/{name}/devices/{uuid}",
    response_model=HistoryBody,
    responses=NOT_KNOWN | _UNANSWERED,
)
async def device(
    context: InContext, name: NodeName, uuid: Uuid, snap: Newest, since: Since = None
) -> Response:
    """Return the history of a device for the last hour or since a time. It has the reserved and
    used memory, the SM activity, and the use of each pod on the device, including pods that have
    ended."""
    if within := _range(context, since):
        queries = ranges_of(context).queries.device(name, uuid)
        return await _from_prometheus(context, snap, queries, within, uuid)
    history = context.history
    if name not in snap.row_of and history.layout(name) is None:
        raise unknown_node(name)
    parts = history.since(name, history.first_step)
    if not any(uuid in layout.devices for layout, _, _ in parts):
        row = snap.row_of.get(name)
        if row is None or all(each.device.uuid != uuid for each in snap.nodes[row].devices):
            raise HTTPException(404, f"no history of device {uuid} of node {name} is on record")
        return encoded(_body(context.head(snap), history.first_step, [], []))
    series = [
        *(_column(parts, uuid, kind, column) for kind, column in _KINDS),
        *_pods(parts, lambda each, layout: layout.devices[each.slot] == uuid),
    ]
    at_s = _times(parts, history.first_step, context.wall_s())
    return encoded(_body(context.head(snap), history.first_step, at_s, series))


_KINDS = (("reserved", RESERVED), ("used", USED), ("sm", SM))


@routes.get(
    "/v1/history",
    response_model=HistoryBody,
    responses=NOT_KNOWN | _UNANSWERED,
)
async def pod(context: InContext, of_pod: OfPod, snap: Newest, since: Since = None) -> Response:
    """Return the history of a pod for the last hour or since a time: its use of each of its
    devices, and for the last hour also their SM activity. Each caller that may ``get`` the pod may
    read it."""
    namespace, name = of_pod
    if within := _range(context, since):
        queries = [ranges_of(context).queries.pod(namespace, name)]
        return await _from_prometheus(context, snap, queries, within)
    at_s, series = pod_series(context, namespace, name)
    if not series and context.cluster.pod_named(namespace, name) is None:
        raise HTTPException(
            404,
            f"no history of pod {namespace}/{name} is on record: no report has shown it on a GPU",
        )
    return encoded(_body(context.head(snap), context.history.first_step, at_s, series))


def pod_series(context: Context, namespace: str, name: str) -> tuple[list[float], list[SeriesView]]:
    """Return the last hour of a pod: the times, and for each of its devices a series of its use and
    a series of the device's SM activity. Both are empty if no report has shown the pod. Only the
    event loop may call it."""
    history, known = context.history, context.cluster.pod_named(namespace, name)
    nodes = [known.node] if known is not None and known.node else history.nodes()
    for node in nodes:
        parts = history.since(node, history.first_step)
        series = list(
            _pods(parts, lambda each, _: (each.namespace, each.name) == (namespace, name))
        )
        if series:
            at_s = _times(parts, history.first_step, context.wall_s())
            uuids = dict.fromkeys(each.device or "" for each in series)
            return at_s, [*series, *(_column(parts, uuid, "sm", SM) for uuid in uuids)]
    return [], []


def _range(context: Context, since: str | None) -> Range | None:
    """Return the range to read from Prometheus, or None if the console has recorded it."""
    if since is None:
        return None
    now_s = context.wall_s()
    begin_s = moment_s(since, now_s)
    if now_s - begin_s <= KEPT_S:
        return None
    return Range(max(begin_s, now_s - MOST_S), now_s)


def ranges_of(context: Context) -> PrometheusRanges:
    """Return the reader of Prometheus.

    Raises ``HTTPException`` 503 if setting prometheus_url is missing.
    """
    if context.ranges is None:
        raise HTTPException(
            503,
            "the console records only the last hour; for a longer range set prometheus_url. "
            "Example: prometheus_url: http://prometheus.monitoring:9090",
        )
    return context.ranges


async def _from_prometheus(
    context: Context,
    snap: Snapshot,
    queries: Sequence[RangeQuery],
    within: Range,
    device: str | None = None,
) -> Response:
    """Return the series of the queries.

    ``device`` is the UUID of the device of all series. If it is None, each series has the UUID in
    its label ``UUID``.
    """
    ranges = ranges_of(context)
    try:
        found = await run_in_threadpool(ranges.read, queries, within)
    except PrometheusUnreadable as err:
        raise HTTPException(503, f"Prometheus cannot be read: {err}") from err
    series = [
        SeriesView(
            kind=each.kind,
            unit=each.unit,
            device=device or each.labels.get("UUID"),
            namespace=each.labels.get("namespace"),
            name=each.labels.get("pod"),
            uid=each.labels.get("pod_uid"),
            values=each.values,
        )
        for each in found
    ]
    return encoded(
        HistoryBody(
            **context.head(snap),
            source="prometheus",
            resolution_s=within.step_s,
            resolution_bytes=1,
            from_s=within.begin_s,
            at_s=within.times(),
            series=series,
        )
    )


def _body(
    head: dict[str, Any], first_step: int, at_s: list[float], series: list[SeriesView]
) -> HistoryBody:
    return HistoryBody(
        **head,
        source="console",
        resolution_s=RESOLUTION_S,
        resolution_bytes=UNIT_BYTES,
        from_s=float(first_step * RESOLUTION_S),
        at_s=at_s,
        series=series,
    )


def _times(parts: Parts, first_step: int, now_s: float) -> list[float]:
    steps = np.maximum(np.concatenate([steps for _, steps, _ in parts]), first_step)
    return [*(float(step) * RESOLUTION_S for step in steps.tolist()), now_s]


def _column(parts: Parts, uuid: str, kind: str, column: int) -> SeriesView:
    def of(layout: Layout) -> int | None:
        if uuid not in layout.devices:
            return None
        return DEVICE_COLUMNS * layout.devices.index(uuid) + column

    is_ratio = column == SM
    values = _values(parts, of, UNIT_RATIO if is_ratio else UNIT_BYTES)
    return SeriesView(kind=kind, unit="ratio" if is_ratio else "bytes", device=uuid, values=values)


def _pods(parts: Parts, wanted: Callable[[PodOn, Layout], bool]) -> Iterable[SeriesView]:
    """Yield a series for each wanted pod on each device."""
    found = {
        (each.uid, layout.devices[each.slot]): each
        for layout, _, _ in parts
        for each in layout.pods
        if wanted(each, layout)
    }
    for (uid, uuid), each in found.items():

        def of(layout: Layout, uid: str = uid, uuid: str = uuid) -> int | None:
            begin = DEVICE_COLUMNS * len(layout.devices)
            columns = (
                begin + position
                for position, pod in enumerate(layout.pods)
                if pod.uid == uid and layout.devices[pod.slot] == uuid
            )
            return next(columns, None)

        yield SeriesView(
            kind="pod",
            unit="bytes",
            device=uuid,
            namespace=each.namespace,
            name=each.name,
            uid=uid,
            requested_bytes=each.requested_bytes,
            values=_values(parts, of, UNIT_BYTES),
        )


def _values(
    parts: Parts, column_of: Callable[[Layout], int | None], unit: float
) -> list[float | None]:
    """Return the values of a column. The last value is repeated for the current time."""
    found: list[float | None] = []
    for layout, steps, values in parts:
        column = column_of(layout)
        if column is None:
            found += [None] * len(steps)
            continue
        units = values[:, column].tolist()
        found += [None if each == UNKNOWN else round(each * unit, 3) for each in units]
    return [*found, found[-1]]
