"""Keeps what nodes show of their GPU memory in step with what is known of it, for ever.

Switched off, it takes back what is still shown: so every replica looks, and nothing is written
where nothing is to be changed.
"""

import asyncio
from collections.abc import Callable
from itertools import islice

import structlog

from extender.kube.client import ApiError, ApiStatus
from extender.periodic import Loops
from extender.state.cluster_state import ClusterState
from extender.state.extended_resource import Shown, to_show

log = structlog.get_logger()

EVERY_S = 5.0
#: Writes in a round; a fleet that is switched on takes some rounds.
AT_MOST = 200
_HINT = "right is ClusterRole headroom-extender-mirror, in deploy/components/in-tree-mirror"

Show = Callable[[str, int | None], None]


class ExtendedResourceController:
    """``show`` writes, and blocks."""

    def __init__(self, cluster: ClusterState, wanted: bool, show: Show) -> None:
        self._cluster = cluster
        self._wanted = wanted
        self._show = show
        self._said = ""

    def start(self, loops: Loops, unready: Callable[[], str]) -> None:
        loops.start("mirror", self.once, EVERY_S, unready=unready)

    async def once(self) -> None:
        due = list(islice(to_show(self._cluster, self._wanted), AT_MOST))
        if due:
            trouble = await asyncio.to_thread(self._write, due)
            if trouble and trouble != self._said:
                log.warning("memory_not_shown", message=trouble, hint=_HINT)
            self._said = trouble

    def _write(self, due: list[Shown]) -> str:
        """What went wrong first; where we may not write at all, no other node is tried."""
        trouble = ""
        for shown in due:
            try:
                self._show(shown.node, shown.mib)
            except ApiStatus as err:
                trouble = trouble or str(err)
                if err.status == 403:
                    break
            except ApiError as err:
                return str(err)
        return trouble
