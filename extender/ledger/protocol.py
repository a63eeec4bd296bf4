"""The bind protocol: how a pod's reservation is written, and the only way to remove it.

A reservation is an entry of ``GPUNode.spec.reservations``, written by compare-and-swap on the
object it was computed from. So any number of replicas may run this protocol against one store, and
the store decides. The order of the steps makes it safe (DESIGN section 6); a comment at each step
gives the reason.
"""

import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

import msgspec
import structlog

from contract.annotations import FINALIZER, RETRY
from contract.gpunode import EVICTED, GPUNode, GPUNodeSpec, Reservation
from contract.kube import Node, ObjectMeta, OwnerReference, Pod
from contract.quantity import format_bytes
from contract.reasons import Reason
from extender.errors import (
    OutcomeUnknown,
    StoreConflict,
    StoreError,
    StoreNotFound,
    StoreRejected,
    StoreTimeout,
)
from extender.ledger.node_batcher import NodeBatcher, Turn
from extender.ledger.store import Binding, Store
from extender.periodic import part_by_part
from extender.placement.placement_record import Placement

log = structlog.get_logger()

#: Attempts of a step that loses races. After that the pod is left to kube-scheduler's next attempt.
ATTEMPTS = 8
#: Up to this number of nodes, each is initialised with a list of its own pods; for more nodes, all
#: pods are listed once.
FEW_NODES = 16
#: Pods that are processed before the event loop serves other tasks.
AT_ONCE = 50


#: Binds a pod as kube-scheduler would: no charges, no annotations.
NOTHING = Placement((), {})


class Judge(Protocol):
    """Fits a pod on one version of a GPUNode, ignoring a reservation that the pod has there."""

    def __call__(self, pod: Pod, gpunode: GPUNode) -> Placement | Reason: ...


class Adopt(Protocol):
    """Returns the reservation to write for a pod that was bound without one; None if the pod needs
    none."""

    def __call__(self, pod: Pod, gpunode: GPUNode) -> Reservation | None: ...


@dataclass(frozen=True, slots=True)
class BindAsk:
    """A bind call of kube-scheduler, with what this replica has cached for it."""

    namespace: str
    name: str
    uid: str
    node: str
    #: The pod as the filter call sent it; None if this replica did not serve that call.
    pod: Pod | None
    #: The GPUNode as the watch delivered it; None if it did not.
    gpunode: GPUNode | None
    #: The placement of ``pod`` on ``gpunode``; None if it was not computed yet.
    placement: Placement | None = None
    #: When kube-scheduler's call times out, on the monotonic clock in seconds. After that its
    #: assumptions about the node (CPU, ports, volumes) no longer hold.
    until_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Bound:
    """The pod is bound to the requested node, by this call or before it."""

    #: resourceVersion of the pod that the decision was made for; empty if there was none.
    version: str = field(default="", compare=False)
    #: In mode observe: the reason for which enforce would have declined the bind.
    despite: Reason | None = None


@dataclass(frozen=True, slots=True)
class Declined:
    """The node has no room (any more); kube-scheduler tries the pod again."""

    reason: Reason
    version: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Failed:
    """The bind failed; ``message`` gives the reason, for the pod's condition."""

    message: str
    version: str = field(default="", compare=False)


Outcome = Bound | Declined | Failed


@dataclass(frozen=True, slots=True)
class _Reserved:
    """The placement to bind the pod with. If it has charges, the reservation is written."""

    pod: Pod
    placement: Placement
    despite: Reason | None


@dataclass(frozen=True, slots=True)
class _Again:
    """The step must start again with the store's current objects."""

    trouble: StoreError | None = None


