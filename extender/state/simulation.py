"""What would happen: a copy of the cluster in which pods come and go and nodes are changed, while
the cluster stays as it is.

A pod is placed as the verbs place it: every node is fitted and ranked on the newest snapshot of the
copy, the best one is promised to it, and that node is weighed again before the next pod comes.
Nobody plays the kubelet: as in a burst, pods that were placed are on their way until the end. What
is asked of the ``ClusterState`` may be asked from any thread, and changes nothing there.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import msgspec
import numpy as np

from contract.gpunode import Device, GPUNode, GPUNodeSpec, GPUNodeStatus, Replicas, Reservation
from contract.kube import Node, Pod
from contract.reasons import Reason
from extender.placement.device_accounting import without
from extender.placement.fit import fit
from extender.placement.fit_cache import FitCache
from extender.placement.placement_record import Placement, place
from extender.placement.request import VramRequest
from extender.placement.snapshot import REASONS, NodeTerms, Snapshot
from extender.placement.snapshot_builder import Table
from extender.state.cluster_state import ClusterState
from extender.state.selectors import Eligible, Obstacle, eligible_nodes

#: What keeps a node from pods for a moment; one that is added is not the one that it is like.
_PASSING = frozenset({Reason.EVICTED_LATELY})


@dataclass(frozen=True, slots=True)
class Placed:
    node: str
    placement: Placement
    #: 0..1
    score: float


@dataclass(frozen=True, slots=True)
class NotPlaced:
    """Of the nodes that the pod may run on; what keeps it from the others is not looked into."""

    reasons: Mapping[Reason, int]
    #: Nodes that kube-scheduler would not offer, by why.
    ineligible: Sequence[tuple[Obstacle, int]]


@dataclass(frozen=True, slots=True)
class _Held:
    """A node as it would be."""

    #: Its name is that of the node whose circumstances it has.
    gpunode: GPUNode
    besides: frozenset[str] = frozenset()
    added: bool = False
    mended: bool = False

    def reserved(self, uid: str, reservation: Reservation | None) -> "_Held":
        reservations = {u: p for u, p in self.gpunode.spec.reservations.items() if u != uid}
        if reservation is not None:
            reservations[uid] = reservation
        spec = msgspec.structs.replace(self.gpunode.spec, reservations=reservations)
        return replace(self, gpunode=msgspec.structs.replace(self.gpunode, spec=spec))

    def reporting(self, status: GPUNodeStatus) -> "_Held":
        return replace(self, gpunode=msgspec.structs.replace(self.gpunode, status=status))


class Simulation:
    """Begins with the cluster as ``snap`` shows it; ``now_s`` is the receiver's monotonic clock."""

    def __init__(self, cluster: ClusterState, snap: Snapshot, now_s: float) -> None:
        self._cluster = cluster
        self._now_s = now_s
        self._market = cluster.usual.market
        self._table = Table.after(snap)
        self._weighings = FitCache(cluster.rules.weights)
        #: Nodes that are not, or not yet, as the cluster has them; None: gone.
        self._held: dict[str, _Held | None] = {}

    def snapshot(self) -> Snapshot:
        """The copy as it is now."""
        return self._table.snapshot()

    def eligible(self, pod: Pod) -> Eligible:
        """The nodes of the copy that the pod may run on."""
        return eligible_nodes(pod, self.snapshot(), self._node)

    def place(self, request: VramRequest, where: Eligible) -> Placed | NotPlaced:
        """Place the pod on the best of these nodes. It must ask for a GPU."""
        snap, rows = self.snapshot(), where.rows
        cached = self._weighings.weigh(request, snap)
        ranking = cached.rank(request, snap, rows, self._now_s, self._market)
        if ranking.winner is None:
            codes = cached.codes(snap, rows, self._now_s)
            counts = np.bincount(codes, minlength=len(REASONS)).tolist()
            reasons = {r: n for r, n in zip(REASONS, counts, strict=True) if r and n}
            return NotPlaced(reasons, where.counts())
        row = int(rows[ranking.winner])
        part = snap.part(np.array([row]))
        verdicts = fit(request, part, np.zeros(1, np.int64), self._now_s)
        placement, name = place(request, part, verdicts, 0), snap.nodes[row].name
        reservation = Reservation(request.namespace, request.name, list(placement.charges))
        held = self._of(name)
        assert held is not None, "a node that takes pods has a ledger"
        self._put(name, held.reserved(request.uid, reservation))
        return Placed(name, placement, float(ranking.scores[ranking.winner]))

    def release(self, uid: str) -> list[str]:
        """The pod ends, and what it used is free; the nodes that held anything for it."""
        pod = self._cluster.pod(uid)
        at = {pod.node} if pod is not None else set()
        at |= {g.name for g in self._cluster.gpunodes() if uid in g.spec.reservations}
        names: list[str] = []
        for name in sorted(at):
            if (held := self._of(name)) is not None:
                status = held.gpunode.status
                left = replace(held.reserved(uid, None), besides=held.besides | {uid})
                self._put(name, left.reporting(without(status, {uid})) if status else left)
                names.append(name)
        return names

    def drain(self, name: str) -> list[Pod]:
        """The node is gone; the pods that have to go elsewhere, the most important first."""
        held = self._of(name)
        self._table.drop(name)
        self._held[name] = None
        if held is None:
            return []
        uids = [*held.gpunode.spec.reservations]
        uids += [pod.metadata.uid for pod in self._cluster.unreserved_pods(name)]
        pods = [self._cluster.pod(uid) for uid in dict.fromkeys(uids) if uid not in held.besides]
        return sorted((pod for pod in pods if pod is not None and _moves(pod, name)), key=_urgency)

    def add(self, like: str, count: int) -> list[str]:
        """So many idle nodes of the same make; their names. Raises ``KeyError`` where there is no
        such node, or nothing is known of its devices."""
        model = self._cluster.gpunode(like)
        if model is None or model.status is None:
            raise KeyError(like)
        uids = [
            *model.spec.reservations,
            *(p.metadata.uid for p in self._cluster.unreserved_pods(like)),
        ]
        there = self.snapshot().row_of
        free = (n for n in itertools.count(1) if f"{like}+{n}" not in there)
        names: list[str] = []
        for number in itertools.islice(free, count):
            status = _idle(model.status, f"+{number}")
            spec = GPUNodeSpec(initialised=True)
            new = msgspec.structs.replace(model, spec=spec, status=status)
            names.append(f"{like}+{number}")
            self._put(names[-1], _Held(new, frozenset(uids), added=True))
        return names

    def set_replicas(self, name: str, count: int) -> None:
        """Every device of the node is shared by so many replicas; 1: by none. Raises ``KeyError``
        where there is no such node, or nothing is known of its devices, and ``ValueError`` where
        more are taken."""
        held = self._of(name)
        if held is None or held.gpunode.status is None:
            raise KeyError(name)
        devices = [_shared(device, count) for device in held.gpunode.status.devices]
        status = msgspec.structs.replace(held.gpunode.status, devices=devices)
        self._put(name, held.reporting(status))

    def mend(self, name: str) -> None:
        """The agent of the node has just reported, and every device whose memory is known is
        healthy. Raises ``KeyError`` where there is no such node, or nothing is known of its
        devices."""
        held = self._of(name)
        if held is None or held.gpunode.status is None:
            raise KeyError(name)
        devices = [
            msgspec.structs.replace(device, healthy=True, health_reason="")
            if device.memory_bytes > 0
            else device
            for device in held.gpunode.status.devices
        ]
        status = msgspec.structs.replace(held.gpunode.status, devices=devices)
        self._put(name, replace(held.reporting(status), mended=True))

    def _of(self, name: str) -> _Held | None:
        if name in self._held:
            return self._held[name]
        gpunode = self._cluster.gpunode(name)
        return None if gpunode is None else _Held(gpunode)

    def _put(self, name: str, held: _Held) -> None:
        self._held[name] = held
        terms = self._cluster.weighed(held.gpunode, held.besides)
        if held.mended:
            terms = msgspec.structs.replace(terms, fresh_until_s=inf, ageing_from_s=inf)
        self._table.put(_as_added(terms, name) if held.added else terms)

    def _node(self, name: str) -> Node | None:
        """A node that was added has the labels and taints of its model."""
        held = self._held.get(name)
        return self._cluster.node(held.gpunode.name if held else name)


