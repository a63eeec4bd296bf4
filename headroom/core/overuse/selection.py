"""Selects the pods to evict because they use more memory than they reserved, or than their limit.

A pod whose use exceeds its limit (``headroom.gpu/vram-limit``) by more than ``TOLERANCE_BYTES`` is
evicted whether or not other pods lack memory. It is selected before all other pods of its device.
The following rules are for pods within their limits, and pods without a limit.

A pod is not evicted because of overuse alone. The device must also be under *pressure*, according
to the driver's measurements. It is under pressure if its free memory is less than

    max(margin, sum over its other pods within their reservation: reserved - used)

because then a pod could not allocate memory that Headroom reserved for it. A pod whose use exceeds
its reservation by more than ``TOLERANCE_BYTES`` is an *offender*. The offender with the largest
excess relative to its reservation is evicted first, and among offenders with equal excess, the
offender with the lowest priority. A pod within its reservation is never evicted, and a pod that is
alone on its device harms only itself.

The author of a pod must not be able to decide that another tenant's pod is evicted instead. So if
an offender may not be evicted, no smaller offender of another namespace is evicted. A pod that was
bound without Headroom is an offender like any other. It has no claim to memory that was reserved
for other pods, so only the rest of the device counts as its reservation. The unused part of this
rest puts no device under pressure.

At most one more pod of a device is selected at a time. A selected pod keeps its warning while it is
an offender, even if another pod has a larger excess. Otherwise two pods that overtake each other
would delay their evictions. Memory of pods that are leaving counts as free.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType

from headroom.core.placement.device_accounting import DeviceTerms
from headroom.core.placement.occupancy import Holder

#: A pod with at most this excess in bytes is not an offender, because a process that uses CUDA
#: needs a context of several hundred MiB on the device before it allocates any memory.
TOLERANCE_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class RunningPod:
    """A pod that is bound to the node and has not ended."""

    priority: int
    #: Whether the pod's annotation and the settings allow its eviction, and none of its evictions
    #: was rejected recently.
    evictable: bool
    leaving: bool = False
    #: UUID of the device for which the ledger already selects the pod. Empty if there is none.
    selected_for: str = ""
    #: Whether Headroom granted the pod's reservation. False if the pod was bound without Headroom.
    granted: bool = True
    #: The pod's limit on each device, in bytes by UUID. Empty if the pod has no limit.
    limits_bytes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    #: Whether the pod may be evicted if its use exceeds its limit.
    evictable_above_limit: bool = False


@dataclass(frozen=True, slots=True)
class Overusing:
    """A pod that uses more than its limit, or more than it reserved on a device under pressure."""

    uid: str
    device: str
    reserved_bytes: int
    used_bytes: int
    #: Measured free memory of the device.
    free_bytes: int
    #: Memory of the device that must stay free for its pods.
    needed_bytes: int
    #: The pod's limit on the device if the pod uses more, and otherwise None.
    exceeded_limit_bytes: int | None = None

    @property
    def excess_bytes(self) -> int:
        return self.used_bytes - self.reserved_bytes


@dataclass(frozen=True, slots=True)
class OveruseEvictions:
    #: The pods to evict by uid, at most one for each device.
    selected: Mapping[str, Overusing]
    #: Pods by uid that were selected before, and are evicted only if they are selected again.
    warned: Mapping[str, Overusing] = field(default_factory=dict)
    #: Devices under pressure on which pods exceed their reservations, but none of them may be
    #: evicted.
    unresolved: tuple[str, ...] = ()

    @property
    def decided(self) -> Mapping[str, Overusing]:
        """The pods by uid for which the ledger contains a decision."""
        return {**self.warned, **self.selected}


NONE = OveruseEvictions({})


@dataclass(frozen=True, slots=True)
class Balance:
    """The free memory of a device, and the part of it that must stay free."""

    #: The free memory that the driver measures, plus the memory of pods that are leaving.
    free_bytes: int
    #: Memory that the device's pods have reserved but do not use, or the margin if it is larger.
    needed_bytes: int
    #: The pods that stay on the device.
    staying: tuple[Holder, ...]
    #: The staying pods that use more than they reserved.
    over: tuple[Holder, ...]
    #: The bytes that count as reserved for each pod that stays, by uid.
    reserved_bytes: Mapping[str, int]
    #: The limit of each pod that stays and has a limit, by uid. A limit is at least the reserved
    #: bytes, so a pod within its reservation never exceeds its limit.
    limits_bytes: Mapping[str, int]

    @property
    def under_pressure(self) -> bool:
        return self.free_bytes < self.needed_bytes and bool(self.over) and len(self.staying) > 1

    def excess_bytes(self, holder: Holder) -> int:
        return (holder.measured_bytes or 0) - self.reserved_bytes[holder.uid]

    def is_offender(self, holder: Holder) -> bool:
        return self.excess_bytes(holder) > TOLERANCE_BYTES

    def exceeded_limit_bytes(self, holder: Holder) -> int | None:
        """Return the pod's limit if its use exceeds the limit by more than the tolerance."""
        limit_bytes = self.limits_bytes.get(holder.uid)
        if limit_bytes is None:
            return None
        return limit_bytes if (holder.measured_bytes or 0) > limit_bytes + TOLERANCE_BYTES else None


