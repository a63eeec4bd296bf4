"""The keys of KAI, HAMi and gpushare, and how their values are read.

Manifests contain amounts without units: ``gpu-memory`` and ``gpumem`` are in MiB, and
``aliyun.com/gpu-mem`` is in the unit of the plugin's flag ``--memory-unit``. Amounts are computed
with integers and rounded up, so that a pod never gets less memory. The functions that read values
raise ``BadValue``.
"""

import re
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal

from contract.annotations import PPM, Bytes, Share
from contract.errors import BadQuantity, shortened
from contract.quantity import MAX_DEVICE_BYTES, parse_bytes

GPU = "nvidia.com/gpu"

#: schedulerName -> its allocator. Pods that are converted do not need these schedulers.
SCHEDULERS = {"kai-scheduler": "KAI", "hami-scheduler": "HAMi"}

KAI_REQUESTS = (
    "gpu-fraction",
    "gpu-memory",
    "gpu-fraction-num-devices",
    "gpu-fraction-container-name",
)
NV_FRACTION = re.compile(r"nvidia\.com/container\.(.+)\.(gpu-memory\.(?:request|limit))")
_NV_COMPUTE_MODE = re.compile(r"nvidia\.com/container\..+\.gpu-compute\.mode")
HAMI_MEMORY, HAMI_PERCENT = "nvidia.com/gpumem", "nvidia.com/gpumem-percentage"
HAMI_RESOURCES = (HAMI_MEMORY, HAMI_PERCENT, "nvidia.com/gpucores", "nvidia.com/priority")
GPUSHARE_MEMORY = "aliyun.com/gpu-mem"

_NO_COMPUTE = (
    "Headroom does not divide compute; annotation headroom.gpu/max-sm keeps a pod off busy devices"
)
#: Resource without an equivalent -> the reason. They are removed.
LOST_RESOURCES = {
    "nvidia.com/gpucores": _NO_COMPUTE,
    "nvidia.com/priority": "Headroom has no priority between pods on one device",
    "aliyun.com/gpu-core.percentage": _NO_COMPUTE,
}
_NODE_SHARES = "sharing is configured in the device plugin of the node"
_KUBELET_ALIGNS = "the kubelet's Topology Manager aligns the devices of a pod"
#: Annotation without an equivalent -> the reason. They are removed.
LOST_ANNOTATIONS = {
    "gpu-fraction-limit": "Headroom has no burst: a pod reserves the most memory that it uses",
    "gpu-memory-limit": "Headroom has no burst: a pod reserves the most memory that it uses",
    "mps": "MPS is configured in the device plugin of the node",
    "nvidia.com/use-gputype": "select nodes by label nvidia.com/gpu.product instead",
    "nvidia.com/nouse-gputype": "select nodes by label nvidia.com/gpu.product instead",
    "nvidia.com/use-gpuuuid": "a pod cannot choose a device by its uuid",
    "nvidia.com/nouse-gpuuuid": "a pod cannot choose a device by its uuid",
    "nvidia.com/vgpu-mode": _NODE_SHARES,
    "nvidia.com/numa-bind": _KUBELET_ALIGNS,
    "nvidia.com/mig-profile-preference": "request the resource of the MIG profile instead",
    "hami.io/numa-alignment": _KUBELET_ALIGNS,
    "hami.io/gpu-scheduler-policy": "annotation headroom.gpu/policy: pack or spread is similar",
    "hami.io/node-scheduler-policy": "annotation headroom.gpu/policy: pack or spread is similar",
}
#: Labels that are reported but kept, because a selector may depend on them.
QUEUES = ("kai.scheduler/queue", "runai/queue")
#: Annotations and labels that another allocator writes when it places a pod. A manifest has them
#: only if it was copied from a placed pod. Some of them on a bound pod make its node ineligible.
STAMPS = re.compile(
    r"ALIYUN_COM_GPU_MEM_.*|hami\.io/(vgpu-.*|bind-.*)|runai-gpu-group(/.*)?|run\.ai/.*"
    r"|runai/shared-gpu-configmap|received-resource-type|nvidia\.com/container\..+\.gpus\.devices"
)
#: Prefix of a resource -> the name of its allocator. These allocators are not converted.
_UNCONVERTED = {"volcano.sh/vgpu-": "Volcano", "tencent.com/vcuda-": "Tencent's GPU manager"}

