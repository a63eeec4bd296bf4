"""Builds the GPUNode status from one sample, and decides whether to write it. Pure.

    used = memory - free - reserved         (bytes, at least 0)

If the driver does not report a figure, it is left out and the device is unhealthy, with the reason.
Figures that contradict each other are reported unchanged, nothing is computed from them, and the
device is unhealthy too.
"""

import math
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

import msgspec

from agent.attribution import attribute, grants
from agent.probes.nvml import Memory
from agent.probes.readings import (
    ActivityReading,
    AnswerReading,
    Degraded,
    DeviceReading,
    DriverReading,
    FactsReading,
    HealthIssueReading,
    HoldingReading,
    LimitReading,
    MirrorReading,
    ObstacleReading,
    PluginReading,
    ProcessReading,
    Reading,
    RegisteredReading,
    SharingReading,
    SourceReading,
    SteeredReading,
    TopologyReading,
)
from agent.sharing import Share, SharingReadings, plugin, shares
from contract.gpunode import (
    MAX_DEVICE_BYTES,
    MAX_UNATTRIBUTED_PROCESSES,
    Condition,
    Device,
    GPUNodeStatus,
    PodUse,
    SmActivity,
    Source,
    Summary,
)

_R = TypeVar("_R")
#: Type of reading -> readings of that type.
_ByKind = dict[type, list[Any]]

_ABSENT = -1

# Limits of the CRD.
MAX_PODS = 4096
MAX_SOURCES = 32
MAX_MESSAGE = 1024

#: Time constant in seconds of the exponential smoothing of SM activity.
SMOOTHED_OVER_S = 60.0

#: Growth of used memory is written if it is at least this much, or 1 % of the device, and at most
#: this often.
GROWN_BYTES = 64 << 20
GROWN_EVERY_S = 5.0
#: Any amount of freed memory is written, at most this often, because pods may wait for it.
FREED_EVERY_S = 1.0
#: A change of SM activity alone is written if it is at least this much, and at most this often.
SM_MOVED_RATIO = 0.1
SM_EVERY_S = 60.0


def summarise(
    readings: Iterable[Reading],
    observed_at: datetime,
    agent_version: str = "",
    before: GPUNodeStatus | None = None,
) -> GPUNodeStatus:
    """Build the status of the GPUNode from one sample.

    ``observed_at`` (with a time zone) is when the sample began; pods that ended later may still be
    in it. ``before`` is the previous status. From it come the transition times of unchanged
    conditions, the start of health issues and smoothed SM activity.
    """
    of = _by_kind(readings)
    driver = _last(of, DriverReading) or DriverReading("", why_not="no probe looked for a driver")
    complaints = _all(of, Degraded)
    found = {reading.uuid: reading for reading in _all(of, DeviceReading)}
    ordered = sorted(found.values(), key=lambda d: (d.index, d.gpu_instance or 0, d.uuid))
    for read in ordered:
        if read.memory is not None and read.memory.reserved_bytes is None:
            what = "driver does not report its reserve, which counts as 0"
            complaints.append(Degraded(read.source, what))
    now = rfc3339(observed_at)
    sharing_readings = SharingReadings(
        _last(of, SharingReading),
        _all(of, RegisteredReading),
        _all(of, HoldingReading),
        _all(of, AnswerReading),
        _all(of, PluginReading),
        _all(of, TopologyReading),
    )
    last = {device.uuid: device for device in before.devices} if before is not None else {}
    shared, more = shares(ordered, sharing_readings, last)
    complaints += more
    devices = [_device(read, shared.get(read.uuid, Share())) for read in ordered]
    # The process probe reads either all processes or none.
    looked = {process.pid: process for process in _all(of, ProcessReading)}
    seen = any(r.source == "proc" and r.state == "ok" for r in _all(of, SourceReading))
    attributed = attribute(
        ordered,
        {device.uuid: device.used_bytes for device in devices if device.used_bytes >= 0},
        sharing_readings.holdings,
        looked if looked or seen else None,
        _all(of, MirrorReading),
    )
    complaints += attributed.complaints
    devices = [
        msgspec.structs.replace(device, unattributed_bytes=attributed.unattributed.get(device.uuid))
        for device in devices
    ]
    devices = [
        _smoothed(device, last.get(device.uuid), observed_at, before)
        for device in _surveyed(devices, of, now, before)
    ]
    limits = grants(
        ordered, sharing_readings.holdings, _all(of, MirrorReading), _all(of, LimitReading)
    )
    sources = _sources(driver, _all(of, SourceReading), complaints)
    return GPUNodeStatus(
        observed_at=now,
        devices=devices,
        pods=attributed.pods[:MAX_PODS],
        limits=limits[:MAX_PODS],
        unattributed_processes=attributed.strangers[:MAX_UNATTRIBUTED_PROCESSES],
        plugin=msgspec.structs.replace(
            plugin(sharing_readings),
            steered=sorted(r.resource for r in _all(of, SteeredReading)),
            steering_obstacle="; ".join(r.reason for r in _all(of, ObstacleReading))[:MAX_MESSAGE],
        ),
        sources=sources,
        summary=_summary(devices),
        conditions=_dated(_conditions(driver, sources), now, before),
        agent_version=agent_version,
        driver_version=driver.version,
        cuda_version=driver.cuda_version,
    )


