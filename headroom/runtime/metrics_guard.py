"""Lets the API server authorize readers of the metrics."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from headroom.runtime.kube.client import KubeApi, load_configuration
from headroom.runtime.server.auth import Guard
from headroom.runtime.server.reviews import KubeReviews
from headroom.runtime.settings.ports import MetricsAccess
from headroom.runtime.settings.settings import Settings


@contextmanager
def metrics_guard(settings: Settings) -> Iterator[Guard | None]:
    """Yield a guard that authorizes readers of the metrics, or None if every client may read
    them."""
    if settings.debug_open or settings.metrics_access is MetricsAccess.OPEN:
        yield None
        return
    # Reviews have separate connections, so that readers cannot use up the connections for the
    # process's work.
    api = KubeApi(load_configuration(), connect_timeout_s=2.0, read_timeout_s=3.0)
    try:
        yield Guard(KubeReviews(api), time.monotonic)
    finally:
        api.close()