MIB = 1 << 20
MAX_DEVICES_ASKED = 1024
#: More memory than any device has. Such a value is in another unit, or includes a unit itself.
TOO_MANY_BYTES = 1 << 40
#: Bytes of a unit -> its name, and 8 GiB in this unit.
_UNITS = {1 << 30: ("GiB", 8), MIB: ("MiB", 8192)}
_DECIMAL = re.compile(r"[0-9]{0,4}(?:\.[0-9]{0,18})?", re.ASCII)


class BadValue(ValueError):
    """A value that cannot be read; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class ForeignRequest:
    """A request for ``amount`` on each of ``devices`` devices, made to another allocator."""

    amount: Bytes | Share
    #: Number of devices.
    devices: int = 1


def lost_annotation(key: str) -> str:
    """Return why the annotation has no equivalent; empty if it is not known as such."""
    return _NODE_SHARES if _NV_COMPUTE_MODE.fullmatch(key) else LOST_ANNOTATIONS.get(key, "")


def count(value: object) -> int:
    """Read a number of devices, from 1 to ``MAX_DEVICES_ASKED``."""
    text = str(value).strip()
    if not re.fullmatch(r"[0-9]{1,4}", text) or not 1 <= int(text) <= MAX_DEVICES_ASKED:
        raise BadValue(f"{shortened(text)} is not a number of devices. Example: 1")
    return int(text)


def in_units(value: object, unit_bytes: int) -> Bytes | None:
    """Read an amount in units of ``unit_bytes`` bytes; None for zero, which requests nothing."""
    text = str(value).strip()
    try:
        units = parse_bytes(text)
    except BadQuantity as err:
        raise BadValue(str(err)) from err
    count_bytes = units * unit_bytes
    if unit_bytes > 1 and count_bytes >= TOO_MANY_BYTES:
        name, eight = _UNITS[unit_bytes]
        raise BadValue(
            f"{shortened(text)} {name} is more than any device has; the value is in {name}. "
            f"Example: {eight}"
        )
    return _amount(count_bytes, text)


def quantity(value: object) -> Bytes | None:
    """Read a Kubernetes quantity of bytes, such as 4Gi; None for zero."""
    return in_units(value, 1)


def fraction(value: object) -> Share:
    """Read a fraction of a device, such as 0.5."""
    return _share(value, PPM, "a fraction above 0 and up to 1. Example: 0.5")


def percentage(value: object) -> Share:
    """Read a percentage of a device, such as 50."""
    return _share(value, PPM // 100, "a percentage above 0 and up to 100. Example: 50")


def _amount(count_bytes: int, text: str) -> Bytes | None:
    if count_bytes < 0 or count_bytes > MAX_DEVICE_BYTES:
        raise BadValue(f"{shortened(text)} is not an amount that any device has")
    return Bytes(count_bytes) if count_bytes else None


def _share(value: object, unit_ppm: int, expected: str) -> Share:
    text = str(value).strip()
    if not _DECIMAL.fullmatch(text) or not any(c.isdigit() for c in text):
        raise BadValue(f"{shortened(text)} is not {expected}")
    ppm = int((Decimal(text) * unit_ppm).to_integral_value(ROUND_CEILING))
    if not 0 < ppm <= PPM:
        raise BadValue(f"{shortened(text)} is not {expected}")
    return Share(ppm)


def unconverted(key: object) -> str:
    """Return the name of the allocator of a key that is not converted; empty for other keys."""
    prefixes = _UNCONVERTED.items()
    return next((name for prefix, name in prefixes if str(key).startswith(prefix)), "")


def is_foreign(key: object) -> bool:
    """Return whether a key, anywhere in a manifest, belongs to an allocator that is converted."""
    return isinstance(key, str) and (
        key in KAI_REQUESTS
        or key in (HAMI_MEMORY, HAMI_PERCENT, GPUSHARE_MEMORY, "aliyun.com/gpu-count")
        or key in LOST_RESOURCES
        # "mps" is too common a word to search for outside annotations.
        or (key in LOST_ANNOTATIONS and key != "mps")
        or key.startswith("nvidia.com/container.")
    )