def balance(
    terms: DeviceTerms, pods: Mapping[str, RunningPod], margin_bytes: int
) -> Balance | None:
    """Return the balance of a device, or None if its use is implausible or unknown.

    ``pods`` maps uids to the pods of the node. Other pods in the report have left.
    """
    device = terms.device
    if not terms.believed:
        return None
    observed = [holder for holder in terms.holders if holder.observed]
    staying = tuple(h for h in observed if h.uid in pods and not pods[h.uid].leaving)
    leaving_bytes = sum(h.measured_bytes or 0 for h in observed if h not in staying)
    memory_bytes = device.memory_bytes - max(0, device.reserved_bytes)
    reserved_bytes = _reserved_bytes(staying, pods, memory_bytes)
    # If the use of a pod is not measured, its unused memory is unknown, so no memory has to stay
    # free for it.
    unused_bytes = sum(
        max(0, reserved_bytes[holder.uid] - holder.measured_bytes)
        for holder in staying
        if holder.measured_bytes is not None and pods[holder.uid].granted
    )
    limits_bytes = {
        holder.uid: max(limit_bytes, reserved_bytes[holder.uid], holder.requested_bytes)
        for holder in staying
        if (limit_bytes := pods[holder.uid].limits_bytes.get(device.uuid)) is not None
    }
    return Balance(
        memory_bytes - device.used_bytes + leaving_bytes,
        max(margin_bytes, unused_bytes),
        staying,
        tuple(h for h in staying if (h.measured_bytes or 0) > reserved_bytes[h.uid]),
        reserved_bytes,
        limits_bytes,
    )


