"""The bind protocol, which writes a pod's reservation before the pod is bound.

A reservation is an entry of ``GPUNode.spec.reservations``, written by compare-and-swap on the
object it was computed from. So any number of replicas may run this protocol against one store,
which accepts only one of several conflicting writes. The order of the steps makes the protocol safe
(docs/design/architecture.md, "Bind"), and a comment at each step gives the reason.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from extender.ledger.bind_call import BindRequest, Bound, Declined, Failed, Outcome
from extender.ledger.node_batcher import NodeBatcher, NodeQueue
from extender.ledger.node_capacity import NodeCapacity
from extender.ledger.reservations import ATTEMPTS, Reservations
from extender.ledger.store import Binding
from headroom.contract.gpunode import GPUNode, Reservation
from headroom.contract.kube import ObjectMeta, Pod
from headroom.contract.reasons import Reason
from headroom.core.placement.placement_record import Placement
from headroom.core.rules.bound_pods import BoundPod
from headroom.errors import (
    OutcomeUnknown,
    StoreConflict,
    StoreError,
    StoreNotFound,
    StoreRejected,
)

#: The placement of a pod that is bound without charges and annotations, as kube-scheduler would
#: bind it.
UNRESERVED = Placement((), {})


class Judge(Protocol):
    """Fits a pod on one version of a GPUNode, ignoring a reservation that the pod already has
    there.

    Returns the placement, or the reason why the pod does not fit.
    """

    def __call__(self, pod: Pod, gpunode: GPUNode) -> Placement | Reason: ...


@dataclass(frozen=True, slots=True)
class _Reserved:
    """The pod can be bound with ``placement``. If the placement requires a reservation, the
    reservation is already written."""

    pod: Pod
    placement: Placement
    #: The same as ``Bound.despite``.
    despite: Reason | None


@dataclass(frozen=True, slots=True)
class _Retry:
    """The attempt must start again with the store's current objects."""

    error: StoreError | None = None


@dataclass(slots=True, eq=False)
class _PendingBind:
    """A bind that is queued for steps 1 to 3."""

    request: BindRequest
    #: The pod and the GPUNode on which the decision is based. An object that is None is read from
    #: the store.
    pod: Pod | None
    gpunode: GPUNode | None
    done: bool = False
    #: The result of steps 1 to 3. An exception is raised to the caller of this bind.
    step: Outcome | _Reserved | _Retry | Exception = field(default_factory=_Retry)
    #: The reservation to write for this bind, or None if the bind needs no reservation.
    reservation: Reservation | None = None

    def finish(self, step: Outcome | _Reserved | _Retry | Exception) -> None:
        self.step, self.done = step, True