def worth_writing(
    before: GPUNodeStatus | None, after: GPUNodeStatus, since_last_write_s: float
) -> bool:
    """Return whether ``after`` differs enough from ``before`` to be written.

    ``before`` is the last written status (None: none yet), not the last sample. So slow growth adds
    up, and a failed write stays due.
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
    """Return ``moment`` in UTC with microseconds, the format of Kubernetes' MicroTime."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _device(read: DeviceReading, share: Share) -> Device:
    memory_bytes, reserved_bytes, used_bytes, fault = _memory(read.memory)
    fault = read.fault or fault
    return Device(
        uuid=read.uuid,
        index=read.index,
        model=read.model,
        kind=read.kind,
        parent=read.parent,
        gpu_instance=read.gpu_instance,
        memory_bytes=memory_bytes,
        reserved_bytes=reserved_bytes,
        used_bytes=used_bytes,
        sharing=share.sharing,
        resource=share.resource,
        replicas=share.replicas,
        healthy=not fault,
        health_reason=fault,
    )


def _surveyed(
    devices: list[Device], of: _ByKind, now: str, before: GPUNodeStatus | None
) -> list[Device]:
    """Return ``devices`` with their facts, activity and health."""
    facts = {r.uuid: r for r in _all(of, FactsReading)}
    activity = {r.uuid: r for r in _all(of, ActivityReading)}
    health_issues = {r.uuid: r for r in _all(of, HealthIssueReading)}
    since = {d.uuid: d.unhealthy_since for d in (before.devices if before is not None else ())}
    return [
        _with(
            device,
            facts.get(device.uuid),
            activity.get(device.uuid),
            health_issues.get(device.uuid),
            since.get(device.uuid) or now,
        )
        for device in devices
    ]


