"""The state of the cluster in memory, as readers see it. ``ClusterWriter`` changes it.

A node is *weighed* when its terms are computed. A change marks its node dirty, and dirty nodes are
weighed again. Snapshots show all nodes as they were weighed last.

One thread owns a ``Cluster``. Only this thread calls ``snapshot``, ``settled`` and
``likely_reservation``. Any thread may call the other methods, because the values they read are
replaced, never changed in place. All returned objects are immutable, so other threads may keep and
read them.
"""

from collections.abc import Mapping, Set

import numpy as np

from headroom.contract.annotations import DeviceChoice
from headroom.contract.gpunode import GPUNode, GPUNodeStatus, Reservation
from headroom.contract.heartbeat import Confirmation
from headroom.contract.kube import Node, Pod
from headroom.contract.pod_limits import has_room_for
from headroom.contract.reasons import Reason
from headroom.core.cluster import readers
from headroom.core.cluster.cluster_parts import Parts
from headroom.core.cluster.object_cache import NOTHING
from headroom.core.cluster.trackers.foreign_allocators import of_pod
from headroom.core.cluster.trackers.heartbeats import NEVER_S
from headroom.core.cluster.trackers.pod_selectors import has_affinity_terms
from headroom.core.eviction.misplaced_pods import Misplaced, idle_on, misplaced
from headroom.core.placement.demand_pricing import Market
from headroom.core.placement.fit import fit
from headroom.core.placement.placement_record import Placement, charges, place
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import Unreadable, VramRequest, asks_for_gpu
from headroom.core.placement.snapshot import NodeTerms, Snapshot
from headroom.core.placement.snapshot_builder import build


