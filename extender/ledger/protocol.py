"""The bind protocol: when a promise is made, and the one way in which it is taken back.

A promise is an entry of ``GPUNode.spec.reservations``, written by compare-and-swap on the object
it was computed from. So any number of these may run against one store; the store decides. The
order of the steps is what makes it safe (DESIGN section 6); each says below why it is there.
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
from extender.batches import part_by_part
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
from extender.placement.placement_record import Placement

log = structlog.get_logger()

#: How often a step is begun anew after losing a race; then the pod is left to be retried.
ATTEMPTS = 8
#: So many nodes are initialised with a list for each; for more, all pods are listed together.
FEW_NODES = 16
#: Pods that are looked at before others have a turn.
AT_ONCE = 50


#: Bound as kube-scheduler itself binds.
NOTHING = Placement((), {})


class Judge(Protocol):
    """Fits a pod on one very object of a node, as if that held no promise to the pod yet."""

    def __call__(self, pod: Pod, gpunode: GPUNode) -> Placement | Reason: ...


class Adopt(Protocol):
    """The reservation of a pod that sits on a node without our promise; None if it is not ours."""

    def __call__(self, pod: Pod, gpunode: GPUNode) -> Reservation | None: ...


@dataclass(frozen=True, slots=True)
class BindAsk:
    """What kube-scheduler wants bound, and what this replica already holds of it."""

    namespace: str
    name: str
    uid: str
    node: str
    #: The pod as the filter call showed it; None where this replica did not see that call.
    pod: Pod | None
    #: The node's object as the watch showed it; None where it did not.
    gpunode: GPUNode | None
    #: As this pod fits on this object; None where that is not known yet.
    placement: Placement | None = None
    #: When kube-scheduler gives up this call, on the monotonic clock in seconds. What it assumed
    #: of the node (CPU, ports, volumes) does not hold afterwards.
    until_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Bound:
    """The pod is bound to the node it was asked for, now or already."""

    #: resourceVersion of the pod that was decided about; empty where none was.
    version: str = field(default="", compare=False)
    #: Why it would have been declined, where that is only observed.
    despite: Reason | None = None


@dataclass(frozen=True, slots=True)
class Declined:
    """There is no room (any more): kube-scheduler will try the pod again."""

    reason: Reason
    version: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Failed:
    """It could not be done; ``message`` says why, for the pod's condition."""

    message: str
    version: str = field(default="", compare=False)


Outcome = Bound | Declined | Failed


@dataclass(frozen=True, slots=True)
class _Reserved:
    """What this pod is to be bound with; written where it is charged anything."""

    pod: Pod
    placement: Placement
    despite: Reason | None


@dataclass(frozen=True, slots=True)
class _Again:
    """To be begun anew, on what the store says now."""

    trouble: StoreError | None = None


@dataclass(slots=True, eq=False)
class _Want:
    """One bind that wants its promise."""

    ask: BindAsk
    #: As this attempt knows them; None: to be read.
    pod: Pod | None
    gpunode: GPUNode | None
    done: bool = False
    #: How it goes on; an error is raised where it was asked for.
    step: Outcome | _Reserved | _Again | Exception = field(default_factory=_Again)
    #: What is charged to it.
    reservation: Reservation | None = None

    def go_on(self, step: Outcome | _Reserved | _Again | Exception) -> None:
        self.step, self.done = step, True


async def one_by_one(works: Iterable[Awaitable[None]]) -> None:
    for work in works:
        await work


def _too_late(ask: BindAsk, trouble: StoreError | None) -> str:
    why = f" (last error: {trouble})" if trouble else ""
    return (
        f"pod {ask.namespace}/{ask.name} is not bound to node {ask.node}: the API server took "
        f"longer than kube-scheduler waits{why}; kube-scheduler tries the pod again"
    )


def _is_final(step: "Outcome | _Reserved | _Again | Exception") -> bool:
    return not isinstance(step, _Reserved | _Again)


