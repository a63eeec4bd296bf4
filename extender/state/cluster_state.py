"""All we know of the cluster: events change it, snapshots are read from it.

One thread owns a ``ClusterState`` and is the only one to call ``apply`` and ``snapshot``. Whatever
it hands out is immutable, so other threads may keep and read it; ``judge`` and what returns one
thing by its name may be called from any thread, because what they read is replaced and never
changed in place.
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
from contract.heartbeat import Vouch, vouch_of
from contract.kube import Lease, Namespace, Node, Pod, PodDisruptionBudget, ResourceSlice
from contract.pod_limits import has_room_for
from contract.reasons import Reason
from extender.placement.demand_pricing import Usual
from extender.placement.device_accounting import DeviceTerms, weigh
from extender.placement.fit import fit
from extender.placement.measurement_delta import remeasured
from extender.placement.occupancy import Found, find
from extender.placement.overfull_devices import Misplaced, misplaced, overfull
from extender.placement.placement_record import Placement, charges, place
from extender.placement.policy import Rules
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
from extender.state.disruption_budgets import Budgets, key
from extender.state.event_filter import as_assumed, matters, older
from extender.state.eviction_backoff import BackOffs, marked
from extender.state.foreign_allocators import ForeignAllocators, of_pod
from extender.state.headroom_gains import HeadroomGains, grew
from extender.state.heartbeats import NEVER_S, Signs
from extender.state.label_inventory import believed
from extender.state.namespaces import Namespaces
from extender.state.node_eligibility import NodeWishes, obstacle, offers_gpus, wishes
from extender.state.nominations import Nominations, Place
from extender.state.overcommitted_devices import Overcommits, any_overcommitted
from extender.state.overuse import Overuses
from extender.state.prediction_tracker import Circumstances, PredictionTracker
from extender.state.request_drift import RequestDrift, as_bound
from extender.state.scheduling_preferences import Neighbours, has_affinity_terms
from extender.state.sm_activity import Activities, grew_idler
from extender.state.unstarted_pods import idle_on

#: The last part of the time in which a report is fresh: by then one heartbeat is missing.
AGEING_RATIO = 1 / 3
#: Nobody is on the way.
NOTHING: Mapping[str, Reservation] = MappingProxyType({})


class ClusterState:
    """``epoch_s`` is the wall time, in Unix seconds, at which the monotonic clock was 0: as the
    wall clock says now, which may have been set since."""

    def __init__(
        self, rules: Rules, stale_after_s: float, epoch_s: float, awaited: Iterable[type] = ()
    ) -> None:
        """``awaited``: kinds without a list of which nothing can be said of any node."""
        self.rules = rules
        #: Those whose list has not come yet. To weigh all nodes after each list would be in vain.
        self._awaited = set(awaited)
        #: Whether everything that was awaited has come, and all nodes were weighed since.
        self.begun = not self._awaited
        self.stale_after_s = stale_after_s
        self.epoch_s = epoch_s
        self._table = Table()
        #: None where what was done since has to be seen at once.
        self._latest: Snapshot | None = None
        #: Who was where on each node when it was weighed last.
        self._found: dict[str, Found] = {}
        #: Nodes to weigh again, in the order in which they changed.
        self._dirty: dict[str, None] = {}
        #: Nodes that could not be weighed.
        self._not_weighed: dict[str, None] = {}
        self._nodes: dict[str, Node] = {}
        #: Grows with every change of a node's taints or cordon, which no snapshot shows.
        self.node_specs = 0
        #: Those on which it is annotated who chooses the device.
        self._with_choice: dict[str, None] = {}
        self._gpunodes: dict[str, GPUNode] = {}
        #: When the agents were heard of last.
        self._signs = Signs(stale_after_s)
        self.namespaces = Namespaces()
        #: Pods that ask for GPUs of ours, by uid.
        self._pods: dict[str, Pod] = {}
        self._uids_on: dict[str, tuple[str, ...]] = {}
        self._uid_of: dict[tuple[str, str], str] = {}
        #: Node -> pods that are being bound to it right now, by uid: kube-scheduler asks about the
        #: next pod before the promise to the last is written.
        self._assumed: dict[str, dict[str, Reservation]] = {}
        #: Pods of ``_pods`` that no node has.
        self._unbound: dict[str, Pod] = {}
        #: Where something got room, and where SMs grew idler, which some pods wait for.
        self.rooms, self.calms = HeadroomGains(), HeadroomGains()
        #: Unbound pods that do.
        self._want_calm: set[str] = set()
        #: Nodes that may hold a promise that nobody needs, since ``take_unsettled`` was called.
        self._unsettled: dict[str, None] = {}
        #: How the pods went that were seen to be deleted, and since when others are gone for sure.
        self.departures = DeletedPods()
        #: How the predictions turned out.
        self.observations = PredictionTracker(self._sat)
        #: Which nodes had to send a pod away lately.
        self.back_offs = BackOffs()
        self.usual = Usual(rules.policy is ScoringPolicy.FRAGMENTATION)
        #: Nodes that may have somebody to send away, or to keep after all.
        self._crowded: dict[str, None] = {}
        self.overcommits = Overcommits()
        #: Who uses more than was asked for.
        self.overuses = Overuses(rules.overuse_after_s)
        #: Whose request was changed after they were bound.
        self.edits = RequestDrift()
        #: Who else gives out GPUs, and of which nodes.
        self._allocators = ForeignAllocators()
        #: Who may not be evicted without harm.
        self.budgets = Budgets()
        #: What pods say of others: kube-scheduler scores nodes by it.
        self.neighbours = Neighbours()
        #: For whom places are held.
        self.nominations = Nominations(
            rules.nomination_hold_s, rules.evict_for_memory, self._unbound.get
        )
        #: How busy SMs are wont to be.
        self.activities = Activities()
        #: Node -> pods bound to it that have not ended; replaced, never changed in place.
        self._sitting_on: dict[str, tuple[Pod, ...]] = {}

    # Reading.

    def snapshot(self) -> Snapshot:
        """Everything applied so far, weighed."""
        self._latest = self._table.snapshot()
        return self._latest

    def settled(self) -> Snapshot:
        """What calls decide on: the last snapshot that was made, unless ``apply`` has taken
        anything since. What the cluster tells is late as it is, and may wait for the next."""
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
        """Those on which it is annotated who chooses the device."""
        return [self._nodes[name] for name in self._with_choice]

    def pod(self, uid: str) -> Pod | None:
        return self._pods.get(uid)

    def pods(self) -> list[Pod]:
        return list(self._pods.values())

    def unbound(self) -> list[Pod]:
        """The pods that no node has and that have not ended."""
        return list(self._unbound.values())

    @property
    def latest_room(self) -> int:
        """The generation of the snapshot in which something had got room anywhere, last; SMs that
        grow idler count while a pod waits for that."""
        calm = self.calms.latest if self._want_calm else 0
        return max(self.rooms.latest, calm)

    def unreserved_pods(self, name: str) -> list[Pod]:
        """The pods on the node to which its ledger, once initialised, promises nothing."""
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
        """The nodes on which a promise may have come to be left over, or to be missing, since the
        last call."""
        names = list(self._unsettled)
        self._unsettled.clear()
        return names

    def confirmation(self, name: str) -> Vouch | None:
        """What the agent's Lease says of the very report that is held; None where it says nothing
        of it, or speaks of another."""
        return self._signs.confirmation(name, self._gpunodes.get(name))

    def report(self, name: str, gpunode: GPUNode | None) -> GPUNodeStatus | None:
        """What is known of the node's devices: what its agent reports, however long ago, or what
        its labels say where none ever did and labels are enough."""
        if gpunode is not None and gpunode.status is not None:
            return gpunode.status
        node = self._nodes.get(name)
        return None if node is None else believed(node, self.rules)

    def pod_named(self, namespace: str, name: str) -> Pod | None:
        return self._pods.get(self._uid_of.get((namespace, name), ""))

    def understand(self, pod: Pod) -> VramRequest | Unreadable:
        """What the pod asks for, with the default of its namespace."""
        return understand(pod, self.namespaces.default_vram(pod.metadata.namespace), self.rules)

    def binding_to(self, name: str) -> dict[str, Reservation]:
        """What this replica is about to promise on the node, by uid."""
        return dict(self._assumed.get(name, {}))

    def binds_under_way(self) -> dict[str, dict[str, Reservation]]:
        """Node -> what ``binding_to`` returns for it."""
        return {name: dict(assumed) for name, assumed in list(self._assumed.items())}

    def manager(self, name: str) -> Reason | None:
        """Who else gives out the GPUs of the node."""
        return self._allocators.manager(name)

    def heard_at_s(self, name: str) -> float:
        """When the node's agent was heard of last, on the receiver's clock; -inf for never."""
        return self._fresh_until_s(name) - self.stale_after_s

    def judge(self, pod: Pod, gpunode: GPUNode, now_s: float) -> Placement | Reason:
        """Fit the pod on this very object of the node, as if it held no promise to it yet."""
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
        # The API server refuses every later update of a pod whose annotations are too large.
        return placement if has_room_for(pod, placement.annotations) else Reason.POD_TOO_LARGE

    def judge_as_weighed(self, pod: Pod, gpunode: GPUNode, now_s: float) -> Placement | None:
        """As ``judge``, of the node as it was weighed last, which is half the work. None where it
        does not fit, or where what was weighed is more than this object. For the thread alone that
        owns the state."""
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
        snap = self._alone(name)
        if snap is None:
            return None
        verdicts = fit(request, snap, np.array([0]), now_s)
        if verdicts.reason(0):
            return None
        placement = place(request, snap, verdicts, 0)
        return placement if has_room_for(pod, placement.annotations) else None

    def weighed(self, gpunode: GPUNode, besides: Set[str] = frozenset()) -> NodeTerms:
        """The node as filter would see it if this were its object, binds under way included and
        promises to the pods with the uids ``besides`` not; from any thread."""
        return self.terms_of(gpunode.name, gpunode, besides, self.binding_to(gpunode.name))

    def adopt(self, pod: Pod, gpunode: GPUNode) -> Reservation | None:
        """What a pod bound to the node without our promise is charged; None if it is not ours."""
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
        """Nodes with a device that has no room for all that sit there, or that is unhealthy, and
        those of which somebody is to leave."""
        return list(self._crowded)

    def misplaced(self, gpunode: GPUNode, now_s: float) -> Misplaced:
        """Who has to leave the node, as this very object of it tells."""
        name = gpunode.name
        if gpunode.status is None or self._fresh_until_s(name) < now_s:
            return Misplaced()
        idle = idle_on(gpunode, self._sitting_on.get(name, ()), self.epoch_s + now_s, self.rules)
        if not idle:
            return Misplaced()
        devices = self.terms_of(name, gpunode).devices
        leaving = self._leaving(gpunode.status, name)
        return misplaced(devices, idle, leaving, not self.back_offs.holds_as_told(gpunode))

    def sitting_on(self, name: str) -> tuple[Pod, ...]:
        """Pods bound to the node that have not ended."""
        return self._sitting_on.get(name, ())

    def nominees(self, now_s: float) -> Mapping[str, tuple[Pod, ...]]:
        """Node -> pods for which others leave it, or have left it."""
        return self.nominations.nominees(now_s, self._departing)

    def held_for(self, pod: Pod, now_s: float) -> dict[str, list[Pod]]:
        """Node -> the nominees that the pod leaves it to."""
        return self.nominations.held_for(pod, now_s, self._departing)

    def places(self, now_s: float) -> Mapping[str, Place]:
        """Uid -> the place that is held, or was held, for an unbound pod; changes nothing."""
        return self.nominations.places(now_s, self._departing)

    def _departing(self, name: str) -> bool:
        return any(pod.metadata.deletion_timestamp for pod in self.sitting_on(name))

    # Writing.

    def follow(self, rules: Rules) -> None:
        """Decide by these rules from now on, of which only what no node was weighed by may differ:
        what is refused, how it is scored, who is evicted."""
        self.rules = rules

    def apply(self, events: Iterable[Event]) -> None:
        """Take events in the order in which they happened, and weigh what they changed at once:
        before the nodes that wait for that."""
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
            waiting.update(self._dirty)  # not weighed if something was raised
            self._dirty = waiting
        if not self._awaited:
            self.begun = self.begun or not waiting

    def taking(self, events: Iterable[Event]) -> Iterator[None]:
        """Take events in steps, each of a fraction of a millisecond, and weigh nothing yet. What
        is applied between two of them may have happened later."""
        for event in events:
            if isinstance(event, Relisted):
                yield from self._relist(event)
            else:
                self._apply(event)
                yield

    def weigh_next(self) -> bool:
        """Weigh one of the nodes that wait for that; false where there is none."""
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
        """Have those nodes weighed again of which that raised an exception."""
        self._dirty.update(self._not_weighed)
        self._not_weighed.clear()

    def _weigh(self, name: str) -> None:
        """Raises what a bug raises; the node takes no pods until it was weighed again."""
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
            self._signs.woke_up.discard(name)
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
        if assumed and any_overcommitted(held):  # what may come is not there yet
            held = self.terms_of(name, gpunode).devices
        self.overcommits.weighed(name, held)
        self.overuses.weighed(name, held)
        generation = self._table.next_generation
        if name in self._signs.woke_up or grew(before, terms):
            self.rooms.note(name, generation)
        self.activities.weighed(name, terms.devices)
        if before is not None and grew_idler(before, terms):
            self.calms.note(name, generation)
        self._signs.woke_up.discard(name)
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
        """Whether a pod that was promised something there is gone, has ended or is elsewhere, or
        one sits there that was promised nothing."""
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
                self._pod_went(uid, ended)
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
                    self._soil_defaulted(name)
            case GPUNodeSeen(gpunode, at_s):
                self._put_gpunode(gpunode, at_s)
            case GPUNodeGone(name):
                self._gpunodes.pop(name, None)
                self._signs.lose_report(name)
                self.departures.keep(name, ())
                self.observations.lose(name)
                self.back_offs.forget(name)
                self._dirty[name] = None
            case HeartbeatSeen(lease, at_s):
                self._put_lease(lease, at_s)
            case HeartbeatGone(name):
                self._drop_lease(name)
            case SliceSeen(piece):
                self._soil(self._allocators.see_slice(piece))
            case SliceGone(name):
                self._soil(self._allocators.lose_slice(name))
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
                    self._dirty[name] = None  # else what is promised counts in its stead already
            case AssumedSeen(binds, nominations):
                self._follow_binds({name: dict(assumed) for name, assumed in binds.items()})
                self.nominations.follow(nominations)

    def _move_activity(self, name: str) -> None:
        """Memory has not moved, so nothing is weighed."""
        before, gpunode = self._table.get(name), self._gpunodes.get(name)
        if before is None or gpunode is None or gpunode.status is None:
            return
        self._put_measured(before, self.activities.moved(before, gpunode.status.observed_at))

    def _put_measured(self, before: NodeTerms, after: NodeTerms) -> None:
        """The node has as much room as before."""
        if grew_idler(before, after):
            self.calms.note(after.name, self._table.next_generation)
        self._table.put_measured(after)

    def concerns(self, pod: Pod) -> bool:
        """Whether anything is kept of this pod; from any thread."""
        return asks_for_gpu(pod, self.rules) or bool(of_pod(pod)) or has_affinity_terms(pod)

    def _relist(self, event: Relisted) -> Iterator[None]:
        """Forget what the list does not name, then take what it does."""
        kind, objects, at_s = event.kind, event.objects, event.at_s
        names: set[str] = set()
        for o in objects:
            names.add(o.metadata.uid if isinstance(o, Pod) else o.metadata.name)
            yield
        budgets = {key(o) for o in objects if isinstance(o, PodDisruptionBudget)}
        gone: list[Event] = []
        if kind is Pod:
            # Not what a watch tells: what is held may not be the last that became of them.
            for uid in [*self._pods, *self._allocators.known("pod"), *self.neighbours.known()]:
                if uid not in names:
                    self._pod_went(uid, last=False)
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
            self.budgets.awaited = False
            gone = [BudgetGone(*each) for each in self.budgets.known() - budgets]
        else:
            gone = [HeartbeatGone(name) for name in self._signs.leased() - names]
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
        soils = matters(pod, self._pods.get(uid), gpunode)
        self._drop_pod(uid, soils=soils)
        if pod.node or pod.ended:
            self.nominations.lose(uid)
        self.neighbours.see(pod)
        # Pods that share a GPU in another's way need not ask for one in ours.
        self._soil(self._allocators.see_pod(pod))
        if not asks_for_gpu(pod, self.rules):
            if not soils:
                self._dirty[pod.node] = None
            return
        self._pods[uid] = pod
        self.edits.see(pod)
        self._uid_of[pod.metadata.namespace, pod.metadata.name] = uid
        if pod.node:
            self._uids_on[pod.node] = (*self._uids_on.get(pod.node, ()), uid)
            if soils:
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

    def _drop_pod(self, uid: str, *, soils: bool = True) -> None:
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
            if soils:
                self._dirty[pod.node] = None

    def _pod_went(self, uid: str, ended: bool = False, last: bool = True) -> None:
        if (pod := self._pods.get(uid)) is not None:
            self.departures.note(pod, ended, last)
        self._soil(self._allocators.lose_pod(uid))
        self.neighbours.lose(uid)
        self.nominations.lose(uid)
        self._drop_pod(uid)

    def _soil(self, names: Iterable[str]) -> None:
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
            reservation = self._expected(pod, gpunode) or self.adopt(pod, gpunode)
        if reservation is not None:
            self._assumed.setdefault(node, {})[metadata.uid] = reservation
            self._dirty[node] = None

    def _follow_binds(self, after: dict[str, dict[str, Reservation]]) -> None:
        """Count these assumed binds instead of those of before."""
        before, self._assumed = self._assumed, after
        names = before.keys() | after.keys()
        self._soil(name for name in names if before.get(name) != after.get(name))

    def _expected(self, pod: Pod, gpunode: GPUNode) -> Reservation | None:
        """What is about to be promised, as far as is known here; None where it has no room."""
        request, name = self.understand(pod), gpunode.name
        if isinstance(request, Unreadable):
            return None
        snap = self._alone(name)
        if snap is None:
            assumed = self._assumed.get(name, NOTHING)
            snap = build([self.terms_of(name, gpunode, assumed=assumed)])
        verdicts = fit(request, snap, np.array([0]), NEVER_S)
        if verdicts.reason(0) is not None or not request.asks:
            return None
        reserved = list(charges(request, snap, verdicts, 0))
        return Reservation(pod.metadata.namespace, pod.metadata.name, reserved)

    def _alone(self, name: str) -> Snapshot | None:
        """The node as it was weighed last; None where it waits to be weighed."""
        if name in self._dirty:
            return None
        snap = self._table.snapshot()
        row = snap.row_of.get(name)
        return None if row is None else snap.part(np.array([row]))

    def _counts_already(self, held: GPUNode | None, gpunode: GPUNode) -> bool:
        """Whether nothing of the node has to be weighed again for this version of its object."""
        name, terms = gpunode.name, self._table.get(gpunode.name)
        if held is None or terms is None or name in self._dirty:
            return False
        # What is overcommitted is told of promises, and not of what may come.
        assumed = self._assumed.get(name, NOTHING)
        return as_assumed(gpunode, held, assumed) and not any_overcommitted(terms.devices)

    def _only_measures(self, held: GPUNode | None, gpunode: GPUNode) -> bool:
        """Whether this version of the node's object tells no more than that pods use more or less
        of what they are charged anyway; then it is taken in, and nothing has to be weighed."""
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
            or name in self._signs.woke_up
            or name in self.overcommits
        ):
            return False
        occupancy, tolerance_bytes = found.occupancy, UNATTRIBUTED_TOLERANCE_BYTES
        devices = remeasured(
            before.devices, occupancy, held.status, gpunode.status, tolerance_bytes
        )
        if devices is None:
            return False
        self._found[name] = msgspec.structs.replace(found, status=gpunode.status)
        self._put_measured(before, self._heard_of(before, self.activities.applied(devices)))
        return True

    def _heard_of(self, before: NodeTerms, devices: tuple[DeviceTerms, ...]) -> NodeTerms:
        """The node, of which an agent reports, as of now."""
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
            self._soil_defaulted(namespace.metadata.name)

    def _soil_defaulted(self, namespace: str) -> None:
        # What its bystanders are charged hangs on it.
        for name, pods in self._sitting_on.items():
            if any(pod.metadata.namespace == namespace for pod in pods):
                self._dirty[name] = None

    def _put_gpunode(self, gpunode: GPUNode, at_s: float) -> None:
        held = self._gpunodes.get(gpunode.name)
        # The watch repeats what our own write returned, and a list all that has not changed.
        if held is not None and (gpunode == held or older(gpunode, held)):
            return
        self.departures.keep(gpunode.name, gpunode.spec.reservations)
        self.observations.see(gpunode, partial(self._circumstances, gpunode), at_s)
        self.back_offs.note(gpunode.name, marked(gpunode), at_s)
        self._gpunodes[gpunode.name] = gpunode
        self._signs.see_report(gpunode, at_s, self.epoch_s)
        if not self._counts_already(held, gpunode) and not self._only_measures(held, gpunode):
            self._dirty[gpunode.name] = None
        elif self._holds_unsettled(gpunode.name):
            self._unsettled[gpunode.name] = None

    def _put_lease(self, lease: Lease, at_s: float) -> None:
        name, vouch = lease.metadata.name, vouch_of(lease)
        if vouch is None:
            self._drop_lease(name)  # says nothing of any report, hence nothing of the node
            return
        gpunode, before = self._gpunodes.get(name), self._table.get(name)
        self._signs.see_lease(name, vouch, gpunode, at_s, self.epoch_s)
        reports = gpunode is not None and gpunode.status is not None
        if not reports or before is None or name in self._signs.woke_up:
            self._dirty[name] = None
            return
        self._table.put_measured(self._heard_of(before, before.devices))
        if self._holds_unsettled(name):
            self._unsettled[name] = None

    def _drop_lease(self, name: str) -> None:
        self._signs.lose_lease(name)
        self._dirty[name] = None

    # Weighing.

    def terms_of(
        self,
        name: str,
        gpunode: GPUNode | None,
        besides: Set[str] = frozenset(),
        assumed: Mapping[str, Reservation] = NOTHING,
        keep: bool = False,
    ) -> NodeTerms:
        """One node's terms; promises to the pods with the uids ``besides`` are not counted.

        ``assumed`` is for filter only: a bind that counted others on their way would refuse for
        promises that are never made. ``keep``: this is how the node is, not how it might be, and is
        built upon the next time; for the thread alone that owns the state.
        """
        wished, status = self._wishes(name), self.report(name, gpunode)
        node, manager = self._nodes.get(name), self._allocators.manager(name)
        reason, detail = obstacle(
            node,
            gpunode,
            status,
            wished,
            manager,
            gpunode is not None and self.back_offs.holds_as_told(gpunode),
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
        if unwritten or not reservations.keys().isdisjoint(besides):
            reservations = {**unwritten, **reservations}
            reservations = {uid: each for uid, each in reservations.items() if uid not in besides}
        leaving = self._leaving(status, name) - assumed.keys()
        before = self._found.get(name) if keep else None
        found = find(status, reservations, leaving, wished.device_choice, before)
        if keep:
            self._found[name] = found
        reserve_bytes = wished.reserve_bytes
        devices = weigh(found.occupancy, status, reserve_bytes, UNATTRIBUTED_TOLERANCE_BYTES)
        devices = self.activities.applied(devices)
        by_agent = status is gpunode.status
        # Nobody vouches for labels, and nobody can be late with it.
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
            pins=wished.device_choice is DeviceChoice.PINNED
            and status.plugin.pinning == "honoured",
            gated=wished.device_choice is DeviceChoice.GATED,
            detail=detail,
        )

    def _fresh_until_s(self, name: str) -> float:
        return self._signs.fresh_until_s(name, self._gpunodes.get(name))

    def _leaving(self, status: GPUNodeStatus, name: str) -> Set[str]:
        """Pods that the report still shows and that are ending, have ended or are gone: before the
        next pod is admitted the kubelet takes back what they hold, or does not."""
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

    def _sat(self, uid: str, node: str) -> bool:
        """Whether the pod was bound to the node, as far as was seen."""
        pod, departure = self._pods.get(uid), self.departures.seen(uid)
        return (pod is not None and pod.node == node) or (
            pod is None and departure is not None and departure.node == node
        )

    def _wishes(self, name: str) -> NodeWishes:
        return wishes(self._nodes.get(name))

    def _unreserved_pods_of(self, gpunode: GPUNode) -> dict[str, Reservation]:
        """The pods on the node that this very object promises nothing to: one held earlier may
        have promised them something that has been taken back since."""
        return {
            pod.metadata.uid: reservation
            for pod in self._sitting_on.get(gpunode.name, ())
            if pod.metadata.uid not in gpunode.spec.reservations
            and (reservation := self.adopt(pod, gpunode)) is not None
        }
