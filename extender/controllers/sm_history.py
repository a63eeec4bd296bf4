"""Brings history of SM activity into the cluster's state, node by node.

Changed figures are grouped by node on the thread that queries Prometheus. The event loop applies
them like changes from watches: in small steps, after kube-scheduler's calls.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence

from extender.config.settings import Settings
from extender.observability.metrics import ViewTelemetry
from extender.placement.device_reading import Activity
from extender.state.changes import ActivitySeen, Event
from extender.state.sm_activity import Activities, Key


@contextlib.asynccontextmanager
async def sm_history(
    settings: Settings,
    telemetry: ViewTelemetry,
    activities: Activities,
    apply: Callable[[Sequence[Event]], None],
) -> AsyncIterator[None]:
    """Queries Prometheus while the context lasts, unless the settings name none.

    ``apply`` receives the changes for the state, on the thread that queries.
    """
    if settings.prometheus_url is None:
        yield
        return
    # The client of Prometheus is an optional dependency.
    from extender.controllers.prometheus import Asked, PrometheusHistory
    from extender.controllers.promql import Span

    def queried(answered: bool, devices: int) -> None:
        telemetry.history_queries.labels("answered" if answered else "failed").inc()
        telemetry.history_devices.set(devices)

    def hand_on(history: Mapping[Key, Activity], moved: Collection[Key]) -> None:
        nodes = {node for key in moved if (node := activities.node_of(key)) is not None}
        apply([ActivitySeen(history, ()), *(ActivitySeen(history, (node,)) for node in nodes)])

    asked = Asked(
        settings.prometheus_url,
        Span(settings.prometheus_quantile, settings.prometheus_window_s),
        every_s=settings.prometheus_refresh_s,
        timeout_s=settings.prometheus_timeout_s,
        stale_after_s=settings.prometheus_stale_after_s,
        token_file=settings.prometheus_token_file,
        ca=settings.prometheus_ca,
    )
    source = PrometheusHistory(asked, hand_on, queried)
    source.start()
    try:
        yield
    finally:
        await asyncio.get_running_loop().run_in_executor(None, source.stop)
