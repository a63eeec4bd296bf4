"""Compares the observed devices of a pod with the prediction, and finds the cause of a miss.

When a pod is bound, its candidates are all devices that the plugin could allocate to it, whatever
happens to the other unconfirmed pods. Pods that are bound later can displace it to another device,
but they fit only if this device has enough memory. When a report shows the pod, there are three
possible results:

* *hit*: all its devices are candidates.
* *shifted*: not all its devices are candidates, but later pods can displace it to these devices.
* *miss*: the pod got devices that the prediction had ruled out, because something unpredictable
  changed before admission.

It is not enough to compare the devices of each pod separately. For example, if two pods have the
candidates A and B, perhaps only one of them can get A. In this case, if both are on A, one of them
is a miss.

The possible devices are computed again from the state at the binding (the *basis*) and the pods
bound since then. They are also computed from the state at each of these later bindings, because the
later bindings relied on newer reports.

If a pod's own NVIDIA_VISIBLE_DEVICES decides its devices, the prediction concerns the devices that
it uses. The report that shows the pod's memory use confirms the prediction. Use of any other device
is a miss.

An unpredictable change is a difference between the basis and the report that shows the pod. The
*surprise* is the change that explains why the pod is on its devices.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum

import msgspec

from headroom.contract.gpunode import Charge, Device, GPUNodeStatus, Replicas, Reservation
from headroom.core.placement.occupancy import possibilities


class Result(Enum):
    HIT = "hit"
    SHIFTED = "shifted"
    MISS = "miss"
    #: No report showed the pod, because it ended first, lost its reservation, or too much changed.
    UNSEEN = "unseen"


class Surprise(Enum):
    """An unpredictable change between binding and admission. ``sentence`` describes it."""

    RELEASED = "released"
    HEALTH = "health"
    BYPASS = "bypass"
    CONFIGURATION = "configuration"
    DISOBEYED = "disobeyed"
    #: There were several changes, and none of them alone explains the miss.
    SEVERAL = "several"
    UNKNOWN = "unknown"

    @property
    def sentence(self) -> str:
        return _SENTENCES[self]


_SENTENCES = {
    Surprise.RELEASED: "a pod that was not terminating released its replica before admission",
    Surprise.HEALTH: "a replica became unhealthy or healthy before admission",
    Surprise.BYPASS: "the kubelet first admitted a pod that Headroom did not bind",
    Surprise.CONFIGURATION: "the devices or the plugin's configuration changed before admission",
    Surprise.DISOBEYED: "NVIDIA_VISIBLE_DEVICES of the pod does not decide which devices it uses",
    Surprise.SEVERAL: "several changes happened before admission, and none alone explains the miss",
    Surprise.UNKNOWN: "no change in the reports explains the miss",
}


@dataclass(frozen=True, slots=True)
class Basis:
    """The state of the node when the reservation was made."""

    status: GPUNodeStatus
    #: All reservations, including the reservations of the pod itself and of adopted pods.
    reservations: Mapping[str, Reservation]
    leaving: Set[str]


@dataclass(frozen=True, slots=True)
class Since:
    """The changes after the basis, up to the report that shows the pod."""

    status: GPUNodeStatus
    #: Reservations that were made after the pod's reservation.
    reservations: Mapping[str, Reservation]
    #: Unreserved pods that another scheduler bound to the node after the basis.
    unreserved_pods: Mapping[str, Reservation]
    #: Unconfirmed pods that are compared after this pod. If one report shows too many pods on a
    #: device, the pod that was bound last is the miss.
    later: Set[str]
    #: Differences from each report to the next, as ``changes`` returns them.
    changes: Set[Surprise]


@dataclass(frozen=True, slots=True)
class Comparison:
    result: Result
    predicted: tuple[str, ...]
    observed: tuple[str, ...]
    #: None unless the result is a miss.
    surprise: Surprise | None = None


def predicted(reservation: Reservation) -> tuple[str, ...]:
    """Return the candidate devices of the pod when it was bound."""
    devices = (
        uuid
        for charge in reservation.charges
        for uuid in charge.candidates
        if uuid not in charge.beyond
    )
    return tuple(dict.fromkeys(devices))


def chosen(reservation: Reservation) -> tuple[str, ...]:
    """Return the devices that Headroom chose for the pod, to which the agent steers it."""
    return tuple(dict.fromkeys(uuid for charge in reservation.charges for uuid in charge.choices))


def observed(status: GPUNodeStatus, uid: str) -> tuple[str, ...]:
    """Return the devices on which the report shows the pod."""
    return tuple(dict.fromkeys(use.device for use in status.pods if use.uid == uid))


def used(status: GPUNodeStatus, uid: str) -> tuple[str, ...]:
    """Return the devices whose memory the pod uses, according to the report."""
    devices = (use.device for use in status.pods if use.uid == uid and (use.used_bytes or 0) > 0)
    return tuple(dict.fromkeys(devices))


def is_by_environment(reservation: Reservation) -> bool:
    """Return whether the pod's own NVIDIA_VISIBLE_DEVICES decides which devices it uses."""
    return any(charge.by_environment for charge in reservation.charges)


