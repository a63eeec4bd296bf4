"""Joins NVML, DCGM and XID events into the readings of each device.

Memory figures come from NVML. DCGM is the best source of SM activity and a second source of XIDs.
Its memory figures only check NVML's. If the two differ by more than timing and rounding explain,
the source ``dcgm`` is reported as degraded, and the figures stay as they are.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import msgspec
import structlog

from agent.probes import sm_activity
from agent.probes.dcgm import DcgmReading, Exporter, Unreadable
from agent.probes.device_health import HealthIssue, HealthSample, HealthState, judge
from agent.probes.driver_limits_probe import LimitsProbe
from agent.probes.nvml_probe import Found, NvmlProbe
from agent.probes.readings import (
    ActivityReading,
    DeviceReading,
    HealthIssueReading,
    Reading,
    SourceReading,
)
from agent.probes.xids import XidWatch

_log = structlog.get_logger()
_decoder = msgspec.json.Decoder(HealthState)

#: Maximum age of DCGM's figures: its collection interval, our scrape interval, and a margin.
_WINDOW_S = 60.0
#: Difference that rounding three figures to MiB, and the time between two calls, can cause.
_TOLERANCE_BYTES = 64 << 20
#: Consecutive scrapes that must disagree: a peak between two of our samples is no disagreement.
_IN_A_ROW = 3
#: Maximum number of directories searched for the agent's own cgroup.
_MOST_CGROUPS = 20_000


class StateFile:
    """Stores the health state of devices, so it survives restarts of the agent.

    The file belongs on the node, under /run: a pod's own directories are deleted with the pod. It
    may be lost at a reboot. Without a file (``path`` is None) the state is kept in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._kept: HealthState | None = None
        self._not_read = ""
        self._not_written = ""

    @property
    def trouble(self) -> str:
        """Why the file cannot be written or read; empty if it can."""
        return self._not_written or self._not_read

    def read(self) -> HealthState:
        """Return the stored state; an empty one if there is no file or it cannot be read."""
        if self._path is None:
            return HealthState()
        try:
            return _decoder.decode(self._path.read_bytes())
        except FileNotFoundError:
            return HealthState()
        except (OSError, ValueError, RecursionError) as err:  # msgspec raises the last two
            self._not_read = f"{self._path} cannot be read, earlier XIDs are not known: {err}"
            return HealthState()

    def write(self, memory: HealthState) -> None:
        """Replace the file atomically, if ``memory`` differs from the file's content."""
        if self._path is None or memory == self._kept:
            return
        unfinished = self._path.with_suffix(".unfinished")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(msgspec.json.encode(memory))
            os.replace(unfinished, self._path)
        except OSError as err:
            why = err.strerror or type(err).__name__
            self._not_written = f"{self._path} cannot be written, XIDs are lost at a restart: {why}"
        else:
            self._kept, self._not_written = memory, ""


