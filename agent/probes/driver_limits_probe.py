"""What the driver itself grants containers: limits per cgroup, which drivers have from r615 on.

The driver counts for each cgroup what its processes take of a device, and refuses what is beyond
the hard limit. It is asked for every container of every pod that holds a device, by the directory
of the container's cgroup: limits are set there, and not on the pod's. A limit is reported and
nothing is decided from it: who may set one is who runs the container.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import structlog

from agent.deadline import Hanging, Worker
from agent.probes.cgroup import container_of, pod_of
from agent.probes.nvml import LIMITS_CALL, DeviceFault, Gate, NvmlError, StaleHandle
from agent.probes.readings import (
    Degraded,
    DeviceReading,
    DriverReading,
    HoldingReading,
    LimitReading,
    Reading,
    SourceReading,
)
from agent.probes.replica_ids import resolve
from contract.gpunode import MAX_DEVICE_BYTES

_log = structlog.get_logger()

SOURCE = "limits"

#: Nothing is decided from limits, and finding the cgroups of 768 pods takes a tenth of a sample.
ASK_EVERY_S = 15.0

#: kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/<pod>
_MOST_LEVELS = 4

_Container = tuple[str, str, str]  # uid of the pod, id, directory


class LimitsProbe:
    """``root`` is the host's /sys/fs/cgroup, or where it is mounted."""

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
        #: When the driver was last asked, and what came of it.
        self._asked_s = float("-inf")
        self._last: list[Reading] = []
        self._gate = gate
        self._deadline_s = deadline_s
        self._root = root
        self._worker: Worker[list[Reading]] = Worker("limits")

    @property
    def hanging(self) -> bool:
        return self._worker.busy

    def close(self) -> None:
        self._worker.close()

    def follow(self, readings: Sequence[Reading]) -> list[Reading]:
        """A ``LimitReading`` for each container that has a limit or memory; raises nothing."""
        pods = _holders(readings)
        if not pods or any(isinstance(r, DriverReading) and r.why_not for r in readings):
            self._asked_s = float("-inf")
            return []
        if self._monotonic() - self._asked_s < self._ask_every_s:
            there = {(device, uid) for device, uids in pods.items() for uid in uids}
            return [
                reading
                for reading in self._last
                if not isinstance(reading, LimitReading) or (reading.device, reading.uid) in there
            ]
        self._asked_s = float("-inf")
        try:
            self._last = self._look(pods)
            self._asked_s = self._monotonic()
            return self._last
        except Hanging:
            why = self._gate.why_late(self._worker.thread_id)
        except NvmlError as err:
            why = str(err)
        except Exception as err:  # noqa: BLE001 - a probe never raises
            _log.error("limits_not_read", exc_info=err)
            why = f"the agent cannot read them: {type(err).__name__}"
        return [SourceReading(SOURCE, "degraded", why)]

    def _look(self, pods: Mapping[str, set[str]]) -> list[Reading]:
        """``pods`` are the uids of those that hold some of each device."""
        if not self._gate.has(LIMITS_CALL):
            return [SourceReading(SOURCE, "absent", "this driver has none; r615 and newer do")]
        if not (self._root / "cgroup.controllers").exists():
            return [SourceReading(SOURCE, "absent", f"{self._root} has no cgroups (v2)")]
        seen = dict(_pods(str(self._root), 0))
        if not seen:  # not even that of the agent itself
            why = f"no pod's cgroup is seen in {self._root}: the host's has to be mounted there"
            return [SourceReading(SOURCE, "degraded", why)]
        asked = {
            device: [
                (uid, container_id, each.path)
                for uid in sorted(uids & seen.keys())
                for each in _folders(seen[uid])
                if (container_id := container_of(each.name))
            ]
            for device, uids in pods.items()
        }
        if not self._worker.give(lambda: list(self._ask(asked))):
            raise Hanging
        found = self._worker.result(time.monotonic() + self._deadline_s)
        return [SourceReading(SOURCE), *found]

    def _ask(self, asked: Mapping[str, Sequence[_Container]]) -> Iterator[Reading]:
        for device, containers in asked.items():
            try:
                handle = self._gate.ask("nvmlDeviceGetHandleByUUID", device)
                for uid, container_id, folder in containers if handle is not None else ():
                    limits = self._gate.limits(handle, folder)
                    if limits is None:
                        continue
                    soft, hard = _limit(limits.soft_bytes), _limit(limits.hard_bytes)
                    used_bytes = min(limits.used_bytes, MAX_DEVICE_BYTES)
                    if used_bytes or soft is not None or hard is not None:
                        yield LimitReading(
                            SOURCE, device, uid, container_id, used_bytes, soft, hard
                        )
            except (DeviceFault, StaleHandle) as err:
                yield Degraded(SOURCE, f"{device}: {err}")


def _holders(readings: Sequence[Reading]) -> dict[str, set[str]]:
    """Device -> uids of the pods that hold some of it. MIG devices have no limits."""
    devices = [r for r in readings if isinstance(r, DeviceReading)]
    sound = {d.uuid for d in devices if d.kind == "gpu" and not d.fault}
    holdings = [r for r in readings if isinstance(r, HoldingReading) and r.uid]
    device_of = resolve({holding.replica for holding in holdings}, devices)
    found: dict[str, set[str]] = {}
    for holding in holdings:
        device = device_of.get(holding.replica)
        if device in sound:
            found.setdefault(device, set()).add(holding.uid)
    return found


def _pods(folder: str, level: int) -> Iterator[tuple[str, str]]:
    """Uid and cgroup directory of every pod; what is not below the kubelet's is not looked at."""
    for each in _folders(folder):
        if uid := pod_of(each.name):
            yield uid, each.path
        elif level < _MOST_LEVELS and (level or "kube" in each.name):
            yield from _pods(each.path, level + 1)


def _folders(folder: str) -> list[os.DirEntry[str]]:
    """What lies in a folder; of one that went meanwhile, nothing."""
    try:
        with os.scandir(folder) as entries:
            return [each for each in entries if each.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _limit(figure: int | None) -> int | None:
    """None where it is no limit: of zero bytes, or of more than any device has."""
    return figure if figure and figure <= MAX_DEVICE_BYTES else None
