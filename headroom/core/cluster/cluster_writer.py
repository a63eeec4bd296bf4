"""Applies all changes to the state of the cluster. No other module changes it.

Only the process's ``EventQueue`` holds a ``ClusterWriter``. Readers hold its ``cluster``, which has
no method that applies a change, and whose parts have only methods for reading. ``Effects`` lists
the work that follows from a change for the rest of the process.

Each change is stored first and then passed to every tracker. If a tracker raises an exception, the
other trackers still get the change, and the exception is raised afterwards. The caller may then
apply the same change again.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Concatenate, ParamSpec

from headroom.contract.gpunode import GPUNode
from headroom.contract.heartbeat import confirmation_of
from headroom.contract.kube import Lease, Pod, PodDisruptionBudget
from headroom.contract.watched import (
    BudgetGone,
    BudgetSeen,
    DraEvent,
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
    changes_of,
)
from headroom.core.cluster.changes import (
    ActivitySeen,
    BindBegun,
    BindEnded,
    DepartureMarked,
    Effects,
    Event,
    GPUNodeWritten,
    GpuUsersSeen,
    HoldsSeen,
    TimePassed,
)
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.cluster_parts import Parts
from headroom.core.cluster.headroom_gains import grew
from headroom.core.cluster.trackers.sm_activity import sm_decreased
from headroom.core.cluster.weighing_queue import as_assumed, matters, older
from headroom.core.eviction.misplaced_pods import overfull
from headroom.core.overuse.tracker import any_overcommitted
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import asks_for_gpu
from headroom.core.placement.snapshot import NodeTerms, Snapshot
from headroom.core.tracker import LastSeen, Tracker, WeighedNode, followers

_What = ParamSpec("_What")


class ClusterWriter:
    """Changes the state that ``cluster`` shows. Only the thread that owns the state may call it."""

    def __init__(
        self, rules: Rules, stale_after_s: float, epoch_s: float, unlisted: Iterable[type] = ()
    ) -> None:
        """``epoch_s`` is the Unix time in seconds at which the monotonic clock was 0. It can
        change. ``unlisted`` contains the kinds that must be listed before any node can be
        weighed."""
        self.parts = parts = Parts(rules, stale_after_s, epoch_s, unlisted)
        self.cluster = Cluster(parts)
        self._objects, self._queue, self._table = parts.objects, parts.queue, parts.table
        self._heartbeats = parts.heartbeats
        self._weigher = parts.weigher
        self._followers = followers(*parts.trackers)
        #: Nodes with a tracker that raised an exception for the last version of their GPUNode.
        self._incomplete: set[str] = set()
        self._effects = Effects()

    def follow(self, rules: Rules) -> None:
        """Use these rules from now on. Nodes are not weighed again, so only rules about rejection,
        scoring and eviction may differ from the old rules."""
        self.parts.adoption.rules = rules

    def set_epoch(self, epoch_s: float) -> None:
        """Set the Unix time at which the monotonic clock was 0. Any thread may call this method."""
        self._heartbeats.epoch_s = epoch_s

    def apply(self, events: Iterable[Event]) -> Effects:
        """Apply events in the order in which they happened, and weigh the changed nodes
        immediately.

        These nodes are weighed before any node that was dirty already.
        """
        self.parts.latest = None
        aside = self._queue.set_aside()
        try:
            for _ in self.steps(events):
                pass
            while self._queue.is_due:
                name = self._queue.pop()
                aside.pop(name, None)
                self._weigh(name)
        finally:
            self._queue.put_back(aside)
        self._queue.update_begun()
        return self.take_effects()

    def steps(self, events: Iterable[Event]) -> Iterator[None]:
        """Apply events in steps, each of a fraction of a millisecond, without weighing any node.

        Between two steps the caller may apply other events, even later ones.
        """
        events = list(events)
        try:
            for event in events:
                if isinstance(event, Relisted):
                    yield from self._relist(event)
                else:
                    self._apply(event)
                    yield
        finally:
            self._effects.events += events

    def weigh_next(self) -> bool:
        """Weigh one dirty node. Return False if there is none, or if a kind is not listed yet."""
        if not self._queue.is_due:
            return False
        try:
            self._weigh(self._queue.pop())
        finally:
            self._queue.update_begun()
        return True

    def settle(self) -> Snapshot:
        """Make the snapshot on which calls base their decisions."""
        self.parts.latest = self._table.snapshot()
        return self.parts.latest

    def weigh_failed_again(self) -> None:
        """Mark as dirty the nodes whose weighing raised an exception."""
        self._queue.retry_failed()

    def take_effects(self) -> Effects:
        """Return the effects of all steps and weighings since the last call."""
        effects, self._effects = self._effects, Effects()
        effects.outcomes = self.parts.observations.take()
        return effects

    # Changes.

    def _apply(self, event: Event) -> None:
        match event:
            case PodSeen(pod):
                self._put_pod(pod)
            case PodGone():
                self._drop_pod(event)
            case NodeSeen(node):
                before = self._objects.put_node(node)
                self._queue.add(node.metadata.name)
                self._track(Tracker.node_seen, node, before)
            case NodeGone(name):
                self._objects.drop_node(name)
                self._queue.add(name)
                self._track(Tracker.node_gone, name)
            case NamespaceSeen(namespace):
                if self.parts.namespaces.put(namespace):
                    self._mark_namespace_dirty(namespace.metadata.name)
            case NamespaceGone(name):
                if self.parts.namespaces.drop(name):
                    self._mark_namespace_dirty(name)
            case GPUNodeSeen(gpunode, at_s):
                self._put_gpunode(gpunode, at_s)
            case GPUNodeWritten(gpunode, at_s):
                if self._objects.uid_of_gpunode(gpunode.name) == gpunode.metadata.uid:
                    self._put_gpunode(gpunode, at_s)
                    self._end_binds(gpunode.name, gpunode.spec.reservations)
            case GPUNodeGone(name, uid):
                if uid in (None, self._objects.uid_of_gpunode(name)):
                    self._objects.gpunodes.pop(name, None)
                    self._incomplete.discard(name)
                    self._queue.add(name)
                    self._track(Tracker.gpunode_gone, name)
            case HeartbeatSeen(lease, at_s):
                self._put_lease(lease, at_s)
            case HeartbeatGone(name):
                self._heartbeats.lease_gone(name)
                self._queue.add(name)
            case _ if isinstance(event, DraEvent):
                nodes, uids = self.parts.allocators.apply(event)
                self._queue.add(*nodes, *self._objects.nodes_of(uids))
            case BudgetSeen(budget):
                self.parts.budgets.see(budget)
            case BudgetGone(namespace_name, name):
                self.parts.budgets.lose(namespace_name, name)
            case DepartureMarked(name, uid, version, at_s):
                if uid in self._objects.reserved(name):
                    self.parts.departures.mark(name, uid, version, at_s)
            case TimePassed(at_s):
                self.parts.overuses.update(at_s)
                self.parts.overcommits.update(at_s)
                for name in self.parts.back_offs.over(at_s):
                    self.parts.back_offs.end(name)
                    self._queue.add(name)
            case ActivitySeen(history, names):
                self.parts.activities.replace(history)
                for name in names:
                    self._move_activity(name)
            case GpuUsersSeen(pods):
                for pod in (*self.parts.gpu_users.values(), *pods.values()):
                    self._table.updated(pod.node)
                self.parts.gpu_users = pods
            case BindBegun(pod, name):
                self._assume(pod, name)
            case BindEnded(uid, name):
                self._end_binds(name, (uid,))
            case HoldsSeen(holds):
                self._queue.add(*self.parts.holds.follow(holds))

    def _track(
        self,
        change: Callable[Concatenate[Tracker, _What], Iterable[str] | None],
        *what: _What.args,
        **also: _What.kwargs,
    ) -> None:
        """Pass a change to the trackers that follow its kind, and mark as dirty the nodes that they
        return. Raise the first exception at the end."""
        kind, error = change.__name__, None
        for tracker in self._followers[kind]:
            try:
                if nodes := getattr(tracker, kind)(*what, **also):
                    self._queue.add(*nodes)
            except Exception as err:  # noqa: BLE001 - the other trackers need the change
                error = error or err
        if error is not None:
            raise error

    def _relist(self, event: Relisted) -> Iterator[None]:
        if event.kind is PodDisruptionBudget:
            self.parts.budgets.unlisted = False
        for change in changes_of(event, self.parts.known(event.kind)):
            if change is not None:
                self._apply(change)
            yield
        self._queue.listed(event.kind)

    def _put_pod(self, pod: Pod) -> None:
        uid, objects = pod.metadata.uid, self._objects
        managed = asks_for_gpu(pod, self.parts.adoption.rules)
        gpunode = None if pod.node in self._queue else objects.gpunodes.get(pod.node)
        in_place = managed and not matters(pod, objects.pods.get(uid), gpunode)
        before = objects.drop_pod(uid)
        if managed:
            objects.put_pod(pod)
        if in_place:
            objects.add_pod(pod)
            self._table.updated(pod.node)
        else:
            nodes = before.node if before else "", pod.node if managed else ""
            self._queue.add(*filter(None, nodes))
        # A pod can use a foreign allocator without requesting a resource that Headroom manages.
        self._track(Tracker.pod_seen, pod, managed)
        if in_place and gpunode is not None:
            self.parts.edits.adopted([pod], gpunode.spec.reservations)

    def _drop_pod(self, event: PodGone) -> None:
        uid, last = event.uid, None
        pod = self._objects.drop_pod(uid)
        if pod is not None and pod.node:
            self._queue.add(pod.node)
        if pod is not None and (pod.node or event.is_last):
            last = LastSeen(pod.node, event.ended or pod.ended)
        self._track(Tracker.pod_gone, uid, last)

    def _mark_namespace_dirty(self, namespace: str) -> None:
        # The charges of unreserved pods in the namespace depend on its default.
        self._queue.add(*self._objects.nodes_with_pods_in(namespace))

    def _put_gpunode(self, gpunode: GPUNode, at_s: float) -> None:
        name, held = gpunode.name, self._objects.gpunodes.get(gpunode.name)
        # The watch repeats the results of this process's own writes, and a list repeats unchanged
        # objects.
        repeated = held == gpunode and name not in self._incomplete
        if repeated or (held is not None and older(gpunode, held)):
            return
        self._objects.gpunodes[name] = gpunode
        self._table.updated(name)
        self._incomplete.add(name)
        try:
            self._track(Tracker.gpunode_seen, gpunode, at_s)
            self._incomplete.discard(name)
        finally:
            if not self._already_counts(held, gpunode):
                self._queue.add(name)
            elif self._objects.has_unsettled(name):
                self._effects.unsettled[name] = None

    def _already_counts(self, held: GPUNode | None, gpunode: GPUNode) -> bool:
        """Return whether the node's terms already include everything in this version of its
        GPUNode."""
        name, terms = gpunode.name, self._table.get(gpunode.name)
        if held is None or terms is None or name in self._queue:
            return False
        # Overcommitment is reported for reservations, not for assumed binds. So an overcommitted
        # node must be weighed again after an assumed bind has become a reservation.
        assumed = self.parts.holds.binding_to(name)
        return as_assumed(gpunode, held, assumed) and not any_overcommitted(terms.devices)

    def _put_lease(self, lease: Lease, at_s: float) -> None:
        name, confirmation = lease.metadata.name, confirmation_of(lease)
        if confirmation is None:
            self._apply(HeartbeatGone(name))  # a Lease that confirms no report is no heartbeat
            return
        gpunode, before = self._objects.gpunodes.get(name), self._table.get(name)
        self._heartbeats.lease_seen(name, confirmation, gpunode, at_s)
        reports = gpunode is not None and gpunode.status is not None
        if not reports or before is None or name in self._heartbeats.revived:
            self._queue.add(name)
            return
        self._table.put_measured(self._weigher.refreshed(before, before.devices))
        if self._objects.has_unsettled(name):
            self._effects.unsettled[name] = None

    def _move_activity(self, name: str) -> None:
        """Update the SM activity of a node. Its memory has not changed, so the node is not
        weighed."""
        before, gpunode = self._table.get(name), self._objects.gpunodes.get(name)
        if before is not None and gpunode is not None and gpunode.status is not None:
            activities = self.parts.activities
            self._put_measured(before, activities.moved(before, gpunode.status.observed_at))

    def _put_measured(self, before: NodeTerms, after: NodeTerms) -> None:
        """Store terms that differ only in measurements. The headroom of the node is unchanged."""
        if sm_decreased(before, after):
            self.parts.sm_decreases.note(after.name, self._table.next_generation)
        self._table.put_measured(after)
        self._table.updated(after.name)

    def _assume(self, pod: Pod, name: str) -> None:
        cluster, gpunode = self.cluster, self._objects.gpunodes.get(name)
        if gpunode is None:
            return
        reservation = cluster.likely_reservation(pod, gpunode) or cluster.adopt(pod, gpunode)
        if reservation is not None:
            self.parts.holds.begin(pod.metadata.uid, name, reservation)
            self._queue.add(name)

    def _end_binds(self, name: str, uids: Iterable[str]) -> None:
        """Stop to count the reservations that these pods' binds were about to write. If one of
        them is not in the ledger, weigh the node again."""
        ended = self.parts.holds.binding_to(name).keys() & set(uids)
        for uid in ended:
            self.parts.holds.end(uid, name)
        if not ended <= self._objects.reserved(name).keys():
            self._queue.add(name)

    # Weighing.

    def _weigh(self, name: str) -> None:
        """Weigh a node. If that raises an exception, the node accepts no pods until the next
        weighing succeeds."""
        try:
            if name in self._objects.nodes or name in self._objects.gpunodes:
                self._weigh_again(name)
            else:
                self._forget(name)
        except Exception:
            self._queue.fail(name)
            self._table.drop(name)
            raise

    def _forget(self, name: str) -> None:
        """Drop everything about a node that has neither a Node nor a GPUNode."""
        self.parts.crowded.pop(name, None)
        self.parts.headroom_gains.lose(name)
        self.parts.sm_decreases.lose(name)
        self._table.drop(name)
        self._objects.drop_pods_of(name)
        self._track(Tracker.node_weighed, WeighedNode(name))

    def _weigh_again(self, name: str) -> None:
        self._objects.update_pods(name)
        gpunode, before = self._objects.gpunodes.get(name), self._table.get(name)
        assumed, is_revived = self.parts.holds.binding_to(name), name in self._heartbeats.revived
        terms = self._weigher.terms_of(name, gpunode, assumed=assumed)
        written = terms.devices
        if assumed and any_overcommitted(written):  # assumed binds may never be written
            written = self._weigher.terms_of(name, gpunode).devices
        pods = self._objects.pods_on(name)
        weighed = WeighedNode(name, gpunode, pods, terms.devices, written)
        self._track(Tracker.node_weighed, weighed)
        if is_revived or grew(before, terms):
            self.parts.headroom_gains.note(name, self._table.next_generation)
        if before is not None and sm_decreased(before, terms):
            self.parts.sm_decreases.note(name, self._table.next_generation)
        crowded = overfull(terms.devices) or self.parts.back_offs.marks(name)
        if crowded:
            self.parts.crowded[name] = None
        else:
            self.parts.crowded.pop(name, None)
        if crowded or self._objects.has_unsettled(name):
            self._effects.unsettled[name] = None
        self._table.put(terms)
