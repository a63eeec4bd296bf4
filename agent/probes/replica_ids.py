"""Maps the replica ids of a device plugin to devices. Pure.

GPU-<uuid>  MIG-<uuid>            a whole device
GPU-<uuid>::3  MIG-<uuid>::3      a replica of a shared device, by NVIDIA's plugin
MIG-GPU-<uuid>/<gi>/<ci>          a MIG device, as drivers before r470 named it
nvidia0/vgpu3  nvidia0/gi1        GKE's plugin: a replica, a MIG device of /dev/nvidia0
nvidia0/gi1/vgpu2                 GKE's plugin: a replica of a MIG device
all                               WSL: the only device
tegra                             Jetson: the only device
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from agent.probes.readings import DeviceReading

#: Names that NVIDIA's plugin gives to the only device on WSL and on Jetson, respectively.
ONLY_DEVICE = ("all", "tegra")

_SHARE = re.compile(r"(?P<device>.+)(?:::|/vgpu)(?P<number>\d{1,6})")
_LEGACY_MIG = re.compile(r"MIG-(?P<gpu>GPU-.+)/(?P<instance>\d{1,6})/(?P<compute>\d{1,6})")
_GKE = re.compile(r"nvidia(?P<minor>\d{1,6})(?:/gi(?P<instance>\d{1,6}))?")


@dataclass(frozen=True, slots=True)
class Replica:
    """The parts of a replica id."""

    device: str
    #: Number of the replica, or None if the id names a whole device.
    number: int | None


@lru_cache(maxsize=1024)
def parse(replica: str) -> Replica:
    """Split a replica id into device and number."""
    if match := _SHARE.fullmatch(replica):
        return Replica(match["device"], int(match["number"]))
    return Replica(replica, None)


def resolve(replicas: Iterable[str], devices: Sequence[DeviceReading]) -> dict[str, str]:
    """Return the UUID of each replica's device, by replica id.

    Ids that match none or several of ``devices`` are omitted.
    """
    by_uuid = {device.uuid for device in devices}
    cache: dict[str, str | None] = {}
    found: dict[str, str] = {}
    for replica in replicas:
        name = parse(replica).device
        if name not in cache:
            cache[name] = name if name in by_uuid else _by_position(name, devices)
        uuid = cache[name]
        if uuid is not None:
            found[replica] = uuid
    return found


def _by_position(name: str, devices: Sequence[DeviceReading]) -> str | None:
    """Return the UUID of the device with a name that is not a UUID, or None unless exactly one
    device matches."""
    if match := _LEGACY_MIG.fullmatch(name):
        # The driver's process list does not distinguish compute instances of one GPU instance.
        there = [
            device.uuid
            for device in devices
            if device.parent == match["gpu"] and device.gpu_instance == int(match["instance"])
        ]
    elif match := _GKE.fullmatch(name):
        instance = None if match["instance"] is None else int(match["instance"])
        there = [
            device.uuid
            for device in devices
            if _minor(device) == int(match["minor"]) and device.gpu_instance == instance
        ]
    else:
        there = [device.uuid for device in devices] if name in ONLY_DEVICE else []
    return there[0] if len(there) == 1 else None


def _minor(device: DeviceReading) -> int:
    """Return the minor number, or the index if the driver does not report the minor number.

    Devices usually have the same order by either number.
    """
    return device.index if device.minor is None else device.minor
