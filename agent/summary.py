"""Decides what a sample says of the node, and whether that is worth a write. Pure.

    used = memory - free - reserved         (bytes; nothing below zero)

Absent is absent: a figure the driver did not give is left out and the device is unhealthy, with the
reason. Numbers that contradict each other are passed on as they came, nothing is computed from
them, and the device is unhealthy as well.
"""

from collections.abc import Iterable
from datetime import UTC, datetime

import msgspec

from agent.nvml import Memory
from agent.probes import (
    ActivityReading,
    Degraded,
    DeviceReading,
    DriverReading,
    FactsReading,
    FenceReading,
    Reading,
    SharingReading,
    SourceReading,
)
from contract.gpunode import (
    MAX_DEVICE_BYTES,
    Condition,
    Device,
    GPUNodeStatus,
    PodUse,
    Replicas,
    SmActivity,
    Source,
    Summary,
)

_ABSENT = -1

#: A write for memory that grew, at least this much (or 1 % of the device) and at most this often.
GROWN_BYTES = 64 << 20
GROWN_EVERY_S = 5.0
#: A write for memory that was freed, however little, since pods may be waiting for it.
FREED_EVERY_S = 1.0
#: A write for SM activity alone.
SM_MOVED_RATIO = 0.1
SM_EVERY_S = 60.0


def summarise(
    readings: Iterable[Reading],
    observed_at: datetime,
    agent_version: str = "",
    before: GPUNodeStatus | None = None,
) -> GPUNodeStatus:
    """Turn one sample into the status of the GPUNode.

    ``observed_at`` (with a zone) is when the sample began: whatever went later may still be in it.
    ``before`` gives conditions that did not change the time at which they last did.
    """
    readings = list(readings)
    driver = DriverReading("", why_not="no probe looked for a driver")
    sharing: SharingReading | None = None
    found: dict[str, DeviceReading] = {}
    missing: list[str] = []
    for reading in readings:
        match reading:
            case DriverReading():
                driver = reading
            case SharingReading():
                sharing = reading
            case DeviceReading():
                found[reading.uuid] = reading
            case Degraded():
                missing.append(f"{reading.source}: {reading.what}")
    ordered = sorted(found.values(), key=lambda d: (d.index, d.gpu_instance or 0, d.uuid))
    for read in ordered:
        if read.memory is not None and read.memory.reserved_bytes is None:
            missing.append(f"{read.source}: driver does not tell its reserve, taken as 0")
        if sharing is not None and read.kind == "mig":
            missing.append(f"{sharing.source}: resource of MIG devices is not known")
    now = rfc3339(observed_at)
    devices = _surveyed([_device(read, sharing) for read in ordered], readings, now, before)
    return GPUNodeStatus(
        observed_at=now,
        devices=devices,
        summary=_summary(devices),
        conditions=_dated(_conditions(driver, missing), now, before),
        agent_version=agent_version,
        driver_version=driver.version,
        cuda_version=driver.cuda_version,
        sources=[
            Source(name=r.source, state=r.state, message=r.message)
            for r in readings
            if isinstance(r, SourceReading)
        ],
    )


def worth_writing(
    before: GPUNodeStatus | None, after: GPUNodeStatus, since_last_write_s: float
) -> bool:
    """Whether a decision somewhere could depend on writing ``after`` over ``before``.

    ``before`` is what was last written (None: nothing yet), not what was last measured: so slow
    growth adds up and a write that failed is simply still due.
    """
    if before is None or _structure(before) != _structure(after):
        return True
    figures = list(zip(_figures(before), _figures(after), strict=True))
    if since_last_write_s >= FREED_EVERY_S and any(new < old for (old, _), (new, _) in figures):
        return True
    if since_last_write_s >= GROWN_EVERY_S and any(
        new - old >= GROWN_BYTES or (new > old and (new - old) * 100 >= memory)
        for (old, _), (new, memory) in figures
    ):
        return True
    return since_last_write_s >= SM_EVERY_S and any(
        _sm_moved(old.sm_activity, new.sm_activity)
        for old, new in zip(before.devices, after.devices, strict=True)
    )


