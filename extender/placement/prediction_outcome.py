"""Whether a pod came to sit where it was predicted to, and if not, what turned the prediction.

When a pod is bound, its candidates are what the plugin could do with it, whatever becomes of the
pods that are on their way with it. Pods that we bind after it can push it on to another device;
they are let in only where that has room. So once a report shows where the pod is, there are three
cases:

*hit*      it sits on candidates, beside no more of those on their way than could come there;
*shifted*  not on candidates, but where pods bound after it can push it, which had room;
*miss*     neither: something happened between binding and admission that nobody can foresee.

Membership alone would not do: of two pods with the candidates A and B at most one may be able to
come to A. Both there is a miss, of one of them.

What can be foreseen is reckoned once more from what was known at the binding (*basis*), with the
pods bound since then; and from what was known at each of their bindings, since they relied on what
had been seen by then. A pod whose own NVIDIA_VISIBLE_DEVICES decides was foretold what it uses, not
what it is given: it is shown when its processes are, and misses where they are elsewhere.

What cannot be foreseen is looked for in the difference to the report that shows the pod:
the surprise is the one without which it cannot be where it is.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum

import msgspec

from contract.annotations import DeviceChoice
from contract.gpunode import Charge, Device, GPUNodeStatus, Replicas, Reservation
from extender.placement.occupancy import possibilities


class Result(Enum):
    HIT = "hit"
    SHIFTED = "shifted"
    MISS = "miss"
    #: No report showed it: it ended before, its promise was lost, or too much happened meanwhile.
    UNSEEN = "unseen"


class Surprise(Enum):
    """What can happen between binding and admission without anybody knowing beforehand."""

    RELEASED = "released"
    HEALTH = "health"
    BYPASS = "bypass"
    CONFIGURATION = "configuration"
    DISOBEYED = "disobeyed"
    #: Of several that happened none explains it alone.
    SEVERAL = "several"
    UNKNOWN = "unknown"

    @property
    def sentence(self) -> str:
        return _SENTENCES[self]


_SENTENCES = {
    Surprise.RELEASED: "a pod that was not known to be ending let go of its replica before",
    Surprise.HEALTH: "a replica turned unhealthy, or healthy again, before",
    Surprise.BYPASS: "a pod that Headroom did not bind was admitted before",
    Surprise.CONFIGURATION: "the devices, or how the plugin shares them out, changed before",
    Surprise.DISOBEYED: "NVIDIA_VISIBLE_DEVICES of the pod does not decide what it uses",
    Surprise.SEVERAL: "several things happened before, and none of them explains it alone",
    Surprise.UNKNOWN: "nothing that the reports show explains it",
}


@dataclass(frozen=True, slots=True)
class Basis:
    """What was known of the node when the pod was promised its memory."""

    status: GPUNodeStatus
    #: All promises, the pod's own too, and what bystanders were charged.
    reservations: Mapping[str, Reservation]
    leaving: Set[str]
    device_choice: DeviceChoice


@dataclass(frozen=True, slots=True)
class Since:
    """What came after, up to the report that shows the pod."""

    status: GPUNodeStatus
    #: Promised by us after the pod was.
    reservations: Mapping[str, Reservation]
    #: On the node without our promise, and not known at the basis.
    unreserved_pods: Mapping[str, Reservation]
    #: Pods on their way that were not compared yet: of those that one report shows together the
    #: one bound last came too many.
    later: Set[str]
    #: What differed from one report to the next (``changes``).
    changes: Set[Surprise]


@dataclass(frozen=True, slots=True)
class Comparison:
    result: Result
    predicted: tuple[str, ...]
    observed: tuple[str, ...]
    #: None unless it is a miss.
    surprise: Surprise | None = None


def predicted(reservation: Reservation) -> tuple[str, ...]:
    """The devices that the pod could be given when it was bound."""
    devices = (
        uuid
        for charge in reservation.charges
        for uuid in charge.candidates
        if uuid not in charge.beyond
    )
    return tuple(dict.fromkeys(devices))


def chosen(reservation: Reservation) -> tuple[str, ...]:
    """The devices that were chosen for the pod, for its node's agent to have them taken."""
    return tuple(dict.fromkeys(charge.choice for charge in reservation.charges if charge.choice))


