"""Lists the pods that hold memory of a device, with the phase of each."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from headroom.console.facts.memory_caps import MemoryCap, caps_on
from headroom.contract.gpunode import PodUse, Reservation
from headroom.contract.kube import Pod
from headroom.contract.reasons import Reason
from headroom.core.cluster.cluster import Cluster
from headroom.core.placement.device_accounting import DeviceTerms
from headroom.core.placement.explain import NodeExplanation
from headroom.core.placement.fit import Verdicts
from headroom.core.placement.occupancy import Holder

#: waiting: reserved, but not bound yet. unconfirmed: bound, but no report shows it on a device yet.
#: starting: bound, and other pods that start alone must wait for it. running: a report shows it on
#: the device. ending: terminating or ended, and its memory is not free yet. gone: deleted, but no
#: sample has shown its memory as free yet.
Phase = Literal["waiting", "unconfirmed", "starting", "running", "ending", "gone"]


@dataclass(frozen=True, slots=True)
class Held:
    """A pod that is on the device, or that the device plugin may put there."""

    namespace: str
    name: str
    uid: str
    phase: Phase
    #: Whether the pod has a reservation on the device. If not, only its measured use is charged.
    reserved: bool
    requested_bytes: int
    #: The measured use in bytes. None if nothing was measured yet.
    measured_bytes: int | None
    #: The larger of requested and measured bytes, which is not free for reservation.
    charged_bytes: int
    #: RFC 3339 time of the reservation; empty if unknown.
    since: str
    #: The pod's ``spec.priority``; None if it is unset or the pod is unknown.
    priority: int | None
    uses: tuple[PodUse, ...]
    #: The limit on the pod's memory; None if no report shows the pod on the device.
    cap: MemoryCap | None


def holders(cluster: Cluster, node: str, terms: DeviceTerms) -> Iterator[Held]:
    """Yield the pods of a device, largest charge first."""
    gpunode = cluster.gpunode(node)
    reservations = gpunode.spec.reservations if gpunode else {}
    status = gpunode.status if gpunode else None
    uses_of: dict[str, list[PodUse]] = {}
    for use in status.pods if status else ():
        if use.device == terms.device.uuid:
            uses_of.setdefault(use.uid, []).append(use)
    occupants: dict[str, Holder | PodUse] = {uid: uses[0] for uid, uses in uses_of.items()}
    occupants |= {holder.uid: holder for holder in terms.holders}
    caps = caps_on(cluster, node, terms)
    found = [
        _held(cluster, occupant, reservations.get(uid), uses_of.get(uid, []), caps.get(uid))
        for uid, occupant in occupants.items()
    ]
    yield from sorted(found, key=lambda held: (-held.charged_bytes, held.namespace, held.name))


def _held(
    cluster: Cluster,
    occupant: Holder | PodUse,
    reservation: Reservation | None,
    uses: list[PodUse],
    cap: MemoryCap | None,
) -> Held:
    """Describe a pod that has a reservation on the device (``Holder``), or only uses the device
    (``PodUse``)."""
    pod, reserved = cluster.pod(occupant.uid), isinstance(occupant, Holder)
    user = cluster.gpu_users.get(occupant.uid)
    named = occupant if occupant.name or user is None else user.metadata
    if isinstance(occupant, Holder):
        phase = phase_of(pod, occupant.observed, occupant.starting)
        requested_bytes = occupant.requested_bytes
        measured_bytes, charged_bytes = occupant.measured_bytes, occupant.charged_bytes
    else:
        # The state contains only pods that request a GPU, but the report still shows this pod.
        phase, requested_bytes = phase_of(pod, observed=True) if pod else "running", 0
        known = [use.used_bytes for use in uses if use.used_bytes is not None]
        measured_bytes = sum(known) if len(known) == len(uses) else None
        charged_bytes = measured_bytes or 0
    return Held(
        namespace=named.namespace,
        name=named.name,
        uid=occupant.uid,
        phase=phase,
        reserved=reserved,
        requested_bytes=requested_bytes,
        measured_bytes=measured_bytes,
        charged_bytes=charged_bytes,
        since=reservation.since if reservation and reserved else "",
        priority=pod.spec.priority if pod else None,
        uses=tuple(uses),
        cap=cap,
    )


def phase_of(pod: Pod | None, observed: bool, starting: bool = False) -> Phase:
    """Return the phase of a pod. ``pod`` is None if it is deleted, and ``observed`` is whether a
    report shows it."""
    if pod is None:
        return "gone"
    if pod.ended or pod.metadata.deletion_timestamp is not None:
        return "ending"
    if starting and pod.node:
        return "starting"
    if observed:
        return "running"
    return "unconfirmed" if pod.node else "waiting"


def blockers(cluster: Cluster, verdicts: Verdicts, node: NodeExplanation) -> list[Held]:
    """Return the pods on the devices that are too full for the pod, largest first.

    If the pod only waits until other pods have started, return the starting pods.
    """
    found: dict[str, Held] = {}
    if node.reason is Reason.OTHER_STARTING:
        for candidate in node.candidates:
            for held in holders(cluster, node.node, candidate.terms):
                if held.phase == "starting":
                    found.setdefault(held.uid, held)
        return list(found.values())
    if node.reason is None or not node.reason.evictable:
        return []
    requested = {verdict.ask.resource for verdict in verdicts.asks}
    terms = verdicts.snap.nodes[verdicts.snap.row_of[node.node]].devices
    short = {each.terms.device.uuid for each in node.candidates if each.short_bytes}
    for each in terms:
        if each.device.uuid in short or (not short and each.device.resource in requested):
            for held in holders(cluster, node.node, each):
                # A pod that chooses its devices itself may use no memory of the device that its
                # replica belongs to.
                if held.charged_bytes or not short:
                    found.setdefault(held.uid, held)
    return sorted(found.values(), key=lambda held: -held.charged_bytes)
