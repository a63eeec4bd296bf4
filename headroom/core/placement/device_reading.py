"""Checks the reported values of devices, and returns their health issues and SM activity.

Headroom places no pod on a device with implausible values, unknown memory or bad health.

There are two sources of SM activity. DCGM's history provides a high quantile over a window, which
shows the usual load. The node's agent provides its last sample. Device utilisation is not SM
activity, because one small kernel on one SM makes it 100 %.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from math import inf

import msgspec

from headroom.contract.commands import command
from headroom.contract.gpunode import MAX_REPLICAS, SM_SOURCES, Device
from headroom.contract.quantity import MAX_DEVICE_BYTES, gib
from headroom.contract.reasons import Reason
from headroom.core.placement.policy import LargestDevice

#: Health issues that make the reported values of a device unusable.
UNBELIEVED = frozenset({Reason.CONTRADICTORY_REPORT, Reason.MEMORY_UNKNOWN})
#: Maximum number of clients of an MPS server. With more clients, the plugin's control daemon sets
#: no memory limits.
MAX_MPS_REPLICAS = 48
#: The plugin's control daemon applies this lower limit to devices with a compute capability below
#: 7.5.
MAX_OLD_MPS_REPLICAS = 16
_OLD_ARCHITECTURES = frozenset({"kepler", "maxwell", "pascal", "volta"})
#: Why no pod may be placed on a device, and the details. It is ``(None, "")`` if there is no issue.
HealthIssue = tuple[Reason | None, str]
_NO_ISSUE: HealthIssue = (None, "")
#: Name of the source that reads DCGM's SM_ACTIVE from Prometheus.
HISTORY = "dcgm-history"


def duplicate_uuids(devices: Sequence[Device]) -> dict[str, int]:
    """Return the UUIDs that several devices report, each with the number of these devices."""
    times = Counter([device.uuid for device in devices])
    return {uuid: count for uuid, count in times.items() if count > 1}


def health_issues(
    devices: Sequence[Device],
    memories: Sequence[Sequence[int]],
    doubled: Mapping[str, int],
    cordoned: Set[str] = frozenset(),
    largest: Sequence[LargestDevice] = (),
) -> list[HealthIssue]:
    """Return the health issue of each device, in the order of ``devices``.

    ``memories`` contains the slots that share the memory of each device, because a contradiction or
    an unknown memory concerns all of them. ``doubled`` is the result of ``duplicate_uuids``.
    ``cordoned`` contains UUIDs of devices or of their GPUs. A device that exceeds ``largest``
    counts as a contradiction.
    """
    contradictory: dict[int, str] = {}
    without_memory: dict[int, str] = {}
    unhealthy: dict[str, str] = {}
    closed: dict[str, str] = {}
    for slot, device in enumerate(devices):
        if device.uuid in doubled:
            contradictory[slot] = f"uuid {device.uuid!r} is reported {doubled[device.uuid]} times"
        elif device.memory_bytes <= 0 and not device.healthy:
            # On Jetson and DGX Spark the driver reports no memory, and the host's memory is no
            # substitute.
            without_memory[slot] = device.health_reason or "unhealthy"
        elif why := _contradiction(device) or _too_large(device, largest):
            contradictory[slot] = why
        if not device.healthy:
            unhealthy[device.uuid] = device.health_reason or "unhealthy"
        if device.is_closed_by_mode:
            closed[device.uuid] = (
                f"its compute mode is {device.compute_mode}; to change it on the node: "
                f"{mode_command(device)}"
            )
    if not (contradictory or without_memory or unhealthy or closed or cordoned):
        return [_NO_ISSUE] * len(devices)
    issues: list[HealthIssue] = []
    for slot, device in enumerate(devices):
        mates = (slot, *memories[slot])
        if contradiction := _first(contradictory, mates):
            issues.append((Reason.CONTRADICTORY_REPORT, contradiction))
        elif no_memory := _first(without_memory, mates):
            issues.append((Reason.MEMORY_UNKNOWN, no_memory))
        elif device.uuid in unhealthy:
            issues.append((Reason.UNHEALTHY_DEVICE, unhealthy[device.uuid]))
        elif device.parent in unhealthy:
            # If a physical GPU is broken, all its MIG devices are broken too.
            issues.append((Reason.UNHEALTHY_DEVICE, f"its GPU: {unhealthy[device.parent]}"))
        elif device.uuid in closed:
            issues.append((Reason.COMPUTE_MODE, closed[device.uuid]))
        elif device.uuid in cordoned:
            issues.append((Reason.CORDONED_DEVICE, ""))
        elif device.parent in cordoned:
            issues.append((Reason.CORDONED_DEVICE, f"its GPU, {device.parent}"))
        else:
            issues.append(_NO_ISSUE)
    return issues


def mode_command(device: Device) -> str:
    """Return the command that sets the default compute mode when it is run on the device's node."""
    return command("nvidia-smi", "-i", device.parent or device.uuid, "-c", "DEFAULT")


