"""Builds the GPUNode status from one sample. Pure, except for ``measure``.

    used = memory - free - reserved         (bytes, at least 0)

If the driver does not report the memory of a device, its figures are absent and the device is
unhealthy. If only the reserve is missing, it counts as 0 and the source is degraded. If figures
contradict each other, they are reported unchanged, the use is absent, and the device is unhealthy.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

import msgspec

from agent.attribution import Attributed, attribute, container_limits, pod_sm
from agent.idle import OfPods
from agent.nvlink import nvlink_groups
from agent.probes.cause import Cause, code_of
from agent.probes.nvml import Memory
from agent.probes.readings import (
    ActivityReading,
    AnswerReading,
    Degraded,
    DeviceReading,
    DriverReading,
    FactsReading,
    HealthIssueReading,
    HighWaterReading,
    HoldingReading,
    HostMemoryReading,
    KubeletVersionReading,
    LimitReading,
    MirrorReading,
    ObstacleReading,
    PermissionReading,
    PluginReading,
    ProcessReading,
    Reading,
    RegisteredReading,
    SharingReading,
    SourceReading,
    SteeredReading,
    TopologyReading,
)
from agent.probes.unified_memory import with_host_memory
from agent.sharing import Share, SharingReadings, plugin, shares
from headroom.contract.gpunode import (
    MAX_UNATTRIBUTED_PROCESSES,
    MAX_WORD,
    Condition,
    Device,
    GPUNodeStatus,
    PodUse,
    SmActivity,
    Source,
)
from headroom.contract.gpunode_json import plain_object
from headroom.contract.gpunode_summary import summary_of
from headroom.contract.quantity import MAX_DEVICE_BYTES

_R = TypeVar("_R")
#: Readings by type.
_ByKind = dict[type, list[Any]]

#: A function that returns the rows of a sample with the peaks of their containers and the idle
#: times of their pods. Its arguments are the attributed memory, the other measurements of pods, and
#: the time of the sample.
Measure = Callable[[Attributed, OfPods, datetime], list[PodUse]]

#: Types of the readings that ``pod_sm`` needs.
_OF_POD_SM = (ProcessReading, MirrorReading, HoldingReading, ActivityReading)

_ABSENT = -1

# Limits of the CRD.
MAX_PODS = 4096
#: Maximum number of rows with peaks and idle times, so that the object fits into etcd.
MAX_ROWS_WITH_PEAKS = 2048
MAX_SOURCES = 32
MAX_MESSAGE = 1024

#: Time constant in seconds of the exponential smoothing of SM activity.
SMOOTHED_OVER_S = 60.0


def summarise(
    readings: Iterable[Reading],
    observed_at: datetime,
    agent_version: str = "",
    before: GPUNodeStatus | None = None,
    measure: Measure = lambda attributed, of_pods, observed_at: attributed.pods,
) -> GPUNodeStatus:
    """Build the status of the GPUNode from one sample.

    ``observed_at`` (with a time zone) is the time when the sample began. Pods that ended later may
    still be in the status. ``before`` is the status of the previous sample. It provides the times
    of states that have not changed, the average of SM activity, and replicas that no source lists
    now. ``measure`` adds peaks and idle times.
    """
    of = _by_kind(readings)
    now = rfc3339(observed_at)
    driver = _last(of, DriverReading) or DriverReading("", why_not="no probe read the driver")
    found = {reading.uuid: reading for reading in _all(of, DeviceReading)}
    ordered = sorted(found.values(), key=lambda d: (d.index, d.gpu_instance or 0, d.uuid))
    last = {device.uuid: device for device in before.devices} if before is not None else {}
    sharing_readings = SharingReadings(
        _last(of, SharingReading),
        _all(of, RegisteredReading),
        _all(of, HoldingReading),
        _all(of, AnswerReading),
        _all(of, PluginReading),
        _all(of, TopologyReading),
    )
    shared, contradictions = shares(ordered, sharing_readings, last)
    ordered, of_pod_only = with_host_memory(
        ordered,
        _last(of, HostMemoryReading),
        lambda uuid: shared.get(uuid, Share()).sharing != "none",
    )
    amounts = {read.uuid: _amounts(read.memory) for read in ordered}
    # The process probe reads either all processes or none.
    processes = {process.pid: process for process in _all(of, ProcessReading)}
    seen = any(r.source == "proc" and r.state == "ok" for r in _all(of, SourceReading))
    attributed = attribute(
        ordered,
        {uuid: each.used_bytes for uuid, each in amounts.items() if each.used_bytes >= 0},
        sharing_readings.holdings,
        processes if processes or seen else None,
        _all(of, MirrorReading),
        {uuid for uuid, share in shared.items() if share.sharing == "mps"},
    )
    unattributed = dict(attributed.unattributed)
    if of_pod_only:
        of_pod = [row.used_bytes or 0 for row in attributed.pods if row.device == of_pod_only]
        total_bytes = amounts[of_pod_only].memory_bytes
        amounts[of_pod_only] = _Amounts(total_bytes, 0, min(sum(of_pod), total_bytes))
        unattributed[of_pod_only] = 0
    facts = {r.uuid: r for r in _all(of, FactsReading)}
    groups = nvlink_groups(facts.values())
    activity = {r.uuid: r for r in _all(of, ActivityReading)}
    health_issues = {r.uuid: r for r in _all(of, HealthIssueReading)}
    elapsed_s = 0.0 if before is None else _elapsed_s(before, observed_at)
    devices = [
        _device(
            read,
            amounts[read.uuid],
            shared.get(read.uuid, Share()),
            unattributed.get(read.uuid),
            facts.get(read.uuid, FactsReading("", read.uuid)),
            groups.get(read.uuid),
            _smoothed(activity.get(read.uuid), last.get(read.uuid), elapsed_s),
            activity.get(read.uuid, ActivityReading("", read.uuid)),
            _health(read, amounts[read.uuid], health_issues.get(read.uuid), last, now),
        )
        for read in ordered
    ]
    limits = container_limits(
        ordered, sharing_readings.holdings, _all(of, MirrorReading), _all(of, LimitReading)
    )
    of_pods = OfPods(
        {(r.container_id, r.device): r.peak_bytes for r in _all(of, HighWaterReading)},
        activity,
        pod_sm(each for kind in _OF_POD_SM for each in of.get(kind, ())),
    )
    complaints = [*_all(of, Degraded), *contradictions, *attributed.complaints]
    for read in ordered:
        if read.memory is not None and read.memory.reserved_bytes is None:
            what = "driver does not report its reserve, which counts as 0"
            complaints.append(Degraded(read.source, what))
    sources = _sources(driver, _all(of, SourceReading), complaints)
    steered = sorted(r.resource for r in _all(of, SteeredReading))
    status = GPUNodeStatus(
        observed_at=now,
        devices=devices,
        pods=[
            *measure(attributed, of_pods, observed_at)[:MAX_ROWS_WITH_PEAKS],
            *attributed.pods[MAX_ROWS_WITH_PEAKS:MAX_PODS],
        ],
        limits=limits[:MAX_PODS],
        unattributed_processes=attributed.outside_pods[:MAX_UNATTRIBUTED_PROCESSES],
        plugin=msgspec.structs.replace(
            plugin(sharing_readings),
            steered=steered,
            steers_several=bool(steered),
            choice_obstacle="; ".join(r.reason for r in _all(of, ObstacleReading))[:MAX_MESSAGE],
            steering_permitted=next((r.permitted for r in _all(of, PermissionReading)), None),
            kubelet_version=next((r.version for r in _all(of, KubeletVersionReading)), "")[
                :MAX_WORD
            ],
        ),
        sources=sources,
        summary=summary_of(devices),
        conditions=_conditions(driver, sources, now, before),
        agent_version=agent_version,
        driver_version=driver.version[:MAX_WORD],
        cuda_version=driver.cuda_version[:MAX_WORD],
    )
    # The API server rejects other characters, which the name of a process can contain.
    return plain_object(status)


def rfc3339(moment: datetime) -> str:
    """Return ``moment`` in UTC with microseconds, the format of Kubernetes' MicroTime."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass(frozen=True, slots=True)