class DeviceProbe:
    """Reads all devices of the node. ``close`` ends its threads."""

    def __init__(
        self,
        nvml: NvmlProbe,
        xids: XidWatch,
        exporter: Exporter | None,
        limits: LimitsProbe,
        state: StateFile,
        incarnation: Callable[[], str],
        monotonic: Callable[[], float],
        now: Callable[[], str],
    ) -> None:
        """``incarnation`` identifies one load of the driver; ``now`` returns RFC 3339 text."""
        self._nvml = nvml
        self._xids = xids
        self._exporter = exporter
        self._limits = limits
        self._state = state
        self._incarnation = incarnation
        self._monotonic = monotonic
        self._now = now
        self._memory: HealthState | None = None
        self._check = CrossCheck()
        self._hanging = False
        self._unusable = False
        #: Whether the driver was released for maintenance at the last sample.
        self._maintained = False
        #: Returns why the driver must be released, empty if it need not be. Set in ``__main__``.
        self.maintenance: Callable[[], str] = lambda: ""

    @property
    def hanging(self) -> bool:
        """Whether a driver call has not returned."""
        return self._hanging or self._limits.hanging

    def read(self) -> Iterable[Reading]:
        now = self._now()
        if why := self.maintenance():
            self._xids.watch(())
            found = self._nvml.released(why, may_close=self._closable)
        else:
            found = self._nvml.read()
        self._unusable = found.unusable
        self._hanging = found.hanging
        dcgm, sources = self._ask_dcgm(found)
        readings: list[Reading] = [found.driver, *found.devices, *found.facts, *found.degraded]
        readings += sm_activity.best([*found.activity, *_activity(dcgm, found.devices)])
        readings += self._health_issues(now, found, dcgm)
        readings += sources
        return readings

    def follow(self, readings: Sequence[Reading]) -> Iterable[Reading]:
        """Return the driver's memory limits of the containers that hold devices."""
        found = self._limits.follow(readings)
        if self._unusable:
            # A device cannot be reset while it is open, and no device is usable.
            self._nvml.release(may_close=self._closable)
        return found

    def close(self) -> None:
        self._nvml.close()
        self._limits.close()
        self._xids.close()
        if self._exporter is not None:
            self._exporter.close()

    @property
    def _closable(self) -> bool:
        return self._xids.quiet and not self._limits.hanging

    def _ask_dcgm(self, found: Found) -> tuple[Sequence[DcgmReading], list[SourceReading]]:
        if self._exporter is None:
            return (), []
        try:
            exposition = self._exporter.newest()
        except Unreadable as err:
            return (), [SourceReading("dcgm", "absent", str(err))]
        except Exception as err:  # noqa: BLE001 - a probe never raises
            _log.error("dcgm_not_read", exc_info=err)
            what = f"the agent cannot read it: {type(err).__name__}"
            return (), [SourceReading("dcgm", "absent", what)]
        wrong = self._check.compare(
            self._monotonic(), self._exporter.scrapes, found.devices, exposition.readings
        )
        if self._exporter.bad_lines:
            wrong.append("some of its lines cannot be read and were ignored")
        if not exposition.readings:
            wrong.append("it exports no metrics of any device")
        elif not any(r.sm_ratio is not None for r in exposition.readings):
            wrong.append("it does not export DCGM_FI_PROF_SM_ACTIVE")
        state = SourceReading("dcgm", "degraded" if wrong else "ok", "; ".join(wrong))
        return exposition.readings, [state]

    def _health_issues(
        self, now: str, found: Found, dcgm: Sequence[DcgmReading]
    ) -> list[HealthIssueReading | SourceReading]:
        if self._memory is None:
            self._memory = self._state.read()
        causes: dict[str, list[str]] = {}
        for device in found.devices:
            listed = causes.setdefault(_physical(device), [])
            if device.fault and device.fault not in listed:
                listed.append(device.fault)
        for uuid, checkup in found.checkups.items():
            causes.setdefault(uuid, []).extend(checkup.causes)
        answers = not found.driver.why_not
        if answers:
            self._xids.watch(() if found.unusable else set(causes))
        sight = HealthSample(
            now=now,
            driver=f"{self._incarnation()}/{found.driver.version}" if answers else "",
            causes=causes,
            checkups=found.checkups,
            xids=self._xids.drain(),
            gauges=_gauges(dcgm, causes),
            maintained=answers and self._maintained,
        )
        self._maintained = bool(self.maintenance()) or (self._maintained and not answers)
        self._memory, health_issues = judge(self._memory, sight)
        self._state.write(self._memory)
        lacks = [*self._xids.lacks, *([self._state.trouble] if self._state.trouble else [])]
        source = SourceReading("xid", "degraded" if lacks else "ok", "; ".join(lacks))
        return [*_unhealthy(found.devices, health_issues), *([source] if answers else [])]