class Binder:
    """Binds pods.

    ``observes`` returns whether the mode is observe (by default it is not). In mode observe, each
    pod is bound as requested, and charged even if that overcommits the node. ``capacity`` declines
    binds to nodes that other schedulers have filled. By default, no bind is declined for that
    reason.
    """

    def __init__(
        self,
        reservations: Reservations,
        judge: Judge,
        observes: Callable[[], bool] = bool,
        monotonic_s: Callable[[], float] = time.monotonic,
        capacity: NodeCapacity | None = None,
    ) -> None:
        self._reservations = reservations
        self._capacity = capacity or NodeCapacity(_no_pods, lambda node: None)
        self._store = reservations.store
        self._judge = judge
        self._observes = observes
        self._monotonic_s = monotonic_s
        self._batcher = NodeBatcher[_PendingBind](self._reserve)

    async def bind(self, request: BindRequest) -> Outcome:
        """Reserve the memory, then bind the pod. The call is idempotent, so it may be repeated for
        a pod, even concurrently, with the same result. Store errors become ``Failed``."""
        try:
            outcome = await self._bind(request)
        except StoreError as err:
            # The pod's state is unknown. A reservation that was written stays, which is safe.
            outcome = Failed(str(err))
        if isinstance(outcome, Bound) or not self._observes():
            return outcome
        return await self._bind_unreserved(request, outcome)

    async def _bind(self, request: BindRequest) -> Outcome:
        pending = _PendingBind(request, request.pod, request.gpunode)
        error: StoreError | None = None
        for _ in range(ATTEMPTS):
            await self._batcher.serve(request.node, pending)  # 1 to 3
            if self._monotonic_s() > request.until_s and not _is_final(pending.step):
                return Failed(_too_late(request, error))
            match pending.step:
                case Exception() as err:
                    raise err
                case _Retry(why):
                    error, pending.gpunode = why or error, None
                    continue
                case _Reserved(pod, placement, despite):
                    pass
                case outcome:
                    return outcome
            # 4. Bind, on condition that the pod has not changed since it was fitted.
            version = pod.metadata.resource_version
            try:
                with self._capacity.arriving(pod, request.node):
                    declined = await self._second_thoughts(pod, request)
                    if declined is None:
                        await self._store.bind(_binding(pod, request.node, placement))
                        return Bound(version, despite)
            except StoreError as err:
                error = err
            else:
                await self._reservations.remove(request.node, request.uid)
                return Declined(declined, version)
            # 5. The Binding was rejected or not answered, so the pod's current state decides.
            pending.pod = await self._store.read_pod(request.namespace, request.name)
            state = _unbound(request, pending.pod)
            if isinstance(state, Pod) and isinstance(error, StoreRejected):
                state = Failed(str(error))
            if isinstance(state, Failed):
                # No attempt can use the reservation now. If this removal fails, the reconciler
                # repeats it.
                await self._reservations.remove(request.node, request.uid)
            if not isinstance(state, Pod):
                return state
            # The pod is still unbound, so start again. The reservation stays, for this or a
            # concurrent attempt.
        return Failed(f"gave up after {ATTEMPTS} attempts: {error}")

    async def _second_thoughts(self, pod: Pod, request: BindRequest) -> Reason | None:
        """Return the reason why a pod with a reservation must not be bound, or None if it may be
        bound."""
        if self._observes():
            return None
        if await self._capacity.exceeded(pod, request.node):
            return Reason.NODE_FILLED
        if request.may_bind is not None and not await request.may_bind():
            return Reason.GROUP_DECLINED
        return None

    async def _reserve(
        self, node: str, queue: NodeQueue[_PendingBind], binds: list[_PendingBind]
    ) -> None:
        """Run steps 1 to 3 for all given binds with one write. If the store rejects the write,
        write each reservation separately. Complete each bind, even after an error."""
        try:
            await self._reserve_together(node, queue, binds)
        except StoreRejected as err:
            # One rejected reservation must not fail the other binds, so write each reservation
            # separately.
            for pending in binds:
                if len(binds) > 1:
                    await self._reserve(node, queue, [pending])
                else:
                    pending.finish(err)
        except Exception as err:  # noqa: BLE001 - raised to the caller of each bind
            for pending in binds:
                pending.finish(err)

    async def _reserve_together(
        self, node: str, queue: NodeQueue[_PendingBind], binds: list[_PendingBind]
    ) -> None:
        # If another request held the lock before, the watch may not show its write yet. So use the
        # object that it wrote, or read the store.
        cached = queue.gpunode if queue.used else binds[-1].gpunode
        if any(pending.gpunode is None for pending in binds):
            cached = None
        queue.used, queue.gpunode = True, None
        before = cached or await self._store.read_gpunode(node)
        if before is None:
            for pending in binds:
                await self._fit_without_gpunode(pending, GPUNode(metadata=ObjectMeta(name=node)))
            return
        gpunode = before
        for pending in binds:
            try:
                await self._fit(pending, gpunode, fresh=cached is None)
            except Exception as err:  # noqa: BLE001 - raised to the caller of this bind only
                pending.reservation = None
                pending.finish(err)
            if pending.reservation is not None:
                stamped = self._reservations.stamped(pending.reservation, gpunode)
                gpunode = _with(gpunode, pending.request.uid, stamped)
        # 3. Reserve, even if the pod has a reservation already, because the write proves that no
        #    replica has removed the reservation in the meantime.
        error: StoreError | None = None
        if gpunode is not before:
            try:
                queue.gpunode = gpunode = await self._reservations.write(before, gpunode.spec)
            except (StoreConflict, StoreNotFound, OutcomeUnknown) as err:
                error = err
        for pending in binds:
            # A pod may have been declined because of another reservation in the failed write.
            if error and (pending.reservation is not None or isinstance(pending.step, Declined)):
                pending.step = _Retry(error)
            pending.gpunode, pending.done = gpunode, True

    async def _fit_without_gpunode(self, pending: _PendingBind, gpunode: GPUNode) -> None:
        """Allow the bind to a node without a GPUNode if the pod needs no reservation. Otherwise
        decline it, for the judge's reason or because no memory can be reserved there yet.
        ``gpunode`` is an empty object with the node's name."""
        request = pending.request
        try:
            state = _unbound(
                request, pending.pod or await self._store.read_pod(request.namespace, request.name)
            )
        except Exception as err:  # noqa: BLE001 - raised to the caller of this bind only
            pending.finish(err)
            return
        if not isinstance(state, Pod):
            pending.finish(state)
            return
        found = self._judge(state, gpunode)
        if isinstance(found, Placement) and not found.charges:
            pending.finish(_Reserved(state, found, None))
        else:
            reason = found if isinstance(found, Reason) else Reason.NO_REPORT
            pending.finish(Declined(reason, state.metadata.resource_version))

    async def _fit(self, pending: _PendingBind, gpunode: GPUNode, fresh: bool) -> None:
        """Run steps 1 and 2 for one bind.

        ``fresh`` states whether ``gpunode`` was just read from the store. If the pod does not fit
        on an object that is not fresh, the attempt is repeated on a fresh object.
        """
        request, pod, pending.reservation = pending.request, pending.pod, None
        # 1. Get the pod, unbound, at a resourceVersion. If it has a reservation already, read the
        # pod after the reservation. Otherwise this attempt could fit an older version of the pod,
        # and replace the reservation of a concurrent attempt with a smaller reservation.
        if pod is None or request.uid in gpunode.spec.reservations:
            pod = await self._store.read_pod(request.namespace, request.name)
        state = _unbound(request, pod)
        if not isinstance(state, Pod):
            pending.step = state
            return
        # 2. Fit the pod on the version of the GPUNode that the write requires.
        pending.pod, placement, despite = state, self._judge(state, gpunode), None
        if isinstance(placement, Reason):
            if not fresh:
                pending.step = _Retry()
                return
            if not self._observes():
                pending.step = Declined(placement, state.metadata.resource_version)
                return
            despite, placement = placement, UNRESERVED
            # Charge the pod like an unreserved pod, so that a later switch to mode enforce starts
            # with correct charges. This is not necessary before the node is initialised, because
            # the initialisation charges all pods on the node.
            if gpunode.spec.initialised:
                pending.reservation = self._reservations.adopt(state, gpunode)
        elif placement.charges:
            metadata = state.metadata
            pending.reservation = placement.reservation(metadata.namespace, metadata.name)
        pending.step = _Reserved(state, placement, despite)

    async def _bind_unreserved(self, request: BindRequest, outcome: Declined | Failed) -> Outcome:
        """Bind a pod without a reservation, because no pod is delayed in mode observe.

        The pod is charged when the watch shows it on the node. Return ``outcome`` unchanged if
        kube-scheduler no longer waits for the response.
        """
        try:
            state = _unbound(request, await self._store.read_pod(request.namespace, request.name))
            if not isinstance(state, Pod):
                return state
            if self._monotonic_s() > request.until_s:
                return outcome
            await self._store.bind(_binding(state, request.node, UNRESERVED))
        except StoreError as err:
            return Failed(str(err), outcome.version)
        despite = outcome.reason if isinstance(outcome, Declined) else None
        return Bound(state.metadata.resource_version, despite)


