"""Finds pods that hold GPU memory but use no SM, with their idle time and the memory that they
hold.

Agents report since when a pod has been idle (``PodUse.idle_since``). A pod *holds* its reservation
on a device, or its measured use if the use is larger. Stale reports are ignored, because a pod may
have become active since then.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from headroom.contract.gpunode import GPUNode, PodUse
from headroom.contract.kube import Pod
from headroom.contract.owners import TEMPLATE_HASHES
from headroom.contract.timestamps import age
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.trusted_rows import trusted_rows
from headroom.core.placement.device_accounting import DeviceTerms
from headroom.core.placement.snapshot import Snapshot

#: A pod counts as idle after this time if it holds at least this much memory. Readers can request
#: other limits.
IDLE_AFTER_S = 3600.0
HELD_BYTES = 1 << 30


class IdlePod(msgspec.Struct, frozen=True, gc=False):
    """A pod on one device."""

    namespace: str
    name: str
    uid: str
    node: str
    device: str
    #: Kind and name of the controller, such as Deployment and llama. Empty if there is none.
    owner_kind: str
    owner_name: str
    #: Measured use of the device by the pod, or None if it is unknown.
    used_bytes: int | None
    #: Memory reserved for the pod on the device, or 0 without a reservation.
    reserved_bytes: int
    #: The fraction of the GPU that no other pod can use, by memory or by replicas, whichever is
    #: larger.
    gpu_ratio: float
    #: Since when the pod has been idle (RFC 3339). Empty if the pod is not idle, or if the time is
    #: unknown.
    idle_since: str
    idle_s: float

    @property
    def held_bytes(self) -> int:
        return max(self.reserved_bytes, self.used_bytes or 0)

    @property
    def gpu_s(self) -> float:
        """Seconds of a whole GPU that were held but not used."""
        return self.gpu_ratio * self.idle_s


def idle_pods(
    cluster: Cluster,
    snap: Snapshot,
    now_s: float,
    wall_s: float,
    after_s: float = IDLE_AFTER_S,
    held_bytes: int = HELD_BYTES,
) -> list[IdlePod]:
    """Return the idle pods on all devices, sorted by wasted GPU time, largest first.

    ``now_s`` is the monotonic time, and ``wall_s`` the Unix time. ``after_s`` is the minimum idle
    time in seconds, and ``held_bytes`` the minimum memory held on a device.
    """
    found = [
        each
        for row, gpunode in _fresh(cluster, snap, now_s)
        if _has_idle_pods(gpunode)
        for each in on_node(cluster, gpunode, snap.nodes[row].devices, wall_s)
        if each.idle_since and each.idle_s >= after_s and each.held_bytes >= held_bytes
    ]
    return sorted(found, key=lambda each: (-each.gpu_s, each.namespace, each.name, each.device))


def devices_of_pod(
    cluster: Cluster, snap: Snapshot, now_s: float, wall_s: float, namespace: str, name: str
) -> list[IdlePod]:
    """Return an entry for each device of a pod, even if the pod is not idle. The result is empty if
    no fresh report shows the pod.
    """
    return [
        each
        for row, gpunode in _fresh(cluster, snap, now_s)
        for each in on_node(cluster, gpunode, snap.nodes[row].devices, wall_s)
        if (each.namespace, each.name) == (namespace, name)
    ]


def _fresh(cluster: Cluster, snap: Snapshot, now_s: float) -> Iterator[tuple[int, GPUNode]]:
    """Yield (row of the snapshot, GPUNode) of each node whose report is fresh."""
    for row, node in enumerate(snap.nodes):
        gpunode = cluster.gpunode(node.name)
        if gpunode is not None and snap.fresh_until_s[row] >= now_s:
            yield row, gpunode


def _has_idle_pods(gpunode: GPUNode) -> bool:
    return gpunode.status is not None and any(use.idle_since for use in gpunode.status.pods)


def on_node(
    cluster: Cluster, gpunode: GPUNode, devices: Sequence[DeviceTerms], wall_s: float
) -> Iterator[IdlePod]:
    """Yield each pod on each device of one node, idle or not, from the node's fresh report."""
    rows: dict[tuple[str, str], list[PodUse]] = defaultdict(list)
    for use in trusted_rows(cluster, gpunode):
        if use.uid:
            rows[use.uid, use.device].append(use)
    terms_of = {terms.device.uuid: terms for terms in devices}
    gpu_bytes = _gpu_bytes(devices)
    for (uid, uuid), uses in rows.items():
        terms = terms_of.get(uuid)
        if terms is None:
            continue
        reservation = gpunode.spec.reservations.get(uid)
        charges = reservation.charges if reservation else ()
        reserved_bytes = sum([charge.candidates.get(uuid, 0) for charge in charges])
        known = [use.used_bytes for use in uses if use.used_bytes is not None]
        used_bytes = sum(known) if len(known) == len(uses) else None
        pod = cluster.pod(uid) or cluster.gpu_users.get(uid)
        kind, owner = owner_of(pod)
        since = next(filter(None, [use.idle_since for use in uses]), "")
        replicas = sum([bool(use.replica) for use in uses])
        yield IdlePod(
            namespace=uses[0].namespace,
            name=uses[0].name,
            uid=uid,
            node=gpunode.name,
            device=uuid,
            owner_kind=kind,
            owner_name=owner,
            used_bytes=used_bytes,
            reserved_bytes=reserved_bytes,
            gpu_ratio=_gpu_ratio(
                terms, gpu_bytes[_gpu(terms)], max(reserved_bytes, used_bytes or 0), replicas
            ),
            idle_since=since,
            idle_s=max(0.0, age(since, wall_s) or 0.0) if since else 0.0,
        )


def _gpu(terms: DeviceTerms) -> str:
    return terms.device.parent or terms.device.uuid


def _gpu_bytes(devices: Iterable[DeviceTerms]) -> Mapping[str, int]:
    """Return the allocatable bytes of each physical GPU. With MIG, sum over its GPU instances."""
    memories = {(_gpu(terms), terms.device.gpu_instance): terms for terms in devices}
    found: dict[str, int] = defaultdict(int)
    for (gpu, _), terms in memories.items():
        found[gpu] += terms.allocatable_bytes
    return found


def _gpu_ratio(terms: DeviceTerms, gpu_bytes: int, held_bytes: int, replicas: int) -> float:
    """Return the fraction of a GPU with ``gpu_bytes`` that is held by bytes or by replicas of a
    device."""
    if gpu_bytes <= 0:
        return 0.0
    by_replicas = replicas / max(1, terms.device.replicas.total) * terms.allocatable_bytes
    return min(1.0, max(held_bytes, by_replicas) / gpu_bytes)


def owner_of(pod: Pod | None) -> tuple[str, str]:
    """Return the kind and name of the pod's controller. If it is the ReplicaSet of a Deployment or
    Rollout, return the kind and name of that object."""
    owner = pod.metadata.controller if pod is not None else None
    if pod is None or owner is None:
        return "", ""
    labels = pod.metadata.labels or {}
    for label, kind in TEMPLATE_HASHES.items() if owner.kind == "ReplicaSet" else ():
        suffix = f"-{labels.get(label, '')}"
        if len(suffix) > 1 and owner.name.endswith(suffix):
            return kind, owner.name.removesuffix(suffix)
    return owner.kind, owner.name
