"""The state of the cluster in memory: events change it, snapshots are read from it.

A node is *weighed* when its terms are computed: eligibility, and per device the reserved,
unconfirmed and free memory. A change marks its node dirty, and dirty nodes are weighed again.

One thread owns a ``ClusterState``; only this thread calls ``apply`` and ``snapshot``. All returned
objects are immutable, so other threads may keep and read them. Any thread may call ``judge`` and
the methods that look up one object, because the values they read are replaced, never changed in
place.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from functools import partial
from math import inf
from types import MappingProxyType

import msgspec
import numpy as np

from contract.annotations import (
    DEVICE_CHOICE,
    MAX_SM,
    DeviceChoice,
    ScoringPolicy,
)
from contract.gpunode import (
    UNATTRIBUTED_TOLERANCE_BYTES,
    GPUNode,
    GPUNodeStatus,
    Reservation,
)
from contract.heartbeat import Confirmation, confirmation_of
from contract.kube import Lease, Namespace, Node, Pod, PodDisruptionBudget, ResourceSlice
from contract.pod_limits import has_room_for
from contract.reasons import Reason
from extender.placement.demand_pricing import DemandTracker
from extender.placement.device_accounting import DeviceTerms, weigh
from extender.placement.fit import fit
from extender.placement.overfull_devices import Misplaced, misplaced, overfull
from extender.placement.placement_record import Placement, charges, place
from extender.placement.policy import Rules
from extender.placement.report_delta import Found, find, with_new_measurements
from extender.placement.request import Unreadable, VramRequest, asks_for_gpu, understand
from extender.placement.snapshot import NodeTerms, Snapshot
from extender.placement.snapshot_builder import Table, build
from extender.state.adoption import adopt
from extender.state.changes import (
    ActivitySeen,
    AssumedSeen,
    BackOffEnded,
    BindBegun,
    BindEnded,
    BudgetGone,
    BudgetSeen,
    DepartureMarked,
    Event,
    GPUNodeGone,
    GPUNodeSeen,
    HeartbeatGone,
    HeartbeatSeen,
    NamespaceGone,
    NamespaceSeen,
    NodeGone,
    NodeSeen,
    PodGone,
    PodSeen,
    Relisted,
    SliceGone,
    SliceSeen,
)
from extender.state.deleted_pods import DeletedPods, is_unreachable
from extender.state.device_pinning import pinned_to
from extender.state.event_filter import as_assumed, matters, older
from extender.state.eviction_backoff import BackOffs, marked
from extender.state.foreign_allocators import ForeignAllocators, of_pod
from extender.state.headroom_gains import HeadroomGains, grew
from extender.state.heartbeats import NEVER_S, Heartbeats
from extender.state.label_inventory import believed
from extender.state.namespaces import Namespaces
from extender.state.node_settings import NodeSettings, node_settings, obstacle, offers_gpus
from extender.state.nominations import Nominations, Place
from extender.state.overcommitted_devices import Overcommits, any_overcommitted
from extender.state.overuse import Overuses
from extender.state.pod_selectors import Budgets, Neighbours, has_affinity_terms, key
from extender.state.prediction_tracker import Circumstances, PredictionTracker
from extender.state.request_drift import RequestDrift, as_bound
from extender.state.sm_activity import Activities, grew_idler
from extender.state.unstarted_pods import idle_on

#: The last part of the time in which a report is fresh. A report this old has missed a heartbeat.
AGEING_RATIO = 1 / 3
#: No reservations.
NOTHING: Mapping[str, Reservation] = MappingProxyType({})


class ClusterState:
    """The objects of the cluster, what was derived from them, and the weighed nodes."""

    def __init__(
        self, rules: Rules, stale_after_s: float, epoch_s: float, awaited: Iterable[type] = ()
    ) -> None:
        """``epoch_s``: the Unix time, in seconds, at which the monotonic clock was 0. It follows
        the wall clock, which may be set at any time.

        ``awaited``: kinds that must be listed before any node can be weighed.
        """
        self.rules = rules
        #: The kinds not listed yet. No node is weighed until this is empty: each further list
        #: would mark all nodes dirty again.
        self._awaited = set(awaited)
        #: Whether all awaited kinds are listed and all nodes have been weighed since.
        self.begun = not self._awaited
        self.stale_after_s = stale_after_s
        self.epoch_s = epoch_s
        self._table = Table()
        #: The last snapshot; None after ``apply``, whose changes must be visible at once.
        self._latest: Snapshot | None = None
        #: Node -> the pods in each of its memories when it was weighed last.
        self._found: dict[str, Found] = {}
        #: Nodes to weigh again, in the order in which they changed.
        self._dirty: dict[str, None] = {}
        #: Nodes whose weighing raised an exception.
        self._not_weighed: dict[str, None] = {}
        self._nodes: dict[str, Node] = {}
        #: Grows with every change of a node's taints or cordon, which are in no snapshot.
        self.node_specs = 0
        #: Nodes with the annotation ``headroom.gpu/device-choice``.
        self._with_choice: dict[str, None] = {}
        self._gpunodes: dict[str, GPUNode] = {}
        #: The last heartbeat of each agent.
        self._heartbeats = Heartbeats(stale_after_s)
        self.namespaces = Namespaces()
        #: Pods that request GPU resources managed by Headroom, by uid.
        self._pods: dict[str, Pod] = {}
        self._uids_on: dict[str, tuple[str, ...]] = {}
        self._uid_of: dict[tuple[str, str], str] = {}
        #: Node -> pod uid -> reservation of an assumed bind. kube-scheduler filters the next pod
        #: before the reservation of the last one is written.
        self._assumed: dict[str, dict[str, Reservation]] = {}
        #: The pods of ``_pods`` that are not bound and have not ended.
        self._unbound: dict[str, Pod] = {}
        #: Nodes that gained headroom, and nodes whose SMs became less busy. Pods are requeued for
        #: the first, and pods with ``headroom.gpu/max-sm`` also for the second.
        self.rooms, self.calms = HeadroomGains(), HeadroomGains()
        #: Uids of unbound pods with ``headroom.gpu/max-sm``.
        self._want_calm: set[str] = set()
        #: Nodes that may have an orphaned or missing reservation, since ``take_unsettled``.
        self._unsettled: dict[str, None] = {}
        #: Deleted pods: their last state, and the proof that their containers have ended.
        self.departures = DeletedPods()
        #: Compares predicted devices with the devices that agents report.
        self.observations = PredictionTracker(self._was_bound)
        #: Nodes that back off after an eviction.
        self.back_offs = BackOffs()
        self.usual = DemandTracker(rules.policy is ScoringPolicy.FRAGMENTATION)
        #: Nodes that may have pods to evict, or to keep after all.
        self._crowded: dict[str, None] = {}
        self.overcommits = Overcommits()
        #: Pods that use more than they requested.
        self.overuses = Overuses(rules.overuse_after_s)
        #: Pods whose request was changed after they were bound.
        self.edits = RequestDrift()
        #: Nodes whose GPUs a foreign allocator manages.
        self._allocators = ForeignAllocators()
        #: PodDisruptionBudgets.
        self.budgets = Budgets()
        #: Preferred affinity between pods, by which kube-scheduler scores nodes.
        self.neighbours = Neighbours()
        #: Pods for which room is held on a node.
        self.nominations = Nominations(
            rules.nomination_hold_s, rules.evict_for_memory, self._unbound.get
        )
        #: SM activity of devices.
        self.activities = Activities()
        #: Node -> pods bound to it that have not ended. Tuples are replaced, never changed.
        self._sitting_on: dict[str, tuple[Pod, ...]] = {}

    # Reading.

    def snapshot(self) -> Snapshot:
        """Return a snapshot of all nodes as they were weighed last."""
        self._latest = self._table.snapshot()
        return self._latest

    def settled(self) -> Snapshot:
        """Return the snapshot that calls decide on: the last one, or a new one after ``apply``.

        Watch events do not force a new snapshot: they are late anyway and may wait for the next.
        """
        return self._latest or self.snapshot()

    def gpunode(self, name: str) -> GPUNode | None:
        return self._gpunodes.get(name)

    def gpunodes(self) -> list[GPUNode]:
        return list(self._gpunodes.values())

    def gpunode_names(self) -> list[str]:
        return list(self._gpunodes)

    def node(self, name: str) -> Node | None:
        return self._nodes.get(name)

    def nodes(self) -> list[Node]:
        return list(self._nodes.values())

    def nodes_with_choice(self) -> list[Node]:
        """Return the nodes with the annotation ``headroom.gpu/device-choice``."""
        return [self._nodes[name] for name in self._with_choice]

    def pod(self, uid: str) -> Pod | None:
        return self._pods.get(uid)

    def pods(self) -> list[Pod]:
        return list(self._pods.values())

    def unbound(self) -> list[Pod]:
        """Return the pods that are not bound and have not ended."""
        return list(self._unbound.values())

    @property
    def latest_room(self) -> int:
        """The generation of the last snapshot in which a node had gained headroom.

        While a pod waits for less busy SMs, nodes whose SMs became less busy count too.
        """
        calm = self.calms.latest if self._want_calm else 0
        return max(self.rooms.latest, calm)

    def unreserved_pods(self, name: str) -> list[Pod]:
        """Return the pods on the node without a reservation.

        Return none until the node's ledger is initialised.
        """
        gpunode = self._gpunodes.get(name)
        if gpunode is None or not gpunode.spec.initialised:
            return []
        reservations = gpunode.spec.reservations
        return [
            pod for pod in self._sitting_on.get(name, ()) if pod.metadata.uid not in reservations
        ]

    @property
    def has_unweighed(self) -> bool:
        """Whether ``weigh_next`` has anything to do."""
        return bool(self._dirty) and not self._awaited

    @property
    def has_unsettled(self) -> bool:
        return bool(self._unsettled)

    def take_unsettled(self) -> list[str]:
        """Return the nodes that may have got an orphaned or missing reservation since the last
        call."""
        names = list(self._unsettled)
        self._unsettled.clear()
        return names

    def confirmation(self, name: str) -> Confirmation | None:
        """Return what the agent's Lease confirms of the current report; None if the Lease does not
        confirm this report."""
        return self._heartbeats.confirmation(name, self._gpunodes.get(name))

    def report(self, name: str, gpunode: GPUNode | None) -> GPUNodeStatus | None:
        """Return the devices of the node: its agent's last report, however old.

        If no agent ever reported, return what the node's labels show, provided that the rules
        accept labels; else None.
        """
        if gpunode is not None and gpunode.status is not None:
            return gpunode.status
        node = self._nodes.get(name)
        return None if node is None else believed(node, self.rules)

    def pod_named(self, namespace: str, name: str) -> Pod | None:
        return self._pods.get(self._uid_of.get((namespace, name), ""))

    def understand(self, pod: Pod) -> VramRequest | Unreadable:
        """Return what the pod requests, with the default of its namespace applied."""
        return understand(pod, self.namespaces.default_vram(pod.metadata.namespace), self.rules)

    def binding_to(self, name: str) -> dict[str, Reservation]:
        """Return the reservations that this replica is about to write for the node, by pod uid."""
        return dict(self._assumed.get(name, {}))

    def binds_under_way(self) -> dict[str, dict[str, Reservation]]:
        """Return ``binding_to`` of all nodes, by node name."""
        return {name: dict(assumed) for name, assumed in list(self._assumed.items())}

    def manager(self, name: str) -> Reason | None:
        """Return the reason that names the foreign allocator of the node's GPUs; None if none."""
        return self._allocators.manager(name)

    def heard_at_s(self, name: str) -> float:
        """Return the time of the agent's last heartbeat, on the receiver's monotonic clock; -inf
        if there was none."""
        return self._fresh_until_s(name) - self.stale_after_s

    def judge(self, pod: Pod, gpunode: GPUNode, now_s: float) -> Placement | Reason:
        """Fit the pod on exactly this version of the GPUNode, without the pod's own reservation.

        Return the placement, or the reason why the pod does not fit.
        """
        request = self.understand(pod)
        if isinstance(request, Unreadable):
            return request.reason
        held = gpunode.spec.reservations.get(pod.metadata.uid)
        request = replace(request, pinned_to=pinned_to(held) if held else "")
        snap = build([self.terms_of(gpunode.name, gpunode, {pod.metadata.uid})])
        verdicts = fit(request, snap, snap.rows([gpunode.name]), now_s)
        if reason := verdicts.reason(0):
            return reason
        placement = place(request, snap, verdicts, 0)
        # The API server rejects every later update of a pod whose annotations are too large.
        return placement if has_room_for(pod, placement.annotations) else Reason.POD_TOO_LARGE

    def judge_as_weighed(self, pod: Pod, gpunode: GPUNode, now_s: float) -> Placement | None:
        """Like ``judge``, but reuse the terms of the last weighing, which is half the work.

        Return None if the pod does not fit, or if the last weighing counted more than this version
        of the GPUNode. Only the thread that owns the state may call this.
        """
        name, uid = gpunode.name, pod.metadata.uid
        reserved, request = gpunode.spec.reservations.keys(), self.understand(pod)
        if (
            gpunode is not self._gpunodes.get(name)
            or uid in reserved
            or uid in self._uids_on.get(name, ())
            or not self._assumed.get(name, NOTHING).keys() <= reserved
            or isinstance(request, Unreadable)
            or not request.asks
        ):
            return None
        snap = self._snapshot_of(name)
        if snap is None:
            return None
        verdicts = fit(request, snap, np.array([0]), now_s)
        if verdicts.reason(0):
            return None
        placement = place(request, snap, verdicts, 0)
        return placement if has_room_for(pod, placement.annotations) else None

    def weighed(self, gpunode: GPUNode, excluded: Set[str] = frozenset()) -> NodeTerms:
        """Return the node's terms as filter would use them if ``gpunode`` were the current version.

        Assumed binds count. Reservations of the pods with the uids ``excluded`` do not. May be
        called from any thread.
        """
        return self.terms_of(gpunode.name, gpunode, excluded, self.binding_to(gpunode.name))

    def adopt(self, pod: Pod, gpunode: GPUNode) -> Reservation | None:
        """Return the reservation to write for an unreserved pod on the node; None if the pod
        requests no GPU resource that Headroom manages."""
        if not asks_for_gpu(pod, self.rules):
            return None
        status = self.report(gpunode.name, gpunode)
        return adopt(
            as_bound(pod),
            self.namespaces.default_vram(pod.metadata.namespace),
            status.devices if status else (),
            self._wishes(gpunode.name).reserve_bytes,
            self.rules,
            obeys_environment=status is None or status.plugin.pinning != "ignored",
        )

    @property
    def crowded(self) -> list[str]:
        """Nodes with an overfull or unhealthy device, or with a pod marked for eviction."""
        return list(self._crowded)

    def misplaced(self, gpunode: GPUNode, now_s: float) -> Misplaced:
        """Return the pods to evict from the node according to exactly this version of the GPUNode.

        Return none if the report is missing or stale.
        """
        name = gpunode.name
        if gpunode.status is None or self._fresh_until_s(name) < now_s:
            return Misplaced()
        idle = idle_on(gpunode, self._sitting_on.get(name, ()), self.epoch_s + now_s, self.rules)
        if not idle:
            return Misplaced()
        devices = self.terms_of(name, gpunode).devices
        leaving = self._leaving(gpunode.status, name)
        return misplaced(devices, idle, leaving, not self.back_offs.holds_in(gpunode))

    def sitting_on(self, name: str) -> tuple[Pod, ...]:
        """Return the pods bound to the node that have not ended."""
        return self._sitting_on.get(name, ())

    def nominees(self, now_s: float) -> Mapping[str, tuple[Pod, ...]]:
        """Return by node the pods for which other pods are or were evicted from it."""
        return self.nominations.nominees(now_s, self._departing)

    def held_for(self, pod: Pod, now_s: float) -> dict[str, list[Pod]]:
        """Return by node the nominees that go before this pod."""
        return self.nominations.held_for(pod, now_s, self._departing)

    def places(self, now_s: float) -> Mapping[str, Place]:
        """Return by pod uid the node that is or was held for an unbound pod. Changes no state."""
        return self.nominations.places(now_s, self._departing)

    def _departing(self, name: str) -> bool:
        return any(pod.metadata.deletion_timestamp for pod in self.sitting_on(name))

    # Writing.

    def follow(self, rules: Rules) -> None:
        """Use these rules from now on.

        They may differ from the old ones only where no weighing depends on them: rejection,
        scoring and eviction.
        """
        self.rules = rules

    def apply(self, events: Iterable[Event]) -> None:
        """Apply events in the order in which they happened, and weigh the changed nodes at once.

        These nodes are weighed before any node that was dirty already.
        """
        self._latest = None
        waiting: dict[str, None] = {}
        if not self._awaited:
            waiting, self._dirty = self._dirty, waiting
        try:
            for _ in self.taking(events):
                pass
            if not self._awaited:
                for name in list(self._dirty):
                    del self._dirty[name]
                    waiting.pop(name, None)
                    self._weigh(name)
        finally:
            waiting.update(self._dirty)  # the nodes not weighed because of an exception
            self._dirty = waiting
        if not self._awaited:
            self.begun = self.begun or not waiting

    def taking(self, events: Iterable[Event]) -> Iterator[None]:
        """Apply events in steps, each of a fraction of a millisecond, without weighing any node.

        Other events may be applied between two steps, and may have happened later.
        """
        for event in events:
            if isinstance(event, Relisted):
                yield from self._relist(event)
            else:
                self._apply(event)
                yield

    def weigh_next(self) -> bool:
        """Weigh one dirty node; return false if there is none, or if a kind is still awaited."""
        if not self.has_unweighed:
            return False
        name = next(iter(self._dirty))
        del self._dirty[name]
        try:
            self._weigh(name)
        finally:
            self.begun = self.begun or not self._dirty
        return True

    def weigh_failed_again(self) -> None:
        """Mark the nodes dirty whose weighing raised an exception."""
        self._dirty.update(self._not_weighed)
        self._not_weighed.clear()

    def _weigh(self, name: str) -> None:
        """Weigh a node. If that raises an exception, the node takes no pods until the next
        weighing succeeds."""
        try:
            self._weigh_again(name)
        except Exception:
            self._not_weighed[name] = None
            self._table.drop(name)
            raise

    def _weigh_again(self, name: str) -> None:
        if name not in self._nodes and name not in self._gpunodes:
            self._crowded.pop(name, None)
            self.rooms.lose(name)
            self.calms.lose(name)
            self._table.drop(name)
            self._found.pop(name, None)
            self._sitting_on.pop(name, None)
            self.observations.weighed(name, ())
            self.overcommits.weighed(name, ())
            self.overuses.weighed(name, ())
            self.activities.weighed(name, ())
            self._heartbeats.revived.discard(name)
            return
        pods = (self._pods[uid] for uid in self._uids_on.get(name, ()))
        self._sitting_on[name] = tuple(pod for pod in pods if not pod.ended)
        assumed = self._assumed.get(name, NOTHING)
        gpunode, before = self._gpunodes.get(name), self._table.get(name)
        terms = self.terms_of(name, gpunode, assumed=assumed, keep=True)
        if gpunode is not None:
            self.edits.adopted(self._sitting_on[name], gpunode.spec.reservations)
        if gpunode is not None and self.observations.waits_on(name):
            self.observations.bypassed(name, self._unreserved_pods_of(gpunode))
        self.observations.weighed(name, terms.devices)
        held = terms.devices
        if assumed and any_overcommitted(held):  # assumed binds are no overcommitment yet
            held = self.terms_of(name, gpunode).devices
        self.overcommits.weighed(name, held)
        self.overuses.weighed(name, held)
        generation = self._table.next_generation
        if name in self._heartbeats.revived or grew(before, terms):
            self.rooms.note(name, generation)
        self.activities.weighed(name, terms.devices)
        if before is not None and grew_idler(before, terms):
            self.calms.note(name, generation)
        self._heartbeats.revived.discard(name)
        if self._holds_unsettled(name):
            self._unsettled[name] = None
        self._note_crowd(name, terms)
        self._table.put(terms)

    def _note_crowd(self, name: str, terms: NodeTerms) -> None:
        if overfull(terms.devices) or self.back_offs.marks(name):
            self._crowded[name] = None
            self._unsettled[name] = None
        else:
            self._crowded.pop(name, None)

    def _holds_unsettled(self, name: str) -> bool:
        """Whether the node may have an orphaned or a missing reservation.

        True if a pod with a reservation is gone, has ended or is on another node, or if a pod on
        the node has no reservation.
        """
        gpunode = self._gpunodes.get(name)
        if gpunode is None:
            return False
        reserved = gpunode.spec.reservations.keys()
        sitting = {pod.metadata.uid for pod in self._sitting_on.get(name, ())}
        if gpunode.spec.initialised and not sitting <= reserved:
            return True
        pods = (self._pods.get(uid) for uid in reserved - sitting)
        return any(pod is None or pod.ended or pod.node not in ("", name) for pod in pods)

    def _apply(self, event: Event) -> None:
        match event:
            case PodSeen(pod):
                self._put_pod(pod)
            case PodGone(uid, ended):
                self._forget_pod(uid, ended)
            case NodeSeen(node):
                if is_unreachable(node) or is_unreachable(self._nodes.get(node.metadata.name)):
                    self.departures.restart(node.metadata.name)
                before = self._nodes.get(node.metadata.name)
                if before is None or before.spec != node.spec:
                    self.node_specs += 1
                self._nodes[node.metadata.name] = node
                if DEVICE_CHOICE in (node.metadata.annotations or {}):
                    self._with_choice[node.metadata.name] = None
                else:
                    self._with_choice.pop(node.metadata.name, None)
                self._allocators.see_node(node)
                self._dirty[node.metadata.name] = None
            case NodeGone(name):
                self._nodes.pop(name, None)
                self._with_choice.pop(name, None)
                self._allocators.lose_node(name)
                self._dirty[name] = None
            case NamespaceSeen(namespace):
                self._put_namespace(namespace)
            case NamespaceGone(name):
                if self.namespaces.lose(name):
                    self._mark_namespace_dirty(name)
            case GPUNodeSeen(gpunode, at_s):
                self._put_gpunode(gpunode, at_s)
            case GPUNodeGone(name):
                self._gpunodes.pop(name, None)
                self._heartbeats.lose_report(name)
                self.departures.keep(name, ())
                self.observations.lose(name)
                self.back_offs.forget(name)
                self._dirty[name] = None
            case HeartbeatSeen(lease, at_s):
                self._put_lease(lease, at_s)
            case HeartbeatGone(name):
                self._drop_lease(name)
            case SliceSeen(piece):
                self._mark_dirty(self._allocators.see_slice(piece))
            case SliceGone(name):
                self._mark_dirty(self._allocators.lose_slice(name))
            case BudgetSeen(budget):
                self.budgets.see(budget)
            case BudgetGone(namespace_name, name):
                self.budgets.lose(namespace_name, name)
            case DepartureMarked(name, uid, version, at_s):
                self.departures.mark(name, uid, version, at_s)
            case BackOffEnded(name):
                self.back_offs.end(name)
                self._dirty[name] = None
            case ActivitySeen(history, names):
                self.activities.see(history)
                for name in names:
                    self._move_activity(name)
            case BindBegun(pod, name, placement):
                self._assume(pod, name, placement)
            case BindEnded(uid, name):
                assumed = self._assumed.get(name, {})
                assumed.pop(uid, None)
                if not assumed:
                    self._assumed.pop(name, None)
                held = self._gpunodes.get(name)
                if held is None or uid not in held.spec.reservations:
                    self._dirty[name] = None  # else the written reservation counts already
            case AssumedSeen(binds, nominations):
                self._follow_binds({name: dict(assumed) for name, assumed in binds.items()})
                self.nominations.follow(nominations)

    def _move_activity(self, name: str) -> None:
        """Update the SM activity of a node. Memory is unchanged, so the node is not weighed."""
        before, gpunode = self._table.get(name), self._gpunodes.get(name)
        if before is None or gpunode is None or gpunode.status is None:
            return
        self._put_measured(before, self.activities.moved(before, gpunode.status.observed_at))

    def _put_measured(self, before: NodeTerms, after: NodeTerms) -> None:
        """Store terms that differ only in measurements. The headroom of the node is unchanged."""
        if grew_idler(before, after):
            self.calms.note(after.name, self._table.next_generation)
        self._table.put_measured(after)

    def concerns(self, pod: Pod) -> bool:
        """Whether anything is kept of this pod; from any thread."""
        return asks_for_gpu(pod, self.rules) or bool(of_pod(pod)) or has_affinity_terms(pod)

    def _relist(self, event: Relisted) -> Iterator[None]:
        """Drop the objects that are not in the list, then apply the listed ones."""
        kind, objects, at_s = event.kind, event.objects, event.at_s
        names: set[str] = set()
        for o in objects:
            names.add(o.metadata.uid if isinstance(o, Pod) else o.metadata.name)
            yield
        budgets = {key(o) for o in objects if isinstance(o, PodDisruptionBudget)}
        gone: list[Event] = []
        if kind is Pod:
            # The last version held may not be the last one that existed, as the watch was down.
            for uid in [*self._pods, *self._allocators.known("pod"), *self.neighbours.known()]:
                if uid not in names:
                    self._forget_pod(uid, last=False)
                yield
        elif kind is Node:
            gone = [NodeGone(name) for name in self._nodes.keys() - names]
        elif kind is Namespace:
            gone = [NamespaceGone(name) for name in self.namespaces.known() - names]
        elif kind is GPUNode:
            gone = [GPUNodeGone(name) for name in self._gpunodes.keys() - names]
        elif kind is ResourceSlice:
            gone = [SliceGone(name) for name in self._allocators.known("slice") - names]
        elif kind is PodDisruptionBudget:
            self.budgets.unlisted = False
            gone = [BudgetGone(*each) for each in self.budgets.known() - budgets]
        else:
            gone = [HeartbeatGone(name) for name in self._heartbeats.leased() - names]
        for event_of_absence in gone:
            self._apply(event_of_absence)
            yield
        for o in objects:
            match o:
                case Pod():
                    self._put_pod(o)
                case Node():
                    self._apply(NodeSeen(o))
                case Namespace():
                    self._put_namespace(o)
                case GPUNode():
                    self._put_gpunode(o, at_s)
                case Lease():
                    self._apply(HeartbeatSeen(o, at_s))
                case ResourceSlice():
                    self._apply(SliceSeen(o))
                case PodDisruptionBudget():
                    self._apply(BudgetSeen(o))
            yield
        self._awaited.discard(kind)
        # In a cluster without nodes nothing is ever weighed.
        self.begun = self.begun or not (self._awaited or self._dirty)

    def _put_pod(self, pod: Pod) -> None:
        uid = pod.metadata.uid
        gpunode = None if pod.node in self._dirty else self._gpunodes.get(pod.node)
        reweigh = matters(pod, self._pods.get(uid), gpunode)
        self._drop_pod(uid, reweigh=reweigh)
        if pod.node or pod.ended:
            self.nominations.lose(uid)
        self.neighbours.see(pod)
        # Pods that use a foreign allocator need not request a resource of ours.
        self._mark_dirty(self._allocators.see_pod(pod))
        if not asks_for_gpu(pod, self.rules):
            if not reweigh:
                self._dirty[pod.node] = None
            return
        self._pods[uid] = pod
        self.edits.see(pod)
        self._uid_of[pod.metadata.namespace, pod.metadata.name] = uid
        if pod.node:
            self._uids_on[pod.node] = (*self._uids_on.get(pod.node, ()), uid)
            if reweigh:
                self._dirty[pod.node] = None
            else:
                others = (o for o in self._sitting_on.get(pod.node, ()) if o.metadata.uid != uid)
                self._sitting_on[pod.node] = (*others, pod)
                self.edits.adopted([pod], self._gpunodes[pod.node].spec.reservations)
        elif not pod.ended:
            self._unbound[uid] = pod
            self.nominations.see(pod)
            if pod.annotation(MAX_SM) is not None:
                self._want_calm.add(uid)

    def _drop_pod(self, uid: str, *, reweigh: bool = True) -> None:
        pod = self._pods.pop(uid, None)
        if pod is None:
            return
        self._unbound.pop(uid, None)
        self._want_calm.discard(uid)
        self.edits.lose(uid)
        key = (pod.metadata.namespace, pod.metadata.name)
        if self._uid_of.get(key) == uid:
            del self._uid_of[key]
        if pod.node:
            if others := tuple([other for other in self._uids_on[pod.node] if other != uid]):
                self._uids_on[pod.node] = others
            else:
                del self._uids_on[pod.node]
            if reweigh:
                self._dirty[pod.node] = None

    def _forget_pod(self, uid: str, ended: bool = False, last: bool = True) -> None:
        if (pod := self._pods.get(uid)) is not None:
            self.departures.note(pod, ended, last)
        self._mark_dirty(self._allocators.lose_pod(uid))
        self.neighbours.lose(uid)
        self.nominations.lose(uid)
        self._drop_pod(uid)

    def _mark_dirty(self, names: Iterable[str]) -> None:
        self._dirty.update(dict.fromkeys(names))

    def _assume(self, pod: Pod, node: str, placement: Placement | None) -> None:
        gpunode, metadata = self._gpunodes.get(node), pod.metadata
        if gpunode is None:
            return
        if placement is not None:
            charged = list(placement.charges)
            reservation: Reservation | None = Reservation(
                metadata.namespace, metadata.name, charged
            )
        else:
            reservation = self._likely_reservation(pod, gpunode) or self.adopt(pod, gpunode)
        if reservation is not None:
            self._assumed.setdefault(node, {})[metadata.uid] = reservation
            self._dirty[node] = None

    def _follow_binds(self, after: dict[str, dict[str, Reservation]]) -> None:
        """Replace all assumed binds by these."""
        before, self._assumed = self._assumed, after
        names = before.keys() | after.keys()
        self._mark_dirty(name for name in names if before.get(name) != after.get(name))

    def _likely_reservation(self, pod: Pod, gpunode: GPUNode) -> Reservation | None:
        """Return the reservation that a bind is likely to write; None if the pod does not fit."""
        request, name = self.understand(pod), gpunode.name
        if isinstance(request, Unreadable):
            return None
        snap = self._snapshot_of(name)
        if snap is None:
            assumed = self._assumed.get(name, NOTHING)
            snap = build([self.terms_of(name, gpunode, assumed=assumed)])
        verdicts = fit(request, snap, np.array([0]), NEVER_S)
        if verdicts.reason(0) is not None or not request.asks:
            return None
        reserved = list(charges(request, snap, verdicts, 0))
        return Reservation(pod.metadata.namespace, pod.metadata.name, reserved)

    def _snapshot_of(self, name: str) -> Snapshot | None:
        """Return a snapshot of this node as it was weighed last; None if the node is dirty."""
        if name in self._dirty:
            return None
        snap = self._table.snapshot()
        row = snap.row_of.get(name)
        return None if row is None else snap.part(np.array([row]))

    def _already_counts(self, held: GPUNode | None, gpunode: GPUNode) -> bool:
        """Whether the node's terms already count everything in this version of its GPUNode."""
        name, terms = gpunode.name, self._table.get(gpunode.name)
        if held is None or terms is None or name in self._dirty:
            return False
        # Overcommitment is reported for reservations, not for assumed binds. So an overcommitted
        # node must be weighed again once an assumed bind has become a reservation.
        assumed = self._assumed.get(name, NOTHING)
        return as_assumed(gpunode, held, assumed) and not any_overcommitted(terms.devices)

    def _apply_measurements(self, held: GPUNode | None, gpunode: GPUNode) -> bool:
        """Apply the version of a GPUNode in which only measured use differs, without weighing.

        Return false, and change nothing, if more than that differs. Use below a pod's reservation
        frees or takes no memory, so most reports qualify.
        """
        name = gpunode.name
        before, found = self._table.get(name), self._found.get(name)
        if (
            held is None
            or held.status is None
            or gpunode.status is None
            or before is None
            or found is None
            or found.status is not held.status
            or held.status.sources != gpunode.status.sources
            or (held.spec is not gpunode.spec and held.spec != gpunode.spec)
            or name in self._crowded
            or name in self._heartbeats.revived
            or name in self.overcommits
        ):
            return False
        occupancy, tolerance_bytes = found.occupancy, UNATTRIBUTED_TOLERANCE_BYTES
        devices = with_new_measurements(
            before.devices, occupancy, held.status, gpunode.status, tolerance_bytes
        )
        if devices is None:
            return False
        self._found[name] = msgspec.structs.replace(found, status=gpunode.status)
        self._put_measured(before, self._refreshed(before, self.activities.applied(devices)))
        return True

    def _refreshed(self, before: NodeTerms, devices: tuple[DeviceTerms, ...]) -> NodeTerms:
        """Return the terms with these devices and the current staleness deadline."""
        fresh_until_s = self._fresh_until_s(before.name)
        return msgspec.structs.replace(
            before,
            devices=devices,
            fresh_until_s=fresh_until_s,
            ageing_from_s=self._ageing_from_s(fresh_until_s),
        )

    def _ageing_from_s(self, fresh_until_s: float) -> float:
        return fresh_until_s - self.stale_after_s * AGEING_RATIO

    def _put_namespace(self, namespace: Namespace) -> None:
        if self.namespaces.see(namespace):
            self._mark_namespace_dirty(namespace.metadata.name)

    def _mark_namespace_dirty(self, namespace: str) -> None:
        # The charges of its unreserved pods depend on the default.
        for name, pods in self._sitting_on.items():
            if any(pod.metadata.namespace == namespace for pod in pods):
                self._dirty[name] = None

    def _put_gpunode(self, gpunode: GPUNode, at_s: float) -> None:
        held = self._gpunodes.get(gpunode.name)
        # The watch repeats the result of our own writes; a list repeats unchanged objects.
        if held is not None and (gpunode == held or older(gpunode, held)):
            return
        self.departures.keep(gpunode.name, gpunode.spec.reservations)
        self.observations.see(gpunode, partial(self._circumstances, gpunode), at_s)
        self.back_offs.note(gpunode.name, marked(gpunode), at_s)
        self._gpunodes[gpunode.name] = gpunode
        self._heartbeats.see_report(gpunode, at_s, self.epoch_s)
        if not self._already_counts(held, gpunode) and not self._apply_measurements(held, gpunode):
            self._dirty[gpunode.name] = None
        elif self._holds_unsettled(gpunode.name):
            self._unsettled[gpunode.name] = None

    def _put_lease(self, lease: Lease, at_s: float) -> None:
        name, vouch = lease.metadata.name, confirmation_of(lease)
        if vouch is None:
            self._drop_lease(name)  # confirms no report, so it is no heartbeat
            return
        gpunode, before = self._gpunodes.get(name), self._table.get(name)
        self._heartbeats.see_lease(name, vouch, gpunode, at_s, self.epoch_s)
        reports = gpunode is not None and gpunode.status is not None
        if not reports or before is None or name in self._heartbeats.revived:
            self._dirty[name] = None
            return
        self._table.put_measured(self._refreshed(before, before.devices))
        if self._holds_unsettled(name):
            self._unsettled[name] = None

    def _drop_lease(self, name: str) -> None:
        self._heartbeats.lose_lease(name)
        self._dirty[name] = None

    # Weighing.

    def terms_of(
        self,
        name: str,
        gpunode: GPUNode | None,
        excluded: Set[str] = frozenset(),
        assumed: Mapping[str, Reservation] = NOTHING,
        keep: bool = False,
    ) -> NodeTerms:
        """Return the terms of one node, without the reservations of the pods ``excluded`` (uids).

        ``assumed``: reservations of assumed binds, for filter only. If a bind counted them, it
        could fail because of reservations that are never written.
        ``keep``: the arguments describe the actual node, not a hypothetical one, and the result
        is reused by the next weighing. Only the thread that owns the state may set it.
        """
        requested, status = self._wishes(name), self.report(name, gpunode)
        node, manager = self._nodes.get(name), self._allocators.manager(name)
        reason, detail = obstacle(
            node,
            gpunode,
            status,
            requested,
            manager,
            gpunode is not None and self.back_offs.holds_in(gpunode),
            self.rules,
        )
        if gpunode is None or status is None:
            others = manager is not None or offers_gpus(node, self.rules)
            equipped = gpunode is not None or others
            if keep:
                self._found.pop(name, None)
            return NodeTerms(name, reason, NEVER_S, detail=detail, equipped=equipped)
        reservations: Mapping[str, Reservation] = gpunode.spec.reservations
        unwritten = {**assumed, **self._unreserved_pods_of(gpunode)}
        if unwritten or not reservations.keys().isdisjoint(excluded):
            reservations = {**unwritten, **reservations}
            reservations = {uid: each for uid, each in reservations.items() if uid not in excluded}
        leaving = self._leaving(status, name) - assumed.keys()
        before = self._found.get(name) if keep else None
        found = find(status, reservations, leaving, requested.device_choice, before)
        if keep:
            self._found[name] = found
        reserve_bytes = requested.reserve_bytes
        devices = weigh(found.occupancy, status, reserve_bytes, UNATTRIBUTED_TOLERANCE_BYTES)
        devices = self.activities.applied(devices)
        by_agent = status is gpunode.status
        # Labels come without a heartbeat, so they never become stale.
        fresh_until_s = self._fresh_until_s(name) if by_agent else inf
        return NodeTerms(
            name,
            reason,
            fresh_until_s,
            devices,
            self._ageing_from_s(fresh_until_s) if by_agent else inf,
            any(source.state == "degraded" for source in status.sources),
            unmeasured="" if by_agent else status.sources[0].message,
            obeys_environment=status.plugin.pinning != "ignored",
            pins=requested.device_choice is DeviceChoice.PINNED
            and status.plugin.pinning == "honoured",
            gated=requested.device_choice is DeviceChoice.GATED,
            detail=detail,
        )

    def _fresh_until_s(self, name: str) -> float:
        return self._heartbeats.fresh_until_s(name, self._gpunodes.get(name))

    def _leaving(self, status: GPUNodeStatus, name: str) -> Set[str]:
        """Return uids of pods that the report still shows and that are ending, have ended or are
        deleted. The kubelet may or may not free their replicas before it admits the next pod."""
        staying = {
            pod.metadata.uid
            for pod in self._sitting_on.get(name, ())
            if not pod.metadata.deletion_timestamp
        }
        return {use.uid for use in status.pods} - staying

    def _circumstances(self, gpunode: GPUNode) -> Circumstances:
        name, status = gpunode.name, gpunode.status
        leaving = self._leaving(status, name) if status else set[str]()
        return Circumstances(
            self._unreserved_pods_of(gpunode), leaving, self._wishes(name).device_choice
        )

    def _was_bound(self, uid: str, node: str) -> bool:
        """Whether the pod is, or was when it was last seen, bound to the node."""
        pod, departure = self._pods.get(uid), self.departures.seen(uid)
        return (pod is not None and pod.node == node) or (
            pod is None and departure is not None and departure.node == node
        )

    def _wishes(self, name: str) -> NodeSettings:
        return node_settings(self._nodes.get(name))

    def _unreserved_pods_of(self, gpunode: GPUNode) -> dict[str, Reservation]:
        """Return the reservations to charge for pods without one in exactly this version of the
        GPUNode. An earlier version may have had reservations that were removed since."""
        return {
            pod.metadata.uid: reservation
            for pod in self._sitting_on.get(gpunode.name, ())
            if pod.metadata.uid not in gpunode.spec.reservations
            and (reservation := self.adopt(pod, gpunode)) is not None
        }
