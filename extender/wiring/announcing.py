"""Has every notice told once by this replica, a few at a time; all of it may be lost or done twice
without harm."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Executor

import structlog

from extender.cluster.notices import Notice

log = structlog.get_logger()

#: Each is a write; the others come with the next round.
AT_ONCE = 64
REMEMBERED = 10_000

#: Tells it; whether it need not be tried again.
Post = Callable[[Notice], bool]


class Announcing:
    def __init__(self, post: Post, pool: Executor) -> None:
        self._post = post
        self._pool = pool
        self._told: OrderedDict[tuple[str, str, str], None] = OrderedDict()

    async def tell(self, notices: Iterable[Notice]) -> None:
        untold = {key: n for n in notices if (key := _key(n)) not in self._told}
        loop = asyncio.get_running_loop()

        async def one(key: tuple[str, str, str], notice: Notice) -> None:
            if await loop.run_in_executor(self._pool, self._post, notice):
                self._told[key] = None
                metadata = notice.pod.metadata
                log.warning(
                    "pod_noticed",
                    pod=f"{metadata.namespace}/{metadata.name}",
                    pod_uid=metadata.uid,
                    node=notice.pod.node,
                    reason=notice.reason,
                    message=notice.message,
                )

        await asyncio.gather(*(one(*each) for each in list(untold.items())[:AT_ONCE]))
        while len(self._told) > REMEMBERED:
            self._told.popitem(last=False)


def _key(notice: Notice) -> tuple[str, str, str]:
    return notice.pod.metadata.uid, notice.reason, notice.key