def observed(status: GPUNodeStatus, uid: str) -> tuple[str, ...]:
    """The devices on which the report shows the pod."""
    return tuple(dict.fromkeys(use.device for use in status.pods if use.uid == uid))


def used(status: GPUNodeStatus, uid: str) -> tuple[str, ...]:
    """The devices of which the report shows that the pod uses memory."""
    devices = (use.device for use in status.pods if use.uid == uid and (use.used_bytes or 0) > 0)
    return tuple(dict.fromkeys(devices))


def is_by_environment(reservation: Reservation) -> bool:
    """Whether the pod's own NVIDIA_VISIBLE_DEVICES decides which devices it uses."""
    return any(charge.by_environment for charge in reservation.charges)


def is_shown(status: GPUNodeStatus, uid: str, reservation: Reservation) -> bool:
    """Whether the report shows the pod with all replicas that it asked for; or, where its own
    variable decides, what it uses."""
    if is_by_environment(reservation):
        return bool(used(status, uid))
    return len(_held(status, {uid})) >= sum(charge.count for charge in reservation.charges) > 0


def changes(before: GPUNodeStatus, after: GPUNodeStatus) -> set[Surprise]:
    """What of one report differs from the one before it and bears on the plugin's choice."""
    found: set[Surprise] = set()
    if _configuration(before) != _configuration(after):
        found.add(Surprise.CONFIGURATION)
    unhealthy = {device.uuid: device.replicas.unhealthy for device in before.devices}
    if any(unhealthy.get(d.uuid, 0) != d.replicas.unhealthy for d in after.devices):
        found.add(Surprise.HEALTH)
    return found


def compare(
    uid: str, reservation: Reservation, grounds: Sequence[tuple[Basis, Since]]
) -> Comparison:
    """Compare where the pod was predicted to sit with where it does.

    ``grounds``: what was known when it was bound and came after, then the same for each report on
    which others were while it was on its way. Each of these was let in with what was known then,
    so the pod must be where each of them allows.
    """
    status = grounds[0][1].status
    said = predicted(reservation)
    seen = observed(status, uid)
    for basis, since in grounds:
        look = _Look(basis, since, seen)
        if not look.explained():
            return Comparison(Result.MISS, said, seen, _surprise(look))
    inside = set(seen) <= set(said)
    return Comparison(Result.HIT if inside else Result.SHIFTED, said, seen)


def compare_used(uid: str, reservation: Reservation, status: GPUNodeStatus) -> Comparison:
    """Compare the devices that a pod's own variable names with those that it uses."""
    said, seen = predicted(reservation), used(status, uid)
    if set(seen) <= set(said):
        return Comparison(Result.HIT, said, seen)
    return Comparison(Result.MISS, said, seen, Surprise.DISOBEYED)


def _surprise(look: "_Look") -> Surprise:
    happened = look.happened()
    if Surprise.RELEASED in happened and look.explained(released=True):
        return Surprise.RELEASED
    if Surprise.HEALTH in happened and look.explained(health=True):
        return Surprise.HEALTH
    if Surprise.BYPASS in happened and look.explained(bypass=True):
        return Surprise.BYPASS
    if Surprise.CONFIGURATION in happened:
        return Surprise.CONFIGURATION  # what another configuration could do is not reckoned
    if len(happened) > 1:
        return Surprise.SEVERAL
    return next(iter(happened), Surprise.UNKNOWN)


