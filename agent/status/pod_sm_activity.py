"""Decides how busy each pod keeps each device, where the driver tells its processes apart. Pure.

It is told beside the report, not in it: no placement depends on it. Only sampled processes count,
so where nothing is told of a pod that has processes on a device, it was idle there.
"""

from collections.abc import Iterable

from agent.probes.readings import (
    ActivityReading,
    HoldingReading,
    MirrorReading,
    ProcessReading,
    Reading,
)
from agent.status.attribution import owner


def pod_sm(readings: Iterable[Reading]) -> dict[tuple[str, str], float]:
    """(pod's uid, device) -> share of the device's SM time, 0..1."""
    readings = list(readings)
    processes = {r.pid: r for r in readings if isinstance(r, ProcessReading)}
    mirrors = {r.hash: r.uid for r in readings if isinstance(r, MirrorReading)}
    holders = {r.uid for r in readings if isinstance(r, HoldingReading) and r.uid}
    known = {mirrors.get(uid, uid) for uid in holders}
    found: dict[tuple[str, str], float] = {}
    for reading in readings:
        if not isinstance(reading, ActivityReading):
            continue
        for pid, ratio in reading.sm_by_pid.items():
            process = processes.get(pid)
            uid = None if process is None else owner(process, known, mirrors)
            if uid is not None:
                key = (uid, reading.uuid)
                found[key] = min(1.0, found.get(key, 0.0) + ratio)
    return found
