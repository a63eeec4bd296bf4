"""Simulates that pods are created again with other requests, to show how much memory this frees and
which pending pods then fit.

The pods leave their nodes and are placed one after another on a copy of the cluster, as real pods
are. Because placing the same pods again already changes something, the simulation also runs with
the current requests, for comparison. Finally it places the pending pods. Each pod gets a device
that the device plugin could choose.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

import msgspec

from headroom.contract.annotations import (
    VRAM,
    Bytes,
    ReplicaShare,
    Share,
    VramAnnotation,
    render_vram,
)
from headroom.contract.gpunode import Charge
from headroom.contract.kube import Pod
from headroom.core.cluster.cluster import Cluster
from headroom.core.placement.request import VramRequest
from headroom.core.placement.snapshot import Snapshot
from headroom.core.rules.eligible_nodes import AMOUNTS, Eligible, eligibility_key, not_modeled
from headroom.core.whatif.simulation import Placed, Simulation, urgency

#: Maximum number of pods that are placed again, and of pending pods.
MAX_PODS, MAX_PENDING = 500, 256


@dataclass(frozen=True, slots=True)
class Amounts:
    """A pod, and the bytes per device that each of its containers is to request."""

    pod: Pod
    by_container: Mapping[str, int]
    #: Bytes that the pod reserves now, minus the bytes that it would request.
    frees_bytes: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The effect of other requests. An empty device has no use and no reservation."""

    #: Number of pods that were placed again, and of pods that ``MAX_PODS`` left out.
    pods: int
    left_out: int
    #: Pods that would fit on no node if they were created again.
    unschedulable: int
    empty_devices: int
    #: Number of empty devices after the pods were placed again with their current requests, and
    #: after they were placed with the other requests.
    empty_devices_again: int
    empty_devices_after: int
    headroom_bytes: int
    headroom_bytes_after: int
    #: Number of pending pods that were tried, how many of them fit on the cluster as it is, and how
    #: many fit with the other requests.
    pending: int
    pending_fit: int
    pending_fit_after: int
    #: Checks of kube-scheduler that the simulation does not make.
    not_checked: tuple[str, ...]


def with_amounts(cluster: Cluster, amounts: Amounts) -> tuple[Pod, VramRequest] | None:
    """Return the pod with these amounts. Containers without an amount keep their request. Return
    None if the pod has no valid request."""
    pod, by_container = amounts.pod, dict[str, Bytes | Share]()
    present = cluster.understand(pod)
    if not isinstance(present, VramRequest) or not present.asks:
        return None
    for ask in present.containers:
        if ask.name in amounts.by_container:
            by_container[ask.name] = Bytes(amounts.by_container[ask.name])
        elif not isinstance(ask.amount, ReplicaShare):
            by_container[ask.name] = ask.amount
    text = render_vram(VramAnnotation(by_container=by_container))
    annotations = {**(pod.metadata.annotations or {}), VRAM: text}
    metadata = msgspec.structs.replace(pod.metadata, annotations=annotations)
    changed = msgspec.structs.replace(pod, metadata=metadata)
    request = cluster.understand(changed)
    return (changed, request) if isinstance(request, VramRequest) else None


def simulate_requests(
    cluster: Cluster,
    snap: Snapshot,
    now_s: float,
    amounts: Iterable[Amounts],
    most_pods: int = MAX_PODS,
) -> Outcome:
    """Simulate that pods are created again with these amounts.

    If there are more than ``most_pods`` bound pods, only the pods that free the most memory are
    simulated. Only the first ``MAX_PENDING`` pending pods, by priority and age, are placed.
    ``now_s`` is this process's monotonic clock.
    """
    wanted = {each.pod.metadata.uid: each for each in amounts}
    bound = [each for each in wanted.values() if each.pod.node]
    chosen = sorted(bound, key=lambda each: (-each.frees_bytes, each.pod.metadata.uid))[:most_pods]
    chosen.sort(key=lambda each: urgency(each.pod))
    changed = [pair for each in chosen if (pair := with_amounts(cluster, each)) is not None]
    present = [pair for pod, _ in changed if (pair := _as_it_is(cluster, pod)) is not None]
    pending = list(_pending(cluster))
    pending_after = [
        (wanted.get(pod.metadata.uid) and with_amounts(cluster, wanted[pod.metadata.uid]))
        or (pod, request)
        for pod, request in pending
    ]
    pods = [pod for pod, _ in (*changed, *pending)]

    again = _Copy(cluster, snap, now_s)
    again.create_again(present)
    after = _Copy(cluster, snap, now_s)
    unschedulable = len(changed) - after.create_again(changed)
    empty_after, headroom_after = after.empty_devices(), after.headroom_bytes()
    now = _Copy(cluster, snap, now_s)
    return Outcome(
        pods=len(changed),
        left_out=len(bound) - len(chosen),
        unschedulable=unschedulable,
        empty_devices=now.empty_devices(),
        empty_devices_again=again.empty_devices(),
        empty_devices_after=empty_after,
        headroom_bytes=now.headroom_bytes(),
        headroom_bytes_after=headroom_after,
        pending=len(pending),
        pending_fit=now.place(pending),
        pending_fit_after=after.place(pending_after),
        not_checked=tuple(dict.fromkeys([AMOUNTS, *(c for pod in pods for c in not_modeled(pod))])),
    )