def rfc3339(moment: datetime) -> str:
    """``moment`` in UTC with microseconds, as Kubernetes' MicroTime and date-time read it."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _device(read: DeviceReading, sharing: SharingReading | None) -> Device:
    memory_bytes, reserved_bytes, used_bytes, fault = _memory(read.memory)
    fault = read.fault or fault
    device = Device(
        uuid=read.uuid,
        index=read.index,
        model=read.model,
        kind=read.kind,
        parent=read.parent,
        gpu_instance=read.gpu_instance,
        memory_bytes=memory_bytes,
        reserved_bytes=reserved_bytes,
        used_bytes=used_bytes,
        healthy=not fault,
        health_reason=fault,
    )
    if sharing is None or read.kind == "mig":
        return device
    return msgspec.structs.replace(
        device,
        sharing=sharing.sharing,
        resource=sharing.resource,
        replicas=Replicas(free=sharing.replicas),
    )


def _surveyed(
    devices: list[Device], readings: list[Reading], now: str, before: GPUNodeStatus | None
) -> list[Device]:
    """``devices`` with what the survey read of each besides memory."""
    facts = {r.uuid: r for r in readings if isinstance(r, FactsReading)}
    activity = {r.uuid: r for r in readings if isinstance(r, ActivityReading)}
    fences = {r.uuid: r for r in readings if isinstance(r, FenceReading)}
    since = {d.uuid: d.unhealthy_since for d in (before.devices if before is not None else ())}
    return [
        _with(
            device,
            facts.get(device.uuid),
            activity.get(device.uuid),
            fences.get(device.uuid),
            since.get(device.uuid) or now,
        )
        for device in devices
    ]


def _with(
    device: Device,
    facts: FactsReading | None,
    activity: ActivityReading | None,
    fence: FenceReading | None,
    since: str,
) -> Device:
    if facts is not None:
        device = msgspec.structs.replace(
            device,
            numa_node=facts.numa_node,
            pci_bus_id=facts.pci_bus_id,
            architecture=facts.architecture,
            compute_mode=facts.compute_mode,
        )
    if activity is not None:
        sm = activity.sm_ratio
        device = msgspec.structs.replace(
            device,
            sm_activity=None if sm is None else SmActivity(ratio=sm, source=activity.source),
            sm_occupancy_ratio=activity.occupancy_ratio,
            utilization_ratio=activity.utilization_ratio,
        )
    if fence is not None:
        reasons = dict.fromkeys([*fence.reason.split("; "), device.health_reason])
        device = msgspec.structs.replace(
            device, healthy=False, health_reason="; ".join(filter(None, reasons))
        )
        since = fence.since
    return msgspec.structs.replace(device, unhealthy_since="" if device.healthy else since)


def _memory(memory: Memory | None) -> tuple[int, int, int, str]:
    """Memory, reserved and used bytes, each -1 where absent, and what contradicts itself."""
    if memory is None:
        return _ABSENT, _ABSENT, _ABSENT, "no memory figures"
    total_bytes, free_bytes = memory.total_bytes, memory.free_bytes
    reserved_bytes = memory.reserved_bytes or 0
    wrong = ""
    # No figures in these texts: they would change, and be written, with every sample.
    if not 0 < total_bytes <= MAX_DEVICE_BYTES:
        wrong = "driver reports an impossible amount of memory"
    elif not 0 <= free_bytes <= total_bytes:
        wrong = "driver reports more memory free than there is"
    elif not 0 <= reserved_bytes <= total_bytes:
        wrong = "driver reports more memory reserved than there is"
    if wrong:
        return _wire_bytes(total_bytes), _wire_bytes(reserved_bytes), _ABSENT, wrong
    # Free and reserved come from two calls and may be a moment apart.
    return total_bytes, reserved_bytes, max(0, total_bytes - free_bytes - reserved_bytes), ""


def _wire_bytes(figure: int) -> int:
    """``figure``, or absent where the API server could not even store it as int64."""
    return figure if 0 <= figure < 1 << 63 else _ABSENT


def _summary(devices: list[Device]) -> Summary:
    # Compute instances of one GPU instance share its memory: count it once.
    memory = {
        (d.parent, d.gpu_instance) if d.kind == "mig" else (d.uuid, None): d.memory_bytes
        for d in devices
        if 0 < d.memory_bytes <= MAX_DEVICE_BYTES
    }
    return Summary(
        devices=len(devices),
        memory=f"{sum(memory.values()) >> 20}Mi",
        sharing=",".join(sorted({d.sharing for d in devices})),
    )


def _conditions(driver: DriverReading, missing: list[str]) -> list[Condition]:
    # dict.fromkeys: eight devices that lack the same say it once.
    lacks = "; ".join(dict.fromkeys(sorted(missing)))
    return [
        Condition(
            type="DriverReady",
            status="False" if driver.why_not else "True",
            reason="NoDriver" if driver.why_not else "Loaded",
            message=driver.why_not,
        ),
        Condition(
            type="Complete",
            status="False" if lacks else "True",
            reason="Degraded" if lacks else "Complete",
            message=lacks,
        ),
    ]


def _dated(conditions: list[Condition], now: str, before: GPUNodeStatus | None) -> list[Condition]:
    old = {c.type: c for c in before.conditions} if before is not None else {}
    return [
        msgspec.structs.replace(
            condition,
            last_transition_time=old[condition.type].last_transition_time
            if condition.type in old and old[condition.type].status == condition.status
            else now,
        )
        for condition in conditions
    ]


def _structure(status: GPUNodeStatus) -> object:
    """All that must be told at once: everything but figures that move by themselves, and times."""
    devices = [
        msgspec.structs.replace(
            device,
            used_bytes=_presence(device.used_bytes),
            unowned_bytes=_presence(device.unowned_bytes),
            sm_activity=None,
            sm_occupancy_ratio=None,
            utilization_ratio=None,
        )
        for device in status.devices
    ]
    pods = [
        msgspec.structs.replace(pod, used_bytes=_presence(pod.used_bytes)) for pod in status.pods
    ]
    conditions = [(c.type, c.status, c.reason, c.message) for c in status.conditions]
    versions = (status.agent_version, status.driver_version)
    return devices, pods, conditions, status.sources, status.plugin, status.summary, versions


def _presence(figure: int | None) -> int:
    return _ABSENT if figure is None or figure < 0 else 0


def _figures(status: GPUNodeStatus) -> list[tuple[int, int]]:
    """(bytes, memory of their device), in an order that only depends on the structure."""
    memory = {device.uuid: device.memory_bytes for device in status.devices}
    found: list[tuple[int, int]] = []
    for device in status.devices:
        found.append((device.used_bytes, device.memory_bytes))
        found.append((device.unowned_bytes or 0, device.memory_bytes))
    found.extend((_pod_bytes(pod), memory.get(pod.device, 0)) for pod in status.pods)
    return found


def _pod_bytes(pod: PodUse) -> int:
    return pod.used_bytes or 0


def _sm_moved(old: SmActivity | None, new: SmActivity | None) -> bool:
    if old is None or new is None or old.source != new.source:
        return old != new
    # Tenths are not exact in binary: 0.3 - 0.2 is a little less than 0.1.
    return round(abs(new.ratio - old.ratio), 6) >= SM_MOVED_RATIO