def _with(
    device: Device,
    facts: FactsReading | None,
    activity: ActivityReading | None,
    health_issue: HealthIssueReading | None,
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
    if health_issue is not None:
        reasons = dict.fromkeys([*health_issue.reason.split("; "), device.health_reason])
        device = msgspec.structs.replace(
            device, healthy=False, health_reason="; ".join(filter(None, reasons))
        )
        since = health_issue.since
    return msgspec.structs.replace(device, unhealthy_since="" if device.healthy else since)


def _memory(memory: Memory | None) -> tuple[int, int, int, str]:
    """Return memory, reserved and used bytes, each -1 if absent, and any contradiction."""
    if memory is None:
        return _ABSENT, _ABSENT, _ABSENT, "no memory figures"
    total_bytes, free_bytes = memory.total_bytes, memory.free_bytes
    reserved_bytes = memory.reserved_bytes or 0
    wrong = ""
    # The texts contain no figures: every sample would change them and cause a write.
    if not 0 < total_bytes <= MAX_DEVICE_BYTES:
        wrong = "driver reports an impossible amount of memory"
    elif not 0 <= free_bytes <= total_bytes:
        wrong = "driver reports more memory free than there is"
    elif not 0 <= reserved_bytes <= total_bytes:
        wrong = "driver reports more memory reserved than there is"
    if wrong:
        return _wire_bytes(total_bytes), _wire_bytes(reserved_bytes), _ABSENT, wrong
    # Free and reserved memory may be read by two calls, so the difference can be negative.
    return total_bytes, reserved_bytes, max(0, total_bytes - free_bytes - reserved_bytes), ""


def _wire_bytes(figure: int) -> int:
    """Return ``figure``; absent if the API server could not store it as int64."""
    return figure if 0 <= figure < 1 << 63 else _ABSENT


def _summary(devices: list[Device]) -> Summary:
    # Compute instances of one GPU instance share its memory, which is counted once.
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


def _sources(
    driver: DriverReading, readings: list[SourceReading], complaints: list[Degraded]
) -> list[Source]:
    """Return one row for each source, with all messages about it. A complaint degrades it."""
    rows: dict[str, SourceReading] = {}
    if driver.source:
        state: Literal["ok", "absent"] = "absent" if driver.why_not else "ok"
        rows[driver.source] = SourceReading(driver.source, state, driver.why_not)
    rows |= {reading.source: reading for reading in readings}
    messages: dict[str, dict[str, None]] = {
        source: {reading.message: None} for source, reading in rows.items() if reading.message
    }
    for complaint in complaints:
        messages.setdefault(complaint.source, {})[complaint.what] = None
        row = rows.get(complaint.source, SourceReading(complaint.source))
        if row.state == "ok":
            rows[complaint.source] = SourceReading(complaint.source, "degraded")
    return [
        Source(
            name=source,
            state=rows[source].state,
            message="; ".join(sorted(messages.get(source, {})))[:MAX_MESSAGE],
        )
        for source in sorted(rows)
    ][:MAX_SOURCES]


def _conditions(driver: DriverReading, sources: list[Source]) -> list[Condition]:
    # An absent source may not exist on this node, so it is in its row but not in the condition.
    missing = {f"{row.name}: {row.message}" for row in sources if row.state == "degraded"}
    lacks = "; ".join(sorted(missing))[:MAX_MESSAGE]
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


def _smoothed(
    device: Device, last: Device | None, observed_at: datetime, before: GPUNodeStatus | None
) -> Device:
    """Return ``device`` with smoothed SM activity: an exponential average of one source's values.

    A sample's weight falls to 1/e in a minute, independent of the sampling interval.
    """
    now, was = device.sm_activity, None if last is None else last.sm_activity
    if now is None or was is None or before is None or now.source != was.source:
        return device
    elapsed_s = max(0.0, (observed_at - datetime.fromisoformat(before.observed_at)).total_seconds())
    kept_ratio = math.exp(-elapsed_s / SMOOTHED_OVER_S)
    old_ratio = was.ratio if was.smoothed_ratio is None else was.smoothed_ratio
    smoothed = now.ratio + (old_ratio - now.ratio) * kept_ratio
    activity = msgspec.structs.replace(now, smoothed_ratio=min(1.0, max(0.0, smoothed)))
    return msgspec.structs.replace(device, sm_activity=activity)


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
    """Return the parts whose change is written at once: all but varying figures and times."""
    devices = [
        msgspec.structs.replace(
            device,
            used_bytes=_presence(device.used_bytes),
            unattributed_bytes=_presence(device.unattributed_bytes),
            sm_activity=None,
            sm_occupancy_ratio=None,
            utilization_ratio=None,
        )
        for device in status.devices
    ]
    pods = [
        msgspec.structs.replace(pod, used_bytes=_presence(pod.used_bytes)) for pod in status.pods
    ]
    limits = [msgspec.structs.replace(limit, used_bytes=0) for limit in status.limits]
    conditions = [(c.type, c.status, c.reason, c.message) for c in status.conditions]
    versions = (status.agent_version, status.driver_version, status.cuda_version)
    plugin, sources, summary = status.plugin, status.sources, status.summary
    return devices, pods, limits, conditions, plugin, sources, summary, versions


def _by_kind(readings: Iterable[Reading]) -> _ByKind:
    found: _ByKind = {}
    for reading in readings:
        found.setdefault(type(reading), []).append(reading)
    return found


def _all(of: _ByKind, kind: type[_R]) -> list[_R]:
    return [*of.get(kind, ())]


def _last(of: _ByKind, kind: type[_R]) -> _R | None:
    return next(reversed(of.get(kind, ())), None)


def _presence(figure: int | None) -> int:
    return _ABSENT if figure is None or figure < 0 else 0


def _figures(status: GPUNodeStatus) -> list[tuple[int, int]]:
    """Return (bytes, memory of the device) in an order that depends only on the structure."""
    memory = {device.uuid: device.memory_bytes for device in status.devices}
    found: list[tuple[int, int]] = []
    for device in status.devices:
        found.append((device.used_bytes, device.memory_bytes))
        found.append((device.unattributed_bytes or 0, device.memory_bytes))
    found.extend((_pod_bytes(pod), memory.get(pod.device, 0)) for pod in status.pods)
    return found


def _pod_bytes(pod: PodUse) -> int:
    return pod.used_bytes or 0


def _sm_moved(old: SmActivity | None, new: SmActivity | None) -> bool:
    if old is None or new is None or old.source != new.source:
        return old != new
    # Tenths are not exact in binary: 0.3 - 0.2 is a little less than 0.1.
    return round(abs(new.ratio - old.ratio), 6) >= SM_MOVED_RATIO
