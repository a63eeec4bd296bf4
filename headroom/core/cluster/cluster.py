"""The state of the cluster in memory, for its readers. ``ClusterWriter`` changes it.

A node is *weighed* when its terms are computed. A change marks its node dirty, and dirty nodes are
weighed again. Snapshots show all nodes as they were weighed last.

One thread owns a ``Cluster``; only this thread calls ``snapshot``, ``settled`` and
``likely_reservation``. Any thread may call the other methods, because the values they read are
replaced, never changed in place. All returned objects are immutable, so other threads may keep and
read them.
"""

from collections.abc import Iterable, Mapping, Set

import numpy as np

from headroom.contract.annotations import DeviceChoice, ScoringPolicy
from headroom.contract.dra import DeviceClass, ResourceClaim
from headroom.contract.gpunode import GPUNode, GPUNodeStatus, Reservation
from headroom.contract.heartbeat import Confirmation
from headroom.contract.kube import Lease, Namespace, Node, Pod, PodDisruptionBudget, ResourceSlice
from headroom.contract.pod_limits import has_room_for
from headroom.contract.reasons import Reason
from headroom.contract.watched import ObjectKey
from headroom.core.cluster.adoption import Adoption
from headroom.core.cluster.headroom_gains import HeadroomGains
from headroom.core.cluster.holds import Holds
from headroom.core.cluster.node_weigher import NodeWeigher
from headroom.core.cluster.object_cache import NOTHING, Namespaces, ObjectCache
from headroom.core.cluster.trackers.deleted_pods import DeletedPods
from headroom.core.cluster.trackers.foreign_allocators import ForeignAllocators, of_pod
from headroom.core.cluster.trackers.gpu_users import GpuUsers
from headroom.core.cluster.trackers.heartbeats import NEVER_S, Heartbeats
from headroom.core.cluster.trackers.nominations import Nominations
from headroom.core.cluster.trackers.pod_selectors import Budgets, Neighbours, has_affinity_terms
from headroom.core.cluster.trackers.prediction_tracker import Circumstances, PredictionTracker
from headroom.core.cluster.trackers.request_drift import RequestDrift
from headroom.core.cluster.trackers.sm_activity import Activities
from headroom.core.cluster.unfinished_binds import UnfinishedBinds
from headroom.core.cluster.weighing_queue import WeighingQueue
from headroom.core.eviction.back_offs import BackOffs
from headroom.core.eviction.misplaced_pods import Misplaced, idle_on, misplaced
from headroom.core.overuse.tracker import Overcommits, Overuses
from headroom.core.placement.demand_pricing import DemandTracker
from headroom.core.placement.fit import fit
from headroom.core.placement.placement_record import Placement, charges, place
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import Unreadable, VramRequest, asks_for_gpu
from headroom.core.placement.snapshot import NodeTerms, Snapshot
from headroom.core.placement.snapshot_builder import Table, build
from headroom.core.starting_alone.tracker import StartingNodes


