"""The bind protocol: how a pod's reservation is written before the pod is bound.

A reservation is an entry of ``GPUNode.spec.reservations``, written by compare-and-swap on the
object it was computed from. So any number of replicas may run this protocol against one store, and
the store decides. The order of the steps makes it safe (DESIGN section 6); a comment at each step
gives the reason.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from contract.gpunode import GPUNode, Reservation
from contract.kube import ObjectMeta, Pod
from contract.reasons import Reason
from extender.errors import OutcomeUnknown, StoreConflict, StoreError, StoreRejected
from extender.ledger.node_batcher import NodeBatcher, Turn
from extender.ledger.reclaim import Reclaimer
from extender.ledger.reservations import ATTEMPTS, ReservationWriter
from extender.ledger.store import Binding
from extender.placement.placement_record import Placement

#: Binds a pod as kube-scheduler would: no charges, no annotations.
NOTHING = Placement((), {})


class Judge(Protocol):
    """Fits a pod on one version of a GPUNode, ignoring a reservation that the pod has there."""

    def __call__(self, pod: Pod, gpunode: GPUNode) -> Placement | Reason: ...


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


class Binder:
    """Binds pods. ``observes`` returns whether the mode is observe, in which each pod is bound as
    requested, and charged what it uses even if that overcommits the node."""

    def __init__(
        self,
        writer: ReservationWriter,
        reclaimer: Reclaimer,
        judge: Judge,
        observes: Callable[[], bool] = bool,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._writer = writer
        self._store = writer.store
        self._reclaimer = reclaimer
        self._judge = judge
        self._observes = observes
        self._monotonic_s = monotonic_s
        self._turns = NodeBatcher[_Want](self._reserve)

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
                await self._reclaimer.remove(ask.node, ask.uid)
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
                gpunode = _with(gpunode, want.ask.uid, self._writer.stamped(want.reservation))
        # 3. Reserve, always, even if the pod has a reservation already: the write proves that no
        # replica removed it in between.
        trouble: StoreError | None = None
        if gpunode is not before:
            try:
                turn.gpunode = gpunode = await self._writer.write(before, gpunode.spec)
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
                want.reservation = self._writer.adopt(state, gpunode)
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


def _too_late(ask: BindAsk, trouble: StoreError | None) -> str:
    why = f" (last error: {trouble})" if trouble else ""
    return (
        f"pod {ask.namespace}/{ask.name} is not bound to node {ask.node}: the API server took "
        f"longer than kube-scheduler waits{why}; kube-scheduler tries the pod again"
    )


def _is_final(step: "Outcome | _Reserved | _Again | Exception") -> bool:
    return not isinstance(step, _Reserved | _Again)


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


def _binding(pod: Pod, node: str, placement: Placement) -> Binding:
    return Binding(
        namespace=pod.metadata.namespace,
        name=pod.metadata.name,
        uid=pod.metadata.uid,
        resource_version=pod.metadata.resource_version,
        node=node,
        annotations=placement.annotations,
    )
