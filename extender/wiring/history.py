"""Brings history of SM activity into the cluster's state, a few nodes at a time.

What moved is sorted by node on the source's thread, and the event loop is given a few nodes at
once, then time for kube-scheduler's calls. So a first answer for 5,000 nodes takes seconds to sink
in, and none takes much of the loop's time.
"""

import contextlib
import threading
import time
from collections.abc import AsyncIterator, Collection, Mapping

from extender.cluster.activity import Key
from extender.cluster.events import ActivitySeen
from extender.placement.activity import Activity
from extender.settings import Settings
from extender.wiring.clusterview import ClusterView

#: Less than a millisecond of the loop's time, and what it then has for others.
_NODES_AT_ONCE = 8
_PAUSE_S = 0.01
#: Devices to look up before others have a turn.
_DEVICES_AT_ONCE = 256


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

    def hand_on(
        history: Mapping[Key, Activity], moved: Collection[Key], stopping: threading.Event
    ) -> None:
        view.deliver([ActivitySeen(history, ())])
        nodes: dict[str, None] = {}
        for i, key in enumerate(moved):
            if (node := activities.node_of(key)) is not None:
                nodes[node] = None
            if i % _DEVICES_AT_ONCE == 0:
                time.sleep(0)
        names = list(nodes)
        for at in range(0, len(names), _NODES_AT_ONCE):
            view.deliver([ActivitySeen(history, names[at : at + _NODES_AT_ONCE])])
            if stopping.wait(_PAUSE_S):
                return

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
