"""Simulates changes of pods and nodes on a copy of the cluster. The cluster itself stays unchanged.

A pod is placed as in kube-scheduler's calls. All nodes are fitted and ranked on the newest snapshot
of the copy, memory is reserved on the best node, and that node is computed again before the next
pod is placed. The simulation has no kubelet, so placed pods stay unconfirmed until the end, as in a
burst, unless ``confirm`` is called. It only calls methods of ``Cluster`` that are safe on any
thread and change nothing.
"""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import msgspec
import numpy as np

from headroom.contract.annotations import DeviceChoice
from headroom.contract.gpunode import (
    MAX_REPLICAS,
    SM_SOURCES,
    GPUNode,
    GPUNodeSpec,
    GPUNodeStatus,
    Reservation,
    SmActivity,
)
from headroom.contract.kube import Node, Pod
from headroom.contract.reasons import Reason
from headroom.core.cluster.cluster import Cluster
from headroom.core.placement.device_accounting import without
from headroom.core.placement.dra_nodes import by_headroom
from headroom.core.placement.fit import Verdicts, fit
from headroom.core.placement.fit_cache import MOST_KINDS, FitCache
from headroom.core.placement.placement_record import Placement, charges
from headroom.core.placement.request import VramRequest
from headroom.core.placement.snapshot import REASONS, Snapshot
from headroom.core.placement.snapshot_builder import Table
from headroom.core.rules.eligible_nodes import Eligible, Obstacle, eligible_nodes
from headroom.core.whatif.simulated_reports import (
    as_added,
    chosen_replicas,
    idle,
    shared,
    shared_resources,
    with_pod,
)


@dataclass(frozen=True, slots=True)
class Placed:
    node: str
    placement: Placement
    #: The score of the node for the pod, from 0 to 1.
    score: float


@dataclass(frozen=True, slots=True)
class NotPlaced:
    """The reasons why the pod fits on no node."""

    #: Number of eligible nodes by reason.
    reasons: Mapping[Reason, int]
    #: Number of nodes that kube-scheduler would not offer, by obstacle.
    ineligible: Sequence[tuple[Obstacle, int]]


@dataclass(frozen=True, slots=True)
class _SimulatedNode:
    """The simulated state of a node."""

    #: The GPUNode. For an added node, it has the name of the model node.
    gpunode: GPUNode
    #: Uids of pods to ignore, because they have left the node or are only on the model node.
    gone: frozenset[str] = frozenset()
    added: bool = False
    repaired: bool = False
    #: The device choice that replaces the node's annotation, or None to keep the annotation.
    device_choice: DeviceChoice | None = None
    #: Uids of simulated pods that have their devices. In the cluster itself, they are not bound.
    confirmed: frozenset[str] = frozenset()

    def reserved(self, uid: str, reservation: Reservation | None) -> "_SimulatedNode":
        reservations = {u: p for u, p in self.gpunode.spec.reservations.items() if u != uid}
        if reservation is not None:
            reservations[uid] = reservation
        spec = msgspec.structs.replace(self.gpunode.spec, reservations=reservations)
        return replace(self, gpunode=msgspec.structs.replace(self.gpunode, spec=spec))

    def reporting(self, status: GPUNodeStatus) -> "_SimulatedNode":
        return replace(self, gpunode=msgspec.structs.replace(self.gpunode, status=status))


