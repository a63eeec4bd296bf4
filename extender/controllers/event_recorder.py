"""Writes each notice as a Kubernetes Event once per replica, a few at a time.

A lost or repeated notice does no harm.
"""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Executor

import structlog

from extender.bounded import Bounded
from extender.observability.metrics import Telemetry
from extender.state.notices import Notice

log = structlog.get_logger()

#: Each is a write to the API server; further notices wait for the next round.
AT_ONCE = 64
REMEMBERED = 10_000
LOOKED_AT_TOGETHER = 64

#: Writes an Event; returns False if it must be tried again.
Post = Callable[[Notice], bool]


def counted(post: Post, telemetry: Telemetry) -> Post:
    """Return ``post`` with its outcomes counted in the metrics."""

    def post_and_count(notice: Notice) -> bool:
        written = post(notice)
        telemetry.events.labels(notice.reason, "written" if written else "failed").inc()
        return written

    return post_and_count


class EventRecorder:
    """Writes Events through ``post``, on threads of ``pool``."""

    def __init__(self, post: Post, pool: Executor) -> None:
        self._post = post
        self._pool = pool
        self._recorded: Bounded[tuple[str, str, str], None] = Bounded(REMEMBERED)

    async def record(self, notices: Iterable[Notice]) -> None:
        pending: dict[tuple[str, str, str], Notice] = {}
        for number, notice in enumerate(notices):
            if (key := _key(notice)) not in self._recorded:
                pending[key] = notice
            if len(pending) == AT_ONCE:
                break
            if number % LOOKED_AT_TOGETHER == 0:
                await asyncio.sleep(0)  # lets kube-scheduler's calls in
        loop = asyncio.get_running_loop()

        async def one(key: tuple[str, str, str], notice: Notice) -> None:
            if await loop.run_in_executor(self._pool, self._post, notice):
                self._recorded[key] = None
                log.warning("noticed", **log_fields(notice))

        await asyncio.gather(*(one(*each) for each in pending.items()))


def log_fields(notice: Notice) -> dict[str, str]:
    """Return the log fields of a notice."""
    about = notice.about
    return {
        "kind": about.kind,
        "name": f"{about.namespace}/{about.name}" if about.namespace else about.name,
        "uid": about.uid,
        "reason": notice.reason,
        "message": notice.message,
    }


def _key(notice: Notice) -> tuple[str, str, str]:
    return notice.about.uid, notice.reason, notice.key
