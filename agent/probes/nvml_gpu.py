"""Reads the memory, processes, activity and health of a physical GPU or of its MIG devices through
NVML.

A handle is used in only one cycle and then resolved again. After a driver reload, a MIG change or
the loss of a device, an old handle is invalid or refers to another device.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
from msgspec.structs import replace

from agent.probes.cause import Cause
from agent.probes.device_health import Checkup
from agent.probes.nvml import LIMITS_CALL, Gate
from agent.probes.nvml_errors import DeviceFault, DeviceLost, StaleHandle
from agent.probes.readings import ActivityReading, Degraded, DeviceReading, FactsReading
from agent.probes.sm_activity import Meter

_log = structlog.get_logger()

SOURCE = "nvml"

_MIG_ENABLED = 1
_MIG_HANDLE = "nvmlDeviceGetMigDeviceHandleByIndex"
_MIG_UNREADABLE = "MIG is on and no instance can be read"
_MIG_FORBIDDEN = Cause("the agent has no permission to read the MIG mode", "mig")
_MIG_CHANGES = Cause("its MIG mode is about to change, which requires a reset", "mig")
_LIMITED_AGENT = Cause(
    "the agent's own cgroup has a GPU memory limit, which hides the device's: remove it from the"
    " agent's pod",
    "memory",
)
_UNCHECKED_CGROUP = Cause(
    "cannot check the agent's own cgroup for a GPU memory limit, which would hide the devices'"
    " memory: mount the host's /sys/fs/cgroup into the agent's container",
    "no_cgroups",
)
_UNCORRECTED, _VOLATILE = 1, 0
_RECOVERY_ACTION = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
_HEALTH_CALLS = (
    ("nvmlDeviceGetRemappedRows",),
    ("nvmlDeviceGetRetiredPagesPendingStatus",),
    ("nvmlDeviceGetFieldValues", [_RECOVERY_ACTION]),
    ("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE),
)
_FACTS_CALLS = (
    ("nvmlDeviceGetPciInfo_v3",),
    ("nvmlDeviceGetArchitecture",),
    ("nvmlDeviceGetComputeMode",),
)

#: Maximum number of NVLinks of a GPU, and the number of samples after which they are read again.
#: The links of a machine that starts become active later than its driver.
_MAX_NVLINKS = 36
_NVLINKS_FOR_SAMPLES = 120

_ARCHITECTURES = {
    2: "kepler",
    3: "maxwell",
    4: "pascal",
    5: "volta",
    6: "turing",
    7: "ampere",
    8: "ada",
    9: "hopper",
    10: "blackwell",
    13: "rubin",
}
_COMPUTE_MODES = {0: "default", 1: "exclusive-thread", 2: "prohibited", 3: "exclusive-process"}


@dataclass(slots=True)
class GpuReadings:
    """The readings of one or several physical GPUs."""

    #: The GPU itself, or its MIG devices.
    devices: list[DeviceReading] = field(default_factory=list)
    facts: list[FactsReading] = field(default_factory=list)
    #: Activity of the devices. One device may have readings from several sources.
    activity: list[ActivityReading] = field(default_factory=list)
    #: Health state of each physical GPU, by UUID.
    checkups: dict[str, Checkup] = field(default_factory=dict)
    degraded: list[Degraded] = field(default_factory=list)

    def add(self, other: "GpuReadings") -> None:
        """Add all readings of another GPU except its devices, which the caller may still change."""
        self.facts += other.facts
        self.activity += other.activity
        self.checkups |= other.checkups
        self.degraded += other.degraded


class GpuReader:
    """Reads the GPU at one index. The class is not thread-safe.

    ``cgroup`` is the full path of the agent's own cgroup directory. It is empty if it is unknown,
    and None if the machine has no cgroups that could have limits.
    """

    def __init__(self, gate: Gate, index: int, sysfs: Path, cgroup: str | None) -> None:
        self._gate = gate
        self._index = index
        self._sysfs = sysfs
        self._cgroup = cgroup
        self._meter = Meter(gate)
        #: Whether the MIG instances could not be read at the last sample.
        self._mig_unread = False
        #: The NVLinks that were read last.
        self._nvlinks = frozenset[str]()
        #: Number of samples until the NVLinks are read again.
        self._nvlinks_left = 0

    def close(self) -> None:
        """Free the samples that the driver holds for this GPU. This call can hang like any driver
        call."""
        self._meter.free()

    def read(self, is_known: bool) -> GpuReadings:
        """Read the GPU, or its MIG devices if MIG is on.

        ``is_known`` states whether devices have been seen at this index before. Raises
        ``DeviceFault`` or ``StaleHandle`` if the GPU does not report its UUID. If its name or its
        MIG devices cannot be read, these errors are raised only if ``is_known``, so that the caller
        reports the devices seen before as faulty. Otherwise the GPU is returned with a fault.
        Raises ``DriverGone``.
        """
        handle, uuid = self._gate.identify(self._index)
        device = DeviceReading(SOURCE, uuid=uuid, index=self._index)
        gpu = GpuReadings()
        try:
            name = self._gate.ask("nvmlDeviceGetName", handle)
            device = replace(device, model=name or "", minor=self._minor(handle))
            mode = self._gate.ask("nvmlDeviceGetMigMode", handle)
            instances = None
            if mode is not None and mode[0] == _MIG_ENABLED:
                instances = list(self._instances(handle, device))
                if not instances:
                    instances = [replace(device, fault=self._why_no_instance())]
            elif "nvmlDeviceGetMigMode" in self._gate.forbidden:
                instances = [replace(device, fault=_MIG_FORBIDDEN)]
        except (DeviceFault, StaleHandle) as err:
            if is_known:
                raise
            gpu.devices.append(replace(device, fault=err.cause))
            return gpu
        self._report_unread_mig(gpu, instances)
        gpu.devices = [self._measured(device, handle)] if instances is None else instances
        if mode is not None and mode[0] != mode[1]:
            # MIG mode changes as soon as no process uses the device, so a new pod would delay the
            # change.
            _mark(gpu, _MIG_CHANGES)
        try:
            self._read_more(gpu, handle, uuid)
        except DeviceLost as err:
            _mark(gpu, err.cause)
        return gpu

    def _read_more(self, gpu: GpuReadings, handle: Any, uuid: str) -> None:
        """Read activity, health and facts of a GPU.

        A failed call degrades the source, and only a lost device becomes unhealthy. Raises
        ``DeviceLost`` and ``DriverGone``.
        """
        by_instance: dict[int | None, list[str]] | None = None
        if any(device.kind == "mig" for device in gpu.devices):
            by_instance = {}
            for device in gpu.devices:
                by_instance.setdefault(device.gpu_instance or 0, []).append(device.uuid)
        for reading in self._meter.measure(handle, uuid, by_instance):
            if isinstance(reading, Degraded):
                gpu.degraded.append(reading)
            else:
                gpu.activity.append(reading)
        health, health_errors = self._gate.ask_each(handle, _HEALTH_CALLS)
        gpu.checkups[uuid] = _checkup(*health)
        facts, facts_errors = self._gate.ask_each(handle, _FACTS_CALLS)
        # MIG devices have no NVLinks.
        nvlinks = self._read_nvlinks(handle) if by_instance is None else frozenset[str]()
        gpu.facts += [self._facts(device.uuid, nvlinks, *facts) for device in gpu.devices]
        errors = health_errors + facts_errors
        try:
            self._check_own_limit(gpu, handle)
        except DeviceLost:
            raise
        except (DeviceFault, StaleHandle) as err:
            errors.append(str(err))
        finally:
            gpu.degraded += [Degraded(SOURCE, f"{uuid}: {err}") for err in dict.fromkeys(errors)]

    def _check_own_limit(self, gpu: GpuReadings, handle: Any) -> None:
        """Mark the devices if a limit on the agent's own cgroup hides their memory."""
        if self._cgroup:
            limits = self._gate.limits(handle, self._cgroup)
            if limits is not None and limits.hard_bytes is not None:
                _mark(gpu, _LIMITED_AGENT)
        elif self._cgroup is not None and self._gate.has(LIMITS_CALL):
            gpu.degraded.append(Degraded(SOURCE, _UNCHECKED_CGROUP))

    def _read_nvlinks(self, handle: Any) -> frozenset[str]:
        """Return the PCI addresses at the other ends of the GPU's active NVLinks.

        Raises ``DeviceLost`` and ``DriverGone``.
        """
        if self._nvlinks_left:
            self._nvlinks_left -= 1
            return self._nvlinks
        found: set[str] = set()
        try:
            for link in range(_MAX_NVLINKS):
                state = self._gate.ask("nvmlDeviceGetNvLinkState", handle, link)
                if state is None:
                    break  # the GPU has no NVLinks
                if state == 1:
                    pci = self._gate.ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
                    found.add(_bus_id(pci).lower())
        except DeviceLost:
            raise
        except (DeviceFault, StaleHandle):
            pass  # the GPU has no further links
        self._nvlinks_left = _NVLINKS_FOR_SAMPLES
        self._nvlinks = frozenset(found - {""})
        return self._nvlinks

    def _facts(
        self, uuid: str, nvlinks: frozenset[str], pci: Any, architecture: Any, mode: Any
    ) -> FactsReading:
        """Return the facts about a device, from its NVLinks and the values of ``_FACTS_CALLS``."""
        bus_id = _bus_id(pci)
        return FactsReading(
            SOURCE,
            uuid,
            pci_bus_id=bus_id,
            nvlinks=nvlinks,
            architecture=_ARCHITECTURES.get(architecture, ""),
            compute_mode=_COMPUTE_MODES.get(mode, ""),
            numa_node=self._numa_node(bus_id),
        )

    def _numa_node(self, bus_id: str) -> int | None:
        """Return the NUMA node that the device is attached to, which is read from sysfs as in the
        plugin.

        NVML's NumaNodeId has another meaning: the NUMA node of the device's own memory (Grace).
        """
        domain, colon, rest = bus_id.lower().partition(":")
        path = self._sysfs / "bus/pci/devices" / f"{domain[-4:]}{colon}{rest}" / "numa_node"
        try:
            node = int(path.read_text())
        except (OSError, ValueError):
            return None
        return node if bus_id and node >= 0 else None

    def _minor(self, handle: Any) -> int | None:
        """Return the minor number, or None if it cannot be read. Raises ``DeviceLost``."""
        try:
            minor = self._gate.ask("nvmlDeviceGetMinorNumber", handle)
        except DeviceLost:
            raise
        except (DeviceFault, StaleHandle):
            return None
        return minor if isinstance(minor, int) else None

    def _instances(self, handle: Any, gpu: DeviceReading) -> Iterator[DeviceReading]:
        """Yield the MIG devices of one GPU.

        Compute instances of one GPU instance share its memory, so all of them report the memory
        that the first instance reports. Each of them may list its own processes.
        """
        read: dict[int, DeviceReading] = {}
        for slot in range(self._gate.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            try:
                part = self._gate.ask(_MIG_HANDLE, handle, slot)
            except StaleHandle:
                part = None  # Some drivers answer INVALID_ARGUMENT for an empty slot.
            if part is None:
                continue
            uuid = self._gate.ask("nvmlDeviceGetUUID", part)
            instance = self._gate.ask("nvmlDeviceGetGpuInstanceId", part)
            if uuid is None or instance is None:
                raise DeviceFault(f"MIG device {slot} reports no UUID or no GPU instance")
            device = DeviceReading(
                SOURCE,
                uuid=uuid,
                index=gpu.index,
                minor=gpu.minor,
                model=self._gate.ask("nvmlDeviceGetName", part) or "",
                kind="mig",
                parent=gpu.uuid,
                gpu_instance=instance,
            )
            measured = self._measured(device, part)
            first = read.setdefault(instance, measured)
            yield replace(measured, memory=first.memory, fault=first.fault or measured.fault)

    def _report_unread_mig(self, gpu: GpuReadings, instances: list[DeviceReading] | None) -> None:
        """Degrade the source if the MIG instances of a GPU cannot be read, and log this once."""
        unread = [d for d in instances or () if d.kind == "gpu"]
        gpu.degraded += [Degraded(SOURCE, Cause(f"{d.uuid}: {d.fault}", "mig")) for d in unread]
        if unread and not self._mig_unread:
            hint = "component deploy/components/mig; with Helm agent.mig: true"
            _log.error("mig_not_readable", uuid=unread[0].uuid, reason=unread[0].fault, hint=hint)
        self._mig_unread = bool(unread)

    def _why_no_instance(self) -> Cause:
        why = "none exists, or the agent's container cannot see them"
        if _MIG_HANDLE in self._gate.forbidden:
            why = "the agent's container has no permission"
        return Cause(f"{_MIG_UNREADABLE}: {why}", "mig")

    def _measured(self, device: DeviceReading, handle: Any) -> DeviceReading:
        """Return ``device`` with its figures, or with the fault that prevents reading them.

        A stale handle is resolved again once.
        """
        try:
            try:
                return self._figures(device, handle)
            except StaleHandle:
                again = self._gate.ask("nvmlDeviceGetHandleByUUID", device.uuid)
                if again is None:
                    gone = Cause("the device disappeared while it was read", "nvml")
                    return replace(device, fault=gone)
                return self._figures(device, again)
        except (DeviceFault, StaleHandle) as err:
            return replace(device, fault=err.cause)

    def _figures(self, device: DeviceReading, handle: Any) -> DeviceReading:
        memory = self._gate.memory(handle)
        processes = self._gate.processes(handle)
        return replace(device, memory=memory, processes=processes)


def _bus_id(pci: Any) -> str:
    """Return the PCI address of a GPU or an NVSwitch, or an empty string if it is unknown."""
    bus_id = "" if pci is None else pci.busId
    return bus_id.decode("ascii", "replace") if isinstance(bus_id, bytes) else str(bus_id)


def _mark(gpu: GpuReadings, fault: Cause) -> None:
    """Set the fault of all devices of the GPU that have none yet."""
    gpu.devices = [replace(device, fault=device.fault or fault) for device in gpu.devices]


def _checkup(remapped: Any, pages: Any, recovery: Any, uncorrected_errors: Any) -> Checkup:
    """Return the health of a GPU, from the values of ``_HEALTH_CALLS``."""
    has_recovery = recovery is not None and recovery[0].nvmlReturn == 0
    return Checkup(
        uncorrected_errors=uncorrected_errors,
        remap_pending=None if remapped is None else bool(remapped[2]),
        remap_failed=None if remapped is None else bool(remapped[3]),
        pages_pending=None if pages is None else bool(pages),
        recovery=int(recovery[0].value.uiVal) if has_recovery else None,
    )
