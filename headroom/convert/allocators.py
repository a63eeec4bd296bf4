"""The keys of KAI, HAMi and gpushare, and how their values are read.

Manifests contain amounts without units. ``gpu-memory`` and ``gpumem`` are in MiB, and
``aliyun.com/gpu-mem`` is in the unit of the plugin's flag ``--memory-unit``. Amounts are computed
with integers and rounded up, so a pod never gets less memory than before. The functions that read
values raise ``BadValue``.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import Any

from headroom.contract.annotations import PPM, Bytes, Share
from headroom.contract.errors import BadQuantity, shortened
from headroom.contract.quantity import MAX_DEVICE_BYTES, parse_bytes

GPU = "nvidia.com/gpu"

#: Maps a schedulerName to its allocator. Converted pods do not need these schedulers.
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
HAMI_NODE_POLICY = "hami.io/node-scheduler-policy"
#: Maps HAMi's policy for nodes to the value of headroom.gpu/policy.
POLICIES = {"binpack": "pack", "spread": "spread"}

_NO_COMPUTE = (
    "Headroom does not divide compute; annotation headroom.gpu/max-sm keeps a pod off busy devices"
)
#: Maps each resource without an equivalent to the reason. The conversion removes these resources.
LOST_RESOURCES = {
    "nvidia.com/gpucores": _NO_COMPUTE,
    "nvidia.com/priority": "Headroom has no priority between pods on one device",
    "aliyun.com/gpu-core.percentage": _NO_COMPUTE,
}
_NODE_SHARES = "sharing is configured in the device plugin of the node"
_KUBELET_ALIGNS = "the kubelet's Topology Manager aligns the devices of a pod"
#: Maps each annotation without an equivalent to the reason. The conversion removes these
#: annotations.
LOST_ANNOTATIONS = {
    "gpu-fraction-limit": "Headroom has no burst: a pod reserves the most memory that it uses",
    "gpu-memory-limit": "Headroom has no burst: a pod reserves the most memory that it uses",
    "mps": "MPS is configured in the device plugin of the node",
    "nvidia.com/use-gputype": "select nodes by label nvidia.com/gpu.product instead",
    "nvidia.com/nouse-gputype": "select nodes by label nvidia.com/gpu.product instead",
    "nvidia.com/use-gpuindexes": "a pod cannot choose a device by its index",
    "nvidia.com/nouse-gpuindexes": "a pod cannot choose a device by its index",
    "nvidia.com/use-gpuuuid": "a pod cannot choose a device by its uuid",
    "nvidia.com/nouse-gpuuuid": "a pod cannot choose a device by its uuid",
    "nvidia.com/vgpu-mode": _NODE_SHARES,
    "nvidia.com/numa-bind": _KUBELET_ALIGNS,
    "nvidia.com/mig-profile-preference": "request the resource of the MIG profile instead",
    "hami.io/numa-alignment": _KUBELET_ALIGNS,
    "hami.io/gpu-scheduler-policy": "headroom.gpu/policy: pack or spread does this for nodes",
    HAMI_NODE_POLICY: "annotation headroom.gpu/policy has pack, spread and fragmentation",
}
#: The closest equivalent of an exclusive GPU.
_EXCLUSIVE = "in Headroom, annotation headroom.gpu/vram: 100% reserves all memory of a GPU"
#: Labels that name a queue of KAI.
QUEUES = ("kai.scheduler/queue", "runai/queue")
#: Maps keys that only one of these allocators reads, anywhere in a manifest, to the allocator.
_OWN_KEYS = {
    re.compile(r"hami\.io/.+"): "HAMi",
    re.compile(r"(kai\.scheduler|runai|run\.ai)/.+"): "KAI",
    re.compile(r"ALIYUN_COM_GPU_.+|aliyun\.com/gpu.+"): "gpushare",
}
#: Maps API groups of the allocators' own objects, such as queues, to the allocator.
_OWN_GROUPS = {"scheduling.run.ai": "KAI", "kai.scheduler": "KAI", "hami.io": "HAMi"}
#: Variables that only HAMi's library in the container reads.
_HAMI_VARIABLES = re.compile(
    r"CUDA_DEVICE_(MEMORY|SM)_LIMIT(_\d+)?|CUDA_OVERSUBSCRIBE|CUDA_TASK_PRIORITY"
    r"|CUDA_DISABLE_CONTROL|CUDA_DEVICE_MEMORY_SHARED_CACHE|GPU_CORE_UTILIZATION_POLICY"
    r"|ACTIVE_OOM_KILLER"
)
#: Maps labels that select an allocator's nodes to the allocator. The migration removes these labels
#: from nodes.
_NODE_LABELS = {("gpu", "on"): "HAMi", ("gpushare", "true"): "gpushare"}
#: PriorityClasses that KAI installs.
_KAI_PRIORITIES = ("train", "build-preemptible", "build", "inference")
#: Resources of NVIDIA's device plugin.
_STOCK_RESOURCE = re.compile(r"nvidia\.com/(gpu|gpu\.shared|mig-.+)")
#: Annotations and labels that another allocator writes when it places a pod. A manifest has them
#: only if it was copied from a placed pod. On a bound pod, some of them make its node ineligible.
STAMPS = re.compile(
    r"ALIYUN_COM_GPU_MEM_.*|hami\.io/(vgpu-.*|bind-.*)|runai-gpu-group(/.*)?|run\.ai/.*"
    r"|runai/shared-gpu-configmap|received-resource-type|nvidia\.com/container\..+\.gpus\.devices"
)
#: Maps the prefix of a resource to the name of an allocator whose pods are not converted.
_UNCONVERTED = {"volcano.sh/vgpu-": "Volcano", "tencent.com/vcuda-": "Tencent's GPU manager"}

MIB = 1 << 20
MAX_DEVICES_ASKED = 1024
#: More memory than any device has. Such a value is in another unit, or contains a unit.
TOO_MANY_BYTES = 1 << 40
#: Maps the bytes of a unit to its name, and to 8 GiB in this unit.
_UNITS = {1 << 30: ("GiB", 8), MIB: ("MiB", 8192)}
_DECIMAL = re.compile(r"[0-9]{0,4}(?:\.[0-9]{0,18})?", re.ASCII)


class BadValue(ValueError):
    """A value that cannot be read. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class ForeignRequest:
    """A request for ``amount`` on each of ``devices`` devices, made to another allocator."""

    amount: Bytes | Share
    #: Number of devices.
    devices: int = 1