_Requested = Sequence[tuple[Pod, VramRequest]]


def _as_it_is(cluster: Cluster, pod: Pod) -> tuple[Pod, VramRequest] | None:
    watched = cluster.pod(pod.metadata.uid)
    request = cluster.understand(watched) if watched is not None else None
    return (watched, request) if watched and isinstance(request, VramRequest) else None


def _pending(cluster: Cluster) -> Iterator[tuple[Pod, VramRequest]]:
    for pod in sorted(cluster.unbound(), key=urgency)[:MAX_PENDING]:
        request = cluster.understand(pod)
        if isinstance(request, VramRequest) and request.asks and not pod.spec.scheduling_gates:
            yield pod, request


class _Copy:
    """A copy of the cluster on which pods are placed."""

    def __init__(self, cluster: Cluster, snap: Snapshot, now_s: float) -> None:
        self._simulation = Simulation(cluster, snap, now_s)
        self._eligible: dict[bytes, Eligible] = {}

    def create_again(self, pods: _Requested) -> int:
        """Remove all the pods, then place them again. Return how many of them found a node."""
        for pod, _ in pods:
            self._simulation.release(pod.metadata.uid)
        # A node ignores the uid of a pod that was released, so the new pod needs another uid.
        return self.place([(pod, replace(each, uid=f"{each.uid}+")) for pod, each in pods])

    def place(self, pods: _Requested) -> int:
        """Place the pods one after another. Return how many of them found a node."""
        placed = 0
        for pod, request in pods:
            if (key := eligibility_key(pod)) not in self._eligible:
                self._eligible[key] = self._simulation.eligible(pod)
            at = self._simulation.place(request, self._eligible[key])
            if isinstance(at, Placed):
                placed += 1
                self._start(request.uid, at)
        return placed

    def _start(self, uid: str, at: Placed) -> None:
        """Let the node report the pod on devices that the plugin could choose.

        If several devices are possible, the pod stays unconfirmed and is charged on each candidate.
        The same applies on a node whose devices are known only from its labels.
        """
        found = [_devices(charge) for charge in at.placement.charges]
        if all(found) and self._simulation.has_report(at.node):
            count_of = {uuid: count for part in found for uuid, count in part.items()}
            self._simulation.observe(uid, at.node, count_of)

    def empty_devices(self) -> int:
        """Count the devices without use, reservations and allocated replicas."""
        return sum(
            terms.believed and not terms.committed_bytes and not terms.device.replicas.allocated
            for node in self._simulation.snapshot().nodes
            for terms in node.devices
        )

    def headroom_bytes(self) -> int:
        """Return the headroom of all devices. An overcommitted device counts as 0."""
        return int(self._simulation.snapshot().node_headroom_bytes.sum())


def _devices(charge: Charge) -> Mapping[str, int]:
    """Return the replicas of each device that the pod gets, by UUID. The mapping is empty if
    several placements are possible."""
    if charge.choices:
        return charge.chosen_replicas
    first = sorted(charge.candidates.keys() - set(charge.beyond))
    if charge.by_environment or not first:
        return {}
    if charge.count <= len(first):
        return dict.fromkeys(islice(cycle(first), charge.count), 1)
    return {}
