"""Decides which device a replica id of a device plugin means. Pure.

GPU-<uuid>  MIG-<uuid>            a whole device
GPU-<uuid>::3  MIG-<uuid>::3      a share of one, by NVIDIA's plugin
MIG-GPU-<uuid>/<gi>/<ci>          a MIG device as drivers before r470 named it
nvidia0/vgpu3  nvidia0/gi1        GKE's plugin: a share, a MIG device of /dev/nvidia0
nvidia0/gi1/vgpu2                 both
all                               WSL: the one device that there is
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from agent.probes.readings import DeviceReading

_SHARE = re.compile(r"(?P<device>.+)(?:::|/vgpu)(?P<number>\d{1,6})")
_LEGACY_MIG = re.compile(r"MIG-(?P<gpu>GPU-.+)/(?P<instance>\d{1,6})/(?P<compute>\d{1,6})")
_GKE = re.compile(r"nvidia(?P<minor>\d{1,6})(?:/gi(?P<instance>\d{1,6}))?")


@dataclass(frozen=True, slots=True)
class Replica:
    """An id taken apart."""

    device: str
    #: Which share of the device; None where the id is that of a whole one.
    number: int | None


@lru_cache(maxsize=1024)
def parse(replica: str) -> Replica:
    if match := _SHARE.fullmatch(replica):
        return Replica(match["device"], int(match["number"]))
    return Replica(replica, None)


def resolve(replicas: Iterable[str], devices: Sequence[DeviceReading]) -> dict[str, str]:
    """Replica id -> uuid of its device; what means none of ``devices``, or several, is left out."""
    by_uuid = {device.uuid for device in devices}
    cache: dict[str, str | None] = {}
    found: dict[str, str] = {}
    for replica in replicas:
        name = parse(replica).device
        if name not in cache:
            cache[name] = name if name in by_uuid else _by_place(name, devices)
        uuid = cache[name]
        if uuid is not None:
            found[replica] = uuid
    return found


def _by_place(name: str, devices: Sequence[DeviceReading]) -> str | None:
    if match := _LEGACY_MIG.fullmatch(name):
        # Compute instances of one GPU instance cannot be told apart by what the driver lists.
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
        there = [device.uuid for device in devices] if name == "all" else []
    return there[0] if len(there) == 1 else None


def _minor(device: DeviceReading) -> int:
    """Where the driver does not tell, it numbers devices in the same order as a rule."""
    return device.index if device.minor is None else device.minor
