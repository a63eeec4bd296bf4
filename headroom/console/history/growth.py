"""Finds devices whose use grows steadily, and estimates when they will be full at that rate.

Loading a model makes the use jump once and then stay constant. So a device counts as growing only
if its use grew in both halves of the window."""

from collections.abc import Sequence

import msgspec

from headroom.console.history.history import (
    DEVICE_COLUMNS,
    RESOLUTION_S,
    UNIT_BYTES,
    UNKNOWN,
    USED,
    History,
    Layout,
)
from headroom.core.placement.device_accounting import DeviceTerms
from headroom.core.placement.snapshot import NodeTerms

#: Longest and shortest window, in seconds.
WINDOW_S = 600
SHORTEST_S = 120
#: Minimum growth in each half of the window. Agents report changes of 64 MiB and more.
LEAST_BYTES = 64 << 20
#: A device is listed if it will be full within this number of seconds.
LISTED_S = 3600.0


class Growing(msgspec.Struct, frozen=True, gc=False):
    """A device that is full in ``full_in_s`` seconds if its use keeps growing at this rate."""

    device: str
    bytes_per_s: float
    full_in_s: float
    #: Namespace and name of the pod that grew most on the device; empty if no pod grew.
    namespace: str = ""
    name: str = ""


def growing(terms: NodeTerms, history: History, step: int) -> tuple[Growing, ...]:
    """Return the devices of the node that will be full within ``LISTED_S``. ``step`` is the
    current step."""
    begin = step - WINDOW_S // RESOLUTION_S
    if history.last_step(terms.name) <= (begin + step) // 2:
        return ()  # nothing changed in the second half
    first = max(begin, history.first_step_of(terms.name))
    if (step - first) * RESOLUTION_S < SHORTEST_S:
        return ()
    moments = first, (first + step) // 2, step
    rows = [row for each in moments if (row := history.at(terms.name, each)) is not None]
    if len(rows) < len(moments) or not _may_grow(rows):
        return ()
    at = [_values_of(*row) for row in rows]
    window_s = (moments[2] - moments[0]) * RESOLUTION_S
    found = (_growing(each, [there[0] for there in at], window_s) for each in terms.devices)
    return tuple(
        msgspec.structs.replace(each, namespace=pod[0], name=pod[1])
        for each in found
        if each is not None
        for pod in [_grown_pod(each.device, at[0][1], at[2][1])]
    )


#: Bytes in use at one time, by device UUID, and by (device UUID, namespace, name of the pod).
_At = tuple[dict[str, int], dict[tuple[str, str, str], int]]


def _may_grow(rows: Sequence[tuple[Layout, Sequence[int]]]) -> bool:
    """Return whether a device may have grown in both halves. This quickly excludes most nodes."""
    (layout, begin), (_, middle), (_, end) = rows
    if any(each.devices != layout.devices for each, _ in rows):
        return True
    used = slice(USED, DEVICE_COLUMNS * len(layout.devices), DEVICE_COLUMNS)
    return any(a < b < c for a, b, c in zip(begin[used], middle[used], end[used], strict=True))


def _values_of(layout: Layout, figures: Sequence[int]) -> _At:
    devices = {
        uuid: figures[DEVICE_COLUMNS * slot + USED] * UNIT_BYTES
        for slot, uuid in enumerate(layout.devices)
        if figures[DEVICE_COLUMNS * slot + USED] != UNKNOWN
    }
    uses = figures[DEVICE_COLUMNS * len(layout.devices) :]
    pods = {
        (layout.devices[pod.slot], pod.namespace, pod.name): units * UNIT_BYTES
        for pod, units in zip(layout.pods, uses, strict=True)
        if units != UNKNOWN
    }
    return devices, pods


def _growing(
    terms: DeviceTerms, used_bytes: Sequence[dict[str, int]], window_s: int
) -> Growing | None:
    """Return how the device grows, or None if it does not. ``used_bytes`` has its use at the
    beginning, the middle and the end of the window."""
    uuid = terms.device.uuid
    if not terms.believed or not all(uuid in each for each in used_bytes):
        return None
    begin, middle, end = (each[uuid] for each in used_bytes)
    if middle - begin < LEAST_BYTES or end - middle < LEAST_BYTES:
        return None
    rate = (end - begin) / window_s
    free_bytes = terms.device.memory_bytes - max(0, terms.device.reserved_bytes) - end
    full_in_s = max(0.0, free_bytes / rate)
    return Growing(uuid, rate, full_in_s) if full_in_s <= LISTED_S else None


def _grown_pod(
    device: str,
    before: dict[tuple[str, str, str], int],
    after: dict[tuple[str, str, str], int],
) -> tuple[str, str]:
    """Return namespace and name of the pod whose use of the device grew most."""
    grown = {
        key: used_bytes - before.get(key, 0)
        for key, used_bytes in after.items()
        if key[0] == device and used_bytes > before.get(key, 0)
    }
    if not grown:
        return "", ""
    return max(grown, key=lambda key: (grown[key], key))[1:]