class Apart:
    """Holds back what the store refuses of one node until the others are done. Each ``with`` is
    about one; a store that does not answer at all is waited for by nobody."""

    def __init__(self) -> None:
        self._troubles: list[StoreError] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, err: BaseException | None, _where: object) -> bool:
        if not isinstance(err, StoreError) or isinstance(err, StoreTimeout):
            return False
        self._troubles.append(err)
        return True

    def complain(self) -> None:
        """Raise what was held back first."""
        if self._troubles:
            raise self._troubles[0]


class Ledger:
    """``written`` is told every GPUNode that we wrote, so that the next decision already knows."""

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
        #: Whether it is known what the node's pods sit on.
        self._known = known
        #: Whether every pod is bound as asked, and charged the truth even where that overcommits.
        self._observes = observes
        self._monotonic_s = monotonic_s
        #: Awaits calls to the store that need not be made in a sequence.
        self._together = together
        self._turns = NodeBatcher[_Want](self._reserve)
        #: Uids of GPUNodes that wait, and to which no Binding from before them can arrive.
        self._cleared: set[str] = set()

    async def bind(self, ask: BindAsk) -> Outcome:
        """Reserve, then bind; any number of times for the same pod, also at once, and with the same
        answer each time."""
        try:
            outcome = await self._bind(ask)
        except StoreError as err:
            # Nothing was learned of the pod. A promise made so far stays, which is safe.
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
            # 5. Refused or unanswered: what became of the pod decides.
            want.pod = await self._store.read_pod(ask.namespace, ask.name)
            state = _unbound(ask, want.pod)
            if isinstance(state, Pod) and isinstance(trouble, StoreRejected):
                state = Failed(str(trouble))
            if isinstance(state, Failed):
                # A promise nobody can use any more; if removing fails, housekeeping will.
                await self.remove(ask.node, ask.uid)
            if not isinstance(state, Pod):
                return state
            # Unbound: once more from the start. The promise stays, for this or a rival attempt.
        return Failed(f"gave up after {ATTEMPTS} attempts: {trouble}")

    async def _reserve(self, node: str, turn: Turn[_Want], wants: list[_Want]) -> None:
        """Steps 1 to 3 for all of these, with one write."""
        try:
            await self._reserve_together(node, turn, wants)
        except StoreRejected as err:
            # What is refused of one must not be the others' harm.
            for want in wants:
                if len(wants) > 1:
                    await self._reserve(node, turn, [want])
                else:
                    want.go_on(err)
        except Exception as err:  # noqa: BLE001 - each raises it where it was asked for
            for want in wants:
                want.go_on(err)

    async def _reserve_together(self, node: str, turn: Turn[_Want], wants: list[_Want]) -> None:
        # Who has had the turn before has written it since a watch told of it.
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
            except Exception as err:  # noqa: BLE001 - raised where it was asked for, by nobody else
                want.reservation = None
                want.go_on(err)
            if want.reservation is not None:
                gpunode = _with(gpunode, want.ask.uid, self._stamped(want.reservation))
        # 3. Reserve, always, also when there is a promise to the pod already: the write proves that
        # nobody took one back in between.
        trouble: StoreError | None = None
        if gpunode is not before:
            try:
                turn.gpunode = gpunode = await self._write(before, gpunode.spec)
            except (StoreConflict, OutcomeUnknown) as err:
                trouble = err
        for want in wants:
            # Who was declined may have been so for a promise that was not made after all.
            if trouble and (want.reservation is not None or isinstance(want.step, Declined)):
                want.step = _Again(trouble)
            want.gpunode, want.done = gpunode, True

    async def _fit_without_gpunode(self, want: _Want, gpunode: GPUNode) -> None:
        """Pass a pod that requests no GPU: it needs no reservation, so no GPUNode to hold one."""
        ask = want.ask
        try:
            state = _unbound(ask, want.pod or await self._store.read_pod(ask.namespace, ask.name))
        except Exception as err:  # noqa: BLE001 - raised where it was asked for, by nobody else
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
        """``fresh``: as the store has it, and not as a watch told, which may be behind."""
        ask, pod, want.reservation = want.ask, want.pod, None
        # 1. Know the pod, unbound, at a resourceVersion. Where there is a promise to it already it
        # is read after that: fitted as an older filter call showed it, it could be promised less
        # than the attempt that made the promise is about to bind.
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
            # As a bystander is: who switches to enforcing begins with the truth. One that is not
            # initialised is charged all that sits there, and may not be before.
            if gpunode.spec.initialised:
                want.reservation = self._adopt(state, gpunode)
        elif placement.charges:
            want.reservation = _reserve(state, placement)
        want.step = _Reserved(state, placement, despite)

    async def _bind_unreserved(self, ask: BindAsk, outcome: Declined | Failed) -> Outcome:
        """While we observe no pod waits for the ledger: who sits on a node without a promise is
        charged when it is seen there."""
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
        """Take a promise back unless its pod may run there; the only way, for anyone, any time.

        A pod that is gone from the store may have sat on the node, and its containers may run on:
        what it was promised stays unless the caller knows that it ended, never sat there, or has
        ``left`` since it was gone (``departed_by``). A report that shows it after all proves more.

        Returns whether the promise is gone. False also when the store does not answer: then it
        stays, which is safe.
        """
        for _ in range(ATTEMPTS):
            try:
                gpunode = await self._store.read_gpunode(node)
                if gpunode is None or uid not in gpunode.spec.reservations:
                    return True
                reservation = gpunode.spec.reservations[uid]
                # From the store itself: a cache could still show it unbound.
                pod = await self._store.read_pod(reservation.namespace, reservation.name)
                if pod is not None and pod.metadata.uid == uid:
                    if pod.node == node and not pod.ended:
                        return False
                    if not pod.node:
                        # Every Binding on its way carries the old resourceVersion and fails now.
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
        """Write down what a pod takes that sits on the node without a promise, even where that
        overcommits; for anyone, any time.

        Returns whether that is written, or needs not be. False also when the store does not answer.
        """
        metadata = unreserved_pod.metadata
        for _ in range(ATTEMPTS):
            try:
                gpunode = await self._store.read_gpunode(node)
                if gpunode is None or metadata.uid in gpunode.spec.reservations:
                    return True
                # After that read: a pod that sits there now was bound without the ledger, or its
                # promise was taken back because it had ended.
                pod = await self._store.read_pod(metadata.namespace, metadata.name)
                if pod is None or pod.metadata.uid != metadata.uid:
                    return True
                if pod.node != node or pod.ended or not gpunode.spec.initialised:
                    return True
                if not self._known(gpunode):
                    return False  # what it can sit on is part of what is written
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
        """Say of exactly these pods that they are to leave the node before they start.

        Of those that have a promise in this very object. Store errors are raised.
        """
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
        """Write the device choice of the Node into its GPUNode, where its agent reads it.

        Reservations stay as they are: filter goes by what the agent reports that it does, and an
        agent changes that only when no pod on its way counts on it. Returns whether it is written.
        Store errors are raised.
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
        """A version of the heartbeat of the node's agent that is newer than the pod's removal.

        A sample that the agent took when it knew a later version than this one was taken when the
        pod was gone. Empty where the agent has no Lease; None where the pod is still there, or
        where the store does not answer.
        """
        try:
            gone = await self._store.read_pod(reservation.namespace, reservation.name)
            if gone is not None and gone.metadata.uid == uid:
                return None
            # After that read, and not from a watch, which may be behind it.
            return await self._store.read_heartbeat_version(node)
        except StoreError:
            return None

    async def initialise(self, nodes: Iterable[Node]) -> list[str]:
        """Make the GPUNodes of these nodes ready to take pods; returns the names of those it made.

        A node whose devices are not known gets its object, and is initialised when they are: only
        then is it known what its pods sit on. Store errors are raised, one that is about a single
        node when all the others are done; calling again is harmless.
        """
        apart, waiting = Apart(), list[GPUNode]()
        for node in nodes:
            with apart:
                gpunode = await self._read_or_create(node)
                if gpunode and not gpunode.spec.initialised and self._known(gpunode):
                    waiting.append(gpunode)
        made = await self._initialise(waiting, apart) if waiting else []
        apart.complain()
        return made

    async def _initialise(self, waiting: Sequence[GPUNode], apart: "Apart") -> list[str]:
        # Bindings on their way were promised on an object that is gone: make them fail, so that
        # the list after this shows every pod that there is and will be without a promise here.
        # That holds for as long as these objects live, so it is done once for each.
        uids = {gpunode.metadata.uid for gpunode in waiting}
        self._cleared &= uids
        if uids - self._cleared:
            await self._touch_unbound(waiting[0])
            self._cleared |= uids
        sitting: dict[str, list[Pod]] = {}
        names = [gpunode.name for gpunode in waiting]
        for name in names if len(names) <= FEW_NODES else (None,):
            # At least all pods that are bound to these, as they are from now on.
            async for pods in part_by_part(await self._store.list_pods(name), AT_ONCE):
                for pod in pods:
                    if pod.node and not pod.ended:
                        sitting.setdefault(pod.node, []).append(pod)
        made: list[str] = []
        for gpunode in waiting:
            with apart:
                if await self._charge_all(gpunode, sitting.get(gpunode.name, ())):
                    made.append(gpunode.name)
        return made

    async def _touch_unbound(self, gpunode: GPUNode) -> None:
        """Make the Bindings of all pods fail that may be on their way.

        A pod that the API server refuses to change (422, 403, an admission webhook that fails)
        keeps no node from pods: if a Binding of it arrives after all, the pod is charged as any
        other that was bound without a reservation.
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
            pass  # changed or gone since it was listed is just as good
        except StoreRejected as err:
            log.warning("pod_not_touched", pod_uid=pod.metadata.uid, message=str(err))

    async def requeue(self, pod: Pod) -> str | None:
        """Make kube-scheduler try the pod again, as it does when its annotations change.

        Returns the annotation that does it: ours, or that of a replica that was faster; None where
        the pod is bound or gone by now. Store errors are raised.
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
            # kube-scheduler has just written why it was refused, or another replica has woken it.
            current = await self._store.read_pod(pod.metadata.namespace, pod.metadata.name)
        return None

    async def let_go(self, names: Iterable[str]) -> None:
        """End these GPUNodes, where somebody deletes them: with their Nodes, or by hand.

        Their promises are lost with them, which is safe: nothing is placed on a node without one,
        and what sits there is charged before the next takes anything. Store errors are raised, one
        that is about a single node when all the others are done.
        """
        apart = Apart()
        for name in names:
            with apart:
                gpunode = await self._store.read_gpunode(name)
                if gpunode is not None and gpunode.metadata.deletion_timestamp:
                    with suppress(StoreConflict, StoreNotFound):  # the next round looks again
                        await self._store.let_go(gpunode)
        apart.complain()

    async def _charge_all(self, listed: GPUNode, pods: Iterable[Pod]) -> bool:
        """Write that ``listed`` holds all that sits there; False if another replica was faster.

        The agent may have written its status since. Nobody has promised anything on this very
        object before it is initialised, so what sits there is still what was listed.
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
            return None  # somebody else was faster; the next round looks again

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
    """The pod while it is still to be bound, else what is decided about it already."""
    which = f"pod {ask.namespace}/{ask.name}"
    if pod is None:
        return Failed(f"{which} does not exist")
    if pod.metadata.uid != ask.uid:
        return Failed(f"{which} was replaced: its uid is {pod.metadata.uid}, not {ask.uid}")
    if (pod.metadata.namespace, pod.metadata.name) != (ask.namespace, ask.name):
        return Failed(f"{which} is not the pod of uid {ask.uid}")
    if pod.node == ask.node:
        return Bound()
    if pod.node:
        return Failed(f"{which} is bound to node {pod.node}")
    if pod.metadata.deletion_timestamp:
        return Failed(f"{which} is being deleted")
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