@dataclass(slots=True)
class CrossCheck:
    """Compares DCGM's memory figures with NVML's."""

    #: (GPU, instance) -> (time last seen, bytes used) of NVML's figures of the last minute.
    _used: dict[tuple[str, int | None], deque[tuple[float, int]]] = field(default_factory=dict)
    #: (GPU, instance) -> consecutive scrapes that disagreed about used memory.
    _doubts: dict[tuple[str, int | None], int] = field(default_factory=dict)
    _compared: int = 0

    def compare(
        self,
        now_s: float,
        scrapes: int,
        devices: Iterable[DeviceReading],
        readings: Iterable[DcgmReading],
    ) -> list[str]:
        """Return the contradictions. ``scrapes`` is the number of expositions read so far."""
        known = {_key(device): device for device in devices}
        for key, device in known.items():
            if device.memory is not None:
                spent = device.memory.total_bytes - device.memory.free_bytes
                series = self._used.setdefault(key, deque())
                if series and series[-1][1] == spent:
                    series.pop()
                series.append((now_s, spent))
        for key in [key for key in self._used if key not in known]:
            del self._used[key]
        for series in self._used.values():
            while series and now_s - series[0][0] > _WINDOW_S:
                series.popleft()
        again, self._compared = scrapes == self._compared, scrapes
        wrong: list[str] = []
        parents = {uuid for uuid, _ in known}
        for reading in readings:
            key = (reading.uuid, reading.gpu_instance)
            if reading.uuid not in parents:
                wrong.append("it exports metrics of devices that this node does not have")
            elif key in known:
                wrong += self._differences(key, known[key], reading, again)
        return list(dict.fromkeys(wrong))

    def _differences(
        self, key: tuple[str, int | None], device: DeviceReading, reading: DcgmReading, again: bool
    ) -> list[str]:
        memory = device.memory
        series = self._used.get(key)
        if memory is None or not series:
            return []
        wrong: list[str] = []
        slack_bytes = max(_TOLERANCE_BYTES, memory.total_bytes // 100)
        parts = (reading.used_bytes, reading.free_bytes, reading.reserved_bytes)
        total_bytes = reading.total_bytes
        if total_bytes is None:
            known = [part for part in parts if part is not None]
            total_bytes = sum(known) if len(known) == len(parts) else None
        if total_bytes is not None and abs(total_bytes - memory.total_bytes) > slack_bytes:
            wrong.append(f"{device.uuid}: its memory is not what NVML reports")
        if reading.used_bytes is not None and not again:
            # Some exporter versions count the driver's reserve as used, some do not.
            least = min(used for _, used in series) - (memory.reserved_bytes or 0) - slack_bytes
            most = max(used for _, used in series) + slack_bytes
            fits = least <= reading.used_bytes <= most
            self._doubts[key] = 0 if fits else self._doubts.get(key, 0) + 1
        if self._doubts.get(key, 0) >= _IN_A_ROW:
            wrong.append(f"{device.uuid}: its used memory is not what NVML reports")
        return wrong


def _activity(
    readings: Iterable[DcgmReading], devices: Iterable[DeviceReading]
) -> list[ActivityReading]:
    by_key = {(r.uuid, r.gpu_instance): r for r in readings}
    found: list[ActivityReading] = []
    for device in devices:
        reading = by_key.get(_key(device))
        if reading is not None:
            sm_ratio, occupancy_ratio = reading.sm_ratio, reading.occupancy_ratio
            found.append(ActivityReading("dcgm", device.uuid, sm_ratio, occupancy_ratio))
            # Utilisation: any kernel keeps the engine active. NVML's figure has priority, but NVML
            # has none for MIG instances.
            engine = ActivityReading(
                "dcgm-engine", device.uuid, utilization_ratio=reading.engine_ratio
            )
            found.append(engine)
    return found


def _gauges(readings: Iterable[DcgmReading], present: Iterable[str]) -> dict[str, int]:
    """Return the last XID of each present GPU; one of a MIG instance counts for its GPU."""
    known = set(present)
    found: dict[str, int] = {}
    for reading in readings:
        if reading.xid is not None and reading.uuid in known:
            found[reading.uuid] = max(found.get(reading.uuid, 0), reading.xid)
    return found


def _unhealthy(
    devices: Iterable[DeviceReading], health_issues: dict[str, HealthIssue]
) -> list[HealthIssueReading]:
    return [
        HealthIssueReading(device.uuid, health_issues[uuid].reason, health_issues[uuid].since)
        for device in devices
        if (uuid := _physical(device)) in health_issues
    ]


def _physical(device: DeviceReading) -> str:
    return device.parent or device.uuid


def _key(device: DeviceReading) -> tuple[str, int | None]:
    return _physical(device), device.gpu_instance


def incarnation(root: Path = Path("/")) -> str:
    """Return an identifier that changes with every boot and every load of the driver's module.

    The kernel gives a module's directory in sysfs a new inode at every load.
    """
    try:
        boot = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "unknown"
    try:
        module = (root / "sys/module/nvidia").stat().st_ino
    except OSError:
        module = 0
    return f"{boot}/{module}"


def own_cgroup(root: Path = Path("/"), pid: int | None = None) -> str | None:
    """Return the full path of the agent's own cgroup directory; empty if it is not found.

    None if there are no cgroups v2, and so no limits of GPU memory. ``pid`` is the agent's process
    id in the host's namespace; by default its own pid, as with hostPID. In a private cgroup
    namespace, the default of most runtimes, the kernel shows the agent's cgroup as "/". Then its
    directory is searched for in the host's cgroups.
    """
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    paths = [line[3:] for line in lines if line.startswith("0::/")]
    if not paths or not (mount / "cgroup.controllers").exists():
        return None
    if paths[0] != "/":
        folder = mount / paths[0].lstrip("/")
        return str(folder) if (folder / "cgroup.controllers").exists() else ""
    wanted = str(os.getpid() if pid is None else pid)
    for folder_name, _, _ in islice(os.walk(mount), 1, _MOST_CGROUPS):
        try:
            processes = Path(folder_name, "cgroup.procs").read_text().split()
        except OSError:  # cgroup.procs of a threaded cgroup cannot be read
            continue
        if wanted in processes:
            return folder_name
    return ""