@dataclass(slots=True, eq=False)
class _Want:
    """One bind that needs its reservation written."""

    ask: BindAsk
    #: The objects of this attempt; None: read them from the store.
    pod: Pod | None
    gpunode: GPUNode | None
    done: bool = False
    #: The next step. An exception is raised to the caller of this bind.
    step: Outcome | _Reserved | _Again | Exception = field(default_factory=_Again)
    #: The reservation to write for it.
    reservation: Reservation | None = None

    def go_on(self, step: Outcome | _Reserved | _Again | Exception) -> None:
        self.step, self.done = step, True


async def one_by_one(calls: Iterable[Awaitable[None]]) -> None:
    """Await the given calls in sequence."""
    for call in calls:
        await call


def _too_late(ask: BindAsk, trouble: StoreError | None) -> str:
    why = f" (last error: {trouble})" if trouble else ""
    return (
        f"pod {ask.namespace}/{ask.name} is not bound to node {ask.node}: the API server took "
        f"longer than kube-scheduler waits{why}; kube-scheduler tries the pod again"
    )


def _is_final(step: "Outcome | _Reserved | _Again | Exception") -> bool:
    return not isinstance(step, _Reserved | _Again)


class ErrorsByNode:
    """Collects store errors that concern one node, so that the other nodes are still processed.

    Each ``with`` block handles one node. ``StoreTimeout`` is not collected: if the store does not
    answer, the other nodes would only wait as well.
    """

    def __init__(self) -> None:
        self._errors: list[StoreError] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, err: BaseException | None, _where: object) -> bool:
        if not isinstance(err, StoreError) or isinstance(err, StoreTimeout):
            return False
        self._errors.append(err)
        return True

    def raise_first(self) -> None:
        """Raise the first collected error."""
        if self._errors:
            raise self._errors[0]