class Simulation:
    """Starts from the cluster in ``snap``. ``now_s`` is the time on the receiver's monotonic clock.

    ``kinds`` is the number of kinds of requests for which fits are cached. If there are more kinds,
    most pods are fitted on all nodes again.
    """

    def __init__(
        self, cluster: Cluster, snap: Snapshot, now_s: float, kinds: int = MOST_KINDS
    ) -> None:
        self._cluster = cluster
        self._now_s = now_s
        #: The prices of device classes, as they were at the start unless a caller replaces them.
        self.market = cluster.market
        self._table = Table.after(snap)
        #: Memory that is held for pods that are not bound yet, as reservations by node and uid.
        self._beside = dict(snap.held)
        self._weighings = FitCache(cluster.rules.weights, kinds)
        #: Nodes that differ from the cluster, or None for a removed node.
        self._held: dict[str, _SimulatedNode | None] = {}
        #: Nodes that have changed since they were weighed. As in the cluster itself, a node is
        #: weighed once for all changes between two snapshots.
        self._changed: dict[str, _SimulatedNode] = {}

    def snapshot(self) -> Snapshot:
        """Return the current snapshot of the copy."""
        for name, held in self._changed.items():
            self._weigh(name, held)
        self._changed.clear()
        return replace(self._table.snapshot(), held=dict(self._beside))

    def eligible(self, pod: Pod) -> Eligible:
        """Return the nodes of the copy that are eligible for the pod."""
        return eligible_nodes(pod, self.snapshot(), self._node)

    def place(self, request: VramRequest, where: Eligible) -> Placed | NotPlaced:
        """Place the pod on the best of these nodes. It must request a GPU."""
        request = by_headroom(request)
        self._end_holds(request.uid)
        snap, rows = self.snapshot(), where.rows
        cached = self._weighings.weigh(request, snap)
        ranking = cached.rank(request, snap, rows, self._now_s, self.market)
        if ranking.winner is None:
            codes = cached.codes(snap, rows, self._now_s)
            counts = np.bincount(codes, minlength=len(REASONS)).tolist()
            reasons = {r: n for r, n in zip(REASONS, counts, strict=True) if r and n}
            return NotPlaced(reasons, where.counts())
        row = int(rows[ranking.winner])
        part = snap.part(np.array([row]))
        verdicts = fit(request, part, np.zeros(1, np.int64), self._now_s)
        # There are no annotations, because a simulated pod has no Binding to write them to.
        placement = Placement(charges(request, part, verdicts, 0), {})
        name = snap.nodes[row].name
        # A pod that starts alone does not get its phase, because its start ends without an action.
        reservation = Reservation(request.namespace, request.name, list(placement.charges))
        held = self._of(name)
        assert held is not None, "a node on which a pod fits has a ledger"
        self._put(name, held.reserved(request.uid, reservation))
        return Placed(name, placement, float(ranking.scores[ranking.winner]))

    def places(self, request: VramRequest, where: Eligible) -> list[str]:
        """Return the names of the nodes on which the pod fits, the best first."""
        request = by_headroom(request)
        snap, rows = self.snapshot(), where.rows
        cached = self._weighings.weigh(request, snap)
        fitting = rows[cached.codes(snap, rows, self._now_s) == 0]
        scores = cached.rank(request, snap, fitting, self._now_s, self.market).scores
        order = np.lexsort((snap.name_rank[fitting], -scores))
        return [snap.nodes[row].name for row in fitting[order].tolist()]

    def fits(self, request: VramRequest, name: str) -> bool:
        """Return whether the pod fits on this node of the copy."""
        return bool(self.verdicts(request, name).fits[0])

    def verdicts(self, request: VramRequest, name: str) -> Verdicts:
        """Fit the pod on this node of the copy."""
        snap = self.snapshot()
        return fit(by_headroom(request), snap, snap.rows([name]), self._now_s)

    def hold(self, held: Mapping[str, Mapping[str, Reservation]]) -> None:
        """Hold exactly this memory, by node and uid, for pods that are not bound yet."""
        for name in held.keys() | self._beside.keys():
            if held.get(name, {}) != self._beside.get(name, {}):
                self._beside[name] = held.get(name, {})
                if (node := self._of(name)) is not None:
                    self._put(name, node)

    def release(self, uid: str) -> list[str]:
        """Remove a pod, free its memory, and return the names of its nodes."""
        pod = self._cluster.pod(uid)
        at = {pod.node} if pod is not None else set()
        at |= self._nodes_of.get(uid, set())
        names: list[str] = []
        for name in sorted(at):
            if (held := self._of(name)) is not None:
                status = held.gpunode.status
                left = replace(held.reserved(uid, None), gone=held.gone | {uid})
                self._put(name, left.reporting(without(status, {uid})) if status else left)
                names.append(name)
        return names

    @cached_property
    def _nodes_of(self) -> Mapping[str, set[str]]:
        """The nodes of the cluster that have reservations of a pod, by its uid."""
        found: dict[str, set[str]] = defaultdict(set)
        for gpunode in self._cluster.gpunodes():
            for uid in gpunode.spec.reservations:
                found[uid].add(gpunode.name)
        return found

    def end(self, uid: str, name: str) -> None:
        """Remove a pod that was placed on this node, and free its memory and its replicas.

        Raises ``KeyError`` if there is no such node or its devices are unknown.
        """
        held, status = self._reported(name)
        left = replace(held.reserved(uid, None), confirmed=held.confirmed - {uid})
        self._put(name, left.reporting(without(status, {uid})))

    def drain(self, name: str) -> list[Pod]:
        """Remove a node and return the pods that must be placed elsewhere. Pods with the highest
        priority come first."""
        held = self._of(name)
        self._table.drop(name)
        self._changed.pop(name, None)
        self._held[name] = None
        if held is None:
            return []
        uids = self._uids_on(name, held.gpunode) - held.gone
        pods = (pod for uid in uids if (pod := self._cluster.pod(uid)) is not None)
        return sorted((pod for pod in pods if _moves(pod, name)), key=urgency)

    def add(self, like: str, count: int) -> list[str]:
        """Add ``count`` idle nodes like the node ``like``, and return their names.

        Raises ``KeyError`` if there is no such node or its devices are unknown.
        """
        model = self._cluster.gpunode(like)
        if model is None or model.status is None:
            raise KeyError(like)
        gone = self._uids_on(like, model)
        existing = self.snapshot().row_of
        free = (n for n in itertools.count(1) if f"{like}+{n}" not in existing)
        suffixes = [f"+{number}" for number in itertools.islice(free, count)]
        for suffix in suffixes:
            status = idle(model.status, suffix)
            spec = GPUNodeSpec(initialised=True)
            new = msgspec.structs.replace(model, spec=spec, status=status)
            self._put(like + suffix, _SimulatedNode(new, gone, added=True))
        return [like + suffix for suffix in suffixes]

    def set_replicas(self, name: str, count: int) -> None:
        """Give every device of the node ``count`` replicas. With one replica, a device is not
        shared.

        Raises ``KeyError`` if there is no such node or its devices are unknown, and ``ValueError``
        if more than ``count`` replicas are in use or unhealthy.
        """
        held, status = self._reported(name)
        devices = [shared(device, count) for device in status.devices]
        self._put(name, held.reporting(msgspec.structs.replace(status, devices=devices)))

    def add_replica(self, name: str) -> None:
        """Give every device of the node one more replica than its most shared device has.

        Raises the errors of ``set_replicas``, and ``ValueError`` if no device is shared or if a
        device already has ``MAX_REPLICAS`` replicas.
        """
        _, status = self._reported(name)
        shared = (each for each in status.devices if each.sharing != "none")
        most = max((each.replicas.total for each in shared), default=0)
        if not 0 < most < MAX_REPLICAS:
            raise ValueError(f"{most} replicas cannot be raised")
        self.set_replicas(name, most + 1)

    def repair(self, name: str) -> None:
        """Make the report of the node fresh, and its devices with known memory healthy and usable.

        Raises ``KeyError`` if there is no such node or its devices are unknown.
        """
        held, status = self._reported(name)
        devices = [
            msgspec.structs.replace(device, healthy=True, health_reason="", compute_mode="default")
            if device.memory_bytes > 0
            else device
            for device in status.devices
        ]
        status = msgspec.structs.replace(status, devices=devices)
        self._put(name, replace(held.reporting(status), repaired=True))

    def steer(self, name: str) -> None:
        """Steer all shared devices of the node. Raises the errors of ``set_device_choice``."""
        self.set_device_choice(name, DeviceChoice.STEERED)

    def set_device_choice(self, name: str, choice: DeviceChoice) -> None:
        """Change how devices of the node are chosen, like an agent whose node has the annotation.

        Raises ``KeyError`` if there is no such node or its devices are unknown, and ``ValueError``
        if it would be steered and no device is shared.
        """
        held, status = self._reported(name)
        steered = sorted(shared_resources(status)) if choice is DeviceChoice.STEERED else []
        if choice is DeviceChoice.STEERED and not steered:
            raise ValueError(f"no device of {name} is shared")
        plugin = msgspec.structs.replace(
            status.plugin, steered=steered, steers_several=bool(steered)
        )
        changed = held.reporting(msgspec.structs.replace(status, plugin=plugin))
        self._put(name, replace(changed, device_choice=choice))

    def confirm(self, uid: str, at: Placed) -> None:
        """Give a placed pod the devices that Headroom chose for it, like a steered node.

        This has no effect on a pod whose device the plugin chooses.
        """
        if count_of := chosen_replicas(at.placement.charges):
            self.observe(uid, at.node, count_of)

    def observe(self, uid: str, name: str, count_of: Mapping[str, int], used: int = 0) -> None:
        """Let the node report that a placed pod holds replicas of these devices (by UUID), and that
        it uses ``used`` bytes of each.

        Raises ``KeyError`` if there is no such node or its devices are unknown.
        """
        held, status = self._reported(name)
        seen = with_pod(status, uid, count_of, used)
        self._put(name, replace(held.reporting(seen), confirmed=held.confirmed | {uid}))

    def measure(self, name: str, activity: Mapping[str, float]) -> None:
        """Let the node report this SM activity (ratio by UUID). Ratios above 1 are reported as 1.

        Raises ``KeyError`` if there is no such node or its devices are unknown.
        """
        held, status = self._reported(name)
        devices = [
            msgspec.structs.replace(
                each, sm_activity=SmActivity(min(1.0, max(0.0, activity[each.uuid])), SM_SOURCES[0])
            )
            if each.uuid in activity
            else each
            for each in status.devices
        ]
        self._put(name, held.reporting(msgspec.structs.replace(status, devices=devices)))

    def has_report(self, name: str) -> bool:
        """Return whether the node reports its devices."""
        held = self._of(name)
        return held is not None and held.gpunode.status is not None

    def _of(self, name: str) -> _SimulatedNode | None:
        if name in self._held:
            return self._held[name]
        gpunode = self._cluster.gpunode(name)
        return None if gpunode is None else _SimulatedNode(gpunode)

    def _uids_on(self, name: str, gpunode: GPUNode) -> frozenset[str]:
        unreserved = (pod.metadata.uid for pod in self._cluster.unreserved_pods(name))
        return frozenset((*gpunode.spec.reservations, *unreserved))

    def _reported(self, name: str) -> tuple[_SimulatedNode, GPUNodeStatus]:
        held = self._of(name)
        if held is None or held.gpunode.status is None:
            raise KeyError(name)
        return held, held.gpunode.status

    def _end_holds(self, uid: str) -> None:
        """Stop holding memory for this pod."""
        for name, reservations in list(self._beside.items()):
            if uid in reservations:
                self._beside[name] = {u: r for u, r in reservations.items() if u != uid}
                if (held := self._of(name)) is not None:
                    self._put(name, held)

    def _put(self, name: str, held: _SimulatedNode) -> None:
        self._held[name] = self._changed[name] = held

    def _weigh(self, name: str, held: _SimulatedNode) -> None:
        gpunode, assumed = held.gpunode, dict[str, Reservation]()
        if not held.added:
            assumed = {**self._beside.get(name, {}), **self._cluster.holds.binding_to(name)}
        if held.confirmed:
            # Otherwise they would count as leaving, because the cluster has no such bound pods.
            reservations = gpunode.spec.reservations
            confirmed = {uid: reservations[uid] for uid in held.confirmed & reservations.keys()}
            assumed = {**assumed, **confirmed}
        terms = self._cluster.terms_of(
            gpunode.name, gpunode, held.gone, assumed, held.device_choice
        )
        if held.repaired:
            terms = msgspec.structs.replace(terms, fresh_until_s=inf, ageing_from_s=inf)
        self._table.put(as_added(terms, name) if held.added else terms)

    def _node(self, name: str) -> Node | None:
        """Return the Node. An added node has the labels and taints of its model node."""
        held = self._held.get(name)
        return self._cluster.node(held.gpunode.name if held else name)


def _moves(pod: Pod, node: str) -> bool:
    """Return whether draining the node moves the pod. DaemonSet pods and static pods stay."""
    owners = pod.metadata.owner_references or ()
    return (
        pod.node == node
        and not pod.ended
        and pod.metadata.deletion_timestamp is None
        and not any(owner.controller and owner.kind in ("DaemonSet", "Node") for owner in owners)
    )


def urgency(pod: Pod) -> tuple[int, str, str]:
    """Return the sort key for pods in the order of scheduling, by priority and then by age."""
    return -(pod.spec.priority or 0), pod.metadata.creation_timestamp or "", pod.metadata.uid
