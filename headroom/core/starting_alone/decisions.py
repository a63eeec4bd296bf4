"""Finds the pods whose start has ended, and describes pods that start alone.

``phase`` decides when a start has ended. The phase is stored in the ledger, so all replicas see the
same phase.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from headroom.contract.annotations import GATED, STARTUP
from headroom.contract.commands import command
from headroom.contract.gate import GATE, has_gate, waits
from headroom.contract.gpunode import ADOPTED, GPUNode, PodUse, Reservation
from headroom.contract.kube import Pod
from headroom.contract.timestamps import age
from headroom.core.placement.request import Unreadable, VramRequest
from headroom.core.starting_alone.phase import Start, StartEnd


class Cluster(Protocol):
    """The part of the cluster's state that the decisions read."""

    def gpunode(self, name: str) -> GPUNode | None: ...

    def pod(self, uid: str) -> Pod | None: ...

    def understand(self, pod: Pod) -> VramRequest | Unreadable: ...


@dataclass(frozen=True, slots=True)
class EndedStart:
    """The end of the start of one pod."""

    end: StartEnd
    #: Seconds since the pod's bind, or None if the time of the bind is unknown.
    age_s: float | None


def ended_starts(cluster: Cluster, gpunode: GPUNode, wall_s: float) -> dict[str, EndedStart]:
    """Return the ends of starts by uid, for pods that the ledger still shows as starting.

    ``wall_s`` is the Unix time in seconds.
    """
    ended: dict[str, EndedStart] = {}
    rows_of: Mapping[str, list[PodUse]] | None = None
    for uid, reservation in gpunode.spec.reservations.items():
        if not reservation.is_starting:
            continue
        if rows_of is None:
            rows_of = _rows_by_pod(gpunode)
        pod = cluster.pod(uid)
        request = cluster.understand(pod) if pod is not None else None
        names = request.containers if isinstance(request, VramRequest) else ()
        start = Start(
            age_s=_age_s(reservation, pod, wall_s),
            timeout_s=reservation.start_timeout_s,
            pod=pod,
            gpu_containers={each.name for each in names},
            rows=rows_of.get(uid, []),
        )
        if (end := start.end) is not None:
            ended[uid] = EndedStart(end, start.age_s)
    return ended


def start_sentence(cluster: Cluster, pod: Pod) -> str:
    """Describe whether a bound pod's start delays other pods, and whether the pod waits if it
    restarts.

    Return an empty text if the pod is not bound or does not start alone.
    """
    gpunode = cluster.gpunode(pod.node)
    reservation = gpunode.spec.reservations.get(pod.metadata.uid) if gpunode else None
    if reservation is None or not reservation.starts_alone:
        return ""
    if waits(pod):
        metadata = pod.metadata
        return "starts alone and waits at its gate. To see what it waits for: " + command(
            "kubectl", "logs", "-n", metadata.namespace, metadata.name, "-c", GATE
        )
    if reservation.is_starting:
        return (
            f"starts alone: other pods with {STARTUP}: alone wait until its start on its GPU has "
            "ended"
        )
    if has_gate(pod):
        return (
            "has started alone. If all its containers start again (reboot, RestartAllContainers), "
            "its gate waits for other such pods on its GPU. A container that restarts by itself "
            "does not wait"
        )
    return (
        "has started alone. If it starts again in place, it does not wait for other such pods, "
        f"because it has no gate. To add a gate, annotate its template. Example: {GATED}: 'true'"
    )


def _rows_by_pod(gpunode: GPUNode) -> dict[str, list[PodUse]]:
    found: dict[str, list[PodUse]] = {}
    for row in gpunode.status.pods if gpunode.status else ():
        found.setdefault(row.uid, []).append(row)
    return found


def _age_s(reservation: Reservation, pod: Pod | None, wall_s: float) -> float | None:
    """Return the seconds since the pod was bound.

    An adopted pod was bound before its reservation was written, so its start may already have
    ended.
    """
    started_at = pod.status.start_time if pod is not None and pod.status is not None else None
    if ADOPTED in reservation.flags and started_at:
        return age(started_at, wall_s)
    return age(reservation.since, wall_s)
