"""Looks up pods that use GPUs without requesting a resource that Headroom manages.

``trackers.gpu_users`` keeps them. When a report shows an unknown pod, only the pods of that node
are listed, at most ``MOST_TRIES`` times for each unknown pod, because a process can outlive its
pod."""

import asyncio
from collections.abc import Callable, Sequence

import structlog

from headroom.contract.kube import Pod
from headroom.core.cluster.changes import Event, GpuUsersSeen
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.trackers.gpu_users import unreserved_users
from headroom.core.placement.updated_nodes import UpdatedNodes
from headroom.errors import StoreError
from headroom.runtime.loops import Loops

log = structlog.get_logger()

EVERY_S = 10.0
#: Maximum number of nodes that are listed in one round.
AT_ONCE = 5
MOST_TRIES = 3
#: Seconds until a pod that was not found is looked up again.
AGAIN_AFTER_S = 60.0


class GpuUserReader:
    """``pods_on`` returns the pods bound to a node. It blocks, and raises ``StoreError``.
    ``deliver`` applies changes."""

    def __init__(
        self,
        cluster: Cluster,
        pods_on: Callable[[str], Sequence[Pod]],
        deliver: Callable[[Sequence[Event]], None],
    ) -> None:
        self._cluster = cluster
        self._deliver = deliver
        self._pods_on = pods_on
        self._updated = UpdatedNodes()
        #: For each node, the uids of the pods in its report that the state does not contain.
        self._wanted: dict[str, frozenset[str]] = {}
        #: For each pod, the number of lookups so far, and the time of the next lookup on the
        #: monotonic clock, by uid.
        self._tries: dict[str, tuple[int, float]] = {}

    def start(self, loops: Loops, begun: asyncio.Event) -> None:
        """Start the loop. It looks up nothing until ``begun`` is set."""

        async def look_up() -> None:
            if begun.is_set():
                await self.once(asyncio.get_running_loop().time())

        loops.start("gpu_users", look_up, EVERY_S)

    async def once(self, now_s: float) -> None:
        """Look up the pods that are due. ``now_s`` is a time of the monotonic clock."""
        self._follow(now_s)
        wanted = {uid for uids in self._wanted.values() for uid in uids}
        self._tries = {uid: tried for uid, tried in self._tries.items() if uid in wanted}
        known = self._cluster.gpu_users
        found = {uid: pod for uid, pod in known.items() if uid in wanted}
        due = [
            node
            for node, uids in self._wanted.items()
            if any(self._is_due(uid, now_s) for uid in uids - found.keys())
        ]
        for node in due[:AT_ONCE]:
            uids = self._wanted[node]
            for uid in uids:
                times, _ = self._tries.get(uid, (0, 0.0))
                self._tries[uid] = times + 1, now_s + AGAIN_AFTER_S
            try:
                pods = await asyncio.to_thread(self._pods_on, node)
            except StoreError as err:
                log.warning("gpu_users_not_read", node=node, message=str(err))
                continue
            found |= {pod.metadata.uid: pod for pod in pods if pod.metadata.uid in uids}
        if found != known:
            self._deliver([GpuUsersSeen(found)])

    def _is_due(self, uid: str, now_s: float) -> bool:
        times, next_s = self._tries.get(uid, (0, now_s))
        return times < MOST_TRIES and now_s >= next_s

    def _follow(self, now_s: float) -> None:
        """Find the unknown pods on the nodes that changed."""
        snap = self._cluster.snapshot()
        for row in self._updated.since_last(snap, now_s):
            name = snap.nodes[row].name
            gpunode = self._cluster.gpunode(name)
            uids = frozenset() if gpunode is None else unreserved_users(gpunode)
            uids = frozenset(uid for uid in uids if self._cluster.pod(uid) is None)
            self._wanted.pop(name, None)
            if uids:
                self._wanted[name] = uids
        if len(self._wanted) and not self._wanted.keys() <= snap.row_of.keys():
            self._wanted = {n: uids for n, uids in self._wanted.items() if n in snap.row_of}
