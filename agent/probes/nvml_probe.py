"""The NVML probe, which reads all devices of the node, with a deadline for each GPU.

Between cycles the probe keeps only the identities of devices. A lost GPU no longer reports its UUID
but still has its index, so it is identified as the device last seen at this index.

Every physical GPU is read in its own thread, so a call that never returns makes only this GPU
unhealthy. Calls about the driver itself run in another thread. If these calls fail or hang, all
devices are unhealthy.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog
from msgspec.structs import replace

from agent.deadline import Hanging, Worker
from agent.probes.cause import Cause
from agent.probes.gpu_count import GpuCount
from agent.probes.nvml import Gate
from agent.probes.nvml_errors import (
    DeviceFault,
    DeviceLost,
    DriverGone,
    NoDriver,
    NvmlError,
    StaleHandle,
)
from agent.probes.nvml_gpu import SOURCE, GpuReader, GpuReadings
from agent.probes.readings import Degraded, DeviceReading, DriverReading
from headroom.contract.gpunode import MAX_DEVICES

_log = structlog.get_logger()

T = TypeVar("T")
_SILENT = Cause("the driver does not answer", "driver")
_NAMED_TWICE = Cause("driver reports its UUID for two devices", "identity")


@dataclass(slots=True)
class Found(GpuReadings):
    """Everything that one cycle read from the driver."""

    driver: DriverReading = field(kw_only=True)
    #: Whether a driver call has not returned.
    hanging: bool = False
    #: Whether every GPU is lost or waits for a reset. The driver counts devices when it is opened,
    #: so it must be opened again to list other devices.
    unusable: bool = False
    #: Whether the driver must be opened again because the kernel has a different number of GPUs.
    is_miscounted: bool = False


@dataclass(frozen=True, slots=True)
class _System:
    version: str
    cuda_version: str
    count: int


class NvmlProbe:
    """Reads all devices through NVML. ``cgroup`` has the same meaning as in ``GpuReader``."""

    def __init__(
        self,
        gate: Gate,
        deadline_s: float = 10.0,
        sysfs: Path = Path("/sys"),
        cgroup: str | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gate = gate
        self._deadline_s = deadline_s
        self._sysfs = sysfs
        self._cgroup = cgroup
        self._gpu_count = GpuCount(sysfs, monotonic)
        self._system: Worker[_System | None] = Worker("nvml")
        self._workers: dict[int, Worker[GpuReadings | None]] = {}
        #: The reader of each GPU index. Only the worker of the index uses it.
        self._readers: dict[int, GpuReader] = {}
        #: The devices last seen at each GPU index, including MIG devices, without figures.
        self._identities: dict[int, list[DeviceReading]] = {}
        #: The last logged reason why the driver was released. Empty if it is open.
        self._released_for = ""

    def read(self) -> Found:
        """Read every device of the node. The call takes at most two deadlines, and raises nothing.

        If the driver cannot be read, return the devices seen last with a fault.
        """
        if self._released_for:
            _log.info("driver_opened_again", reason=f"no longer: {self._released_for}")
            self._released_for = ""
        try:
            system = self._in_time(self._system, self._ask_system)
        except NoDriver as err:
            return self._blind(str(err))
        except DriverGone as err:
            return self._gone(err)
        except Hanging as err:
            return self._blind(f"driver does not answer: {err}", hanging=True)
        except Exception as err:  # noqa: BLE001 - a probe never raises
            # The fault may affect every device, so no device can be trusted.
            return self._blind(f"driver does not answer: {_reason(err)}")
        assert system is not None
        try:
            return self._read_gpus(system)
        except DriverGone as err:
            return self._gone(err)

    def _gone(self, err: DriverGone) -> Found:
        why_not = f"driver was unloaded or replaced: {err}; the agent restarts itself"
        return self._blind(why_not, gone=True, hanging=self._busy)

    def release(self, *, may_close: bool) -> bool:
        """Close the driver until the next ``read``, and return whether it was closed.

        The driver stays open while a call of this probe is in progress. ``may_close`` must be false
        while other code has a call in progress.
        """
        if not may_close or self._system.busy or self._busy:
            return False
        until_s = time.monotonic() + self._deadline_s
        try:
            for index in [*self._readers]:
                worker = self._workers[index]
                given = worker.give(self._readers.pop(index).close)
                self._result(worker, given, until_s)
            self._in_time(self._system, self._gate.stop)
        except (NvmlError, Hanging) as err:
            _log.warning("driver_not_released", reason=str(err))
            return False
        self._gpu_count.closed()
        return True

    def released(self, why: Cause, *, may_close: bool) -> Found:
        """Close the driver if possible, and return the devices seen last with ``why`` as their
        fault.

        This method replaces ``read`` for every sample while the driver must be released.
        """
        closed = self.release(may_close=may_close)
        state = "released" if closed else "being released"
        if closed and why != self._released_for:
            _log.info("driver_released", reason=why)
            self._released_for = why
        fault = Cause(f"the driver is released: {why}", "driver")
        return self._blind(Cause(f"driver is {state}: {why}", why.code), fault)

    def close(self) -> None:
        self._system.close()
        for worker in self._workers.values():
            worker.close()

    @property
    def _busy(self) -> bool:
        return any(worker.busy for worker in self._workers.values())

    def _read_gpus(self, system: _System) -> Found:
        """Read all GPUs at the same time, each in its thread. Raises ``DriverGone``."""
        driver = DriverReading(SOURCE, system.version, cuda_version=system.cuda_version)
        found = Found(driver=driver)
        seen: dict[int, list[DeviceReading]] = {}
        #: Why a GPU could not be read, by its index.
        lost: dict[int, Cause] = {}
        gone: DriverGone | None = None
        unusable_count = 0
        for index in [index for index in self._workers if index >= system.count]:
            self._remove(index)
        given = {index: self._begin(index) for index in range(system.count)}
        until_s = time.monotonic() + self._deadline_s
        for index in given:
            try:
                gpu = self._result(self._workers[index], given[index], until_s)
            except DriverGone as err:
                # Wait for the other workers, because their results belong to this cycle.
                gone = err
            except Hanging as err:
                lost[index], found.hanging = Cause(str(err), "hang"), True
            except Exception as err:  # noqa: BLE001 - a probe never raises
                lost[index] = _reason(err)
                unusable_count += isinstance(err, DeviceLost)
            else:
                assert gpu is not None
                unusable_count += any(c.needs_reset for c in gpu.checkups.values())
                seen[index] = gpu.devices
                found.add(gpu)
        if gone is not None:
            raise gone
        found.unusable = unusable_count == system.count
        found.is_miscounted = self._gpu_count.compare(system.count)
        present = {device.uuid for devices in seen.values() for device in devices}
        for index, why in lost.items():
            known = [d for d in self._identities.get(index, []) if d.uuid not in present]
            if not known:
                what = f"device {index} does not report its UUID: {why}"
                found.degraded.append(Degraded(SOURCE, what))
            seen[index] = [replace(device, fault=why) for device in known]
        self._identities = {
            index: [replace(d, memory=None, processes=None, fault="") for d in devices]
            for index, devices in seen.items()
        }
        found.devices = list(_named_once(device for i in sorted(seen) for device in seen[i]))
        found.degraded += [Degraded(SOURCE, what) for what in self._lacks(found.devices)]
        return found

    def _lacks(self, devices: Iterable[DeviceReading]) -> Iterator[str]:
        """Yield a message for everything that the driver does not show to this agent."""
        if any(d.processes is None for d in devices if d.memory is not None):  # vGPU guests, WSL
            yield "driver lists no processes: memory in use cannot be attributed to pods"
        yield from (f"no permission for {name}" for name in sorted(self._gate.forbidden))
        yield from self._gpu_count.messages()

    def _begin(self, index: int) -> bool:
        """Start to read the GPU at ``index``, and return False if the previous call has not
        returned."""
        if index not in self._workers:
            self._workers[index] = Worker(f"nvml-{index}")
        if index not in self._readers:
            self._readers[index] = GpuReader(self._gate, index, self._sysfs, self._cgroup)
        is_known = bool(self._identities.get(index))
        return self._workers[index].give(partial(self._readers[index].read, is_known))

    def _remove(self, index: int) -> None:
        """Remove the reader of a GPU that is gone. The next call also ends its thread.

        The reader frees the samples that the driver holds. While a call hangs in the thread, the
        samples and the thread stay, so a GPU that appears at ``index`` has to wait.
        """
        if (reader := self._readers.pop(index, None)) is not None:
            self._workers[index].give(reader.close)
        elif not self._workers[index].busy:
            self._workers.pop(index).close()

    def _blind(
        self,
        why_not: str,
        fault: Cause = _SILENT,
        gone: bool = False,
        hanging: bool = False,
    ) -> Found:
        """Report the devices seen last with ``fault``, because the driver cannot be read now."""
        devices = _named_once(
            replace(device, fault=fault)
            for devices in self._identities.values()
            for device in devices
        )
        driver = DriverReading(SOURCE, why_not=why_not, gone=gone)
        return Found(list(devices), driver=driver, hanging=hanging)

    def _in_time(self, worker: Worker[T], work: Callable[[], T]) -> T:
        """Run ``work`` within the deadline and return its result. Raises ``Hanging``."""
        return self._result(worker, worker.give(work), time.monotonic() + self._deadline_s)

    def _result(self, worker: Worker[T], given: bool, until_s: float) -> T:
        """Return the result of the worker's job. Raises ``Hanging`` with the name of the pending
        call.

        ``given`` states whether the worker has started the job.
        """
        try:
            if given:
                return worker.result(until_s)
        except Hanging:
            pass
        raise Hanging(self._gate.why_late(worker.thread_id))

    def _ask_system(self) -> _System:
        """Open the driver if necessary, and return its versions and the number of GPUs."""
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


def _named_once(devices: Iterable[DeviceReading]) -> Iterator[DeviceReading]:
    """Yield each UUID once. A UUID that several devices report is marked as faulty."""
    by_uuid: dict[str, list[DeviceReading]] = {}
    for device in devices:
        by_uuid.setdefault(device.uuid, []).append(device)
    for first, *others in by_uuid.values():
        yield replace(first, fault=_NAMED_TWICE) if others else first


def _reason(err: Exception) -> Cause:
    """Return the text of a driver's error, or the name of the exception for a bug in the agent."""
    if isinstance(err, (DeviceFault, StaleHandle)):
        return err.cause
    _log.error("driver_not_read", exc_info=err)
    return Cause(f"the agent cannot read it: {type(err).__name__}", "other")