def is_shown(status: GPUNodeStatus, uid: str, reservation: Reservation) -> bool:
    """Return whether the report shows the pod with all replicas that it requested.

    If the pod's own variable decides its devices, return whether the report shows any memory use.
    """
    if is_by_environment(reservation):
        return bool(used(status, uid))
    return len(_held(status, {uid})) >= sum(charge.count for charge in reservation.charges) > 0


def changes(before: GPUNodeStatus, after: GPUNodeStatus) -> set[Surprise]:
    """Return the differences that affect the plugin's choice, which are CONFIGURATION and
    HEALTH."""
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
    """Compare the predicted devices of a pod with its observed devices.

    ``grounds`` begins with the pod's own basis and the changes since then. The other items belong
    to pods that were bound while this pod was unconfirmed. These later bindings relied on newer
    reports, so the observed devices must be possible on every ground.
    """
    status = grounds[0][1].status
    candidates = predicted(reservation)
    devices = observed(status, uid)
    for basis, since in grounds:
        replay = _Replay(basis, since, devices)
        if not replay.explained():
            return Comparison(Result.MISS, candidates, devices, _surprise(replay))
    together = chosen(reservation)
    if len(together) > 1 and set(devices) < set(together):
        # A container got one device twice.
        replay = _Replay(*grounds[0], devices)
        return Comparison(Result.MISS, candidates, devices, _surprise(replay))
    hit = set(devices) <= set(candidates)
    return Comparison(Result.HIT if hit else Result.SHIFTED, candidates, devices)


def compare_used(uid: str, reservation: Reservation, status: GPUNodeStatus) -> Comparison:
    """Compare the predicted devices of a pod that chooses its devices with the devices that it
    uses."""
    candidates, devices = predicted(reservation), used(status, uid)
    if set(devices) <= set(candidates):
        return Comparison(Result.HIT, candidates, devices)
    return Comparison(Result.MISS, candidates, devices, Surprise.DISOBEYED)


def _surprise(replay: "_Replay") -> Surprise:
    """Return the cause of a miss."""
    changed = replay.changed()
    if Surprise.RELEASED in changed and replay.explained(released=True):
        return Surprise.RELEASED
    if Surprise.HEALTH in changed and replay.explained(health=True):
        return Surprise.HEALTH
    if Surprise.BYPASS in changed and replay.explained(bypass=True):
        return Surprise.BYPASS
    if Surprise.CONFIGURATION in changed:
        return Surprise.CONFIGURATION  # the effects of a changed configuration are not computed
    if len(changed) > 1:
        return Surprise.SEVERAL
    return next(iter(changed), Surprise.UNKNOWN)


