"""The ledger, through which the extender writes all reservations and binds all pods."""

import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from extender.ledger.bind import Binder, Judge
from extender.ledger.initialise import Initialiser, one_by_one
from extender.ledger.node_capacity import NodeCapacity
from extender.ledger.reservations import ATTEMPTS, Adopt, Reservations, has_devices
from extender.ledger.store import Store
from headroom.contract.annotations import RETRY
from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Pod
from headroom.errors import StoreConflict, StoreNotFound


class Ledger:
    """Writes reservations and binds pods.

    ``Reservations``, ``Initialiser`` and ``Binder`` describe the parameters.
    """

    def __init__(
        self,
        store: Store,
        judge: Judge,
        adopt: Adopt,
        written: Callable[[GPUNode], None],
        wall_s: Callable[[], float],
        new_id: Callable[[], str],
        known: Callable[[GPUNode], bool] = has_devices,
        observes: Callable[[], bool] = bool,
        monotonic_s: Callable[[], float] = time.monotonic,
        together: Callable[[Iterable[Awaitable[None]]], Awaitable[None]] = one_by_one,
        capacity: NodeCapacity | None = None,
    ) -> None:
        self._store = store
        self._new_id = new_id
        self.reservations = Reservations(store, adopt, written, wall_s, new_id, known)
        self.initialiser = Initialiser(self.reservations, together)
        self.binder = Binder(self.reservations, judge, observes, monotonic_s, capacity)

    async def requeue(self, pod: Pod) -> str | None:
        """Change annotation ``RETRY`` of the pod, so that kube-scheduler retries the pod.

        Return the annotation's new value, which another replica may have written. Return None if
        the pod is bound or gone, or if all attempts lost a race. Raise other store errors.
        """
        retry = self._new_id()
        current: Pod | None = pod
        for _ in range(ATTEMPTS):
            if current is None or current.metadata.uid != pod.metadata.uid or current.node:
                return None
            if current.annotation(RETRY) != pod.annotation(RETRY):
                return current.annotation(RETRY)
            with suppress(StoreConflict, StoreNotFound):
                await self._store.touch_pod(current, retry, RETRY)
                return retry
            # kube-scheduler has just written the pod's condition, or another replica has requeued
            # the pod.
            current = await self._store.read_pod(pod.metadata.namespace, pod.metadata.name)
        return None
