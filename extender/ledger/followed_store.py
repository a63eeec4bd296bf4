"""A store that removes a GPUNode from the cache if a call finds that the GPUNode was deleted."""

from collections.abc import Callable, Sequence

from extender.ledger.counting_store import ConflictCountingStore
from extender.ledger.store import Store
from extender.metrics import Telemetry
from headroom.contract.gpunode import GPUNode, GPUNodeSpec
from headroom.contract.watched import GPUNodeGone
from headroom.core.cluster.changes import Event
from headroom.core.cluster.cluster import Cluster
from headroom.errors import StoreNotFound


class FollowedStore(ConflictCountingStore):
    """Passes all calls to another store, and delivers ``GPUNodeGone`` for each GPUNode that is not
    found.

    A uid is never used again. So if an object was cached before a call and is missing in the
    response, it is deleted permanently, even if the response arrives late.
    """

    def __init__(
        self,
        store: Store,
        telemetry: Telemetry,
        cluster: Cluster,
        deliver: Callable[[Sequence[Event]], None],
    ) -> None:
        super().__init__(store, telemetry)
        self._cluster = cluster
        self._deliver = deliver

    async def read_gpunode(self, name: str) -> GPUNode | None:
        cached = self._cluster.gpunode(name)
        found = await super().read_gpunode(name)
        if found is None and cached is not None:
            self._gone(cached)
        return found

    async def write_spec(self, before: GPUNode, spec: GPUNodeSpec) -> GPUNode:
        try:
            return await super().write_spec(before, spec)
        except StoreNotFound:
            self._gone(before)
            raise

    async def remove_finalizer(self, gpunode: GPUNode) -> None:
        try:
            await super().remove_finalizer(gpunode)
        except StoreNotFound:
            self._gone(gpunode)
            raise

    def _gone(self, gpunode: GPUNode) -> None:
        self._deliver([GPUNodeGone(gpunode.name, gpunode.metadata.uid)])