class _Amounts:
    """Memory of one device in bytes. Unknown figures are -1. ``fault`` describes what is wrong with
    them."""

    memory_bytes: int = _ABSENT
    reserved_bytes: int = _ABSENT
    used_bytes: int = _ABSENT
    fault: str = ""


def _amounts(memory: Memory | None) -> _Amounts:
    """Compute the used memory from the driver's figures, or determine why the figures are wrong."""
    if memory is None:
        return _Amounts(fault=Cause("driver does not report the memory of this device", "memory"))
    total_bytes, free_bytes = memory.total_bytes, memory.free_bytes
    reserved_bytes = memory.reserved_bytes or 0
    wrong = ""
    # The texts contain no figures, because each sample would change them and so cause a write.
    if not 0 < total_bytes <= MAX_DEVICE_BYTES:
        wrong = "driver reports an impossible amount of memory"
    elif not 0 <= free_bytes <= total_bytes:
        wrong = "driver reports more free memory than total memory"
    elif not 0 <= reserved_bytes <= total_bytes:
        wrong = "driver reports more reserved memory than total memory"
    if wrong:
        fault = Cause(wrong, "memory")
        return _Amounts(_wire_bytes(total_bytes), _wire_bytes(reserved_bytes), fault=fault)
    # Free and reserved memory may come from two separate calls, so the difference can be negative.
    used_bytes = max(0, total_bytes - free_bytes - reserved_bytes)
    return _Amounts(total_bytes, reserved_bytes, used_bytes)


@dataclass(frozen=True, slots=True)
class _Health:
    """Why a device is unhealthy, with codes, and since when. All fields are empty if it is
    healthy."""

    reason: str = ""
    codes: tuple[str, ...] = ()
    since: str = ""


