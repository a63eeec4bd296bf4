"""Who holds memory of a device, and how far along each of them is."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from contract.gpunode import GPUNode, PodUse
from contract.kube import Pod
from extender.placement.device_accounting import DeviceTerms
from extender.placement.occupancy import Holder
from extender.state.cluster_state import ClusterState

#: waiting: promised, and its Binding was not seen; on_its_way: bound, on no device yet; running:
#: seen on the device; ending: it is being deleted or has ended, and its memory is not free yet;
#: gone: deleted, and no sample has shown yet that its memory is free.
Phase = Literal["waiting", "on_its_way", "running", "ending", "gone"]


@dataclass(frozen=True, slots=True)
class Held:
    """One pod on one device, or one that may come to be there."""

    namespace: str
    name: str
    uid: str
    phase: Phase
    #: False: it came without us, and only what it was measured to use is charged.
    reserved: bool
    requested_bytes: int
    #: None while nothing was measured.
    measured_bytes: int | None
    #: What counts against the device: the larger of both.
    charged_bytes: int
    #: RFC 3339, when it was promised; empty where that is not known.
    since: str
    #: As the pod says; None where it is not known, or does not.
    priority: int | None
    uses: tuple[PodUse, ...]


def holders(cluster: ClusterState, node: str, terms: DeviceTerms) -> Iterator[Held]:
    """All of a device, those with the most first."""
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


def _unobserved_pod(cluster: ClusterState, one: PodUse, rows: list[PodUse]) -> Held:
    pod = cluster.pod(one.uid)
    uses = tuple(use for use in rows if use.uid == one.uid)
    known = [use.used_bytes for use in uses if use.used_bytes is not None]
    measured_bytes = sum(known) if len(known) == len(uses) else None
    return Held(
        namespace=one.namespace,
        name=one.name,
        uid=one.uid,
        # One that asks for no GPU of ours is not known by name, and is there all the same.
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
    return "on_its_way" if pod.node else "waiting"