class Cluster:
    """Shows the state of a ``ClusterWriter``. No method changes the state."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._objects = parts.objects
        self._queue = parts.queue
        self._table = parts.table
        self._heartbeats = parts.heartbeats
        self._adoption = parts.adoption
        self._weigher = parts.weigher
        #: The lowest priority of the pods on each node, by node. Nodes without pods are absent.
        self.least_priority: Mapping[str, int] = parts.objects.lowest_priorities
        #: Nodes that gained headroom. Any pod may be requeued for them.
        self.headroom_gains: readers.HeadroomGains = parts.headroom_gains
        #: Nodes whose SM activity decreased. Only pods with ``headroom.gpu/max-sm`` are requeued
        #: for them.
        self.sm_decreases: readers.HeadroomGains = parts.sm_decreases
        self.namespaces: readers.Namespaces = parts.namespaces
        self.budgets: readers.Budgets = parts.budgets
        #: The last state of deleted pods, and the proof that their containers have ended.
        self.departures: readers.DeletedPods = parts.departures
        #: Compares predicted devices with the devices that agents report.
        self.observations: readers.PredictionTracker = parts.observations
        self.overcommits: readers.Overcommits = parts.overcommits
        #: Pods that use more than they requested.
        self.overuses: readers.Overuses = parts.overuses
        #: Nodes with pods that start alone and have not started yet.
        self.starting: readers.StartingNodes = parts.starting
        #: Pods whose request was changed after they were bound.
        self.edits: readers.RequestDrift = parts.edits
        #: Preferred affinity between pods, by which kube-scheduler scores nodes.
        self.neighbours: readers.Neighbours = parts.neighbours
        #: Nodes with reservations of pods that are not bound yet.
        self.unfinished_binds: readers.UnfinishedBinds = parts.unfinished_binds
        self.activities: readers.Activities = parts.activities
        #: Memory that is held for pods that are not bound yet.
        self.holds: readers.Holds = parts.holds

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
    def market(self) -> Market | None:
        """The prices of device classes, or None before the first pod with the policy
        fragmentation."""
        return self._parts.calls.demand.market

    @property
    def dra_resources(self) -> frozenset[str]:
        """The extended resources that a DeviceClass names."""
        return self._parts.allocators.allocation.resources

    @property
    def gpu_users(self) -> Mapping[str, Pod]:
        """The pods that use GPUs without requesting a GPU that Headroom manages, by uid."""
        return self._parts.gpu_users

    def snapshot(self) -> Snapshot:
        """Return a snapshot of all nodes as they were weighed last."""
        self._parts.latest = self._table.shown()
        return self._parts.latest

    @property
    def generation(self) -> int:
        """The generation that the result of ``snapshot`` would have, without making the
        snapshot."""
        return self._table.shown_generation

    def settled(self) -> Snapshot:
        """Return the snapshot that calls use for their decisions. It is the last snapshot, or a new
        one after ``apply``.

        Watch events do not force a new snapshot, because they arrive late anyway and can wait for
        the next snapshot.
        """
        if self._parts.latest is None:
            self._parts.latest = self._table.snapshot()
        return self._parts.latest

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
        """A number that grows with every change of a node's taints or cordon, which snapshots do
        not contain."""
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
        """Return the pods on the node that lack a reservation. There are none before the node is
        initialised."""
        gpunode = self.gpunode(name)
        if gpunode is None or not gpunode.spec.initialised:
            return []
        pods = [p for p in self.pods_on(name) if p.metadata.uid not in gpunode.spec.reservations]
        return [pod for pod in pods if self.adopt(pod, gpunode) is not None]

    def confirmation(self, name: str) -> Confirmation | None:
        """Return what the agent's Lease confirms about the current report, or None if it confirms
        nothing."""
        return self._heartbeats.confirmation(name, self.gpunode(name))

    def last_heartbeat_s(self, name: str) -> float:
        """Return the monotonic time of the agent's last heartbeat, or -inf if there was none."""
        return self._weigher.fresh_until_s(name) - self.stale_after_s

    def report(self, name: str, gpunode: GPUNode | None) -> GPUNodeStatus | None:
        """Return the devices of the node, from its agent's last report or from its labels."""
        return self._weigher.report(name, gpunode)

    def manager(self, name: str) -> Reason | None:
        """Return the reason that names the foreign allocator of the node's GPUs, or None if
        none."""
        return self._parts.allocators.manager(name)

    def backs_off(self, name: str) -> bool:
        """Whether the node accepts no pods for a while, because a pod was evicted from it."""
        return self._parts.back_offs.holds(name)

    def concerns(self, pod: Pod) -> bool:
        """Whether the state stores anything about this pod."""
        return asks_for_gpu(pod, self.rules) or bool(of_pod(pod)) or has_affinity_terms(pod)

    def understand(self, pod: Pod) -> VramRequest | Unreadable:
        """Return the pod's request after the default of its namespace has been applied."""
        return self._adoption.understand(pod)

    def terms_of(
        self,
        name: str,
        gpunode: GPUNode | None,
        excluded: Set[str] = frozenset(),
        assumed: Mapping[str, Reservation] = NOTHING,
        choice: DeviceChoice | None = None,
    ) -> NodeTerms:
        """Return the result of ``NodeWeigher.terms_of`` for a node that may be hypothetical."""
        return self._weigher.terms_of(name, gpunode, excluded, assumed, device_choice=choice)

    def weighed(self, gpunode: GPUNode, excluded: Set[str] = frozenset()) -> NodeTerms:
        """Return the node's terms as filter would use them if ``gpunode`` were the current version.

        Assumed binds count. Reservations of pods whose uids are in ``excluded`` do not count.
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
        """Return the reservation that a bind is likely to write, or None if the pod does not
        fit."""
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
        return list(self._parts.crowded)

    def misplaced(self, gpunode: GPUNode, now_s: float) -> Misplaced:
        """Return the pods to evict from the node according to exactly this version of the GPUNode.
        There are none if the report is missing or stale."""
        name = gpunode.name
        if gpunode.status is None or self._weigher.fresh_until_s(name) < now_s:
            return Misplaced()
        idle = idle_on(gpunode, self.pods_on(name), self.epoch_s + now_s, self.rules)
        if not idle:
            return Misplaced()
        devices = self.terms_of(name, gpunode).devices
        leaving = self._weigher.leaving(gpunode.status, name)
        return misplaced(devices, idle, leaving, not self._parts.back_offs.holds_in(gpunode))
