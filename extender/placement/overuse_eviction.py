"""Selects the pods to evict because they use more memory than they reserved.

Overuse alone evicts no pod: the device must be under *pressure*, according to what the driver
measures. It is if its free memory is less than

    max(margin, sum over its other pods within their reservation: reserved - used)

so that a pod could not allocate memory that is reserved for it. The pod with the lowest priority is
evicted first, then the one with the largest excess. A pod within its reservation is never evicted,
and a pod that is alone on its device harms only itself.

At most one pod of a device is selected at a time. It stays selected until it uses less, is leaving,
or the pressure ends. Memory of pods that are leaving counts as free.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from extender.placement.device_accounting import DeviceTerms
from extender.placement.occupancy import Holder


@dataclass(frozen=True, slots=True)
class RunningPod:
    """A pod that is bound to the node and has not ended."""

    priority: int
    #: Whether its annotation and the settings allow its eviction, and no eviction of it was
    #: rejected lately.
    evictable: bool
    leaving: bool = False
    #: Uuid of the device because of which the ledger already selects it; empty for none.
    selected_for: str = ""


@dataclass(frozen=True, slots=True)
class Overusing:
    """A pod that uses more than it reserved on a device under pressure."""

    uid: str
    device: str
    reserved_bytes: int
    used_bytes: int
    #: Measured free memory of the device, and what its pods need to be free.
    free_bytes: int
    needed_bytes: int

    @property
    def excess_bytes(self) -> int:
        return self.used_bytes - self.reserved_bytes


@dataclass(frozen=True, slots=True)
class OveruseEvictions:
    #: By uid, the pods to evict: at most one for each device.
    selected: Mapping[str, Overusing]
    #: Devices under pressure on which pods exceed their reservations, and none may be evicted.
    unresolved: tuple[str, ...] = ()


NONE = OveruseEvictions({})


@dataclass(frozen=True, slots=True)
class Balance:
    """The free memory of a device, and how much of it must stay free."""

    #: As the driver measures it, with the memory of pods that are leaving.
    free_bytes: int
    #: Memory that its pods have reserved and do not use, or the margin if that is more.
    needed_bytes: int
    #: The pods that stay on it, and those of them that use more than they reserved.
    staying: tuple[Holder, ...]
    over: tuple[Holder, ...]

    @property
    def under_pressure(self) -> bool:
        return self.free_bytes < self.needed_bytes and bool(self.over) and len(self.staying) > 1


def balance(
    terms: DeviceTerms, pods: Mapping[str, RunningPod], margin_bytes: int
) -> Balance | None:
    """Return the balance of a device; None if its use is implausible or unknown.

    ``pods`` maps uids to the pods of the node; other pods in the report have left.
    """
    device = terms.device
    if not terms.believed:
        return None
    observed = [holder for holder in terms.holders if holder.observed]
    staying = tuple(h for h in observed if h.uid in pods and not pods[h.uid].leaving)
    leaving_bytes = sum(h.measured_bytes or 0 for h in observed if h not in staying)
    return Balance(
        device.memory_bytes - max(0, device.reserved_bytes) - device.used_bytes + leaving_bytes,
        max(margin_bytes, sum(map(_unused_bytes, staying))),
        staying,
        tuple(holder for holder in staying if _excess_bytes(holder) > 0),
    )


def overuse_evictions(
    devices: Iterable[DeviceTerms], pods: Mapping[str, RunningPod], margin_bytes: int
) -> OveruseEvictions:
    """Return the pods to evict from the node.

    ``devices``: one for each memory. ``pods``: as for ``balance``. Devices with an implausible or
    unknown use are never under pressure.
    """
    selected: dict[str, Overusing] = {}
    unresolved: list[str] = []
    for terms in devices:
        found = balance(terms, pods, margin_bytes)
        if found is None or not found.under_pressure:
            continue
        uuid, over = terms.device.uuid, found.over
        candidates = [h for h in over if pods[h.uid].evictable and h.uid not in selected]
        if not candidates:
            if not any(holder.uid in selected for holder in over):
                unresolved.append(uuid)
            continue
        first = min(candidates, key=lambda h: _eviction_order(h, pods[h.uid], uuid))
        selected[first.uid] = Overusing(
            first.uid,
            uuid,
            first.requested_bytes,
            first.measured_bytes or 0,
            found.free_bytes,
            found.needed_bytes,
        )
    return OveruseEvictions(selected, tuple(unresolved))


def _unused_bytes(holder: Holder) -> int:
    """Return how much of its reservation the pod does not use; 0 if its use is not measured."""
    if holder.measured_bytes is None:
        return 0
    return max(0, holder.requested_bytes - holder.measured_bytes)


def _excess_bytes(holder: Holder) -> int:
    return (holder.measured_bytes or 0) - holder.requested_bytes


def _eviction_order(holder: Holder, pod: RunningPod, device: str) -> tuple[bool, int, int, str]:
    return pod.selected_for != device, pod.priority, -_excess_bytes(holder), holder.uid


def changes(
    before: Mapping[str, str], after: Mapping[str, Overusing]
) -> Iterator[tuple[str, Overusing | None]]:
    """Yield the uids whose selection changes, with the new one; None if it ends.

    ``before`` maps each selected uid to its device.
    """
    for uid in before.keys() - after.keys():
        yield uid, None
    for uid, found in after.items():
        if before.get(uid) != found.device:
            yield uid, found