async def _no_pods(node: str) -> list[BoundPod]:
    return []


def _too_late(request: BindRequest, error: StoreError | None) -> str:
    why = f" (last error: {error})" if error else ""
    return (
        f"pod {request.namespace}/{request.name} is not bound to node {request.node}: the API "
        f"server took longer than kube-scheduler waits{why}; kube-scheduler tries the pod again"
    )


def _is_final(step: "Outcome | _Reserved | _Retry | Exception") -> bool:
    return not isinstance(step, _Reserved | _Retry)


def _with(gpunode: GPUNode, uid: str, reservation: Reservation) -> GPUNode:
    reservations = {**gpunode.spec.reservations, uid: reservation}
    spec = msgspec.structs.replace(gpunode.spec, reservations=reservations)
    return msgspec.structs.replace(gpunode, spec=spec)


def _unbound(request: BindRequest, pod: Pod | None) -> Pod | Bound | Failed:
    """Return the pod if it can still be bound. Otherwise return ``Bound`` if it is bound to the
    requested node, or ``Failed`` with the obstacle."""
    subject = f"pod {request.namespace}/{request.name}"
    if pod is None:
        return Failed(f"{subject} does not exist")
    if pod.metadata.uid != request.uid:
        return Failed(f"{subject} was replaced: its uid is {pod.metadata.uid}, not {request.uid}")
    if (pod.metadata.namespace, pod.metadata.name) != (request.namespace, request.name):
        return Failed(f"{subject} is not the pod of uid {request.uid}")
    if pod.node == request.node:
        return Bound()
    if pod.node:
        return Failed(f"{subject} is bound to node {pod.node}")
    if pod.metadata.deletion_timestamp:
        return Failed(f"{subject} is being deleted")
    return pod


def _binding(pod: Pod, node: str, placement: Placement) -> Binding:
    return Binding(
        namespace=pod.metadata.namespace,
        name=pod.metadata.name,
        uid=pod.metadata.uid,
        resource_version=pod.metadata.resource_version,
        node=node,
        annotations=placement.annotations,
    )
