"""A store that counts its write conflicts."""

from collections.abc import Iterator
from contextlib import contextmanager

from extender.ledger.store import Binding, Store
from extender.metrics import Telemetry
from headroom.contract.annotations import TOUCHED
from headroom.contract.gpunode import GPUNode, GPUNodeSpec
from headroom.contract.kube import Pod
from headroom.errors import StoreConflict


class ConflictCountingStore(Store):
    """Passes all calls to another store, and counts its write conflicts by kind."""

    def __init__(self, store: Store, telemetry: Telemetry) -> None:
        self._store = store
        self._conflicts = telemetry.ledger_conflicts

    async def read_gpunode(self, name: str) -> GPUNode | None:
        return await self._store.read_gpunode(name)

    async def create_gpunode(self, gpunode: GPUNode) -> GPUNode:
        with self._counted("create"):
            return await self._store.create_gpunode(gpunode)

    async def write_spec(self, before: GPUNode, spec: GPUNodeSpec) -> GPUNode:
        with self._counted("spec"):
            return await self._store.write_spec(before, spec)

    async def remove_finalizer(self, gpunode: GPUNode) -> None:
        with self._counted("finalizer"):
            await self._store.remove_finalizer(gpunode)

    async def read_pod(self, namespace: str, name: str) -> Pod | None:
        return await self._store.read_pod(namespace, name)

    async def read_heartbeat_version(self, node: str) -> str:
        return await self._store.read_heartbeat_version(node)

    async def list_pods(self, node: str | None = None) -> list[Pod]:
        return await self._store.list_pods(node)

    async def bind(self, binding: Binding) -> None:
        with self._counted("binding"):
            await self._store.bind(binding)

    async def touch_pod(self, pod: Pod, value: str, key: str = TOUCHED) -> Pod:
        with self._counted("pod"):
            return await self._store.touch_pod(pod, value, key)

    @contextmanager
    def _counted(self, write: str) -> Iterator[None]:
        """Count a ``StoreConflict`` and raise it again."""
        try:
            yield
        except StoreConflict:
            self._conflicts.labels(write).inc()
            raise
