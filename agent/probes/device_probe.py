"""Combines NVML, DCGM and XID events into the readings of each device.

Memory figures come from NVML. DCGM is the best source of SM activity and a second source of XIDs.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from msgspec.structs import replace

from agent.probes import sm_activity
from agent.probes.cause import Cause
from agent.probes.dcgm import Exporter
from agent.probes.dcgm_exposition import DcgmReading, activity_of, last_xids
from agent.probes.device_health import HealthSample, HealthState, judge
from agent.probes.driver_limits_probe import LimitsProbe
from agent.probes.nvml_probe import Found, NvmlProbe
from agent.probes.readings import DeviceReading, HealthIssueReading, Reading, SourceReading
from agent.probes.state_file import StateFile
from agent.probes.xids import XidWatch

#: Maximum number of directories searched for the agent's own cgroup.
_MOST_CGROUPS = 20_000


class DeviceProbe:
    """Reads all devices of the node. ``close`` ends its threads."""

    def __init__(
        self,
        nvml: NvmlProbe,
        xids: XidWatch,
        exporter: Exporter | None,
        limits: LimitsProbe,
        state: StateFile[HealthState],
        incarnation: Callable[[], str],
        now: Callable[[], str],
    ) -> None:
        """Create the probe. ``incarnation`` identifies the current load of the driver's module, and
        ``now`` returns the time in RFC 3339 format."""
        self._nvml = nvml
        self._xids = xids
        self._exporter = exporter
        self._limits = limits
        self._state = state
        self._incarnation = incarnation
        self._now = now
        self._health: HealthState | None = None
        self._hanging = False
        self._must_reopen = False
        #: Whether the driver was released for maintenance and has not answered since then.
        self._maintained = False
        #: Why the driver must be released, or None if it need not be released. The caller sets this
        #: cause before each sample.
        self.maintenance: Cause | None = None

    @property
    def hanging(self) -> bool:
        """Whether a driver call has not returned."""
        return self._hanging or self._limits.hanging

    def read(self) -> Iterable[Reading]:
        if (why := self.maintenance) is not None:
            self._xids.watch(())
            found = self._nvml.released(why, may_close=self._closable)
        else:
            found = self._nvml.read()
        self._must_reopen = found.unusable or found.is_miscounted
        self._hanging = found.hanging
        dcgm: Sequence[DcgmReading] = ()
        sources: list[SourceReading] = []
        if self._exporter is not None:
            dcgm, source = self._exporter.read(found.devices)
            sources.append(source)
        return [
            found.driver,
            *found.devices,
            *found.facts,
            *found.degraded,
            *sm_activity.best([*found.activity, *activity_of(dcgm, found.devices)]),
            *self._health_issues(found, dcgm),
            *sources,
        ]

    def follow(self, readings: Sequence[Reading]) -> Iterable[Reading]:
        """Return the driver's memory limits of the containers that hold devices."""
        found = self._limits.follow(readings)
        if self._must_reopen:
            # A device cannot be reset while it is open. The driver counts GPUs only when it is
            # opened.
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
        """Whether neither the XID watch nor the limits probe has a driver call in progress."""
        return self._xids.quiet and not self._limits.hanging

    def _health_issues(
        self, found: Found, dcgm: Sequence[DcgmReading]
    ) -> Iterator[HealthIssueReading | SourceReading]:
        """Decide which devices are unhealthy, store the result, and watch the present GPUs for
        XIDs.

        Yield a reading for each unhealthy device, and one for the source ``xid``.
        """
        if self._health is None:
            self._health = self._state.read()
        causes: dict[str, list[str]] = {}
        for device in found.devices:
            listed = causes.setdefault(_physical(device), [])
            if device.fault and device.fault not in listed:
                listed.append(device.fault)
        for uuid, checkup in found.checkups.items():
            causes.setdefault(uuid, []).extend(checkup.causes)
        answers = not found.driver.why_not
        if answers:
            self._xids.watch(() if self._must_reopen else set(causes))
        sample = HealthSample(
            now=self._now(),
            driver=f"{self._incarnation()}/{found.driver.version}" if answers else "",
            causes=causes,
            checkups=found.checkups,
            xids=self._xids.drain(),
            gauges=last_xids(dcgm, causes),
            maintained=answers and self._maintained,
        )
        self._maintained = self.maintenance is not None or (self._maintained and not answers)
        self._health, issues = judge(self._health, sample)
        self._state.write(self._health)
        for device in found.devices:
            if (issue := issues.get(_physical(device))) is not None:
                yield replace(issue, uuid=device.uuid)
        if answers:
            lacks = [*self._xids.lacks, *filter(None, [self._state.trouble])]
            yield SourceReading("xid", "degraded" if lacks else "ok", "; ".join(lacks))


def _physical(device: DeviceReading) -> str:
    """Return the UUID of the physical GPU."""
    return device.parent or device.uuid


def incarnation(root: Path = Path("/")) -> str:
    """Return an identifier that changes with every boot and with every load of the driver's module.

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
    """Return the full path of the agent's own cgroup directory, which is empty if it is not found.

    Return None without cgroups v2, because GPU memory has no limits there. ``pid`` is the agent's
    process id in the host's namespace. The default is its own pid, which is the same with hostPID.
    In a private cgroup namespace, which most runtimes use by default, the kernel shows the agent's
    cgroup as "/". In this case the directory is searched for among the host's cgroups.
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
