"""Reconciles the ledger with the cluster, on changed nodes immediately and on all nodes every few
seconds.

``reconcile.queue`` finds the corrections, and the ledger writes them. This module decides when that
happens, so that slow work delays neither other work nor kube-scheduler's calls.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import structlog

from extender.event_recorder import EventRecorder
from extender.eviction.controller import EvictionController
from extender.ledger.ledger import Ledger
from extender.reconcile.queue import (
    Orphan,
    Unmarked,
    UnreservedPod,
    being_deleted,
    changed_settings,
    orphans,
    uninitialised,
    unreserved_pods,
)
from headroom.contract.kube import Node
from headroom.contract.watched import GPUNodeGone, GPUNodeSeen, NodeSeen
from headroom.core.cluster.changes import DepartureMarked, Effects, Event
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.node_settings import AgentSettings
from headroom.core.cluster.notices import notices
from headroom.errors import StoreError
from headroom.runtime.loops import Loops, part_by_part
from headroom.runtime.settings.settings import Mode, Settings

log = structlog.get_logger()

#: Number of seconds between two rounds over all nodes.
EVERY_S = 5.0
#: Number of seconds between two rounds in which nodes are initialised, while a node is waiting.
READY_EVERY_S = 0.25
#: Number of seconds for which a round waits for its nodes. Slower nodes are finished in the
#: background.
WAITED_S = 1.0
#: Number of nodes that are checked before the event loop serves other tasks.
AT_ONCE = 20
#: Maximum number of nodes that are written concurrently. The other connections are left for binds.
WRITTEN_AT_ONCE = 8


class ReconcileController:
    """Reconciles reservations, GPUNodes and Events.

    ``unready`` returns the reason why the cache is incomplete, or "" if it is complete. While it is
    incomplete, a pod that is not in the cache may exist. In mode observe, no pods are evicted and
    no Events are written.
    """

    def __init__(
        self,
        cluster: Cluster,
        event_recorder: EventRecorder,
        loops: Loops,
        settings: Settings,
        unready: Callable[[], str],
        deliver: Callable[[Sequence[Event]], None],
    ) -> None:
        self._cluster = cluster
        self._event_recorder = event_recorder
        self._loops = loops
        self._settings = settings
        self._unready = unready
        self._deliver = deliver
        self._writes = asyncio.Semaphore(WRITTEN_AT_ONCE)
        self.every_s, self.ready_every_s = EVERY_S, READY_EVERY_S
        self.waited_s, self.at_once = WAITED_S, AT_ONCE
        #: This event is set if a reservation may be orphaned or missing.
        self._reservations_changed = asyncio.Event()
        #: This event is set if a GPUNode may have to be initialised, or its finalizer removed.
        self._nodes_changed = asyncio.Event()
        self._round_at_s = 0.0
        #: Nodes that may have an orphaned or missing reservation.
        self._unsettled: dict[str, None] = {}
        #: The task that checks the reservations of a node, by node.
        self._checks: dict[str, asyncio.Task[None]] = {}
        #: The controller that evicts pods, or None if this process evicts no pods.
        self.eviction_controller: EvictionController | None = None

    def follow(self, settings: Settings) -> None:
        """Use these settings from now on."""
        self._settings = settings

    def react(self, effects: Effects) -> None:
        """Schedule a check of nodes on which a reservation may be orphaned or missing, that may
        have to be initialised, or whose settings for the agent have changed."""
        if effects.unsettled:
            self._unsettled |= effects.unsettled
            self._reservations_changed.set()
        seen = [event.node for event in effects.events if isinstance(event, NodeSeen)]
        held = filter(None, (self._cluster.gpunode(node.metadata.name) for node in seen))
        if (
            any(map(_changes_readiness, effects.events))
            or uninitialised(self._cluster, seen)
            or changed_settings(self._cluster, held)
        ):
            self._nodes_changed.set()

    def start(self, ledger: Ledger) -> None:
        """Start three loops, so that none waits for the API calls of another."""
        changed, new = self._reservations_changed, self._nodes_changed
        start = self._loops.start
        start("reservations", lambda: self.check_reservations(ledger), self.every_s, changed)
        start("nodes", lambda: self.prepare_nodes(ledger), self.every_s, new, self.ready_every_s)
        start("notices", self.record_events, self.every_s)

    async def once(self, ledger: Ledger) -> None:
        """Run one round of all checks on all nodes."""
        self._round_at_s = 0.0
        await self.check_reservations(ledger)
        await self.prepare_nodes(ledger)
        await self.record_events()

    async def prepare_nodes(self, ledger: Ledger) -> None:
        """Remove the finalizers of deleted GPUNodes, initialise new nodes, and copy changed
        settings of Nodes for their agents."""
        if self._unready():
            self._nodes_changed.set()  # No pods are placed on nodes until they are initialised.
            return
        gone, changed = list[str](), list[tuple[str, AgentSettings]]()
        async for held in part_by_part(self._cluster.gpunodes(), self.at_once):
            gone += being_deleted(held)
            changed += changed_settings(self._cluster, held)
        if gone:
            with _logged():
                await ledger.initialiser.remove_finalizer(gone)
        for name, settings in changed:
            with _logged():
                copied = await ledger.initialiser.copy_settings(
                    name, settings.device_choice, settings.cordoned
                )
                log.info("node_settings_copied", node=name, copied=copied, **asdict(settings))
        waiting: list[Node] = []
        async for some in part_by_part(self._cluster.nodes(), self.at_once):
            waiting += uninitialised(self._cluster, some)
        if waiting:
            with _logged():
                ready = await ledger.initialiser.initialise(waiting)
                log.info("nodes_initialised", nodes=ready)

    async def record_events(self) -> None:
        """Write Events for users."""
        if self._unready():
            return
        if self._settings.mode is not Mode.OBSERVE:
            await self._event_recorder.record(notices(self._cluster))

    async def check_reservations(self, ledger: Ledger) -> None:
        """Remove orphaned reservations, and charge unreserved pods.

        Changed nodes are checked immediately, and all nodes every few seconds. If a correction
        fails, the next round finds it again. The corrections of one node are written one after
        another, because they change the same object. A slow node does not delay other nodes.
        """
        everywhere = time.monotonic() >= self._round_at_s
        if everywhere:
            self._round_at_s = time.monotonic() + self.every_s
        on, self._unsettled = list(self._unsettled), {}
        if self._unready():
            return  # a pod that is not listed yet may exist
        after_s = self._settings.orphan_after_s
        nodes = [each.name for each in self._cluster.gpunodes()] if everywhere else on
        of_node: dict[str, list[UnreservedPod | Orphan | Unmarked]] = {}
        async for some in part_by_part(nodes, self.at_once):
            for found in (
                *unreserved_pods(self._cluster, some),
                *orphans(self._cluster, time.time(), after_s, some),
            ):
                of_node.setdefault(found.node, []).append(found)
        begun = {
            node: asyncio.create_task(self._correct_node(ledger, node, findings))
            for node, findings in of_node.items()
            if node not in self._checks
        }
        self._checks |= begun
        if begun:
            await asyncio.wait(begun.values(), timeout=self.waited_s)
        if self.eviction_controller and self._settings.mode is not Mode.OBSERVE:
            await self.eviction_controller.once()

    async def _correct_node(
        self, ledger: Ledger, node: str, findings: Sequence[UnreservedPod | Orphan | Unmarked]
    ) -> None:
        try:
            async with self._writes:
                for found in findings:
                    await self._correct(ledger, found)
        except Exception:  # noqa: BLE001 - logged and counted; the next round finds the rest again
            self._loops.failing("reservations")
        finally:
            del self._checks[node]

    async def _correct(self, ledger: Ledger, found: UnreservedPod | Orphan | Unmarked) -> None:
        if isinstance(found, UnreservedPod):
            node, uid = found.node, found.pod.metadata.uid
            charged = await ledger.reservations.charge(node, found.pod)
            log.info("unreserved_pod_adopted", node=node, pod_uid=uid, charged=charged)
            return
        node, uid = found.node, found.uid
        if isinstance(found, Orphan):
            removed = await ledger.reservations.remove(node, uid, found.left)
            log.info("reservation_checked", node=node, pod_uid=uid, removed=removed)
            return
        version = await ledger.reservations.departed_by(node, uid, found.reservation)
        if version is not None:
            self._deliver([DepartureMarked(node, uid, version, time.monotonic())])
            log.info("reservation_waits_for_sample", node=node, pod_uid=uid, lease_version=version)


def _changes_readiness(event: Event) -> bool:
    """Return whether the event may be about a node that must be initialised, or a GPUNode whose
    finalizer must be removed."""
    if isinstance(event, GPUNodeSeen):
        return not event.gpunode.spec.initialised or bool(event.gpunode.metadata.deletion_timestamp)
    return isinstance(event, GPUNodeGone)


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """Log a store error instead of raising it, so that the next task still runs."""
    try:
        yield
    except StoreError as err:
        log.warning("reconcile_failed", message=str(err))
