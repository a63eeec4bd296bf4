"""The parts of the cluster's state. ``ClusterWriter`` changes them, and ``Cluster`` shows them to
readers."""

from collections.abc import Iterable, Mapping

from headroom.contract.annotations import ScoringPolicy
from headroom.contract.dra import DeviceClass, ResourceClaim
from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Lease, Namespace, Node, Pod, PodDisruptionBudget, ResourceSlice
from headroom.contract.watched import ObjectKey
from headroom.core.cluster.adoption import Adoption
from headroom.core.cluster.assumed_binds import AssumedBinds, Calls
from headroom.core.cluster.headroom_gains import HeadroomGains
from headroom.core.cluster.holds import Holds
from headroom.core.cluster.node_weigher import NodeWeigher
from headroom.core.cluster.object_cache import Namespaces, ObjectCache
from headroom.core.cluster.trackers.deleted_pods import DeletedPods
from headroom.core.cluster.trackers.foreign_allocators import ForeignAllocators
from headroom.core.cluster.trackers.heartbeats import Heartbeats
from headroom.core.cluster.trackers.nominations import Nominations
from headroom.core.cluster.trackers.pod_selectors import Budgets, Neighbours
from headroom.core.cluster.trackers.prediction_tracker import Circumstances, PredictionTracker
from headroom.core.cluster.trackers.request_drift import RequestDrift
from headroom.core.cluster.trackers.sm_activity import Activities
from headroom.core.cluster.unfinished_binds import UnfinishedBinds
from headroom.core.cluster.weighing_queue import WeighingQueue
from headroom.core.eviction.back_offs import BackOffs
from headroom.core.overuse.tracker import Overcommits, Overuses
from headroom.core.placement.demand_pricing import DemandTracker
from headroom.core.placement.policy import Rules
from headroom.core.placement.snapshot import Snapshot
from headroom.core.placement.snapshot_builder import Table
from headroom.core.starting_alone.tracker import StartingNodes
from headroom.core.tracker import Tracker


class Parts:
    """The objects of the cluster, what was derived from them, and the weighed nodes."""

    def __init__(
        self, rules: Rules, stale_after_s: float, epoch_s: float, unlisted: Iterable[type]
    ) -> None:
        self.objects = ObjectCache()
        self.queue = WeighingQueue(unlisted)
        self.table = Table()
        #: The last snapshot. It is None after this process's own changes, which must be visible
        #: immediately.
        self.latest: Snapshot | None = None
        self.headroom_gains, self.sm_decreases = HeadroomGains(), HeadroomGains()
        #: Nodes that may have pods to mark for eviction, or marks to remove.
        self.crowded: dict[str, None] = {}
        self.namespaces = Namespaces()
        self.budgets = Budgets()
        self.budgets.unlisted = bool(self.queue.unlisted)
        #: Pods that use GPUs without requesting a GPU that Headroom manages, by uid.
        self.gpu_users: Mapping[str, Pod] = {}
        self.departures = DeletedPods()
        self.observations = PredictionTracker(self)
        self.back_offs = BackOffs()
        self.heartbeats = Heartbeats(stale_after_s, epoch_s)
        self.allocators = ForeignAllocators()
        self.nominations = Nominations(
            rules.nomination_hold_s, rules.evict_for_memory, self.objects.has_leaving_pod
        )
        self.unfinished_binds = UnfinishedBinds(self.objects)
        self.neighbours = Neighbours()
        self.edits = RequestDrift()
        self.overcommits = Overcommits()
        self.overuses = Overuses(rules.overuse_after_s)
        self.starting = StartingNodes()
        self.activities = Activities()
        self.adoption = Adoption(rules, self.objects, self.namespaces, self.allocators)
        self.weigher = NodeWeigher(
            self.adoption,
            self.objects,
            self.heartbeats,
            self.back_offs,
            self.activities,
        )
        self.calls = Calls(
            AssumedBinds(self.nominations),
            DemandTracker(rules.policy is ScoringPolicy.FRAGMENTATION),
        )
        self.holds = Holds(
            self.calls.assumed,
            self.nominations,
            self.objects,
            self.weigher.adopt,
            self.heartbeats,
        )
        #: The parts that follow every change, in the order in which they are created above.
        self.trackers = [part for part in vars(self).values() if isinstance(part, Tracker)]

    def known(self, kind: type) -> Iterable[ObjectKey]:
        """Return the keys of the stored objects of this kind."""
        objects, allocators = self.objects, self.allocators
        known: dict[type, Iterable[ObjectKey]] = {
            Pod: dict.fromkeys([*objects.pods, *allocators.known("pod"), *self.neighbours.known()]),
            Node: list(objects.nodes),
            Namespace: self.namespaces.known(),
            GPUNode: list(objects.gpunodes),
            **{kind: allocators.allocation.known(kind) for kind in (DeviceClass, ResourceClaim)},
            ResourceSlice: allocators.known("slice"),
            PodDisruptionBudget: self.budgets.known(),
            Lease: self.heartbeats.leased(),
        }
        return known[kind]

    def was_bound(self, uid: str, node: str) -> bool:
        """Whether the pod is, or was when it was last seen, bound to the node."""
        pod, last = self.objects.pods.get(uid), self.departures.seen(uid)
        return (pod is not None and pod.node == node) or (
            pod is None and last is not None and last.node == node
        )

    def circumstances(self, gpunode: GPUNode) -> Circumstances:
        """Return the facts about the node from which its devices are predicted."""
        name, status = gpunode.name, gpunode.status
        return Circumstances(
            self.weigher.adopted(gpunode),
            self.weigher.leaving(status, name) if status else set[str](),
        )