def _reserved_bytes(
    staying: Iterable[Holder], pods: Mapping[str, RunningPod], memory_bytes: int
) -> dict[str, int]:
    """Return the bytes that count as reserved for each pod on a device, by uid.

    Pods that were bound without Headroom share the part of ``memory_bytes`` that no granted
    reservation takes, in proportion to their charges.
    """
    charged = {holder.uid: holder.requested_bytes for holder in staying}
    adopted = {uid: asked_bytes for uid, asked_bytes in charged.items() if not pods[uid].granted}
    adopted_bytes = sum(adopted.values())
    left_bytes = max(0, memory_bytes - sum(charged.values()) + adopted_bytes)
    if adopted_bytes <= left_bytes:
        return charged
    shares = {uid: asked * left_bytes // adopted_bytes for uid, asked in adopted.items()}
    return charged | shares


def overuse_evictions(
    devices: Iterable[DeviceTerms], pods: Mapping[str, RunningPod], margin_bytes: int
) -> OveruseEvictions:
    """Return the pods to evict from the node.

    ``devices`` contains one device for each memory, and ``pods`` is the argument of ``balance``.
    Devices with an implausible or unknown use are never under pressure.
    """
    selected: dict[str, Overusing] = {}
    warned: dict[str, Overusing] = {}
    unresolved: list[str] = []
    for terms in devices:
        found = balance(terms, pods, margin_bytes)
        if found is None:
            continue
        uuid = terms.device.uuid
        above_limit = [h for h in found.over if found.exceeded_limit_bytes(h) is not None]
        if not found.under_pressure and not above_limit:
            continue
        offenders = sorted(
            filter(found.is_offender, found.over) if found.under_pressure else above_limit,
            key=lambda h: _eviction_order(h, found, pods),
        )
        first = next((h for h in offenders if _may_evict_above_limit(h, found, pods)), None)
        if first is None and found.under_pressure:
            first = _first_to_evict(offenders, pods)
            if first is None:
                unresolved.append(uuid)
        for holder in offenders:
            uid = holder.uid
            evictable = pods[uid].evictable or _may_evict_above_limit(holder, found, pods)
            is_first, is_warned = holder is first, pods[uid].selected_for == uuid
            if uid not in selected and (is_first or (is_warned and evictable)):
                (selected if is_first else warned)[uid] = Overusing(
                    uid,
                    uuid,
                    found.reserved_bytes[uid],
                    holder.measured_bytes or 0,
                    found.free_bytes,
                    found.needed_bytes,
                    found.exceeded_limit_bytes(holder),
                )
    warned = {uid: over for uid, over in warned.items() if uid not in selected}
    return OveruseEvictions(selected, warned, tuple(unresolved))


def _may_evict_above_limit(holder: Holder, found: Balance, pods: Mapping[str, RunningPod]) -> bool:
    """Return whether the pod exceeds its limit and may be evicted for it.

    Another pod that may not be evicted does not protect it, unlike among the pods that only exceed
    their reservations: the limit of a pod does not depend on other pods.
    """
    is_above = found.exceeded_limit_bytes(holder) is not None
    return is_above and pods[holder.uid].evictable_above_limit


def _eviction_order(
    holder: Holder, found: Balance, pods: Mapping[str, RunningPod]
) -> tuple[bool, Fraction, int, str]:
    """Return a sort key. The pod with the smallest key is evicted first.

    Pods above their limits come first, by their excess relative to the limit. The others follow, by
    their excess relative to the reservation.
    """
    limit_bytes = found.exceeded_limit_bytes(holder)
    allowed_bytes = found.reserved_bytes[holder.uid] if limit_bytes is None else limit_bytes
    excess_bytes = (holder.measured_bytes or 0) - allowed_bytes - TOLERANCE_BYTES
    relative = Fraction(excess_bytes, max(1, allowed_bytes))
    return limit_bytes is None, -relative, pods[holder.uid].priority, holder.uid


def _first_to_evict(offenders: Iterable[Holder], pods: Mapping[str, RunningPod]) -> Holder | None:
    """Return the first of the sorted offenders that may be evicted, or None if none of them may be
    evicted."""
    exempt: set[str] = set()
    for holder in offenders:
        if pods[holder.uid].evictable:
            return holder if exempt <= {holder.namespace} else None
        exempt.add(holder.namespace)
    return None


def changes(
    before: Mapping[str, str], after: Mapping[str, Overusing]
) -> Iterator[tuple[str, Overusing | None]]:
    """Yield each uid whose selection changes with the new selection, or with None if the selection
    ends.

    ``before`` maps each selected uid to its device.
    """
    for uid in before.keys() - after.keys():
        yield uid, None
    for uid, found in after.items():
        if before.get(uid) != found.device:
            yield uid, found
