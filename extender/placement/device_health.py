"""Why nothing may be placed on a device, whatever room it has: figures that cannot be true, memory
that nobody can tell, hardware that is broken."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from contract.gpunode import MAX_DEVICE_BYTES, MAX_REPLICAS, Device
from contract.reasons import Reason

#: Of a device fenced for one of these the figures are not to be reckoned with.
UNBELIEVED = frozenset({Reason.CONTRADICTORY_REPORT, Reason.MEMORY_UNKNOWN})
#: Clients that an MPS server takes; the plugin's control daemon sets no caps for more of them.
MAX_MPS_REPLICAS = 48
#: The same where the compute capability is below 7.5, as the daemon reckons it.
MAX_OLD_MPS_REPLICAS = 16
_OLD_ARCHITECTURES = frozenset({"kepler", "maxwell", "pascal", "volta"})
#: The reason, and the particulars.
HealthIssue = tuple[Reason | None, str]
_OPEN: HealthIssue = (None, "")


def doubles(devices: Sequence[Device]) -> dict[str, int]:
    """The UUIDs that several of the devices are reported by -> how many."""
    times = Counter([device.uuid for device in devices])
    return {uuid: count for uuid, count in times.items() if count > 1}


def health_issues(
    devices: Sequence[Device],
    memories: Sequence[Sequence[int]],
    doubled: Mapping[str, int],
) -> list[HealthIssue]:
    """Of each device, in their order. ``memories`` are the slots of those that share its memory;
    ``doubled`` is what ``doubles`` says."""
    wrong: dict[int, str] = {}
    silent: dict[int, str] = {}
    sick: dict[str, str] = {}
    for slot, device in enumerate(devices):
        if device.uuid in doubled:
            wrong[slot] = f"uuid {device.uuid!r} is reported {doubled[device.uuid]} times"
        elif device.memory_bytes <= 0 and not device.healthy:
            # Jetson, DGX Spark: absent is absent, and never what the host has.
            silent[slot] = device.health_reason or "unhealthy"
        elif why := _contradiction(device):
            wrong[slot] = why
        if not device.healthy:
            sick[device.uuid] = device.health_reason or "unhealthy"
    if not (wrong or silent or sick):
        return [_OPEN] * len(devices)
    found: list[HealthIssue] = []
    for slot, device in enumerate(devices):
        mates = (slot, *memories[slot])
        if mistaken := _first(wrong, mates):
            found.append((Reason.CONTRADICTORY_REPORT, mistaken))
        elif untold := _first(silent, mates):
            found.append((Reason.MEMORY_UNKNOWN, untold))
        elif device.uuid in sick:
            found.append((Reason.UNHEALTHY_DEVICE, sick[device.uuid]))
        elif device.parent in sick:
            # What breaks a physical GPU breaks all its instances.
            found.append((Reason.UNHEALTHY_DEVICE, f"its GPU: {sick[device.parent]}"))
        else:
            found.append(_OPEN)
    return found


def _first(told: Mapping[int, str], slots: Iterable[int]) -> str:
    return next((told[slot] for slot in slots if slot in told), "")


def _contradiction(device: Device) -> str:
    """What cannot be true about the device's own figures; empty when they agree."""
    replicas = device.replicas
    if not device.uuid:
        return "no uuid"
    if not 0 < device.memory_bytes <= MAX_DEVICE_BYTES:
        return f"memory is {device.memory_bytes} bytes"
    if not 0 <= device.reserved_bytes <= device.memory_bytes:
        return f"reserved is {device.reserved_bytes} of {device.memory_bytes} bytes"
    if not 0 <= device.used_bytes <= device.memory_bytes:
        return f"used is {device.used_bytes} of {device.memory_bytes} bytes"
    if (
        device.unattributed_bytes is not None
        and not 0 <= device.unattributed_bytes <= device.used_bytes
    ):
        return f"unowned is {device.unattributed_bytes} of {device.used_bytes} bytes used"
    if min(replicas.free, replicas.allocated, replicas.unhealthy) < 0:
        return "a number of replicas is negative"
    if replicas.total > (MAX_REPLICAS if device.sharing != "none" else 1):
        return f"{replicas.total} replicas of a device with sharing {device.sharing}"
    return _impossible_mps(device) if device.sharing == "mps" else ""


def _impossible_mps(device: Device) -> str:
    """Why the plugin cannot share the device by MPS as it is said to; empty where it can."""
    if device.kind == "mig":
        return "a MIG device is said to be shared by MPS, which the plugin refuses"
    old = device.architecture in _OLD_ARCHITECTURES
    most = MAX_OLD_MPS_REPLICAS if old else MAX_MPS_REPLICAS
    if device.replicas.total > most:
        return f"{device.replicas.total} replicas by MPS, which takes {most} clients of this GPU"
    return ""
