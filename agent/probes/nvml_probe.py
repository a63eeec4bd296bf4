"""The NVML probe: reads the node's devices, their memory and processes, and their faults.

Handles are used for one cycle only and then resolved again. After a driver reload, a MIG change or
a lost device, an old handle is invalid or names another device. Between cycles the probe keeps only
identities. A lost GPU does not report its UUID, but it still has its index. So the device last seen
at that index is the lost one.

Every physical GPU is read in its own thread, with a deadline. Calls about the driver itself have
another thread. A call that never returns makes only its own device unhealthy.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import structlog

from agent.deadline import Hanging, Worker
from agent.probes.device_health import Checkup
from agent.probes.nvml import (
    LIMITS_CALL,
    DeviceFault,
    DeviceLost,
    DriverGone,
    Gate,
    NoDriver,
    NvmlError,
    StaleHandle,
)
from agent.probes.readings import (
    ActivityReading,
    Degraded,
    DeviceReading,
    DriverReading,
    FactsReading,
)
from agent.probes.sm_activity import Meter
from contract.gpunode import MAX_DEVICES

_log = structlog.get_logger()

T = TypeVar("T")
#: Calls the named NVML function with a device handle and the given arguments; returns None if the
#: driver has no answer.
Ask = Callable[..., Any]

SOURCE = "nvml"

_MIG_ENABLED = 1
_MIG_HANDLE = "nvmlDeviceGetMigDeviceHandleByIndex"
_MIG_UNREADABLE = "MIG is on and no instance can be read"
_MIG_FORBIDDEN = "the agent has no permission to read the MIG mode"
_UNCHECKED_CGROUP = (
    "cannot check the agent's own cgroup for a GPU memory limit, which would hide the devices'"
    " memory: mount the host's /sys/fs/cgroup into the agent's container"
)
#: PCI classes of display and 3D controllers.
_GPU_CLASSES = ("0x0300", "0x0302")
_UNCORRECTED, _VOLATILE = 1, 0
_RECOVERY_ACTION = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION

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


@dataclass(frozen=True, slots=True)
class Found:
    """Everything that one cycle read from the driver."""

    driver: DriverReading
    devices: list[DeviceReading] = field(default_factory=list)
    facts: list[FactsReading] = field(default_factory=list)
    #: A device may have readings of several sources.
    activity: list[ActivityReading] = field(default_factory=list)
    #: UUID of the physical GPU -> its health state.
    checkups: dict[str, Checkup] = field(default_factory=dict)
    degraded: list[Degraded] = field(default_factory=list)
    #: Whether a driver call has not returned.
    hanging: bool = False
    #: Whether every GPU is lost or waits for a reset. The driver counts devices when it is opened,
    #: so it must be opened again to see others.
    unusable: bool = False


@dataclass(slots=True)
class _Gpu:
    """Readings of one index: of the GPU, or of its MIG devices."""

    devices: list[DeviceReading] = field(default_factory=list)
    facts: list[FactsReading] = field(default_factory=list)
    activity: list[ActivityReading] = field(default_factory=list)
    checkups: dict[str, Checkup] = field(default_factory=dict)
    degraded: list[Degraded] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _System:
    version: str
    cuda_version: str
    count: int


class NvmlProbe:
    """Reads all devices through NVML.

    ``cgroup`` is the full path of the agent's own cgroup directory. It is empty if unknown, and
    None if the machine has no cgroups that could have limits.
    """

    def __init__(
        self,
        gate: Gate,
        deadline_s: float = 10.0,
        sysfs: Path = Path("/sys"),
        cgroup: str | None = None,
    ) -> None:
        self._gate = gate
        self._deadline_s = deadline_s
        self._sysfs = sysfs
        self._cgroup = cgroup
        self._system: Worker[_System] = Worker("nvml")
        self._workers: dict[int, Worker[_Gpu]] = {}
        #: GPU index -> its meter, used only by the worker of that index.
        self._meters: dict[int, Meter] = {}
        #: GPU index -> the devices last seen there, including MIG devices, without figures.
        self._identities: dict[int, list[DeviceReading]] = {}
        #: Indices of GPUs whose MIG instances could not be read at the last sample.
        self._unread: set[int] = set()
        #: Why the driver was released, as last logged; empty if it is open.
        self._released_for = ""

    def look(self) -> Found:
        """Read every device of the node. Takes at most two deadlines and raises nothing."""
        if self._released_for:
            _log.info("driver_opened_again", reason=f"no longer: {self._released_for}")
            self._released_for = ""
        try:
            system = self._in_time(self._system, self._ask_system)
        except NoDriver as err:
            return self._blind(DriverReading(SOURCE, why_not=str(err)))
        except DriverGone as err:
            return self._gone(err)
        except Hanging as err:
            why_not = f"driver does not answer: {err}"
            return replace(self._blind(DriverReading(SOURCE, why_not=why_not)), hanging=True)
        except Exception as err:  # noqa: BLE001 - a probe never raises
            # The fault is not of one device: nothing that this driver reports can be trusted.
            return self._blind(
                DriverReading(SOURCE, why_not=f"driver does not answer: {_reason(err)}")
            )
        return self._look_at_devices(system)

    def release(self, *, may_close: bool) -> bool:
        """Close the driver until the next ``look``; return whether it was closed.

        The driver stays open while a call of this probe is in progress. ``may_close`` is false
        while other code has a call in progress.
        """
        busy = self._system.busy or any(worker.busy for worker in self._workers.values())
        if not may_close or busy:
            return False
        until_s = time.monotonic() + self._deadline_s
        try:
            for index in [*self._meters]:
                worker, meter = self._workers[index], self._meters.pop(index)
                self._result(worker, worker.give(_bound_back(meter)), until_s)
            self._in_time(self._system, self._close_driver)
        except (NvmlError, Hanging) as err:
            _log.warning("driver_not_released", reason=str(err))
            return False
        return True

    def released(self, why: str, *, may_close: bool) -> Found:
        """Close the driver as soon as possible; return what to report while it is released."""
        closed = self.release(may_close=may_close)
        state = "released" if closed else "being released"
        if closed and why != self._released_for:
            _log.info("driver_released", reason=why)
            self._released_for = why
        return self._blind(
            DriverReading(SOURCE, why_not=f"driver is {state}: {why}"),
            f"the driver is released: {why}",
        )

    def _close_driver(self) -> _System:
        self._gate.stop()
        return _System("", "", 0)

    def close(self) -> None:
        self._system.close()
        for worker in self._workers.values():
            worker.close()

    def _look_at_devices(self, system: _System) -> Found:
        driver = DriverReading(SOURCE, system.version, cuda_version=system.cuda_version)
        found = Found(driver)
        seen: dict[int, list[DeviceReading]] = {}
        lost: dict[int, str] = {}
        gone: DriverGone | None = None
        hanging = False
        unusable = 0
        for index in [index for index in self._workers if index >= system.count]:
            self._part(index)
        for index in range(system.count):
            if index not in self._workers:
                self._workers[index] = Worker(f"nvml-{index}")
            if index not in self._meters:
                self._meters[index] = Meter(self._gate)
        workers = {index: self._workers[index] for index in range(system.count)}
        given = {i: w.give(_bound(self._at, i)) for i, w in workers.items()}
        until_s = time.monotonic() + self._deadline_s
        for index, worker in workers.items():
            try:
                gpu = self._result(worker, given[index], until_s)
            except DriverGone as err:
                gone = err  # wait for the other workers too: their results belong to this cycle
            except Hanging as err:
                lost[index], hanging = str(err), True
            except Exception as err:  # noqa: BLE001 - a probe never raises
                lost[index] = _reason(err)
                unusable += isinstance(err, DeviceLost)
            else:
                unusable += any(c.needs_reset for c in gpu.checkups.values())
                seen[index] = gpu.devices
                found.facts.extend(gpu.facts)
                found.activity.extend(gpu.activity)
                found.checkups.update(gpu.checkups)
                found.degraded.extend(gpu.degraded)
        if gone is not None:
            return self._gone(gone)
        present = {device.uuid for devices in seen.values() for device in devices}
        for index, why in lost.items():
            known = [d for d in self._identities.get(index, []) if d.uuid not in present]
            if not known:
                what = f"device {index} does not report its UUID: {why}"
                found.degraded.append(Degraded(SOURCE, what))
            seen[index] = [replace(device, fault=why) for device in known]
        measured = [d for devices in seen.values() for d in devices if d.memory is not None]
        if any(device.processes is None for device in measured):  # vGPU guests, WSL
            what = "driver lists no processes: memory in use cannot be attributed to pods"
            found.degraded.append(Degraded(SOURCE, what))
        self._identities = {
            index: [replace(d, memory=None, processes=None, fault="") for d in devices]
            for index, devices in seen.items()
        }
        found.devices.extend(_named_once(device for i in sorted(seen) for device in seen[i]))
        found.degraded.extend(
            Degraded(SOURCE, f"no permission for {name}") for name in sorted(self._gate.forbidden)
        )
        if not system.count and (attached := self._attached()):
            what = (
                f"the kernel has {attached} NVIDIA GPU{'s' if attached != 1 else ''}, but the"
                " driver shows none to this container: delete the agent's pod when the driver is"
                " ready"
            )
            found.degraded.append(Degraded(SOURCE, what))
        return replace(found, hanging=hanging, unusable=unusable == system.count)

    def _attached(self) -> int:
        """Return the number of GPUs that the kernel has bound to NVIDIA's driver."""
        found = 0
        for device in self._sysfs.glob("bus/pci/devices/*"):
            with contextlib.suppress(OSError):
                is_gpu = (device / "class").read_text().startswith(_GPU_CLASSES)
                found += is_gpu and (device / "driver").readlink().name == "nvidia"
        return found

    def _part(self, index: int) -> None:
        """Free the driver's samples for the GPU that was at ``index``, then close its thread.

        The call runs in that thread because it may hang like any other call. If a call hangs there
        already, the samples are lost. If the GPU comes back, it has to wait for the thread.
        """
        if (meter := self._meters.pop(index, None)) is not None:
            self._workers[index].give(_bound_back(meter))
        elif not self._workers[index].busy:
            self._workers.pop(index).close()

    def _gone(self, err: DriverGone) -> Found:
        why_not = f"driver was unloaded or replaced: {err}; the agent restarts itself"
        found = self._blind(DriverReading(SOURCE, why_not=why_not, gone=True))
        return replace(found, hanging=any(w.busy for w in self._workers.values()))

    def _blind(self, driver: DriverReading, fault: str = "the driver does not answer") -> Found:
        """Report the devices seen last with ``fault``, because nothing can be read now."""
        devices = [
            replace(device, fault=fault)
            for devices in self._identities.values()
            for device in devices
        ]
        return Found(driver, list(_named_once(devices)))

    def _in_time(self, worker: Worker[_System], work: Callable[[], _System]) -> _System:
        return self._result(worker, worker.give(work), time.monotonic() + self._deadline_s)

    def _result(self, worker: Worker[T], given: bool, until_s: float) -> T:
        """Return the result of the worker's job. Raises ``Hanging`` with the pending call."""
        try:
            if given:
                return worker.result(until_s)
        except Hanging:
            pass
        raise Hanging(self._gate.why_late(worker.thread_id))

    def _ask_system(self) -> _System:
        self._gate.start()
        self._gate.forbidden.clear()
        version = self._gate.ask("nvmlSystemGetDriverVersion") or ""
        cuda = self._gate.ask("nvmlSystemGetCudaDriverVersion")
        count = self._gate.ask("nvmlDeviceGetCount")
        if count is None:
            raise NoDriver("driver does not report the number of devices")
        if count > MAX_DEVICES:
            raise NoDriver(f"driver reports more than {MAX_DEVICES} devices")
        cuda_version = "" if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}"
        return _System(version, cuda_version, count)

    def _at(self, index: int) -> _Gpu:
        """Read the GPU at ``index``, or its MIG devices if MIG is on.

        Raises ``DeviceFault`` or ``StaleHandle`` if it cannot be read which of the two applies.
        """
        handle = self._gate.ask("nvmlDeviceGetHandleByIndex", index)
        uuid = None if handle is None else self._gate.ask("nvmlDeviceGetUUID", handle)
        if uuid is None:
            raise DeviceFault("no handle or no UUID")
        self._meters[index].keep({uuid})
        device = DeviceReading(SOURCE, uuid=uuid, index=index)
        gpu = _Gpu()
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
            self._complain(gpu, index, instances)
        except (DeviceFault, StaleHandle) as err:
            if self._identities.get(index):
                raise  # report the devices last seen here, which may be MIG devices
            gpu.devices.append(replace(device, fault=str(err)))
            return gpu
        gpu.devices = [self._measured(device, handle)] if instances is None else instances
        if mode is not None and mode[0] != mode[1]:
            # The mode changes once no process uses the device, so a new pod would delay it.
            why = "its MIG mode is about to change, which takes a reset"
            gpu.devices = [replace(d, fault=d.fault or why) for d in gpu.devices]
        try:
            self._more(gpu, handle, uuid, index)
        except DeviceLost as err:
            gpu.devices = [replace(d, fault=d.fault or str(err)) for d in gpu.devices]
        return gpu

    def _more(self, gpu: _Gpu, handle: Any, uuid: str, index: int) -> None:
        """Read activity, health and facts of a GPU.

        A call that fails degrades the source; only a lost device becomes unhealthy. Raises
        ``DeviceLost`` and ``DriverGone``.
        """
        by_instance: dict[int, list[str]] | None = None
        if any(device.kind == "mig" for device in gpu.devices):
            by_instance = {}
            for device in gpu.devices:
                by_instance.setdefault(device.gpu_instance or 0, []).append(device.uuid)
        for reading in self._meters[index].measure(handle, uuid, by_instance):
            if isinstance(reading, Degraded):
                gpu.degraded.append(reading)
            else:
                gpu.activity.append(reading)

        def alone(question: Callable[[], T]) -> T | None:
            """Return None and record the failure, so that other calls are still made."""
            try:
                return question()
            except DeviceLost:
                raise
            except (DeviceFault, StaleHandle) as err:
                if (degraded := Degraded(SOURCE, f"{uuid}: {err}")) not in gpu.degraded:
                    gpu.degraded.append(degraded)
                return None

        def ask(name: str, *args: Any) -> Any:
            return alone(lambda: self._gate.ask(name, handle, *args))

        gpu.checkups[uuid] = _checkup(ask)
        facts = self._facts(ask, uuid)
        gpu.facts.extend(replace(facts, uuid=device.uuid) for device in gpu.devices)
        if not (cgroup := self._cgroup):
            if cgroup is not None and self._gate.has(LIMITS_CALL):
                gpu.degraded.append(Degraded(SOURCE, _UNCHECKED_CGROUP))
            return
        limits = alone(lambda: self._gate.limits(handle, cgroup))
        if limits is not None and limits.hard_bytes is not None:
            why = "the agent's own cgroup has a GPU memory limit, which hides the device's"
            gpu.devices = [replace(d, fault=d.fault or why) for d in gpu.devices]

    def _facts(self, ask: Ask, uuid: str) -> FactsReading:
        pci = ask("nvmlDeviceGetPciInfo_v3")
        architecture = ask("nvmlDeviceGetArchitecture")
        mode = ask("nvmlDeviceGetComputeMode")
        bus_id = "" if pci is None else _text(pci.busId)
        return FactsReading(
            SOURCE,
            uuid,
            pci_bus_id=bus_id,
            architecture=_ARCHITECTURES.get(architecture, ""),
            compute_mode=_COMPUTE_MODES.get(mode, ""),
            numa_node=self._numa_node(bus_id),
        )

    def _numa_node(self, bus_id: str) -> int | None:
        """Return the NUMA node that the device is attached to, from sysfs as the plugin does.

        NVML's NumaNodeId is something else: the NUMA node of the device's own memory (Grace).
        """
        domain, colon, rest = bus_id.lower().partition(":")
        path = self._sysfs / "bus/pci/devices" / f"{domain[-4:]}{colon}{rest}" / "numa_node"
        try:
            node = int(path.read_text())
        except (OSError, ValueError):
            return None
        return node if bus_id and node >= 0 else None

    def _minor(self, handle: Any) -> int | None:
        """Return the minor number; None if it cannot be read. Raises ``DeviceLost``."""
        try:
            minor = self._gate.ask("nvmlDeviceGetMinorNumber", handle)
        except DeviceLost:
            raise
        except (DeviceFault, StaleHandle):
            return None
        return minor if isinstance(minor, int) else None

    def _instances(self, handle: Any, gpu: DeviceReading) -> Iterator[DeviceReading]:
        """Yield the MIG devices of one GPU.

        Compute instances of one GPU instance share its memory, so all of them report the memory of
        the first one. Each may list its own processes.
        """
        read: dict[int, DeviceReading] = {}
        for slot in range(self._gate.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            try:
                part = self._gate.ask(_MIG_HANDLE, handle, slot)
            except StaleHandle:
                part = None  # some drivers answer INVALID_ARGUMENT for an empty slot
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

    def _complain(self, gpu: _Gpu, index: int, instances: list[DeviceReading] | None) -> None:
        """Degrade the source if the MIG instances of a GPU cannot be read, and log that once."""
        unread = [d for d in instances or () if d.kind == "gpu"]
        gpu.degraded += [Degraded(SOURCE, f"{d.uuid}: {d.fault}") for d in unread]
        if not unread:
            self._unread.discard(index)
        elif index not in self._unread:
            self._unread.add(index)
            hint = "component deploy/components/mig; with Helm agent.mig: true"
            _log.error("mig_not_readable", uuid=unread[0].uuid, reason=unread[0].fault, hint=hint)

    def _why_no_instance(self) -> str:
        if _MIG_HANDLE in self._gate.forbidden:
            return f"{_MIG_UNREADABLE}: the agent's container has no permission"
        return f"{_MIG_UNREADABLE}: none exists, or the agent's container cannot see them"

    def _measured(self, device: DeviceReading, handle: Any) -> DeviceReading:
        """Return ``device`` with its figures; a stale handle is resolved again, once."""
        try:
            try:
                return self._figures(device, handle)
            except StaleHandle:
                again = self._gate.ask("nvmlDeviceGetHandleByUUID", device.uuid)
                if again is None:
                    return replace(device, fault="device disappeared while it was read")
                return self._figures(device, again)
        except (DeviceFault, StaleHandle) as err:
            return replace(device, fault=str(err))

    def _figures(self, device: DeviceReading, handle: Any) -> DeviceReading:
        memory = self._gate.memory(handle)
        processes = self._gate.processes(handle)
        fault = "" if memory is not None else "driver does not report the memory of this device"
        return replace(device, memory=memory, processes=processes, fault=fault)


def _named_once(devices: Iterable[DeviceReading]) -> Iterator[DeviceReading]:
    """Yield each UUID once; a UUID that several devices report is marked as faulty."""
    by_uuid: dict[str, list[DeviceReading]] = {}
    for device in devices:
        by_uuid.setdefault(device.uuid, []).append(device)
    for first, *others in by_uuid.values():
        yield replace(first, fault="driver reports its UUID for two devices") if others else first


def _bound_back(meter: Meter) -> Callable[[], _Gpu]:
    return lambda: _given_back(meter)


def _given_back(meter: Meter) -> _Gpu:
    meter.keep(())
    return _Gpu()


def _bound(work: Callable[[int], _Gpu], index: int) -> Callable[[], _Gpu]:
    return lambda: work(index)


def _reason(err: Exception) -> str:
    """Return the driver's error as text; for a bug in the agent, the name of the exception."""
    if isinstance(err, (DeviceFault, StaleHandle)):
        return str(err)
    _log.error("driver_not_read", exc_info=err)
    return f"the agent cannot read it: {type(err).__name__}"


def _text(value: Any) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)


def _checkup(ask: Ask) -> Checkup:
    remapped = ask("nvmlDeviceGetRemappedRows")
    pages = ask("nvmlDeviceGetRetiredPagesPendingStatus")
    recovery = ask("nvmlDeviceGetFieldValues", [_RECOVERY_ACTION])
    has_recovery = recovery is not None and recovery[0].nvmlReturn == 0
    return Checkup(
        uncorrected_errors=ask("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE),
        remap_pending=None if remapped is None else bool(remapped[2]),
        remap_failed=None if remapped is None else bool(remapped[3]),
        pages_pending=None if pages is None else bool(pages),
        recovery=int(recovery[0].value.uiVal) if has_recovery else None,
    )