def _first(details: Mapping[int, str], slots: Iterable[int]) -> str:
    """Return the details of the first slot with details, or an empty string if there is none."""
    return next((details[slot] for slot in slots if slot in details), "")


def _contradiction(device: Device) -> str:
    """Return which of the device's own values is implausible, or an empty string if all are
    plausible."""
    replicas = device.replicas
    if not device.uuid:
        return "no uuid"
    memory_bytes, used_bytes = device.memory_bytes, device.used_bytes
    unattributed_bytes = device.unattributed_bytes or 0
    if memory_bytes == 0:
        return "memory is zero"
    contradiction = (
        _out_of_range("memory", memory_bytes, MAX_DEVICE_BYTES)
        or _out_of_range("reserved", device.reserved_bytes, memory_bytes)
        or _out_of_range("used", used_bytes, memory_bytes)
        or _out_of_range("unattributed", unattributed_bytes, used_bytes)
    )
    if contradiction:
        return contradiction
    if min(replicas.free, replicas.allocated, replicas.unhealthy) < 0:
        return "a number of replicas is negative"
    if replicas.total > (MAX_REPLICAS if device.sharing != "none" else 1):
        return f"{replicas.total} replicas of a device with sharing {device.sharing}"
    return _impossible_mps(device) if device.sharing == "mps" else ""


def _too_large(device: Device, largest: Sequence[LargestDevice]) -> str:
    """Return how the device exceeds the setting ``largest_devices``, or an empty string if it does
    not."""
    for each in largest:
        if each.resource != device.resource:
            continue
        replicas = max(1, device.replicas.total)
        if (
            device.memory_bytes > each.memory_bytes
            or device.memory_bytes * each.replicas > each.memory_bytes * replicas
        ):
            return (
                f"memory is {gib(device.memory_bytes, up=True)} (replicas: {replicas}), and "
                f"setting largest_devices permits {gib(each.memory_bytes)} (replicas: "
                f"{each.replicas})"
            )
    return ""


def _out_of_range(name: str, value_bytes: int, most_bytes: int) -> str:
    """Return why an amount of memory is invalid, or an empty string if it is in
    0..``most_bytes``."""
    if value_bytes < 0:
        return f"{name} is missing or negative"
    if value_bytes > most_bytes:
        return f"{name} is {gib(value_bytes, up=True)}, and at most {gib(most_bytes)} is possible"
    return ""


def _impossible_mps(device: Device) -> str:
    """Return why the plugin cannot share the device by MPS as reported, or an empty string if it
    can."""
    if device.kind == "mig":
        return "a MIG device is reported as shared by MPS, which the plugin does not support"
    old = device.architecture in _OLD_ARCHITECTURES
    limit = MAX_OLD_MPS_REPLICAS if old else MAX_MPS_REPLICAS
    if device.replicas.total > limit:
        return f"{device.replicas.total} replicas by MPS, which has at most {limit} on this GPU"
    return ""


class Activity(msgspec.Struct, frozen=True, gc=False):
    """The SM activity of one device.

    The garbage collector does not track these objects, because every device of the cluster has one
    and they cannot be part of a cycle.
    """

    #: 0..1
    ratio: float
    #: Either ``HISTORY`` or the agent's source, which is one of ``SM_SOURCES``.
    source: str
    #: The quantile and its window in seconds, or None for a single sample.
    quantile: float | None = None
    window_s: float | None = None
    #: Time of the newest sample. For ``HISTORY`` it is ``sampled_at_s``, in seconds of the
    #: extender's monotonic clock. For the agent it is ``sampled_at``, in RFC 3339.
    sampled_at_s: float = -inf
    sampled_at: str = ""


def reported(device: Device, sampled_at: str) -> Activity | None:
    """Return the agent's sample, or None if it is absent, out of range or not SM activity."""
    sm = device.sm_activity
    if sm is None or sm.source not in SM_SOURCES or not 0 <= sm.ratio <= 1:
        return None
    return Activity(sm.ratio, sm.source, sampled_at=sampled_at)