class _Look:
    """One pod on its devices, and what could have brought it there."""

    def __init__(self, basis: Basis, since: Since, seen: Sequence[str]) -> None:
        self._basis = basis
        self._since = since
        own = {**since.reservations, **basis.reservations}
        sat = _held(basis.status, own.keys())
        arrived = _held(since.status, own.keys() - since.later) - sat
        # What a pod uses by its own variable is no replica.
        strangers = {other for other, reservation in own.items() if is_by_environment(reservation)}
        arrived = {held for held in arrived if held[1] or held[2] not in strangers}
        #: Device of the pod -> replicas of it that those on their way have by now.
        self._arrived = {uuid: sum(device == uuid for device, *_ in arrived) for uuid in seen}
        before, now = ({use.uid for use in s.pods} for s in (basis.status, since.status))
        self._gone = before - now
        known = own.keys() | before
        heard_of = {o: p for o, p in since.unreserved_pods.items() if o not in basis.reservations}
        self._unreserved_pods = {**_unobserved_pods(since.status, known), **heard_of}

    def happened(self) -> set[Surprise]:
        found = set(self._since.changes)
        if self._gone - self._basis.leaving:
            found.add(Surprise.RELEASED)
        if self._unreserved_pods:
            found.add(Surprise.BYPASS)
        return found

    def explained(self, released: bool = False, health: bool = False, bypass: bool = False) -> bool:
        """Whether what was known, and what happened as given, could bring it there."""
        basis, since = self._basis, self._since
        status = _with_health(basis.status, since.status) if health else basis.status
        reservations = {**since.reservations, **basis.reservations}
        if bypass:
            reservations |= self._unreserved_pods
        leaving = basis.leaving | self._gone if released else basis.leaving
        chances = possibilities(status, reservations, leaving, basis.device_choice)
        most = {
            device.uuid: chance.most(0, self._let_go(device.uuid, leaving)) + chance.unexplained
            for device, chance in zip(status.devices, chances, strict=True)
        }
        return all(count <= most.get(uuid, 0) for uuid, count in self._arrived.items())

    def _let_go(self, uuid: str, leaving: Set[str]) -> int:
        """Replicas of the device that pods that were ending hold no longer."""
        gone = _held(self._basis.status, leaving & self._gone)
        return sum(device == uuid for device, *_ in gone)


def _held(status: GPUNodeStatus, uids: Set[str]) -> set[tuple[str, str, str]]:
    """(device, replica, uid) of these pods; one that init containers leave to others counts once.

    With the uid, because the replica of a pod that is gone can be given to the next.
    """
    return {(use.device, use.replica, use.uid) for use in status.pods if use.uid in uids}


def _unobserved_pods(status: GPUNodeStatus, known: Set[str]) -> dict[str, Reservation]:
    """Pods that only the report tells of, as if they had been promised what they hold."""
    resource_of = {device.uuid: device.resource for device in status.devices}
    held = _held(status, {use.uid for use in status.pods} - known)
    counts = Counter((uid, resource_of.get(device, "")) for device, _, uid in held)
    return {
        uid: Reservation(namespace="", name="", charges=[Charge(resource=resource, count=count)])
        for (uid, resource), count in counts.items()
    }


def _configuration(status: GPUNodeStatus) -> tuple[object, ...]:
    plugin = status.plugin
    devices = {
        (device.uuid, device.resource, device.sharing, device.numa_node, device.replicas.total)
        for device in status.devices
    }
    steered = frozenset(plugin.steered)
    return plugin.allocation_policy, plugin.topology_manager_policy, steered, devices


def _with_health(status: GPUNodeStatus, later: GPUNodeStatus) -> GPUNodeStatus:
    """The report as if replicas had been as healthy as in a later one."""
    unhealthy = {device.uuid: device.replicas.unhealthy for device in later.devices}
    devices = [_with_unhealthy(d, unhealthy.get(d.uuid, 0)) for d in status.devices]
    return msgspec.structs.replace(status, devices=devices)


def _with_unhealthy(device: Device, unhealthy: int) -> Device:
    replicas = device.replicas
    free = max(0, replicas.free - (unhealthy - replicas.unhealthy))
    replicas = Replicas(free=free, allocated=replicas.allocated, unhealthy=unhealthy)
    return msgspec.structs.replace(device, replicas=replicas)
