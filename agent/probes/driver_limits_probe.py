"""Reads the GPU memory limits of containers, which the driver (r615 and newer) keeps per cgroup.

For each cgroup the driver counts the memory that its processes use on a device. Allocations beyond
the hard limit fail. The probe reads the limits of every container of every pod that holds a device,
from the directory of the container's cgroup, because limits are set on this cgroup and not on the
pod's.

With the driver's backend ``dmem`` and a recent kernel, each of these cgroups also has a high-water
mark: the file ``dmem.peak`` contains the maximum number of bytes that its processes ever used, by
memory region. NVML has no call for it.

Limits are only reported. No decision depends on them, because the user who runs the container can
set them.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import structlog

from agent.deadline import Hanging, Worker
from agent.probes.cgroup import container_of
from agent.probes.nvml import LIMITS_CALL, Gate
from agent.probes.nvml_errors import DeviceFault, NvmlError, StaleHandle
from agent.probes.pod_cgroups import folders, pod_cgroups
from agent.probes.readings import (
    Degraded,
    DeviceReading,
    DriverReading,
    FactsReading,
    HighWaterReading,
    HoldingReading,
    LimitReading,
    Reading,
    SourceReading,
)
from agent.probes.replica_ids import resolve
from headroom.contract.quantity import MAX_DEVICE_BYTES

_log = structlog.get_logger()

SOURCE = "limits"

#: Minimum number of seconds between two reads. Limits are not urgent, because no decision depends
#: on them, and finding the cgroups of 768 pods takes a tenth of a sample's time.
ASK_EVERY_S = 15.0

_PEAK_FILE = "dmem.peak"
_MOST_PEAK_BYTES = 1 << 16
#: A line of ``dmem.peak`` about the memory of a GPU, with the GPU's PCI address and bytes. Example:
#: nvidia/0000:17:00.0/vidmem 8589934592
_PEAK_LINE = re.compile(
    r"nvidia/(?P<pci>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-7])?/vidmem"
    r" (?P<bytes>[0-9]{1,19})"
)

_Container = tuple[str, str, str]  # uid of the pod, container id, directory


class LimitsProbe:
    """Reads the limits of containers. ``root`` is the host's /sys/fs/cgroup.

    ``deadline_s`` is the total timeout of the driver calls in one read. ``ask_every_s`` is the
    minimum time between two reads.
    """

    def __init__(
        self,
        gate: Gate,
        deadline_s: float,
        root: Path,
        ask_every_s: float = 0.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask_every_s = ask_every_s
        self._monotonic = monotonic
        #: When the limits were last read. With -infinity, the next sample reads them again.
        self._asked_s = float("-inf")
        self._last: list[Reading] = []
        self._gate = gate
        self._deadline_s = deadline_s
        self._root = root
        self._worker: Worker[list[Reading]] = Worker("limits")

    @property
    def hanging(self) -> bool:
        """Whether a driver call of this probe has not returned."""
        return self._worker.busy

    def close(self) -> None:
        self._worker.close()

    def follow(self, readings: Sequence[Reading]) -> list[Reading]:
        """Return the readings of limits and high-water marks, and the state of the source.

        There is a ``LimitReading`` for each container with a limit or use, and a
        ``HighWaterReading`` for each container with a high-water mark. The figures may be
        ``ask_every_s`` old. Raises nothing.
        """
        pods = _holders(readings)
        if not pods or any(isinstance(r, DriverReading) and r.why_not for r in readings):
            self._asked_s = float("-inf")
            return []
        if self._monotonic() - self._asked_s >= self._ask_every_s:
            self._asked_s = float("-inf")
            try:
                self._last = self._read(pods, readings)
                self._asked_s = self._monotonic()
            except Hanging:
                return _degraded(self._gate.why_late(self._worker.thread_id))
            except NvmlError as err:
                return _degraded(str(err))
            except Exception as err:  # noqa: BLE001 - a probe never raises
                _log.error("limits_not_read", exc_info=err)
                return _degraded(f"the agent cannot read the limits: {type(err).__name__}")
        return [
            reading
            for reading in self._last
            if not isinstance(reading, LimitReading | HighWaterReading)
            or reading.uid in pods.get(reading.device, ())
        ]

    def _read(self, pods: Mapping[str, set[str]], readings: Sequence[Reading]) -> list[Reading]:
        """Read all limits. ``pods`` contains the uids of the pods that hold each device.

        Raises ``Hanging`` and ``NvmlError``.
        """
        if not self._gate.has(LIMITS_CALL):
            why = "this driver does not support memory limits; r615 and newer do"
            return [SourceReading(SOURCE, "absent", why)]
        if not (self._root / "cgroup.controllers").exists():
            return [SourceReading(SOURCE, "absent", f"{self._root} has no cgroups (v2)")]
        seen = pod_cgroups(self._root)
        if not seen:  # Not even the agent's own pod has a cgroup there.
            why = f"no pod's cgroup is in {self._root}: mount the host's /sys/fs/cgroup there"
            return _degraded(why)
        asked = {
            device: [
                (uid, container_id, each.path)
                for uid in sorted(uids & seen.keys())
                for each in folders(seen[uid])
                if (container_id := container_of(each.name))
            ]
            for device, uids in pods.items()
        }
        found = self._worker.run(lambda: list(self._ask(asked)), self._deadline_s)
        addresses = {_pci(r.pci_bus_id): r.uuid for r in readings if isinstance(r, FactsReading)}
        return [SourceReading(SOURCE), *found, *_high_water(asked, addresses)]

    def _ask(self, asked: Mapping[str, Sequence[_Container]]) -> Iterator[Reading]:
        """Make the driver calls for these containers, by device. Runs in the worker's thread."""
        for device, containers in asked.items():
            try:
                handle = self._gate.ask("nvmlDeviceGetHandleByUUID", device)
            except (DeviceFault, StaleHandle) as err:
                yield Degraded(SOURCE, f"{device}: {err}")
                continue
            for uid, container_id, folder in containers if handle is not None else ():
                try:
                    limits = self._gate.limits(handle, folder)
                except (DeviceFault, StaleHandle) as err:
                    # Continue, because a cgroup that cannot be read must not hide the others.
                    yield Degraded(SOURCE, f"{device}: {err}")
                    continue
                if limits is None:
                    continue
                soft, hard = _limit(limits.soft_bytes), _limit(limits.hard_bytes)
                used_bytes = min(limits.used_bytes, MAX_DEVICE_BYTES)
                if used_bytes or soft is not None or hard is not None:
                    yield LimitReading(SOURCE, device, uid, container_id, used_bytes, soft, hard)


