"""Lists all pods that request, reserve or use GPU memory.

Each pod has one row. Views filter the rows, and sum them by owner.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import msgspec

from headroom.console.facts.device_occupants import Phase, phase_of
from headroom.contract.annotations import Bytes
from headroom.contract.gpunode import EVICTED, Charge, Device, GPUNode, PodUse, Reservation
from headroom.contract.kube import Pod
from headroom.contract.owners import TEMPLATE_HASHES, cron_job_of
from headroom.contract.timestamps import age
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.idle_pods import HELD_BYTES, IDLE_AFTER_S, owner_of
from headroom.core.cluster.trusted_rows import trusted_rows
from headroom.core.placement.device_accounting import DeviceTerms, first_of_each_memory
from headroom.core.placement.occupancy import Holder
from headroom.core.placement.per_node import PerNode
from headroom.core.placement.request import Portion, Unreadable, VramRequest, asks_for_gpu
from headroom.core.placement.snapshot import NodeTerms, Snapshot


class GpuPod(msgspec.Struct, frozen=True, gc=False):
    """One pod on all its devices."""

    namespace: str
    name: str
    uid: str
    #: Kind and name of the controller. Without a controller, they are "Pod" and the pod's own name.
    owner_kind: str
    owner_name: str
    #: The node of the pod. Empty while the pod is pending.
    node: str
    #: Model of the pod's devices, or of its candidate devices. Empty if the pod has neither.
    model: str
    phase: Phase
    #: Whether the pod has a reservation, and whether it is marked for eviction.
    reserved: bool
    #: Whether the pod needs no reservation, because kube-scheduler allocated its GPUs by DRA.
    by_dra: bool
    evicting: bool
    #: Names of the devices on which a report shows the pod.
    devices: tuple[str, ...]
    #: The reserved memory, or the memory that is charged for the pod until the ledger has its
    #: reservation.
    reserved_bytes: int
    #: The measured use in bytes. None if the pod's use of a device is not measured, or if no report
    #: shows the pod yet.
    used_bytes: int | None
    #: Sum of the peaks of the pod's containers since they started.
    peak_bytes: int
    #: Memory that the pod uses beyond its reservations, summed over its devices.
    overuse_bytes: int
    #: Memory that the pod requests while it is pending. 0 for a share of a device, because the size
    #: of the device is not known yet.
    waiting_bytes: int
    #: When the pod last used an SM of any of its devices (RFC 3339). Empty if the pod is not idle.
    idle_since: str
    #: When the pod was created (RFC 3339). Empty if this is unknown.
    created_at: str

    @property
    def unused_bytes(self) -> int:
        """Memory that is reserved and not in use; 0 if its use is not measured."""
        if self.used_bytes is None:
            return 0
        return max(0, self.reserved_bytes - (self.used_bytes - self.overuse_bytes))

    def is_owned_by(self, owner: str) -> bool:
        """Return whether an owner, such as Deployment/llama, has created the pod.

        The row names only one owner. The Job of a CronJob is named after the CronJob and the
        minute, and the pod of a ReplicaSet after the ReplicaSet.
        """
        kind, _, name = owner.partition("/")
        if (self.owner_kind, self.owner_name) == (kind, name):
            return True
        if kind == "CronJob" and self.owner_kind == "Job":
            return cron_job_of(self.owner_name) == name
        of_set = kind == "ReplicaSet" and self.owner_kind in TEMPLATE_HASHES.values()
        return of_set and self.name.rpartition("-")[0] == name

    def is_idle(self, wall_s: float) -> bool:
        """Whether the pod counts as idle by the limits of ``idle_pods``. ``wall_s`` is the Unix
        time."""
        held_bytes = max(self.reserved_bytes, self.used_bytes or 0)
        idle_s = age(self.idle_since, wall_s) if self.idle_since else None
        return idle_s is not None and idle_s >= IDLE_AFTER_S and held_bytes >= HELD_BYTES


class GpuPods:
    """Keeps the rows of all pods. Several threads may use it.

    A pod that has a reservation and is not bound yet has a single row, in the list of the node that
    reserves memory for it.

    The rows of a node are kept until the node changes, because a large fleet has 100,000 pods, and
    few of them change between two calls.
    """

    def __init__(self) -> None:
        #: The rows of each node, and the uids of pods in these rows that are not bound to the node.
        self._nodes = PerNode[tuple[list[GpuPod], Set[str]]]()

    def of(self, cluster: Cluster, snap: Snapshot) -> Iterator[GpuPod]:
        """Yield the rows of all pods."""
        for _, rows in self.by_node(cluster, snap):
            yield from rows

    def by_node(self, cluster: Cluster, snap: Snapshot) -> Iterator[tuple[str, Sequence[GpuPod]]]:
        """Yield each node of the snapshot with its rows. The rows are the same object until one of
        them changes.

        The rows of pods that are pending, or bound to a node that is not in the snapshot, come
        first under an empty name."""
        on_nodes = [(node.name, self.on_node(cluster, node)) for node in snap.nodes]
        yield "", self.without_node(cluster, snap)
        yield from on_nodes

    def on_node(self, cluster: Cluster, node: NodeTerms) -> Sequence[GpuPod]:
        """Return the rows of a node, which are the same object until a row changes."""
        name = node.name
        # A heartbeat changes none of these.
        sources = node.devices, cluster.gpunode(name), cluster.pods_on(name), cluster.gpu_users
        return self._nodes.find(node, sources, partial(_rows, cluster))[0]

    def without_node(self, cluster: Cluster, snap: Snapshot) -> list[GpuPod]:
        """Return the rows of pods that are pending, or bound to a node that is not in the snapshot.

        Call it after ``on_node`` was called for all nodes.
        """
        self._nodes.drop_others(snap)
        reserved = {uid for _, unbound in self._nodes.values() for uid in unbound}
        pending = [
            _without_devices(pod, requested_bytes(cluster.understand(pod)))
            for pod in cluster.unbound()
            if pod.metadata.uid not in reserved
        ]
        elsewhere = [
            _without_devices(pod)
            for pod in cluster.bound_elsewhere(snap.row_of.keys())
            if _is_listed(cluster, pod)
        ]
        return pending + elsewhere


def bytes_of(charges: Iterable[Charge]) -> int:
    """Return the maximum memory that a pod takes with these charges, counting each GPU once."""
    return sum(
        sum(sorted(each.candidates.values(), reverse=True)[: _devices_of(each)]) for each in charges
    )


def requested_bytes(request: VramRequest | Unreadable) -> int:
    """Return the most bytes that a pod requests at the same time, summed over its devices.

    A share of a device counts as 0, because its size depends on the device.
    """
    if isinstance(request, Unreadable):
        return 0
    return sum(max(map(_bytes_of_phase, ask.phases), default=0) for ask in request.asks)


def _bytes_of_phase(phase: Iterable[Portion]) -> int:
    return sum(
        each.count * each.amount.count_bytes for each in phase if isinstance(each.amount, Bytes)
    )


def unconfirmed_by_model(cluster: Cluster, node: NodeTerms) -> Mapping[str, int]:
    """Return the bytes reserved for pods that no report shows yet, by device model.

    Each pod counts once, under the model of the first device that it could get.
    """
    memories = first_of_each_memory(node.devices)
    holders = [(terms.device.model, each) for terms in memories for each in terms.holders]
    known = {holder.uid for _, holder in holders if holder.observed}
    found = Counter[str]()
    if len(known) == len(holders):
        return found
    reservations = _reservations(cluster, node.name, cluster.gpunode(node.name))
    for model, holder in holders:
        if holder.uid not in known:
            known.add(holder.uid)
            reservation = reservations.get(holder.uid)
            found[model] += bytes_of(reservation.charges) if reservation else holder.requested_bytes
    return found


def _reservations(
    cluster: Cluster, node: str, gpunode: GPUNode | None
) -> Mapping[str, Reservation]:
    """Return the reservations of a node by uid, including reservations that are being written."""
    return {**cluster.holds.binding_to(node), **(gpunode.spec.reservations if gpunode else {})}


def _devices_of(charge: Charge) -> int:
    """Return the maximum number of devices that the charge gives to the pod."""
    return len(charge.candidates) if charge.by_environment else charge.count


def _is_listed(cluster: Cluster, pod: Pod) -> bool:
    return not pod.ended and asks_for_gpu(pod, cluster.rules)


def _without_devices(pod: Pod, waiting_bytes: int = 0) -> GpuPod:
    """Return the row of a pod whose devices are unknown."""
    metadata = pod.metadata
    return _row(
        *(pod, metadata.namespace, metadata.name, metadata.uid, pod.node),
        waiting_bytes=waiting_bytes,
    )


def _row(
    pod: Pod | None,
    namespace: str,
    name: str,
    uid: str,
    node: str,
    *,
    starting: bool = False,
    model: str = "",
    reserved: bool = False,
    by_dra: bool = False,
    evicting: bool = False,
    reserved_bytes: int = 0,
    devices: tuple[str, ...] = (),
    used_bytes: int | None = None,
    peak_bytes: int = 0,
    overuse_bytes: int = 0,
    waiting_bytes: int = 0,
    idle_since: str = "",
) -> GpuPod:
    kind, owner = owner_of(pod)
    return GpuPod(
        namespace=namespace,
        name=name,
        uid=uid,
        owner_kind=kind or "Pod",
        owner_name=owner or name,
        node=node,
        model=model,
        phase=phase_of(pod, bool(devices), starting),
        reserved=reserved,
        by_dra=by_dra,
        evicting=evicting,
        devices=devices,
        reserved_bytes=reserved_bytes,
        used_bytes=used_bytes,
        peak_bytes=peak_bytes,
        overuse_bytes=overuse_bytes,
        waiting_bytes=waiting_bytes,
        idle_since=idle_since,
        created_at=(pod.metadata.creation_timestamp if pod else None) or "",
    )


def _rows(cluster: Cluster, node: NodeTerms, *sources: Any) -> tuple[list[GpuPod], Set[str]]:
    rows = list(_on_node(cluster, node.name, *sources))
    return rows, {row.uid for row in rows} - {pod.metadata.uid for pod in sources[2]}


def _on_node(
    cluster: Cluster,
    node: str,
    devices: Sequence[DeviceTerms],
    gpunode: GPUNode | None,
    pods: Iterable[Pod],
    users: Mapping[str, Pod],
) -> Iterator[GpuPod]:
    """Yield the pods that hold or use memory of the node, then all other pods bound to it.

    ``users`` are the pods that use GPUs without requesting any. They are left out until their names
    are known.
    """
    held: dict[str, list[tuple[Device, Holder]]] = defaultdict(list)
    for terms in first_of_each_memory(devices):
        for holder in terms.holders:
            held[holder.uid].append((terms.device, holder))
    uses: dict[str, list[PodUse]] = defaultdict(list)
    for use in trusted_rows(cluster, gpunode):
        uses[use.uid].append(use)
    reservations = _reservations(cluster, node, gpunode)
    for uid, found in held.items():
        yield _held(cluster, node, found, uses.get(uid, ()), reservations.get(uid))
    by_uuid = {terms.device.uuid: terms.device for terms in devices}
    bound = {pod.metadata.uid for pod in pods}
    for pod in pods:
        uid = pod.metadata.uid
        if uid not in held and (uid in uses or _is_listed(cluster, pod)):
            by_dra = cluster.is_left_to_dra(pod)
            yield _unreserved(pod, node, uses.get(uid, ()), by_uuid, by_dra)
    for uid in uses.keys() - held.keys() - bound:
        if uid in users or any(use.name for use in uses[uid]):
            yield _unreserved(users.get(uid), node, uses[uid], by_uuid)


def _held(
    cluster: Cluster,
    node: str,
    found: Sequence[tuple[Device, Holder]],
    uses: Sequence[PodUse],
    reservation: Reservation | None,
) -> GpuPod:
    """Return the row of a pod that holds memory. ``found`` has each device with the memory that the
    pod holds there.

    ``reservation`` is None if the ledger has none yet, for example because the pod has still to be
    adopted.
    """
    device, first = found[0]
    seen = [(device, holder) for device, holder in found if holder.observed]
    reserved_bytes = sum(holder.requested_bytes for _, holder in seen)
    if not seen and reservation is not None:
        reserved_bytes = bytes_of(reservation.charges)
    elif not seen:
        reserved_bytes = max(holder.requested_bytes for _, holder in found)
    measured = [holder.measured_bytes for _, holder in seen]
    known = [each for each in measured if each is not None]
    return _row(
        cluster.pod(first.uid),
        first.namespace,
        first.name,
        first.uid,
        node,
        starting=first.starting,
        model=device.model,
        reserved=reservation is not None,
        evicting=reservation is not None
        and (EVICTED in reservation.flags or reservation.overuse is not msgspec.UNSET),
        reserved_bytes=reserved_bytes,
        devices=tuple(device.name for device, _ in seen),
        used_bytes=sum(known) if known and len(known) == len(measured) else None,
        peak_bytes=_peak_bytes(uses),
        overuse_bytes=sum(
            max(0, (holder.measured_bytes or 0) - holder.requested_bytes) for _, holder in seen
        ),
        idle_since=_idle_since(uses),
    )


def _unreserved(
    pod: Pod | None,
    node: str,
    uses: Sequence[PodUse],
    devices: Mapping[str, Device],
    by_dra: bool = False,
) -> GpuPod:
    """Return the row of a pod without a reservation. ``devices`` maps UUIDs to the node's devices.

    If ``pod`` is None, namespace and name come from the report.
    """
    known = [use.used_bytes for use in uses if use.used_bytes is not None]
    there = {use.device for use in uses} & devices.keys()
    on = sorted((devices[uuid] for uuid in there), key=lambda each: (each.index, each.uuid))
    named = next((use for use in uses if use.name), None)
    identity = pod.metadata if pod is not None else named
    assert identity is not None
    return _row(
        pod,
        identity.namespace,
        identity.name,
        identity.uid,
        node,
        by_dra=by_dra,
        model=on[0].model if on else "",
        devices=tuple(each.name for each in on),
        used_bytes=sum(known) if known and len(known) == len(uses) else None,
        peak_bytes=_peak_bytes(uses),
        idle_since=_idle_since(uses),
    )


def _peak_bytes(uses: Iterable[PodUse]) -> int:
    """Return the sum of the peaks. A container without a peak counts with its current use."""
    return sum(max(use.peak_bytes or 0, use.used_bytes or 0) for use in uses)


def _idle_since(uses: Sequence[PodUse]) -> str:
    """Return the time since which the pod is idle on all its devices; empty if any is active.

    All containers of a pod on one device have the same time.
    """
    by_device: dict[str, str] = {}
    for use in uses:
        by_device[use.device] = by_device.get(use.device) or use.idle_since
    return max(by_device.values()) if by_device and all(by_device.values()) else ""