def lost_annotation(key: str, value: object = "") -> str:
    """Return why the annotation has no equivalent, or "" if it is not known to have none."""
    if key.endswith("-scheduler-policy") and "mutex" in str(value):
        return _EXCLUSIVE
    return _NODE_SHARES if _NV_COMPUTE_MODE.fullmatch(key) else LOST_ANNOTATIONS.get(key, "")


def lost_resource(key: str, value: object, is_whole: bool) -> tuple[bool, str]:
    """Return whether removing a resource in ``LOST_RESOURCES`` loses anything, and the reason.

    ``is_whole`` is whether the converted container requests all memory of a GPU.
    """
    text = str(value).strip()
    if text == "0":
        return False, "0: removed, because it requests nothing"
    if key == "nvidia.com/gpucores" and text == "100":
        if is_whole:
            return False, "100: removed, because no other pod has memory on the GPU anyway"
        return True, f"100 keeps other pods off the GPU in HAMi; {_EXCLUSIVE}"
    return True, LOST_RESOURCES[key]


def unread(key: object) -> str:
    """Return the only allocator that reads a key of a manifest, or "" for other keys."""
    return next((name for keys, name in _OWN_KEYS.items() if keys.fullmatch(str(key))), "")


def object_of(api_version: object) -> str:
    """Return the only allocator that reads objects of this API version, or "" for other
    versions."""
    return _OWN_GROUPS.get(str(api_version).partition("/")[0], "")


def unread_in(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a name and the reason for each part of a converted pod's spec that now has no effect,
    or an unwanted effect."""
    selector = spec.get("nodeSelector") or {}
    for (key, value), allocator in _NODE_LABELS.items():
        if str(selector.get(key)) == value:
            yield (
                f"nodeSelector {key}: {value}",
                f"marks nodes of {allocator}; remove it, or the pod waits when they lose the label",
            )
    if (name := spec.get("priorityClassName")) in _KAI_PRIORITIES:
        yield f"priorityClassName: {name}", "KAI installs it; without KAI, the pod is rejected"
    for container in (*(spec.get("initContainers") or ()), *spec["containers"]):
        for env in container.get("env") or ():
            name = env.get("name") if isinstance(env, dict) else ""
            if _HAMI_VARIABLES.fullmatch(str(name)):
                yield f"{name}", "only HAMi's library in the container reads the variable"
        resources = container.get("resources") or {}
        for key in {**(resources.get("requests") or {}), **(resources.get("limits") or {})}:
            if str(key).startswith("nvidia.com/") and not _STOCK_RESOURCE.fullmatch(str(key)):
                yield f"{key}", "NVIDIA's device plugin does not offer it, so the pod would wait"


def count(value: object) -> int:
    """Read a number of devices, from 1 to ``MAX_DEVICES_ASKED``."""
    text = str(value).strip()
    if not re.fullmatch(r"[0-9]{1,4}", text) or not 1 <= int(text) <= MAX_DEVICES_ASKED:
        raise BadValue(f"{shortened(text)} is not a number of devices. Example: 1")
    return int(text)


def in_units(value: object, unit_bytes: int) -> Bytes | None:
    """Read an amount in units of ``unit_bytes`` bytes. Return None for 0, which requests
    nothing."""
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
    """Read a Kubernetes quantity of bytes, such as 4Gi. Return None for 0."""
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
    """Return the name of an allocator that is not converted, or "" for other keys."""
    prefixes = _UNCONVERTED.items()
    return next((name for prefix, name in prefixes if str(key).startswith(prefix)), "")


def is_foreign(key: object) -> bool:
    """Return whether a key, anywhere in a manifest, belongs to an allocator that is converted."""
    if not isinstance(key, str):
        return False
    key = key.removeprefix("requests.").removeprefix("limits.")  # in a ResourceQuota
    return (
        key in KAI_REQUESTS
        or key in (HAMI_MEMORY, HAMI_PERCENT, GPUSHARE_MEMORY, "aliyun.com/gpu-count")
        or key in LOST_RESOURCES
        # "mps" is too common a word to search for outside annotations.
        or (key in LOST_ANNOTATIONS and key != "mps")
        or key.startswith("nvidia.com/container.")
    )
