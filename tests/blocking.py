"""Blocking versions of the ledger and its stores, for tests without an event loop."""

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from types import ModuleType, TracebackType
from typing import Any, TypeVar

from kubernetes.client import Configuration

from extender.ledger import ledger
from extender.ledger.embedded_store import AsyncStore, SyncStore
from extender.ledger.kube_store import KubernetesStore
from headroom.contract.gpunode import GPUNode
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.runtime.kube.async_client import AsyncKubeApi
from headroom.runtime.kube.client import KubeApi
from tests.waiting import PATIENCE_S

T = TypeVar("T")


def now(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that does no I/O, and return its result. The coroutine may await
    ``sleep(0)``.
    """
    while True:
        try:
            awaited = work.send(None)
        except StopIteration as end:
            result: T = end.value
            return result
        assert awaited is None, f"the coroutine waits for {awaited}"


class Ledger:
    """A ledger with blocking methods over a synchronous store.

    ``code`` is the module that defines the ledger, or a mutated copy of the module.
    """

    def __init__(self, store: SyncStore, *args: Any, code: ModuleType = ledger, **how: Any) -> None:
        self.awaited = code.Ledger(AsyncStore(store), *args, **how)

    def __getattr__(self, name: str) -> Any:
        whole = self.awaited
        parts = (whole.binder, whole.reservations, whole.initialiser, whole)
        method = getattr(next(part for part in parts if hasattr(part, name)), name)
        return lambda *args, **how: now(method(*args, **how))


def ledger_over(
    state: ClusterWriter,
    store: SyncStore,
    now_s: Callable[[], float],
    *,
    epoch_s: float = 0.0,
    wall_s: Callable[[], float] | None = None,
    written: Callable[[GPUNode], None] = lambda gpunode: None,
    ids: str = "id",
) -> Ledger:
    """Return a ledger that checks whether pods fit with the state. Its attempts have the IDs id-0,
    id-1 and so on, or another prefix than ``id``.

    ``wall_s`` is the wall clock. Without it, the wall clock showed ``epoch_s`` when ``now_s`` was
    0.
    """
    numbers = itertools.count()
    return Ledger(
        store,
        lambda pod, gpunode: state.cluster.judge(pod, gpunode, now_s()),
        state.cluster.adopt,
        written,
        wall_s=wall_s or (lambda: epoch_s + now_s()),
        new_id=lambda: f"{ids}-{next(numbers)}",
    )


async def give_way(operation: str, when: str) -> None:
    """Let the loop run other tasks."""
    await asyncio.sleep(0)


class Faraway:
    """An asynchronous ``Store`` over a synchronous store.

    ``meanwhile`` is awaited with "before" and "after" around each operation. If it raises, the
    request or the response is lost.
    """

    def __init__(
        self, store: SyncStore, meanwhile: Callable[[str, str], Awaitable[None]] = give_way
    ) -> None:
        self._store, self._meanwhile = store, meanwhile

    def __getattr__(self, operation: str) -> Any:
        async def call(*args: Any, **how: Any) -> Any:
            await self._meanwhile(operation, "before")
            try:
                return getattr(self._store, operation)(*args, **how)
            finally:
                await self._meanwhile(operation, "after")

        return call


class Loop:
    """An event loop in its own thread. Other threads use it to call an API server."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="loop of a test")
        self._apis: list[AsyncKubeApi] = []

    def __enter__(self) -> "Loop":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        err: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        try:
            for api in self._apis:
                self.run(api.close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def run(self, work: Awaitable[T]) -> T:
        """Await ``work`` on the loop and return its result. Raises ``TimeoutError`` after
        ``PATIENCE_S``.
        """

        async def awaited() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(awaited(), self._loop).result(PATIENCE_S)

    def api(self, configuration: Configuration, **how: float) -> AsyncKubeApi:
        async def made() -> AsyncKubeApi:
            return AsyncKubeApi(configuration, **how)

        self._apis.append(self.run(made()))
        return self._apis[-1]

    def store(self, configuration: Configuration, lists: KubeApi, **how: Any) -> "Blocking":
        """A ``KubernetesStore`` whose methods block."""
        names = ("connect_timeout_s", "read_timeout_s", "total_timeout_s")
        timeouts = {key: how.pop(key) for key in names if key in how}
        return Blocking(self, KubernetesStore(self.api(configuration, **timeouts), lists, **how))


class Blocking:
    """Wraps an asynchronous object with blocking methods, which any thread can call."""

    def __init__(self, loop: Loop, awaited: object) -> None:
        self._loop, self._awaited = loop, awaited

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, getattr(self._awaited, name))

    def _call(self, method: Any, *args: Any, **how: Any) -> Any:
        return self._loop.run(method(*args, **how))
