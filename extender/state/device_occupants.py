"""Lists the pods that hold memory of a device, with the phase of each."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from contract.gpunode import GPUNode, PodUse
from contract.kube import Pod
from extender.placement.device_accounting import DeviceTerms
from extender.placement.occupancy import Holder
from extender.state.cluster_state import ClusterState

#: waiting: reserved, not bound yet. unconfirmed: bound, on no device yet. running: reported on the
#: device. ending: being deleted or ended, and its memory is not free yet. gone: deleted, and no
#: sample has shown yet that its memory is free.
Phase = Literal["waiting", "unconfirmed", "running", "ending", "gone"]


@dataclass(frozen=True, slots=True)
class Held:
    """A pod that is on the device, or that the device plugin may put there."""

    namespace: str
    name: str
    uid: str
    phase: Phase
    #: Whether the pod has a reservation there. If not, only its measured use is charged.
    reserved: bool
    requested_bytes: int
    #: None if nothing was measured yet.
    measured_bytes: int | None
    #: The larger of requested and measured bytes: the memory that is not free for reservation.
    charged_bytes: int
    #: RFC 3339 time of the reservation; empty if unknown.
    since: str
    #: The pod's ``spec.priority``; None if it is unset or the pod is unknown.
    priority: int | None
    uses: tuple[PodUse, ...]


def holders(cluster: ClusterState, node: str, terms: DeviceTerms) -> Iterator[Held]:
    """Yield the pods of a device, the largest charge first."""
    gpunode = cluster.gpunode(node)
    status = gpunode.status if gpunode else None
    rows = [use for use in status.pods if use.device == terms.device.uuid] if status else []
    reserved = {holder.uid for holder in terms.holders}
    found = [_held(cluster, gpunode, holder, rows) for holder in terms.holders]
    unobserved_pods = {use.uid: use for use in rows if use.uid not in reserved}
    found += [_unobserved_pod(cluster, use, rows) for use in unobserved_pods.values()]
    yield from sorted(found, key=lambda held: (-held.charged_bytes, held.namespace, held.name))


def _held(
    cluster: ClusterState, gpunode: GPUNode | None, holder: Holder, rows: list[PodUse]
) -> Held:
    pod = cluster.pod(holder.uid)
    reservation = gpunode.spec.reservations.get(holder.uid) if gpunode else None
    return Held(
        namespace=holder.namespace,
        name=holder.name,
        uid=holder.uid,
        phase=_phase(pod, holder.observed),
        reserved=True,
        requested_bytes=holder.requested_bytes,
        measured_bytes=holder.measured_bytes,
        charged_bytes=holder.charged_bytes,
        since=reservation.since if reservation else "",
        priority=pod.spec.priority if pod else None,
        uses=tuple(use for use in rows if use.uid == holder.uid),
    )


def _unobserved_pod(cluster: ClusterState, first_use: PodUse, rows: list[PodUse]) -> Held:
    pod = cluster.pod(first_use.uid)
    uses = tuple(use for use in rows if use.uid == first_use.uid)
    known = [use.used_bytes for use in uses if use.used_bytes is not None]
    measured_bytes = sum(known) if len(known) == len(uses) else None
    return Held(
        namespace=first_use.namespace,
        name=first_use.name,
        uid=first_use.uid,
        # The state keeps no pods that request no GPU; the report shows this one all the same.
        phase=_phase(pod, observed=True) if pod else "running",
        reserved=False,
        requested_bytes=0,
        measured_bytes=measured_bytes,
        charged_bytes=measured_bytes or 0,
        since="",
        priority=pod.spec.priority if pod else None,
        uses=uses,
    )


def _phase(pod: Pod | None, observed: bool) -> Phase:
    if pod is None:
        return "gone"
    if pod.ended or pod.metadata.deletion_timestamp is not None:
        return "ending"
    if observed:
        return "running"
    return "unconfirmed" if pod.node else "waiting"