class Ledger:
    """Writes, reads and removes reservations. ``written`` is called with each GPUNode that was
    written, so that the next decision sees it at once."""

    def __init__(
        self,
        store: Store,
        judge: Judge,
        adopt: Adopt,
        written: Callable[[GPUNode], None],
        wall_s: Callable[[], float],
        new_id: Callable[[], str],
        known: Callable[[GPUNode], bool] = lambda gpunode: bool(
            gpunode.status and gpunode.status.devices
        ),
        observes: Callable[[], bool] = bool,
        monotonic_s: Callable[[], float] = time.monotonic,
        together: Callable[[Iterable[Awaitable[None]]], Awaitable[None]] = one_by_one,
    ) -> None:
        self._store = store
        self._judge = judge
        self._adopt = adopt
        self._written = written
        self._wall_s = wall_s
        self._new_id = new_id
        #: Whether the devices of the node's pods are known.
        self._known = known
        #: Mode observe: each pod is bound as requested, and charged what it uses even if that
        #: overcommits the node.
        self._observes = observes
        self._monotonic_s = monotonic_s
        #: Awaits calls to the store that may run concurrently.
        self._together = together
        self._turns = NodeBatcher[_Want](self._reserve)
        #: Uids of GPUNodes to initialise whose older Bindings can no longer succeed.
        self._cleared: set[str] = set()

    async def bind(self, ask: BindAsk) -> Outcome:
        """Reserve, then bind. The call is idempotent: it may be repeated for a pod, also
        concurrently, with the same result."""
        try:
            outcome = await self._bind(ask)
        except StoreError as err:
            # The pod's state is unknown. A reservation written so far stays, which is safe.
            outcome = Failed(str(err))
        if isinstance(outcome, Bound) or not self._observes():
            return outcome
        return await self._bind_unreserved(ask, outcome)

    async def _bind(self, ask: BindAsk) -> Outcome:
        want = _Want(ask, ask.pod, ask.gpunode)
        trouble: StoreError | None = None
        for _ in range(ATTEMPTS):
            await self._turns.take(ask.node, want)  # 1 to 3
            if self._monotonic_s() > ask.until_s and not _is_final(want.step):
                return Failed(_too_late(ask, trouble))
            match want.step:
                case Exception() as err:
                    raise err
                case _Again(why):
                    trouble, want.gpunode = why or trouble, None
                    continue
                case _Reserved(pod, placement, despite):
                    pass
                case outcome:
                    return outcome
            # 4. Bind, on condition that the pod is still the one that was fitted.
            try:
                await self._store.bind(_binding(pod, ask.node, placement))
                return Bound(pod.metadata.resource_version, despite)
            except StoreError as err:
                trouble = err
            # 5. Rejected or unanswered: the pod's current state decides.
            want.pod = await self._store.read_pod(ask.namespace, ask.name)
            state = _unbound(ask, want.pod)
            if isinstance(state, Pod) and isinstance(trouble, StoreRejected):
                state = Failed(str(trouble))
            if isinstance(state, Failed):
                # No attempt can use the reservation any more. If this removal fails, the reconciler
                # repeats it.
                await self.remove(ask.node, ask.uid)
            if not isinstance(state, Pod):
                return state
            # Still unbound: start again. The reservation stays, for this or a concurrent attempt.
        return Failed(f"gave up after {ATTEMPTS} attempts: {trouble}")

    async def _reserve(self, node: str, turn: Turn[_Want], wants: list[_Want]) -> None:
        """Run steps 1 to 3 for all of these binds, with one write."""
        try:
            await self._reserve_together(node, turn, wants)
        except StoreRejected as err:
            # A rejected bind must not fail the others: write each on its own.
            for want in wants:
                if len(wants) > 1:
                    await self._reserve(node, turn, [want])
                else:
                    want.go_on(err)
        except Exception as err:  # noqa: BLE001 - raised to the caller of each bind
            for want in wants:
                want.go_on(err)

    async def _reserve_together(self, node: str, turn: Turn[_Want], wants: list[_Want]) -> None:
        # An earlier holder of the lock wrote a newer object than the watch has delivered.
        held = turn.gpunode if turn.used else wants[-1].gpunode
        if any(want.gpunode is None for want in wants):
            held = None
        turn.used, turn.gpunode = True, None
        before = held or await self._store.read_gpunode(node)
        if before is None:
            for want in wants:
                await self._fit_without_gpunode(want, GPUNode(metadata=ObjectMeta(name=node)))
            return
        gpunode = before
        for want in wants:
            try:
                await self._fit(want, gpunode, fresh=held is None)
            except Exception as err:  # noqa: BLE001 - raised to the caller of this bind only
                want.reservation = None
                want.go_on(err)
            if want.reservation is not None:
                gpunode = _with(gpunode, want.ask.uid, self._stamped(want.reservation))
        # 3. Reserve, always, even if the pod has a reservation already: the write proves that no
        # replica removed it in between.
        trouble: StoreError | None = None
        if gpunode is not before:
            try:
                turn.gpunode = gpunode = await self._write(before, gpunode.spec)
            except (StoreConflict, OutcomeUnknown) as err:
                trouble = err
        for want in wants:
            # A pod may have been declined because of a reservation that was not written after all.
            if trouble and (want.reservation is not None or isinstance(want.step, Declined)):
                want.step = _Again(trouble)
            want.gpunode, want.done = gpunode, True

    async def _fit_without_gpunode(self, want: _Want, gpunode: GPUNode) -> None:
        """Pass a pod that requests no GPU: without a GPUNode it can still be bound, because it
        needs no reservation."""
        ask = want.ask
        try:
            state = _unbound(ask, want.pod or await self._store.read_pod(ask.namespace, ask.name))
        except Exception as err:  # noqa: BLE001 - raised to the caller of this bind only
            want.go_on(err)
            return
        if not isinstance(state, Pod):
            want.go_on(state)
            return
        placement = self._judge(state, gpunode)
        if isinstance(placement, Placement) and not placement.charges:
            want.go_on(_Reserved(state, placement, None))
        else:
            want.go_on(Declined(Reason.NO_REPORT, state.metadata.resource_version))

    async def _fit(self, want: _Want, gpunode: GPUNode, fresh: bool) -> None:
        """Run steps 1 and 2 for one bind. ``fresh``: ``gpunode`` was read from the store, not
        delivered by a watch, which may be behind."""
        ask, pod, want.reservation = want.ask, want.pod, None
        # 1. Get the pod, unbound, at a resourceVersion. If it has a reservation already, read it
        # after that reservation. Otherwise an older version from a filter call could reserve less
        # than the attempt that wrote the reservation is about to bind.
        if pod is None or ask.uid in gpunode.spec.reservations:
            pod = await self._store.read_pod(ask.namespace, ask.name)
        state = _unbound(ask, pod)
        if not isinstance(state, Pod):
            want.step = state
            return
        # 2. Fit it on the object that the write will be conditional on.
        known = ask.placement if state is ask.pod and gpunode is ask.gpunode else None
        want.pod, placement, despite = state, known or self._judge(state, gpunode), None
        if isinstance(placement, Reason):
            if not fresh:
                want.step = _Again()
                return
            if not self._observes():
                want.step = Declined(placement, state.metadata.resource_version)
                return
            despite, placement = placement, NOTHING
            # Adopt it as an unreserved pod, so that a later switch to mode enforce starts with
            # correct charges. Not before the node is initialised: that charges all pods on the
            # node.
            if gpunode.spec.initialised:
                want.reservation = self._adopt(state, gpunode)
        elif placement.charges:
            want.reservation = _reserve(state, placement)
        want.step = _Reserved(state, placement, despite)

    async def _bind_unreserved(self, ask: BindAsk, outcome: Declined | Failed) -> Outcome:
        """Bind a pod without a reservation, in mode observe. No pod waits for the ledger there: an
        unreserved pod is charged when it is seen on the node."""
        try:
            state = _unbound(ask, await self._store.read_pod(ask.namespace, ask.name))
            if not isinstance(state, Pod):
                return state
            if self._monotonic_s() > ask.until_s:
                return outcome
            await self._store.bind(_binding(state, ask.node, NOTHING))
        except StoreError as err:
            return Failed(str(err), outcome.version)
        despite = outcome.reason if isinstance(outcome, Declined) else None
        return Bound(state.metadata.resource_version, despite)

    async def remove(self, node: str, uid: str, left: bool = False) -> bool:
        """Remove a reservation unless its pod may run on the node. This is the only way to remove
        one. Any caller may use it at any time.

        A pod that is gone from the store may have run on the node, and its containers may still
        run. So its reservation stays unless the pod is known to have ended, never ran there, or has
        ``left`` since it was deleted (``departed_by``). A report that still shows the pod overrides
        ``left``.

        Return whether the reservation is gone. Return False also if the store does not answer; then
        it stays, which is safe.
        """
        for _ in range(ATTEMPTS):
            try:
                gpunode = await self._store.read_gpunode(node)
                if gpunode is None or uid not in gpunode.spec.reservations:
                    return True
                reservation = gpunode.spec.reservations[uid]
                # Read from the store: a cache could still show the pod unbound.
                pod = await self._store.read_pod(reservation.namespace, reservation.name)
                if pod is not None and pod.metadata.uid == uid:
                    if pod.node == node and not pod.ended:
                        return False
                    if not pod.node:
                        # Bindings in flight carry the old resourceVersion and now fail.
                        await self._store.touch_pod(pod, self._new_id())
                elif not left or _shown(gpunode, uid):
                    return False
                rest = {u: r for u, r in gpunode.spec.reservations.items() if u != uid}
                await self._write(gpunode, msgspec.structs.replace(gpunode.spec, reservations=rest))
                return True
            except (StoreConflict, StoreNotFound):
                continue
            except StoreError:
                return False
        return False

    async def charge(self, node: str, unreserved_pod: Pod) -> bool:
        """Write the reservation of a pod that is bound to the node without one, even if that
        overcommits a device. Any caller may use it at any time.

        Return whether the reservation is written or not needed. Return False also if the store does
        not answer.
        """
        metadata = unreserved_pod.metadata
        for _ in range(ATTEMPTS):
            try:
                gpunode = await self._store.read_gpunode(node)
                if gpunode is None or metadata.uid in gpunode.spec.reservations:
                    return True
                # Read after the GPUNode: a pod that is there now was bound without the ledger, or
                # its reservation was removed because the pod had ended.
                pod = await self._store.read_pod(metadata.namespace, metadata.name)
                if pod is None or pod.metadata.uid != metadata.uid:
                    return True
                if pod.node != node or pod.ended or not gpunode.spec.initialised:
                    return True
                if not self._known(gpunode):
                    return False  # the reservation lists the devices, which are not known yet
                if (reservation := self._adopt(pod, gpunode)) is None:
                    return True
                reservations = {
                    **gpunode.spec.reservations,
                    metadata.uid: self._stamped(reservation),
                }
                spec = msgspec.structs.replace(gpunode.spec, reservations=reservations)
                await self._write(gpunode, spec)
                return True
            except (StoreConflict, StoreNotFound):
                continue
            except StoreError:
                return False
        return False

    async def mark(self, gpunode: GPUNode, leave: Collection[str]) -> GPUNode:
        """Mark exactly these pods to leave the node before they start, as far as ``gpunode`` has
        reservations for them. Return the GPUNode that was written; raise store errors."""
        reservations = {
            uid: _marked(reservation, uid in leave)
            for uid, reservation in gpunode.spec.reservations.items()
        }
        if reservations == gpunode.spec.reservations:
            return gpunode
        return await self._write(
            gpunode, msgspec.structs.replace(gpunode.spec, reservations=reservations)
        )

    async def note_choice(self, node: str, choice: str) -> bool:
        """Write the device choice of the Node into its GPUNode, where the agent reads it.

        Reservations are unchanged. Filter uses the device choice that the agent reports, and an
        agent changes it only when no unconfirmed pod depends on it. Return whether it is written;
        raise store errors.
        """
        for _ in range(ATTEMPTS):
            gpunode = await self._store.read_gpunode(node)
            if gpunode is None:
                return False
            if gpunode.spec.device_choice == choice:
                return True
            spec = msgspec.structs.replace(gpunode.spec, device_choice=choice)
            with suppress(StoreConflict, StoreNotFound):
                await self._write(gpunode, spec)
                return True
        return False

    async def departed_by(self, node: str, uid: str, reservation: Reservation) -> str | None:
        """Return a version of the agent's Lease that is newer than the removal of the pod.

        If the agent had seen a later Lease version when it took a sample, the pod was already gone.
        Return an empty string if the agent has no Lease; None if the pod still exists or the store
        does not answer.
        """
        try:
            gone = await self._store.read_pod(reservation.namespace, reservation.name)
            if gone is not None and gone.metadata.uid == uid:
                return None
            # Read after the pod, and from the store: a watch may be behind.
            return await self._store.read_heartbeat_version(node)
        except StoreError:
            return None

    async def initialise(self, nodes: Iterable[Node]) -> list[str]:
        """Make the GPUNodes of these nodes ready to take pods; return the names of the initialised
        ones.

        A node without known devices gets its GPUNode only. It is initialised once its devices are
        known, because only then can its pods be charged. The call may be repeated. Raise store
        errors; an error about a single node is raised after all other nodes are done.
        """
        errors, waiting = ErrorsByNode(), list[GPUNode]()
        for node in nodes:
            with errors:
                gpunode = await self._read_or_create(node)
                if gpunode and not gpunode.spec.initialised and self._known(gpunode):
                    waiting.append(gpunode)
        made = await self._initialise(waiting, errors) if waiting else []
        errors.raise_first()
        return made

    async def _initialise(self, waiting: Sequence[GPUNode], errors: "ErrorsByNode") -> list[str]:
        # Bindings in flight have their reservations in a GPUNode that is gone. Make them fail, so
        # that the list below contains each pod that is bound without a reservation, now or later.
        # This holds for the lifetime of the GPUNodes, so it is done once for each.
        uids = {gpunode.metadata.uid for gpunode in waiting}
        self._cleared &= uids
        if uids - self._cleared:
            await self._touch_unbound(waiting[0])
            self._cleared |= uids
        pods_on: dict[str, list[Pod]] = {}
        names = [gpunode.name for gpunode in waiting]
        for name in names if len(names) <= FEW_NODES else (None,):
            # The list contains at least all pods that are bound to these nodes from now on.
            async for pods in part_by_part(await self._store.list_pods(name), AT_ONCE):
                for pod in pods:
                    if pod.node and not pod.ended:
                        pods_on.setdefault(pod.node, []).append(pod)
        made: list[str] = []
        for gpunode in waiting:
            with errors:
                if await self._charge_all(gpunode, pods_on.get(gpunode.name, ())):
                    made.append(gpunode.name)
        return made

    async def _touch_unbound(self, gpunode: GPUNode) -> None:
        """Make all Bindings in flight fail, by changing an annotation of each unbound pod.

        The API server may reject the change of a pod (422, 403, a failing admission webhook). That
        blocks no node: if a Binding of this pod succeeds later, the pod is adopted like any
        unreserved pod.
        """
        async for pods in part_by_part(await self._store.list_pods(node=""), 10 * AT_ONCE):
            unbound = [
                pod
                for pod in pods
                if not (pod.node or pod.ended) and self._adopt(pod, gpunode) is not None
            ]
            await self._together(map(self._touch, unbound))

    async def _touch(self, pod: Pod) -> None:
        try:
            await self._store.touch_pod(pod, self._new_id())
        except (StoreConflict, StoreNotFound):
            pass  # changed or deleted since it was listed: its Bindings fail as well
        except StoreRejected as err:
            log.warning("pod_not_touched", pod_uid=pod.metadata.uid, message=str(err))

    async def requeue(self, pod: Pod) -> str | None:
        """Make kube-scheduler retry the pod, by changing an annotation of it.

        Return the annotation's value, which may be that of a faster replica; None if the pod is
        bound or gone. Raise store errors.
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
            # it.
            current = await self._store.read_pod(pod.metadata.namespace, pod.metadata.name)
        return None

    async def remove_finalizer(self, names: Iterable[str]) -> None:
        """Remove our finalizer from those of these GPUNodes that are being deleted, with their
        Nodes or by hand.

        Their reservations are lost, which is safe: nothing is placed on a node without a GPUNode,
        and its pods are charged before a new GPUNode takes more. Raise store errors; an error about
        a single node is raised after all other nodes are done.
        """
        errors = ErrorsByNode()
        for name in names:
            with errors:
                gpunode = await self._store.read_gpunode(name)
                if gpunode is not None and gpunode.metadata.deletion_timestamp:
                    with suppress(StoreConflict, StoreNotFound):  # the next round checks it again
                        await self._store.remove_finalizer(gpunode)
        errors.raise_first()

    async def _charge_all(self, listed: GPUNode, pods: Iterable[Pod]) -> bool:
        """Write reservations for all pods on the node; return False if another replica was faster.

        The agent may have written its status since ``listed`` was read. No replica reserves on a
        GPUNode before it is initialised, so ``pods`` is still complete.
        """
        gpunode: GPUNode | None = listed
        for _ in range(ATTEMPTS):
            if gpunode is None or gpunode.metadata.uid != listed.metadata.uid:
                return False
            if gpunode.spec.initialised or not self._known(gpunode):
                return False
            reservations = dict(gpunode.spec.reservations)
            for pod in pods:
                if pod.metadata.uid in reservations:
                    continue
                if (reservation := self._adopt(pod, gpunode)) is not None:
                    reservations[pod.metadata.uid] = self._stamped(reservation)
            spec = msgspec.structs.replace(
                gpunode.spec, initialised=True, reservations=reservations
            )
            with suppress(StoreConflict, StoreNotFound):
                await self._write(gpunode, spec)
                return True
            gpunode = await self._store.read_gpunode(listed.name)
        return False

    async def _read_or_create(self, node: Node) -> GPUNode | None:
        name = node.metadata.name
        if (gpunode := await self._store.read_gpunode(name)) is not None:
            return gpunode
        owner = OwnerReference(api_version="v1", kind="Node", name=name, uid=node.metadata.uid)
        metadata = ObjectMeta(name=name, finalizers=[FINALIZER], owner_references=[owner])
        try:
            return await self._store.create_gpunode(GPUNode(metadata=metadata))
        except StoreConflict:
            return None  # another client was faster; the next round checks it again

    def _stamped(self, reservation: Reservation) -> Reservation:
        since = datetime.fromtimestamp(self._wall_s(), UTC).isoformat(timespec="milliseconds")
        return msgspec.structs.replace(reservation, attempt=self._new_id(), since=since)

    async def _write(self, before: GPUNode, spec: GPUNodeSpec) -> GPUNode:
        reserved = sum(
            max(charge.candidates.values(), default=0) * charge.count
            for reservation in spec.reservations.values()
            for charge in reservation.charges
        )
        spec = msgspec.structs.replace(spec, reserved=format_bytes(reserved))
        after = await self._store.write_spec(before, spec)
        self._written(after)
        return after


def _with(gpunode: GPUNode, uid: str, reservation: Reservation) -> GPUNode:
    reservations = {**gpunode.spec.reservations, uid: reservation}
    spec = msgspec.structs.replace(gpunode.spec, reservations=reservations)
    return msgspec.structs.replace(gpunode, spec=spec)


def _reserve(pod: Pod, placement: Placement) -> Reservation:
    metadata, charges = pod.metadata, list(placement.charges)
    return Reservation(namespace=metadata.namespace, name=metadata.name, charges=charges)


def _unbound(ask: BindAsk, pod: Pod | None) -> Pod | Bound | Failed:
    """Return the pod if it can still be bound, else the outcome that its state already
    determines."""
    subject = f"pod {ask.namespace}/{ask.name}"
    if pod is None:
        return Failed(f"{subject} does not exist")
    if pod.metadata.uid != ask.uid:
        return Failed(f"{subject} was replaced: its uid is {pod.metadata.uid}, not {ask.uid}")
    if (pod.metadata.namespace, pod.metadata.name) != (ask.namespace, ask.name):
        return Failed(f"{subject} is not the pod of uid {ask.uid}")
    if pod.node == ask.node:
        return Bound()
    if pod.node:
        return Failed(f"{subject} is bound to node {pod.node}")
    if pod.metadata.deletion_timestamp:
        return Failed(f"{subject} is being deleted")
    return pod


def _shown(gpunode: GPUNode, uid: str) -> bool:
    return gpunode.status is not None and any(use.uid == uid for use in gpunode.status.pods)


def _marked(reservation: Reservation, leaves: bool) -> Reservation:
    if leaves == (EVICTED in reservation.flags):
        return reservation
    flags = [flag for flag in reservation.flags if flag != EVICTED] + [EVICTED] * leaves
    return msgspec.structs.replace(reservation, flags=flags)


def _binding(pod: Pod, node: str, placement: Placement) -> Binding:
    return Binding(
        namespace=pod.metadata.namespace,
        name=pod.metadata.name,
        uid=pod.metadata.uid,
        resource_version=pod.metadata.resource_version,
        node=node,
        annotations=placement.annotations,
    )
