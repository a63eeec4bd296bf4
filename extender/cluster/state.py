"""All we know of the cluster: events change it, snapshots are read from it.

One thread owns a ``ClusterState`` and is the only one to call ``apply``. Whatever it hands out is
immutable, so other threads may keep and read it; ``judge`` may be called from any thread, because
what it reads is replaced and never changed in place.
"""

from collections.abc import Iterable, Set

import msgspec

from contract.annotations import DEFAULT_VRAM, RESERVE, parse_reserve
from contract.errors import BadAnnotation
from contract.gpunode import GPUNode, Reservation
from contract.kube import Lease, Namespace, Node, Pod
from contract.reasons import Reason
from extender.cluster.bystanders import adopt
from extender.cluster.events import (
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
)
from extender.cluster.freshness import NEVER_S, Pulse
from extender.placement.equation import weigh, without
from extender.placement.fit import fit
from extender.placement.placed import Placement, place
from extender.placement.request import Unreadable, VramRequest, asks_for_gpu, understand
from extender.placement.rules import Rules
from extender.placement.snapshot import NodeTerms, Snapshot
from extender.placement.table import Table, build


class ClusterState:
    """``epoch_s`` is the wall time, in Unix seconds, at which the monotonic clock was 0."""

    def __init__(self, rules: Rules, stale_after_s: float, epoch_s: float) -> None:
        self.rules = rules
        self._stale_after_s = stale_after_s
        self._epoch_s = epoch_s
        self._table = Table()
        #: Nodes to weigh again, in the order in which they changed.
        self._dirty: dict[str, None] = {}
        self._nodes: dict[str, Node] = {}
        self._gpunodes: dict[str, GPUNode] = {}
        self._reports: dict[str, Pulse] = {}
        self._leases: dict[str, Pulse] = {}
        self._default_vram: dict[str, str] = {}
        #: Pods that ask for GPUs of ours, by uid.
        self._pods: dict[str, Pod] = {}
        self._uids_on: dict[str, set[str]] = {}
        self._uid_of: dict[tuple[str, str], str] = {}
        #: Pods that were seen bound to a node that holds a promise to them, and then deleted.
        self._departed: set[str] = set()
        #: Node -> pods bound to it that have not ended; replaced, never changed in place.
        self._sitting_on: dict[str, tuple[Pod, ...]] = {}

    # Reading.

    def snapshot(self) -> Snapshot:
        """Everything applied so far, weighed."""
        return self._table.snapshot()

    def gpunode(self, name: str) -> GPUNode | None:
        return self._gpunodes.get(name)

    def gpunodes(self) -> list[GPUNode]:
        return list(self._gpunodes.values())

    def nodes(self) -> list[Node]:
        return list(self._nodes.values())

    def pod(self, uid: str) -> Pod | None:
        return self._pods.get(uid)

    def pods(self) -> list[Pod]:
        return list(self._pods.values())

    def departed(self, uid: str) -> bool:
        """Whether a pod with a promise was seen to be deleted."""
        return uid in self._departed

    def pod_named(self, namespace: str, name: str) -> Pod | None:
        return self._pods.get(self._uid_of.get((namespace, name), ""))

    def understand(self, pod: Pod) -> VramRequest | Unreadable:
        """What the pod asks for, with the default of its namespace."""
        return understand(pod, self._default_vram.get(pod.metadata.namespace), self.rules)

    def judge(self, pod: Pod, gpunode: GPUNode, now_s: float) -> Placement | Reason:
        """Fit the pod on this very object of the node, as if it held no promise to it yet."""
        request = self.understand(pod)
        if isinstance(request, Unreadable):
            return request.reason
        snap = build([self._weigh(gpunode.name, gpunode, {pod.metadata.uid})])
        verdicts = fit(request, snap, snap.rows([gpunode.name]), now_s)
        return verdicts.reason(0) or place(request, snap, verdicts, 0)

    def adopt(self, pod: Pod, gpunode: GPUNode) -> Reservation | None:
        """What a pod bound to the node without our promise is charged; None if it is not ours."""
        if not asks_for_gpu(pod, self.rules):
            return None
        return adopt(
            pod,
            self._default_vram.get(pod.metadata.namespace),
            gpunode.status.devices if gpunode.status else (),
            self._reserve(gpunode.name)[0],
            self.rules,
        )

    def fits_after_eviction(self, pod: Pod, node: str, victims: Set[str], now_s: float) -> bool:
        """Whether the pod would fit on the node once the pods with these uids have gone."""
        request, gpunode = self.understand(pod), self._gpunodes.get(node)
        if isinstance(request, VramRequest) and not request.asks:
            return True
        if isinstance(request, Unreadable) or gpunode is None or gpunode.status is None:
            return False
        status = without(gpunode.status, victims)
        left = msgspec.structs.replace(gpunode, status=status)
        snap = build([self._weigh(node, left, victims | {pod.metadata.uid})])
        return bool(fit(request, snap, snap.rows([node]), now_s).fits[0])

    # Writing.

    def apply(self, events: Iterable[Event]) -> None:
        """Take events in the order in which they happened."""
        for event in events:
            self._apply(event)
        for name in self._dirty:
            if name in self._nodes or name in self._gpunodes:
                pods = (self._pods[uid] for uid in self._uids_on.get(name, ()))
                self._sitting_on[name] = tuple(pod for pod in pods if not pod.ended)
                self._table.put(self._weigh(name, self._gpunodes.get(name)))
            else:
                self._table.drop(name)
                self._sitting_on.pop(name, None)
        self._dirty.clear()

    def _apply(self, event: Event) -> None:
        match event:
            case PodSeen(pod):
                self._put_pod(pod)
            case PodGone(uid):
                self._note_departure(uid)
                self._drop_pod(uid)
            case NodeSeen(node):
                self._nodes[node.metadata.name] = node
                self._dirty[node.metadata.name] = None
            case NodeGone(name):
                self._nodes.pop(name, None)
                self._dirty[name] = None
            case NamespaceSeen(namespace):
                self._put_namespace(namespace)
            case NamespaceGone(name):
                self._put_default_vram(name, None)
            case GPUNodeSeen(gpunode, at_s):
                self._put_gpunode(gpunode, at_s)
            case GPUNodeGone(name):
                self._gpunodes.pop(name, None)
                self._reports.pop(name, None)
                self._dirty[name] = None
            case HeartbeatSeen(lease, at_s):
                self._beat(self._leases, lease.metadata.name, lease.spec.renew_time or "", at_s)
            case HeartbeatGone(name):
                self._leases.pop(name, None)
                self._dirty[name] = None
            case Relisted():
                self._relist(event)

    def _relist(self, event: Relisted) -> None:
        """Forget what the list does not name, then take what it does."""
        kind, objects, at_s = event.kind, event.objects, event.at_s
        names = {o.metadata.uid if isinstance(o, Pod) else o.metadata.name for o in objects}
        gone: list[Event] = []
        if kind is Pod:
            gone = [PodGone(uid) for uid in self._pods.keys() - names]
        elif kind is Node:
            gone = [NodeGone(name) for name in self._nodes.keys() - names]
        elif kind is Namespace:
            gone = [NamespaceGone(name) for name in self._default_vram.keys() - names]
        elif kind is GPUNode:
            gone = [GPUNodeGone(name) for name in self._gpunodes.keys() - names]
        else:
            gone = [HeartbeatGone(name) for name in self._leases.keys() - names]
        for event_of_absence in gone:
            self._apply(event_of_absence)
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

    def _put_pod(self, pod: Pod) -> None:
        uid = pod.metadata.uid
        self._drop_pod(uid)
        if not asks_for_gpu(pod, self.rules):
            return
        self._pods[uid] = pod
        self._uid_of[pod.metadata.namespace, pod.metadata.name] = uid
        if pod.node:
            self._uids_on.setdefault(pod.node, set()).add(uid)
            self._dirty[pod.node] = None

    def _drop_pod(self, uid: str) -> None:
        pod = self._pods.pop(uid, None)
        if pod is None:
            return
        key = (pod.metadata.namespace, pod.metadata.name)
        if self._uid_of.get(key) == uid:
            del self._uid_of[key]
        if pod.node:
            self._uids_on[pod.node].discard(uid)
            self._dirty[pod.node] = None

    def _note_departure(self, uid: str) -> None:
        pod = self._pods.get(uid)
        gpunode = self._gpunodes.get(pod.node) if pod else None
        if gpunode is not None and uid in gpunode.spec.reservations:
            self._departed.add(uid)

    def _put_namespace(self, namespace: Namespace) -> None:
        annotations = namespace.metadata.annotations or {}
        self._put_default_vram(namespace.metadata.name, annotations.get(DEFAULT_VRAM))

    def _put_default_vram(self, namespace: str, text: str | None) -> None:
        if self._default_vram.get(namespace) == text:
            return
        if text is None:
            del self._default_vram[namespace]
        else:
            self._default_vram[namespace] = text
        # What its bystanders are charged hangs on it.
        for name, pods in self._sitting_on.items():
            if any(pod.metadata.namespace == namespace for pod in pods):
                self._dirty[name] = None

    def _put_gpunode(self, gpunode: GPUNode, at_s: float) -> None:
        held = self._gpunodes.get(gpunode.name)
        if held is not None and _older(gpunode, held):
            return
        if held is not None and self._departed:
            self._departed -= held.spec.reservations.keys() - gpunode.spec.reservations.keys()
        self._gpunodes[gpunode.name] = gpunode
        self._dirty[gpunode.name] = None
        stamp = gpunode.status.observed_at if gpunode.status else ""
        self._beat(self._reports, gpunode.name, stamp, at_s)

    def _beat(self, pulses: dict[str, Pulse], name: str, stamp: str, at_s: float) -> None:
        pulse = pulses.setdefault(name, Pulse())
        pulse.beat(stamp, at_s, self._epoch_s, self._stale_after_s)
        self._dirty[name] = None

    # Weighing.

    def _weigh(
        self, name: str, gpunode: GPUNode | None, besides: Set[str] = frozenset()
    ) -> NodeTerms:
        """One node's terms; promises to the pods with the uids ``besides`` are not counted."""
        reserve_bytes, reason = self._reserve(name)
        if name not in self._nodes:
            reason = Reason.UNKNOWN_NODE
        elif reason is None and (gpunode is None or gpunode.status is None):
            reason = Reason.NO_REPORT
        elif reason is None and gpunode is not None and not gpunode.spec.initialised:
            reason = Reason.NOT_INITIALISED
        if gpunode is None or gpunode.status is None:
            return NodeTerms(name, reason, NEVER_S)
        promises = {**self._bystanders_of(gpunode), **gpunode.spec.reservations}
        promises = {uid: promise for uid, promise in promises.items() if uid not in besides}
        devices = weigh(gpunode.status, promises, reserve_bytes, self.rules.unowned_tolerance_bytes)
        return NodeTerms(name, reason, self._fresh_until_s(name), devices)

    def _fresh_until_s(self, name: str) -> float:
        moved_at_s = [
            pulses[name].moved_at_s for pulses in (self._reports, self._leases) if name in pulses
        ]
        return max(moved_at_s, default=NEVER_S) + self._stale_after_s

    def _reserve(self, name: str) -> tuple[int, Reason | None]:
        node = self._nodes.get(name)
        text = (node.metadata.annotations or {}).get(RESERVE) if node else None
        if text is None:
            return 0, None
        try:
            return parse_reserve(text), None
        except BadAnnotation:
            return 0, Reason.BAD_NODE_ANNOTATION

    def _bystanders_of(self, gpunode: GPUNode) -> dict[str, Reservation]:
        """The pods on the node that this very object promises nothing to: one held earlier may
        have promised them something that has been taken back since."""
        return {
            pod.metadata.uid: promise
            for pod in self._sitting_on.get(gpunode.name, ())
            if pod.metadata.uid not in gpunode.spec.reservations
            and (promise := self.adopt(pod, gpunode)) is not None
        }


def _older(new: GPUNode, held: GPUNode) -> bool:
    """Whether ``new`` is an earlier version of the same object than the one held.

    What our own write returned can arrive before the watch tells of the writes before it.
    """
    if new.metadata.uid != held.metadata.uid:
        return False
    try:
        return int(new.metadata.resource_version) < int(held.metadata.resource_version)
    except ValueError:
        return False