def _health(
    read: DeviceReading,
    amounts: _Amounts,
    issue: HealthIssueReading | None,
    last: Mapping[str, Device],
    now: str,
) -> _Health:
    """Return the health of a device, from its issue and from a fault of its figures."""
    reasons = [*issue.reason.split("; ")] if issue is not None else []
    codes = [*issue.codes] if issue is not None else []
    if fault := read.fault or amounts.fault:
        reasons.append(fault)
        codes.append(code_of(fault) or "other")
    if not reasons:
        return _Health()
    reason = "; ".join(dict.fromkeys(reasons))[:MAX_MESSAGE]
    was = last.get(read.uuid)
    since = issue.since if issue is not None else was.unhealthy_since if was is not None else ""
    return _Health(reason, tuple(dict.fromkeys(codes)), since or now)


def _device(
    read: DeviceReading,
    amounts: _Amounts,
    share: Share,
    unattributed_bytes: int | None,
    facts: FactsReading,
    nvlink_group: int | None,
    sm_activity: SmActivity | None,
    activity: ActivityReading,
    health: _Health,
) -> Device:
    return Device(
        uuid=read.uuid,
        index=read.index,
        model=read.model,
        kind=read.kind,
        parent=read.parent,
        gpu_instance=read.gpu_instance,
        numa_node=facts.numa_node,
        nvlink_group=nvlink_group,
        memory_bytes=amounts.memory_bytes,
        reserved_bytes=amounts.reserved_bytes,
        used_bytes=amounts.used_bytes,
        unattributed_bytes=unattributed_bytes,
        sm_activity=sm_activity,
        sm_occupancy_ratio=activity.occupancy_ratio,
        utilization_ratio=activity.utilization_ratio,
        sharing=share.sharing,
        resource=share.resource,
        replicas=share.replicas,
        healthy=not health.reason,
        health_reason=health.reason,
        health_codes=[*health.codes],
        unhealthy_since=health.since,
        pci_bus_id=facts.pci_bus_id,
        architecture=facts.architecture,
        compute_mode=facts.compute_mode,
    )


def _smoothed(
    activity: ActivityReading | None, last: Device | None, elapsed_s: float
) -> SmActivity | None:
    """Return SM activity with its exponential average, or None if it was not measured.

    A sample's weight falls to 1/e in ``SMOOTHED_OVER_S`` seconds, independently of the sampling
    interval. The average starts again if the source changes. ``last`` is the device as last
    reported.
    """
    if activity is None or activity.sm_ratio is None:
        return None
    now = SmActivity(ratio=activity.sm_ratio, source=activity.source)
    was = None if last is None else last.sm_activity
    if was is None or now.source != was.source:
        return now
    old_ratio = was.ratio if was.smoothed_ratio is None else was.smoothed_ratio
    smoothed = now.ratio + (old_ratio - now.ratio) * math.exp(-elapsed_s / SMOOTHED_OVER_S)
    return msgspec.structs.replace(now, smoothed_ratio=min(1.0, max(0.0, smoothed)))


def _elapsed_s(before: GPUNodeStatus, observed_at: datetime) -> float:
    """Return the seconds since the previous status, or 0 if the clock was set back."""
    then = datetime.fromisoformat(before.observed_at)
    return max(0.0, (observed_at - then).total_seconds())


def _wire_bytes(figure: int) -> int:
    """Return ``figure``, or -1 if the API server would reject the whole report because of it."""
    return figure if 0 <= figure <= MAX_DEVICE_BYTES else _ABSENT


def _sources(
    driver: DriverReading, readings: list[SourceReading], complaints: list[Degraded]
) -> list[Source]:
    """Return one row for each source, with all messages about it.

    A complaint about an ``ok`` source makes it ``degraded``.
    """
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
            codes=sorted({code_of(text) for text in messages.get(source, {})} - {""}),
        )
        for source in sorted(rows)
    ][:MAX_SOURCES]


def _conditions(
    driver: DriverReading, sources: list[Source], now: str, before: GPUNodeStatus | None
) -> list[Condition]:
    """Return the conditions DriverReady and Complete.

    ``now`` is the transition time of a condition whose status has changed since ``before``.
    """
    old = {c.type: c for c in before.conditions} if before is not None else {}
    # A source may be absent because this node does not have it, so it does not make the condition
    # False.
    degraded = {f"{row.name}: {row.message}" for row in sources if row.state == "degraded"}
    lacks = "; ".join(sorted(degraded))[:MAX_MESSAGE]
    found: list[Condition] = []
    for kind, wrong, good_reason, bad_reason in (
        ("DriverReady", driver.why_not[:MAX_MESSAGE], "Loaded", "NoDriver"),
        ("Complete", lacks, "Complete", "Degraded"),
    ):
        status, was = "False" if wrong else "True", old.get(kind)
        since = was.last_transition_time if was is not None and was.status == status else now
        found.append(Condition(kind, status, bad_reason if wrong else good_reason, wrong, since))
    return found


def _by_kind(readings: Iterable[Reading]) -> _ByKind:
    found: _ByKind = {}
    for reading in readings:
        found.setdefault(type(reading), []).append(reading)
    return found


def _all(of: _ByKind, kind: type[_R]) -> list[_R]:
    return [*of.get(kind, ())]


def _last(of: _ByKind, kind: type[_R]) -> _R | None:
    """Return the last reading of one type, or None if there is none."""
    return next(reversed(of.get(kind, ())), None)
