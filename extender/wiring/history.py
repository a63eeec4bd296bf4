"""Brings history of SM activity into the cluster's state, node by node.

What moved is sorted by node on the source's thread. The event loop takes it in as it takes in what
watches report: a little at a time, after kube-scheduler's calls.
"""

import contextlib
from collections.abc import AsyncIterator, Collection, Mapping

from extender.cluster.activity import Key
from extender.cluster.events import ActivitySeen
from extender.placement.activity import Activity
from extender.settings import Settings
from extender.wiring.clusterview import ClusterView


@contextlib.asynccontextmanager
async def history_brought(settings: Settings, view: ClusterView) -> AsyncIterator[None]:
    """While the context lasts, history comes in; where settings name no Prometheus, none does."""
    if settings.prometheus_url is None:
        yield
        return
    # Its client is an extra.
    from extender.sources.history import Span
    from extender.sources.prometheus import Asked, PrometheusHistory

    telemetry, activities = view.telemetry, view.cluster.activities

    def told(answered: bool, devices: int) -> None:
        telemetry.history_queries.labels("answered" if answered else "failed").inc()
        telemetry.history_devices.set(devices)

    def hand_on(history: Mapping[Key, Activity], moved: Collection[Key]) -> None:
        nodes = {node for key in moved if (node := activities.node_of(key)) is not None}
        view.tell([ActivitySeen(history, ()), *(ActivitySeen(history, (node,)) for node in nodes)])

    asked = Asked(
        settings.prometheus_url,
        Span(settings.prometheus_quantile, settings.prometheus_window_s),
        every_s=settings.prometheus_refresh_s,
        timeout_s=settings.prometheus_timeout_s,
        stale_after_s=settings.prometheus_stale_after_s,
        token_file=settings.prometheus_token_file,
        ca=settings.prometheus_ca,
    )
    source = PrometheusHistory(asked, hand_on, told)
    source.start()
    try:
        yield
    finally:
        await view.loop.run_in_executor(None, source.stop)