class Cluster:
    """The objects of the cluster, what was derived from them, and the weighed nodes."""

    def __init__(
        self, rules: Rules, stale_after_s: float, epoch_s: float, unlisted: Iterable[type] = ()
    ) -> None:
        """``epoch_s`` is the Unix time in seconds at which the monotonic clock was 0. It can
        change. ``unlisted`` are the kinds that must be listed before any node can be weighed."""
        self._objects = ObjectCache()
        #: Node -> the lowest priority of ``pods_on``. It has no nodes without pods.
        self.least_priority: Mapping[str, int] = self._objects.lowest_priorities
        self._queue = WeighingQueue(unlisted)
        self._table = Table()
        #: The last snapshot; None after ``apply``, whose changes must be visible at once.
        self._latest: Snapshot | None = None
        #: Nodes that gained headroom. Any pod may be requeued for them. Nodes whose SM activity
        #: decreased. Only pods with ``headroom.gpu/max-sm`` are requeued for them.
        self.headroom_gains, self.sm_decreases = HeadroomGains(), HeadroomGains()
        #: Nodes that may have pods to mark for eviction, or marks to remove.
        self._crowded: dict[str, None] = {}
        self.usual = DemandTracker(rules.policy is ScoringPolicy.FRAGMENTATION)
        self.namespaces = Namespaces()
        self.budgets = Budgets()
        self.budgets.unlisted = bool(self._queue.unlisted)
        self._heartbeats = Heartbeats(stale_after_s, epoch_s)
        self._allocators = ForeignAllocators()
        #: Objects of DRA: classes, slices and claims.
        self.dra = self._allocators.allocation
        #: Deleted pods: their last state, and the proof that their containers have ended.
        self.departures = DeletedPods()
        #: Compares predicted devices with the devices that agents report.
        self.observations = PredictionTracker(self)
        self.back_offs = BackOffs()
        self.overcommits = Overcommits()
        #: Pods that use more than they requested.
        self.overuses = Overuses(rules.overuse_after_s)
        #: Nodes with pods that start alone and have not started yet.
        self.starting = StartingNodes()
        #: Pods whose request was changed after they were bound.
        self.edits = RequestDrift()
        #: Preferred affinity between pods, by which kube-scheduler scores nodes.
        self.neighbours = Neighbours()
        self._nominations = Nominations(
            rules.nomination_hold_s, rules.evict_for_memory, self._objects.has_leaving_pod
        )
        #: Nodes with reservations of pods that are not bound yet.
        self.unfinished_binds = UnfinishedBinds(self._objects)
        self.activities = Activities()
        self.gpu_users = GpuUsers()
        self._adoption = Adoption(rules, self._objects, self.namespaces, self._allocators)
        self._weigher = NodeWeigher(
            self._adoption,
            self._objects,
            self._heartbeats,
            self._allocators,
            self.back_offs,
            self.activities,
        )
        #: Memory that is held for pods that are not bound yet.
        self.holds = Holds(
            self._nominations, self._objects, self._weigher.adopt, lambda: self.epoch_s
        )

    @property
    def rules(self) -> Rules:
        return self._adoption.rules

    @property
    def stale_after_s(self) -> float:
        return self._heartbeats.stale_after_s

    @property
    def epoch_s(self) -> float:
        return self._heartbeats.epoch_s

    @property
    def begun(self) -> bool:
        """Whether all required kinds are listed and all nodes have been weighed since."""
        return self._queue.begun

    @property
    def has_unweighed(self) -> bool:
        """Whether a node waits to be weighed."""
        return self._queue.is_due

    def snapshot(self) -> Snapshot:
        """Return a snapshot of all nodes as they were weighed last."""
        self._latest = self._table.shown()
        return self._latest

    @property
    def generation(self) -> int:
        """The generation that ``snapshot`` would have; does not make the snapshot."""
        return self._table.shown_generation

    def settled(self) -> Snapshot:
        """Return the snapshot that calls decide on: the last one, or a new one after ``apply``.

        Watch events do not force a new snapshot, because they are late anyway and may wait for the
        next one.
        """
        return self._latest or self.settle()

    def settle(self) -> Snapshot:
        """Make the snapshot that calls decide on."""
        self._latest = self._table.snapshot()
        return self._latest

    @property
    def latest_gain(self) -> int:
        """The generation of the last snapshot in which a node had gained headroom.

        While a pod with ``headroom.gpu/max-sm`` waits, a decrease of SM activity also counts as a
        gain.
        """
        sm_decrease = self.sm_decreases.latest if self._objects.with_max_sm else 0
        return max(self.headroom_gains.latest, sm_decrease)

    @property
    def node_specs(self) -> int:
        """Grows with every change of a node's taints or cordon, which are in no snapshot."""
        return self._objects.node_specs

    def node(self, name: str) -> Node | None:
        return self._objects.nodes.get(name)

    def nodes(self) -> list[Node]:
        return list(self._objects.nodes.values())

    def cordoned_nodes(self) -> list[str]:
        return sorted(list(self._objects.cordoned))

    def gpunode(self, name: str) -> GPUNode | None:
        return self._objects.gpunodes.get(name)

    def gpunodes(self) -> list[GPUNode]:
        return list(self._objects.gpunodes.values())

    def pod(self, uid: str) -> Pod | None:
        return self._objects.pods.get(uid)

    def pod_named(self, namespace: str, name: str) -> Pod | None:
        return self._objects.pod_named(namespace, name)

    def pods(self) -> list[Pod]:
        return list(self._objects.pods.values())

    def unbound(self) -> list[Pod]:
        """Return the pods that are not bound and have not ended."""
        return list(self._objects.unbound.values())

    def bound_elsewhere(self, names: Set[str]) -> list[Pod]:
        """Return the pods that are bound to nodes outside of ``names``."""
        uids_on = self._objects.uids_on
        uids = [uid for name in uids_on.keys() - names for uid in uids_on.get(name, ())]
        return [pod for pod in map(self.pod, uids) if pod is not None]

    def pods_on(self, name: str) -> tuple[Pod, ...]:
        """Return the pods bound to the node that have not ended."""
        return self._objects.pods_on(name)

    def unreserved_pods(self, name: str) -> list[Pod]:
        """Return the pods on the node that lack a reservation; none before it is initialised."""
        gpunode = self.gpunode(name)
        if gpunode is None or not gpunode.spec.initialised:
            return []
        pods = [p for p in self.pods_on(name) if p.metadata.uid not in gpunode.spec.reservations]
        return [pod for pod in pods if self.adopt(pod, gpunode) is not None]

    def _known(self, kind: type) -> Iterable[ObjectKey]:
        """Return the keys of the stored objects of this kind."""
        objects, allocators = self._objects, self._allocators
        known: dict[type, Iterable[ObjectKey]] = {
            Pod: dict.fromkeys([*objects.pods, *allocators.known("pod"), *self.neighbours.known()]),
            Node: list(objects.nodes),
            Namespace: self.namespaces.known(),
            GPUNode: list(objects.gpunodes),
            **{kind: allocators.allocation.known(kind) for kind in (DeviceClass, ResourceClaim)},
            ResourceSlice: allocators.known("slice"),
            PodDisruptionBudget: self.budgets.known(),
            Lease: self._heartbeats.leased(),
        }
        return known[kind]

    def confirmation(self, name: str) -> Confirmation | None:
        """Return what the agent's Lease confirms about the current report; None if it confirms
        nothing."""
        return self._heartbeats.confirmation(name, self.gpunode(name))

    def last_heartbeat_s(self, name: str) -> float:
        """Return the monotonic time of the agent's last heartbeat; -inf if there was none."""
        return self._weigher.fresh_until_s(name) - self.stale_after_s

    def report(self, name: str, gpunode: GPUNode | None) -> GPUNodeStatus | None:
        """Return the devices of the node, from its agent's last report or from its labels."""
        return self._weigher.report(name, gpunode)

    def manager(self, name: str) -> Reason | None:
        """Return the reason that names the foreign allocator of the node's GPUs; None if none."""
        return self._allocators.manager(name)

    def concerns(self, pod: Pod) -> bool:
        """Whether the state stores anything about this pod."""
        return asks_for_gpu(pod, self.rules) or bool(of_pod(pod)) or has_affinity_terms(pod)

    def understand(self, pod: Pod) -> VramRequest | Unreadable:
        """Return what the pod requests, with the default of its namespace applied."""
        return self._adoption.understand(pod)

    def was_bound(self, uid: str, node: str) -> bool:
        """Whether the pod is, or was when it was last seen, bound to the node."""
        pod, last = self.pod(uid), self.departures.seen(uid)
        return (pod is not None and pod.node == node) or (
            pod is None and last is not None and last.node == node
        )

    def circumstances(self, gpunode: GPUNode) -> Circumstances:
        """Return the facts on which the prediction of devices on the node depends."""
        name, status = gpunode.name, gpunode.status
        return Circumstances(
            self._weigher.adopted(gpunode),
            self._weigher.leaving(status, name) if status else set[str](),
        )

    def terms_of(
        self,
        name: str,
        gpunode: GPUNode | None,
        excluded: Set[str] = frozenset(),
        assumed: Mapping[str, Reservation] = NOTHING,
        choice: DeviceChoice | None = None,
    ) -> NodeTerms:
        """Return ``NodeWeigher.terms_of`` of a node that may be hypothetical."""
        return self._weigher.terms_of(name, gpunode, excluded, assumed, device_choice=choice)

    def weighed(self, gpunode: GPUNode, excluded: Set[str] = frozenset()) -> NodeTerms:
        """Return the node's terms as filter would use them if ``gpunode`` were the current version.

        Assumed binds count. The reservations of the pods whose uids are in ``excluded`` do not.
        """
        return self.terms_of(gpunode.name, gpunode, excluded, self.holds.binding_to(gpunode.name))

    def adopt(self, pod: Pod, gpunode: GPUNode) -> Reservation | None:
        """Return the reservation to write for an unreserved pod on the node."""
        return self._weigher.adopt(pod, gpunode)

    def is_left_to_dra(self, pod: Pod) -> bool:
        """Whether the bound pod needs no reservation, because it holds its GPUs by DRA."""
        return self._adoption.is_left_to_dra(pod)

    def judge(self, pod: Pod, gpunode: GPUNode, now_s: float) -> Placement | Reason:
        """Fit the pod on exactly this version of the GPUNode, without the pod's own reservation.

        Return the placement, or the reason why the pod does not fit.
        """
        request = self.understand(pod)
        if isinstance(request, Unreadable):
            return request.reason
        snap = build([self.terms_of(gpunode.name, gpunode, {pod.metadata.uid})])
        verdicts = fit(request, snap, snap.rows([gpunode.name]), now_s)
        if reason := verdicts.reason(0):
            return reason
        placement = place(request, snap, verdicts, 0)
        # The API server rejects every later update of a pod whose annotations are too large.
        return placement if has_room_for(pod, placement.annotations) else Reason.POD_TOO_LARGE

    def likely_reservation(self, pod: Pod, gpunode: GPUNode) -> Reservation | None:
        """Return the reservation that a bind is likely to write; None if the pod does not fit."""
        request, name = self.understand(pod), gpunode.name
        if isinstance(request, Unreadable):
            return None
        weighed = self._table.snapshot()
        row = None if name in self._queue else weighed.row_of.get(name)
        if row is None:
            snap = build([self.terms_of(name, gpunode, assumed=self.holds.binding_to(name))])
        else:
            snap = weighed.part(np.array([row]))
        verdicts = fit(request, snap, np.array([0]), NEVER_S)
        if verdicts.reason(0) is not None or not request.asks or verdicts.by_dra[0]:
            return None
        likely = Placement(charges(request, snap, verdicts, 0), {}, request.start_timeout_s)
        return likely.reservation(pod.metadata.namespace, pod.metadata.name)

    @property
    def crowded(self) -> list[str]:
        """Nodes with an overfull, unhealthy or cordoned device, or a pod marked for eviction."""
        return list(self._crowded)

    def misplaced(self, gpunode: GPUNode, now_s: float) -> Misplaced:
        """Return the pods to evict from the node according to exactly this version of the GPUNode;
        no pods if the report is missing or stale."""
        name = gpunode.name
        if gpunode.status is None or self._weigher.fresh_until_s(name) < now_s:
            return Misplaced()
        idle = idle_on(gpunode, self.pods_on(name), self.epoch_s + now_s, self.rules)
        if not idle:
            return Misplaced()
        devices = self.terms_of(name, gpunode).devices
        leaving = self._weigher.leaving(gpunode.status, name)
        return misplaced(devices, idle, leaving, not self.back_offs.holds_in(gpunode))
