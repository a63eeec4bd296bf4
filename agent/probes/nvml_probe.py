"""The NVML probe: which devices the node has, what each holds, and which cannot be trusted.

Handles live for one cycle: they are resolved anew each time, because a driver reload, a MIG change
or a device that fell off the bus makes old ones name nothing, or something else. Between cycles
only identities are kept. A lost GPU no longer tells its UUID, but its index still counts, so
what was last seen at that index is what was lost.

Every physical GPU is read in a thread of its own and awaited with a deadline, and so are the calls
that are about no device: one that never returns takes its device with it and nothing else.
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
#: Asks the driver by the name of a function, with what comes after the handle; None where it does
#: not tell.
Ask = Callable[..., Any]

SOURCE = "nvml"

_MIG_ENABLED = 1
_MIG_HANDLE = "nvmlDeviceGetMigDeviceHandleByIndex"
_MIG_UNREADABLE = "MIG is on and no instance can be read"
_MIG_FORBIDDEN = "whether MIG is on may not be read"
_UNCHECKED_CGROUP = (
    "whether the agent's own cgroup has a GPU memory limit, which would hide the devices' memory,"
    " cannot be checked: mount the host's /sys/fs/cgroup there"
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
    """All that one look at the driver tells."""

    driver: DriverReading
    devices: list[DeviceReading] = field(default_factory=list)
    facts: list[FactsReading] = field(default_factory=list)
    #: Of several sources for one device.
    activity: list[ActivityReading] = field(default_factory=list)
    #: Physical GPU -> its state.
    checkups: dict[str, Checkup] = field(default_factory=dict)
    degraded: list[Degraded] = field(default_factory=list)
    #: Whether some call has not returned.
    hanging: bool = False
    #: Whether no GPU is left that is neither lost nor waits for a reset. The driver counts the
    #: devices that are there when it is opened, so it has to be opened again to see others.
    unusable: bool = False


@dataclass(slots=True)
class _Gpu:
    """What one index tells: the GPU there, or the MIG devices it is cut into."""

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
    """``cgroup`` is the full path of our own cgroup's directory: empty if it is not known, None if
    the machine has no cgroups that could have limits."""

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
        #: By index, each used by the worker of that index alone.
        self._meters: dict[int, Meter] = {}
        #: index of the physical GPU -> what was last seen there, MIG devices included; no figures.
        self._identities: dict[int, list[DeviceReading]] = {}
        #: Indices of GPUs whose MIG instances could not be read at the last sample.
        self._unread: set[int] = set()
        #: Why the driver is left alone, as it was logged last.
        self._left_alone = ""

    def look(self) -> Found:
        """Every device of the node; takes no longer than two deadlines, and raises nothing."""
        if self._left_alone:
            _log.info("driver_opened_again", reason=f"no longer: {self._left_alone}")
            self._left_alone = ""
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
            # A fault without a device: nothing of this driver can be trusted.
            return self._blind(
                DriverReading(SOURCE, why_not=f"driver does not answer: {_told(err)}")
            )
        return self._look_at_devices(system)

    def release(self, *, may_close: bool) -> bool:
        """Close the driver until the next ``look``; whether that was done.

        It is not while a call is under way: ours, or one of others, who say so by ``may_close``.
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
        """What is reported while the driver is left alone; it is closed as soon as it can be."""
        closed = self.release(may_close=may_close)
        state = "released" if closed else "being released"
        if closed and why != self._left_alone:
            _log.info("driver_released", reason=why)
            self._left_alone = why
        return self._blind(
            DriverReading(SOURCE, why_not=f"driver is {state}: {why}"),
            f"the driver is left alone: {why}",
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
                gone = err  # the others are awaited all the same: they are of this look
            except Hanging as err:
                lost[index], hanging = str(err), True
            except Exception as err:  # noqa: BLE001 - a probe never raises
                lost[index] = _told(err)
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
                what = f"device {index} does not tell its UUID: {why}"
                found.degraded.append(Degraded(SOURCE, what))
            seen[index] = [replace(device, fault=why) for device in known]
        told = [d for devices in seen.values() for d in devices if d.memory is not None]
        if any(device.processes is None for device in told):  # vGPU guests, WSL
            what = "driver lists no processes: of the memory in use nobody can tell whose it is"
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
                f"the kernel has {attached} of NVIDIA's GPUs and the driver shows none to this"
                " container: delete the agent's pod when the driver is ready"
            )
            found.degraded.append(Degraded(SOURCE, what))
        return replace(found, hanging=hanging, unusable=unusable == system.count)

    def _attached(self) -> int:
        """NVIDIA's GPUs that the kernel has given to NVIDIA's driver."""
        found = 0
        for device in self._sysfs.glob("bus/pci/devices/*"):
            with contextlib.suppress(OSError):
                is_gpu = (device / "class").read_text().startswith(_GPU_CLASSES)
                found += is_gpu and (device / "driver").readlink().name == "nvidia"
        return found

    def _part(self, index: int) -> None:
        """Give back what the driver keeps for the GPU that was at ``index``, and then its thread.

        In that thread, since the call may hang like any other; where one hangs there already, what
        is kept is lost with it. Should the GPU come back, it has to wait for the thread.
        """
        if (meter := self._meters.pop(index, None)) is not None:
            self._workers[index].give(_bound_back(meter))
        elif not self._workers[index].busy:
            self._workers.pop(index).close()

    def _gone(self, err: DriverGone) -> Found:
        why_not = f"driver was unloaded or replaced: {err}; the agent starts itself anew"
        found = self._blind(DriverReading(SOURCE, why_not=why_not, gone=True))
        return replace(found, hanging=any(w.busy for w in self._workers.values()))

    def _blind(self, driver: DriverReading, fault: str = "the driver does not answer") -> Found:
        """Nothing is known now; the devices seen last are still named, none can be trusted."""
        devices = [
            replace(device, fault=fault)
            for devices in self._identities.values()
            for device in devices
        ]
        return Found(driver, list(_named_once(devices)))

    def _in_time(self, worker: Worker[_System], work: Callable[[], _System]) -> _System:
        return self._result(worker, worker.give(work), time.monotonic() + self._deadline_s)

    def _result(self, worker: Worker[T], given: bool, until_s: float) -> T:
        """What the worker's job returned; raises ``Hanging``, naming the call that it sits in."""
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
            raise NoDriver("driver does not tell how many devices there are")
        if count > MAX_DEVICES:
            raise NoDriver(f"driver counts more than {MAX_DEVICES} devices")
        cuda_version = "" if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}"
        return _System(version, cuda_version, count)

    def _at(self, index: int) -> _Gpu:
        """The GPU at ``index``, or its MIG devices where it is cut into those.

        Raises ``DeviceFault`` or ``StaleHandle`` where it cannot be told which of the two it is.
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
                raise  # what was last seen here is at fault: perhaps MIG devices, not this GPU
            gpu.devices.append(replace(device, fault=str(err)))
            return gpu
        gpu.devices = [self._measured(device, handle)] if instances is None else instances
        if mode is not None and mode[0] != mode[1]:
            # It changes as soon as nobody uses the device: whoever came now would be in the way.
            why = "its MIG mode is about to change, which takes a reset"
            gpu.devices = [replace(d, fault=d.fault or why) for d in gpu.devices]
        try:
            self._more(gpu, handle, uuid, index)
        except DeviceLost as err:
            gpu.devices = [replace(d, fault=d.fault or str(err)) for d in gpu.devices]
        return gpu

    def _more(self, gpu: _Gpu, handle: Any, uuid: str, index: int) -> None:
        """All that is good to know: what fails of it is said, and only a lost device is at fault.

        Raises ``DeviceLost`` and ``DriverGone``.
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
            """One that fails spoils no answer to the others."""
            try:
                return question()
            except DeviceLost:
                raise
            except (DeviceFault, StaleHandle) as err:
                if (said := Degraded(SOURCE, f"{uuid}: {err}")) not in gpu.degraded:
                    gpu.degraded.append(said)
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
        """The node whose memory is near the device, from the kernel, where the plugin has it too.

        NVML's NumaNodeId is another thing: the node that the device's own memory is (Grace).
        """
        domain, colon, rest = bus_id.lower().partition(":")
        path = self._sysfs / "bus/pci/devices" / f"{domain[-4:]}{colon}{rest}" / "numa_node"
        try:
            node = int(path.read_text())
        except (OSError, ValueError):
            return None
        return node if bus_id and node >= 0 else None

    def _minor(self, handle: Any) -> int | None:
        """Good to know only: what fails of it is passed over, but for a lost device."""
        try:
            minor = self._gate.ask("nvmlDeviceGetMinorNumber", handle)
        except DeviceLost:
            raise
        except (DeviceFault, StaleHandle):
            return None
        return minor if isinstance(minor, int) else None

    def _instances(self, handle: Any, gpu: DeviceReading) -> Iterator[DeviceReading]:
        """The MIG devices of one GPU.

        Compute instances of one GPU instance share its memory, so all of one (parent, GPU
        instance) report the figures of the first; processes may be listed by each for itself.
        """
        read: dict[int, DeviceReading] = {}
        for slot in range(self._gate.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            try:
                part = self._gate.ask(_MIG_HANDLE, handle, slot)
            except StaleHandle:
                part = None  # some drivers say INVALID_ARGUMENT, not NOT_FOUND, for an empty slot
            if part is None:
                continue
            uuid = self._gate.ask("nvmlDeviceGetUUID", part)
            instance = self._gate.ask("nvmlDeviceGetGpuInstanceId", part)
            if uuid is None or instance is None:
                raise DeviceFault(f"MIG device {slot} tells no UUID or no GPU instance")
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
        """Degrade the source, and log once, if the instances of a GPU cannot be read."""
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
        return f"{_MIG_UNREADABLE}: there is none, or they are not shown to the agent's container"

    def _measured(self, device: DeviceReading, handle: Any) -> DeviceReading:
        """``device`` with its figures; a handle that went stale meanwhile is resolved once more."""
        try:
            try:
                return self._figures(device, handle)
            except StaleHandle:
                again = self._gate.ask("nvmlDeviceGetHandleByUUID", device.uuid)
                if again is None:
                    return replace(device, fault="device went while it was read")
                return self._figures(device, again)
        except (DeviceFault, StaleHandle) as err:
            return replace(device, fault=str(err))

    def _figures(self, device: DeviceReading, handle: Any) -> DeviceReading:
        memory = self._gate.memory(handle)
        processes = self._gate.processes(handle)
        fault = "" if memory is not None else "driver does not tell the memory of this device"
        return replace(device, memory=memory, processes=processes, fault=fault)


def _named_once(devices: Iterable[DeviceReading]) -> Iterator[DeviceReading]:
    """Every UUID once; what is said of one that several devices give cannot be trusted."""
    by_uuid: dict[str, list[DeviceReading]] = {}
    for device in devices:
        by_uuid.setdefault(device.uuid, []).append(device)
    for first, *others in by_uuid.values():
        yield replace(first, fault="driver gives its UUID to two devices") if others else first


def _bound_back(meter: Meter) -> Callable[[], _Gpu]:
    return lambda: _given_back(meter)


def _given_back(meter: Meter) -> _Gpu:
    meter.keep(())
    return _Gpu()


def _bound(work: Callable[[int], _Gpu], index: int) -> Callable[[], _Gpu]:
    return lambda: work(index)


def _told(err: Exception) -> str:
    """What an error says of the driver; of what is a mistake of ours, its name."""
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
    told = recovery is not None and recovery[0].nvmlReturn == 0
    return Checkup(
        uncorrected_errors=ask("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE),
        remap_pending=None if remapped is None else bool(remapped[2]),
        remap_failed=None if remapped is None else bool(remapped[3]),
        pages_pending=None if pages is None else bool(pages),
        recovery=int(recovery[0].value.uiVal) if told else None,
    )