def _as_added(terms: NodeTerms, name: str) -> NodeTerms:
    """Its agent has just reported."""
    return msgspec.structs.replace(
        terms,
        name=name,
        reason=None if terms.reason in _PASSING else terms.reason,
        fresh_until_s=inf,
        ageing_from_s=inf,
        degraded=False,
    )


def _idle(status: GPUNodeStatus, suffix: str) -> GPUNodeStatus:
    """The same devices in another machine, sound and used by nobody."""
    devices = [
        msgspec.structs.replace(
            device,
            uuid=device.uuid + suffix,
            parent=device.parent + suffix if device.parent else device.parent,
            used_bytes=min(device.used_bytes, 0),
            unattributed_bytes=0,
            sm_activity=None,
            healthy=device.memory_bytes > 0,
            health_reason=device.health_reason if device.memory_bytes <= 0 else "",
            replicas=Replicas(free=device.replicas.total),
        )
        for device in status.devices
    ]
    return msgspec.structs.replace(status, devices=devices, pods=[], unattributed_processes=[])


def _shared(device: Device, count: int) -> Device:
    replicas, sharing = device.replicas, device.sharing
    free = count - replicas.allocated - replicas.unhealthy
    if free < 0:
        raise ValueError(f"{count - free} replicas of {device.uuid} are taken")
    if count == 1:
        sharing = "none"
    elif sharing == "none":
        sharing = "time-slicing"
    return msgspec.structs.replace(
        device, sharing=sharing, replicas=msgspec.structs.replace(replicas, free=free)
    )


def _moves(pod: Pod, node: str) -> bool:
    """Whether draining the node has the pod run elsewhere: those of daemons stay, and mirrors of
    static ones."""
    owners = pod.metadata.owner_references or ()
    return (
        pod.node == node
        and not pod.ended
        and pod.metadata.deletion_timestamp is None
        and not any(owner.controller and owner.kind in ("DaemonSet", "Node") for owner in owners)
    )


def _urgency(pod: Pod) -> tuple[int, str, str]:
    return -(pod.spec.priority or 0), pod.metadata.creation_timestamp or "", pod.metadata.uid
