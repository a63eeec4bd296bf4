"""Takes samples: reads all probes, and builds the status of the GPUNode from their readings."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from agent.peak_recorder import PeakRecorder, lives_path
from agent.peaks import Lives
from agent.probes.dcgm import TIMEOUT_S, Exporter
from agent.probes.device_health import HealthState
from agent.probes.device_probe import DeviceProbe, incarnation, own_cgroup
from agent.probes.driver_limits_probe import ASK_EVERY_S, LimitsProbe
from agent.probes.host_memory import HostMemoryProbe
from agent.probes.kubelet import KubeletProbe
from agent.probes.nvml import Gate
from agent.probes.nvml_probe import NvmlProbe
from agent.probes.plugin_config import ConfigurationProbe
from agent.probes.processes import ProcessProbe
from agent.probes.readings import Follower, Probe, Reading, SharingReading
from agent.probes.state_file import StateFile
from agent.probes.xids import XidWatch
from agent.settings import Settings
from agent.status_builder import rfc3339, summarise
from headroom.contract.gpunode import GPUNodeStatus

if TYPE_CHECKING:
    from agent.probes.node_probe import NodeApi

#: Minimum number of seconds between the starts of two samples, even if the checkpoint changes more
#: often. ``apart_s`` can return more.
SAMPLES_APART_S = 0.5
#: Share of one core that samples may take while pods arrive continuously.
CORE_SHARE = 0.02


class Sampler:
    """Reads every probe, then passes the readings to every follower, which adds its own readings.

    ``take`` is called by one thread.
    """

    def __init__(self, settings: Settings, devices: DeviceProbe) -> None:
        self.devices = devices
        self.probes: list[Probe] = [
            devices,
            KubeletProbe(settings.checkpoint, settings.pod_resources, cgroups=settings.cgroups),
            ConfigurationProbe(settings.proc, settings.checkpoint.parent),
        ]
        self.followers: list[Follower] = [
            devices,
            ProcessProbe(settings.proc),
            HostMemoryProbe(settings.unified_memory_bytes),
        ]
        self._node_api: NodeApi | None = None
        self._pause: Callable[[], None] = lambda: None
        #: The sharing that the agent's flags set. It takes priority over the detected sharing.
        self._stated: list[Reading] = []
        if settings.sharing_stated:
            self._stated.append(
                SharingReading("flags", settings.resource, settings.replicas, settings.sharing)
            )
        self._last: GPUNodeStatus | None = None
        # With --once, the file of the running agent must not be overwritten.
        state = None if settings.once else settings.state
        self._peaks = PeakRecorder(
            None if state is None else StateFile(lives_path(state), Lives(), "peaks")
        )
        try:
            self._agent_version = version("headroom-gpu")
        except PackageNotFoundError:
            self._agent_version = "unknown"  # The agent runs from a checkout.

    def add_cluster(
        self, node_api: "NodeApi", *last: Follower, pause: Callable[[], None] = lambda: None
    ) -> None:
        """Add the probes that need a cluster. The followers in ``last`` run after all others.

        ``pause`` is called between two probes, and waits while other work is more urgent.
        """
        self._pause = pause
        self._node_api = node_api
        self.probes.append(node_api)
        self.followers = [node_api, *self.followers, *last]

    def take(self) -> tuple[GPUNodeStatus, Sequence[Reading]]:
        """Take one sample, and return the status built from it, and its readings."""
        if self._node_api is not None:
            self.devices.maintenance = self._node_api.maintenance
        # Record the time before the first probe, because a pod that ends during the sample may
        # still be in the status.
        observed_at = datetime.now(UTC)
        readings = [*self._stated]
        for probe in self.probes:
            self._pause()
            readings += probe.read()
        for follower in self.followers:
            self._pause()
            readings += follower.follow(readings)
        self._last = summarise(
            readings, observed_at, self._agent_version, self._last, self._peaks.measure
        )
        return self._last, readings

    def close(self) -> None:
        """Save the peaks for the next agent on this node."""
        self._peaks.save()


def device_probe_of(
    settings: Settings, exporter_timeout_s: float = TIMEOUT_S, sysfs: Path = Path("/sys")
) -> DeviceProbe:
    """Build the device probe from the settings."""
    gate = Gate()
    return DeviceProbe(
        NvmlProbe(gate, settings.driver_timeout_s, sysfs, own_cgroup()),
        XidWatch(gate, settings.driver_timeout_s),
        Exporter(settings.dcgm_url, settings.dcgm_interval_s, exporter_timeout_s)
        if settings.dcgm_url
        else None,
        LimitsProbe(gate, settings.driver_timeout_s, settings.cgroups, ASK_EVERY_S),
        StateFile(settings.state, HealthState(), "XIDs"),
        incarnation,
        lambda: rfc3339(datetime.now(UTC)),
    )


def apart_s(cpu_s: float, interval_s: float) -> float:
    """Return the minimum number of seconds between the starts of two samples.

    The result limits the CPU time of samples to ``CORE_SHARE`` of a core, but is at most
    ``interval_s``. ``cpu_s`` is the CPU time of the last sample.
    """
    return max(SAMPLES_APART_S, min(cpu_s / CORE_SHARE, interval_s))


def next_due_s(due_s: float, now_s: float, interval_s: float, needed_in_s: float) -> float:
    """Return when to take the next sample, on the clock of ``due_s`` and ``now_s``.

    ``due_s`` is the time at which the last sample was due. The next sample is due ``interval_s``
    later, or ``needed_in_s`` seconds from now if that is earlier. Missed samples are skipped.
    """
    return min(max(due_s + interval_s, now_s), now_s + min(interval_s, needed_in_s))