class _Replay:
    """The choices of the plugin between a basis and the report that shows the pod."""

    def __init__(self, basis: Basis, since: Since, devices: Sequence[str]) -> None:
        self._basis = basis
        self._since = since
        own = {**since.reservations, **basis.reservations}
        held_before = _held(basis.status, own.keys())
        arrived = _held(since.status, own.keys() - since.later) - held_before
        # If a pod's own variable decides its devices, its rows without a replica do not count.
        by_variable = {uid for uid, each in own.items() if is_by_environment(each)}
        arrived = {held for held in arrived if held[1] or held[2] not in by_variable}
        #: Number of replicas that were allocated to pods since the basis, by device of the pod.
        self._arrived = {uuid: sum(device == uuid for device, *_ in arrived) for uuid in devices}
        before, now = ({use.uid for use in s.pods} for s in (basis.status, since.status))
        self._gone = before - now
        expected = own.keys() | before
        bound = {
            uid: reservation
            for uid, reservation in since.unreserved_pods.items()
            if uid not in basis.reservations
        }
        self._unreserved_pods = {**_unknown_pods(since.status, expected), **bound}

    def changed(self) -> set[Surprise]:
        """Return all unpredictable changes since the basis."""
        surprises = set(self._since.changes)
        if self._gone - self._basis.leaving:
            surprises.add(Surprise.RELEASED)
        if self._unreserved_pods:
            surprises.add(Surprise.BYPASS)
        return surprises

    def explained(self, released: bool = False, health: bool = False, bypass: bool = False) -> bool:
        """Return whether the observed devices are possible from the basis with these changes."""
        basis, since = self._basis, self._since
        status = _with_health(basis.status, since.status) if health else basis.status
        reservations = {**since.reservations, **basis.reservations}
        if bypass:
            reservations |= self._unreserved_pods
        leaving = basis.leaving | self._gone if released else basis.leaving
        choices = possibilities(status, reservations, leaving)
        most = {
            device.uuid: choice.most(0, self._released(device.uuid, leaving)) + choice.unexplained
            for device, choice in zip(status.devices, choices, strict=True)
        }
        return all(count <= most.get(uuid, 0) for uuid, count in self._arrived.items())

    def _released(self, uuid: str, leaving: Set[str]) -> int:
        """Return how many replicas of the device terminating pods have released."""
        gone = _held(self._basis.status, leaving & self._gone)
        return sum(device == uuid for device, *_ in gone)


def _held(status: GPUNodeStatus, uids: Set[str]) -> set[tuple[str, str, str]]:
    """Return (device, replica, uid) for the replicas that these pods hold.

    A replica that an app container takes over from an init container counts only once. The uid is
    included because the plugin can give the replica of a deleted pod to another pod.
    """
    return {(use.device, use.replica, use.uid) for use in status.pods if use.uid in uids}


def _unknown_pods(status: GPUNodeStatus, known: Set[str]) -> dict[str, Reservation]:
    """Return the reservations that would exist if pods that are only in the report had
    reservations."""
    resource_of = {device.uuid: device.resource for device in status.devices}
    held = _held(status, {use.uid for use in status.pods} - known)
    counts = Counter((uid, resource_of.get(device, "")) for device, _, uid in held)
    charges: dict[str, list[Charge]] = {}
    for (uid, resource), count in counts.items():
        charges.setdefault(uid, []).append(Charge(resource=resource, count=count))
    return {uid: Reservation(namespace="", name="", charges=of) for uid, of in charges.items()}


def _configuration(status: GPUNodeStatus) -> tuple[object, ...]:
    """Return the values of the report that change only if the node is configured differently."""
    plugin = status.plugin
    devices = {
        (device.uuid, device.resource, device.sharing, device.numa_node, device.replicas.total)
        for device in status.devices
    }
    steered = frozenset(plugin.steered)
    return plugin.allocation_policy, plugin.topology_manager_policy, steered, devices


def _with_health(status: GPUNodeStatus, later: GPUNodeStatus) -> GPUNodeStatus:
    """Return the report with the numbers of unhealthy replicas of a later report."""
    unhealthy = {device.uuid: device.replicas.unhealthy for device in later.devices}
    devices = [_with_unhealthy(d, unhealthy.get(d.uuid, 0)) for d in status.devices]
    return msgspec.structs.replace(status, devices=devices)


def _with_unhealthy(device: Device, unhealthy: int) -> Device:
    replicas = device.replicas
    free = max(0, replicas.free - (unhealthy - replicas.unhealthy))
    replicas = Replicas(free=free, allocated=replicas.allocated, unhealthy=unhealthy)
    return msgspec.structs.replace(device, replicas=replicas)
