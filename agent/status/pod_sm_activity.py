"""Computes each pod's share of a device's SM time, if the driver measures processes. Pure.

It is exported as a metric and is not in the report, because no placement depends on it. Only active
processes are sampled. A pod that has processes on a device but no figure was idle there.
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
    """Return (pod uid, device) -> share of the device's SM time, 0..1."""
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
