"""The NVML probe: which devices the node has, what each holds, and which cannot be trusted.

Handles live for one cycle: they are resolved anew each time, because a driver reload, a MIG change
or a device that fell off the bus makes old ones name nothing, or something else. Between cycles
only identities are kept. A lost GPU no longer tells its UUID, but its index still counts, so
what was last seen at that index is what was lost.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from agent.nvml import DeviceFault, Gate, NoDriver, StaleHandle
from agent.probes import Degraded, DeviceReading, DriverReading, Reading

SOURCE = "nvml"

_MIG_ENABLED = 1


class NvmlProbe:
    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        #: index of the physical GPU -> what was last seen there, MIG devices included; no figures.
        self._identities: dict[int, list[DeviceReading]] = {}

    def read(self) -> Iterable[Reading]:
        """Every device of the node. Raises ``DriverGone``."""
        try:
            self._gate.start()
            self._gate.forbidden.clear()
            version = self._gate.ask("nvmlSystemGetDriverVersion") or ""
            count = self._gate.ask("nvmlDeviceGetCount")
        except NoDriver as err:
            return [DriverReading(SOURCE, why_not=str(err))]
        except (DeviceFault, StaleHandle) as err:
            # A fault without a device: nothing of this driver can be trusted.
            return [DriverReading(SOURCE, why_not=f"driver does not answer: {err}")]
        if count is None:
            return [
                DriverReading(SOURCE, why_not="driver does not tell how many devices there are")
            ]
        readings: list[Reading] = [DriverReading(SOURCE, version=version)]
        seen: dict[int, list[DeviceReading]] = {}
        lost: dict[int, str] = {}
        for index in range(count):
            try:
                seen[index] = list(self._at(index))
            except (DeviceFault, StaleHandle) as err:
                lost[index] = str(err)
        present = {device.uuid for devices in seen.values() for device in devices}
        for index, why in lost.items():
            known = [d for d in self._identities.get(index, []) if d.uuid not in present]
            if not known:
                readings.append(Degraded(SOURCE, f"device {index} does not tell its UUID: {why}"))
            seen[index] = [replace(device, fault=why) for device in known]
        self._identities = {
            index: [replace(d, memory=None, processes=None, fault="") for d in devices]
            for index, devices in seen.items()
        }
        readings += [device for devices in seen.values() for device in devices]
        readings += [
            Degraded(SOURCE, f"no permission for {name}") for name in sorted(self._gate.forbidden)
        ]
        return readings

    def _at(self, index: int) -> Iterator[DeviceReading]:
        """The GPU at ``index``, or its MIG devices where it is cut into those.

        Raises ``DeviceFault`` or ``StaleHandle`` where it cannot be told which of the two it is.
        """
        handle = self._gate.ask("nvmlDeviceGetHandleByIndex", index)
        uuid = None if handle is None else self._gate.ask("nvmlDeviceGetUUID", handle)
        if uuid is None:
            raise DeviceFault("no handle or no UUID")
        device = DeviceReading(SOURCE, uuid=uuid, index=index)
        try:
            device = replace(device, model=self._gate.ask("nvmlDeviceGetName", handle) or "")
            mode = self._gate.ask("nvmlDeviceGetMigMode", handle)
            instances = None
            if mode is not None and mode[0] == _MIG_ENABLED:
                instances = list(self._instances(handle, uuid, index))
        except (DeviceFault, StaleHandle) as err:
            if self._identities.get(index):
                raise  # what was last seen here is at fault: perhaps MIG devices, not this GPU
            yield replace(device, fault=str(err))
            return
        if instances is None:
            yield self._measured(device, handle)
        else:
            yield from instances

    def _instances(self, parent: Any, parent_uuid: str, index: int) -> Iterator[DeviceReading]:
        """The MIG devices of one GPU.

        Compute instances of one GPU instance share its memory, so it is read once for each
        (parent, GPU instance) and all that share it report the same figures.
        """
        read: dict[int, DeviceReading] = {}
        for slot in range(self._gate.ask("nvmlDeviceGetMaxMigDeviceCount", parent) or 0):
            try:
                handle = self._gate.ask("nvmlDeviceGetMigDeviceHandleByIndex", parent, slot)
            except StaleHandle:
                handle = None  # some drivers say INVALID_ARGUMENT, not NOT_FOUND, for an empty slot
            if handle is None:
                continue
            uuid = self._gate.ask("nvmlDeviceGetUUID", handle)
            instance = self._gate.ask("nvmlDeviceGetGpuInstanceId", handle)
            if uuid is None or instance is None:
                raise DeviceFault(f"MIG device {slot} tells no UUID or no GPU instance")
            device = DeviceReading(
                SOURCE,
                uuid=uuid,
                index=index,
                model=self._gate.ask("nvmlDeviceGetName", handle) or "",
                kind="mig",
                parent=parent_uuid,
                gpu_instance=instance,
            )
            if instance not in read:
                read[instance] = self._measured(device, handle)
            shared = read[instance]
            yield replace(
                device, memory=shared.memory, processes=shared.processes, fault=shared.fault
            )

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