def _degraded(why: str) -> list[Reading]:
    return [SourceReading(SOURCE, "degraded", why)]


def _holders(readings: Sequence[Reading]) -> dict[str, set[str]]:
    """Return the uids of the pods that hold each healthy GPU without MIG.

    MIG devices have no limits.
    """
    devices = [r for r in readings if isinstance(r, DeviceReading)]
    healthy = {d.uuid for d in devices if d.kind == "gpu" and not d.fault}
    holdings = [r for r in readings if isinstance(r, HoldingReading) and r.uid]
    device_of = resolve({holding.replica for holding in holdings}, devices)
    found: dict[str, set[str]] = {}
    for holding in holdings:
        device = device_of.get(holding.replica)
        if device in healthy:
            found.setdefault(device, set()).add(holding.uid)
    return found


def _high_water(
    asked: Mapping[str, Sequence[_Container]], addresses: Mapping[tuple[int, ...], str]
) -> Iterator[HighWaterReading]:
    """Yield the high-water marks of the containers in ``asked``, which lists them by device.

    ``addresses`` maps PCI addresses to devices.
    """
    holders = {each: asked[device] for device in asked for each in asked[device]}
    for uid, container_id, folder in holders:
        for pci, peak_bytes in _peaks(folder):
            device = addresses.get(pci, "")
            if device in asked and (uid, container_id, folder) in asked[device]:
                yield HighWaterReading(_PEAK_FILE, device, uid, container_id, peak_bytes)


def _peaks(folder: str) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield (PCI address, bytes) for each high-water mark of a cgroup. Without the file there are
    none."""
    try:
        with open(f"{folder}/{_PEAK_FILE}", "rb") as file:
            text = file.read(_MOST_PEAK_BYTES).decode("ascii", "replace")
    except OSError:
        return
    for line in text.splitlines():
        found = _PEAK_LINE.fullmatch(line)
        if found and 0 < int(found["bytes"]) <= MAX_DEVICE_BYTES:
            yield _pci(found["pci"]), int(found["bytes"])


def _pci(address: str) -> tuple[int, ...]:
    """Return domain, bus and device of a PCI address such as 00000000:0F:00.0, or () if unknown."""
    try:
        return tuple(int(part, 16) for part in address.partition(".")[0].split(":"))
    except ValueError:
        return ()


def _limit(figure: int | None) -> int | None:
    """Return a limit in bytes, or None if it is 0 or larger than the memory of any device."""
    return figure if figure and figure <= MAX_DEVICE_BYTES else None
