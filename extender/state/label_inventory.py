"""What the labels of a node say of its GPUs, where no agent ever reported them: not measured.

A label is a claim about all GPUs of the node at once. Where they differ GPU feature discovery tells
of one of them, at random, so labels are believed only where what they say adds up to what the
kubelet offers: ``count x replicas == allocatable``. A plugin that is down, or a replica that is
unhealthy, then closes the node too.

=============  ================================================================================
GFD            ``nvidia.com/gpu.{count,replicas,memory,sharing-strategy}``; memory in MiB, of one
               whole GPU or one MIG device (older ones wrote bytes)
GKE            ``gke-accelerator`` and, where shared, ``gke-max-shared-clients-per-gpu``; of a
               partition the memory that its name says
Karpenter,     ``instance-gpu-count`` and ``instance-gpu-memory``, in MiB of one GPU
EKS Auto Mode
instance type  the name of what was sold, where nobody says more: node groups of EKS, pools of AKS
=============  ================================================================================

Only the first two tell of sharing. Of the others nothing is believed where the plugin offers more
than one replica of each GPU, parts of one, or a resource whose name tells that it is shared. What
else AKS and EKS write names a vendor or a model, and neither count nor memory: not enough. The
sizes in names are what is sold, and devices have a little more or less; they are read as so many
10**9 bytes, which all but the smallest have. No label says what the driver keeps for itself:
``ASSUMED_RESERVED_BYTES`` is taken off, which is more than drivers are known to keep.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from contract.errors import BadQuantity
from contract.gpunode import (
    MAX_DEVICE_BYTES,
    MAX_DEVICES,
    MAX_REPLICAS,
    Device,
    GPUNodeStatus,
    Replicas,
    Sharing,
    Source,
)
from contract.kube import Node
from contract.quantity import parse_bytes
from extender.placement.policy import MIB, Rules
from extender.state.instance_types import TYPE, gpus_of
from extender.state.mig_layout import mig_obstacle

GIB = 1 << 30
GB = 10**9
ASSUMED_RESERVED_BYTES = GIB
#: Name of the source that stands in the place of an agent's probes.
SOURCE = "labels"

_WHOLE = "nvidia.com/gpu"
#: A figure in MiB from here on would be a device of 1 TiB: it is one in bytes.
_BYTES_FROM = 1 << 20
_GFD = "nvidia.com/gpu."
_GKE = "cloud.google.com/gke-"
_KARPENTERS = {
    "Karpenter": "karpenter.k8s.aws/instance-gpu-",
    "EKS Auto Mode": "eks.amazonaws.com/instance-gpu-",
}
#: Labels that are not enough -> whose they are, and what they do name.
_TOO_LITTLE = {
    "kubernetes.azure.com/accelerator": ("AKS", "a vendor"),
    "karpenter.azure.com/sku-gpu-name": ("AKS", "a model and a count"),
    "k8s.amazonaws.com/accelerator": ("EKS", "a model"),
    "cloud.google.com/gke-accelerator": ("GKE", "a model or a way of sharing that is not known"),
    f"{_GFD}product": ("GPU feature discovery", "a model"),
}
_RIGHT = (
    "right are, for example, nvidia.com/gpu.count: 4, .replicas: 1, .memory: 81559, "
    ".sharing-strategy: none"
)
#: GB of GKE's accelerators whose names do not end in them.
_GKE_GB = {
    "nvidia-tesla-t4": 15,
    "nvidia-tesla-p4": 7,
    "nvidia-tesla-p100": 16,
    "nvidia-tesla-v100": 16,
    "nvidia-tesla-a100": 40,
    "nvidia-l4": 24,
}
_SHARING: Mapping[str, Sharing] = {
    "none": "none",
    "time-slicing": "time-slicing",
    "time-sharing": "time-slicing",
    "mps": "mps",
}


@dataclass(frozen=True, slots=True)
class _Told:
    who: str
    #: None where they do not say: then it is what the kubelet offers.
    devices: int | None
    memory_bytes: int
    replicas: int
    sharing: Sharing
    model: str
    #: Whether one replica of each is what they say, and not only what nobody denies.
    tells_sharing: bool = True


def believed(node: Node, rules: Rules) -> GPUNodeStatus | None:
    """The report that labels make up; None where they do not say enough, or contradict.

    With ``require_report`` only GPUs that nobody shares are believed: who gets one has it alone,
    whatever else is not known.
    """
    told = _told(node, rules)
    return None if isinstance(told, str) else _status(*told, node.metadata.labels or {})


def why_not_believed(node: Node, rules: Rules) -> str:
    """What is missing in the labels, or wrong; empty where they are believed."""
    told = _told(node, rules)
    return told if isinstance(told, str) else ""


def _told(node: Node, rules: Rules) -> tuple[_Told, str, int] | str:
    """What the labels say, of which resource and how many devices; or why that is not enough."""
    labels = node.metadata.labels or {}
    told = _gfd(labels) or _gke(labels) or _karpenter(labels) or _instance(labels)
    if told is None:
        return _missing(labels)
    if (obstacle := mig_obstacle(node)) is not None:
        return obstacle[1]
    offered = _offered(node, rules)
    if len(offered) != 1:
        names = " and ".join(sorted(offered)) or "none that is managed"
        return f"labels tell of devices of one resource, and the node offers {names}"
    ((resource, replicas),) = offered.items()
    says = f"labels of {told.who} say"
    if not told.tells_sharing and resource != _WHOLE:
        return f"{says} nothing of {resource}, only of whole GPUs; {_RIGHT}"
    devices, rest = divmod(replicas, told.replicas)
    if rest or not 0 < devices <= MAX_DEVICES or told.devices not in (None, devices):
        count = "" if told.devices is None else f"{told.devices} "
        shared = f"of {told.replicas} replicas" if told.tells_sharing else "and nothing of sharing"
        return f"{says} {count}GPUs {shared}, and the node offers {replicas} of {resource}"
    if (told.replicas > 1) != (told.sharing != "none") or told.replicas > MAX_REPLICAS:
        return f"{says} {told.replicas} replicas and sharing {told.sharing}"
    if rules.require_report and told.sharing != "none":
        return f"{says} that its GPUs are shared: without a report that takes require_report: false"
    if not ASSUMED_RESERVED_BYTES < told.memory_bytes <= MAX_DEVICE_BYTES:
        return f"{says} that a GPU has {told.memory_bytes} bytes"
    return told, resource, devices


def _missing(labels: Mapping[str, str]) -> str:
    for label, (who, what) in _TOO_LITTLE.items():
        if label in labels:
            return f"labels of {who} name {what}; {_RIGHT}"
    return f"no label tells of its GPUs; {_RIGHT}"


def _status(told: _Told, resource: str, devices: int, labels: Mapping[str, str]) -> GPUNodeStatus:
    return GPUNodeStatus(
        devices=[
            Device(
                uuid=f"label-{index}",
                index=index,
                model=told.model,
                architecture=labels.get(f"{_GFD}family", ""),
                memory_bytes=told.memory_bytes,
                reserved_bytes=ASSUMED_RESERVED_BYTES,
                used_bytes=0,
                sharing=told.sharing,
                resource=resource,
                replicas=Replicas(free=told.replicas),
            )
            for index in range(devices)
        ],
        sources=[
            Source(
                name=SOURCE, state="degraded", message=f"not measured: as labels of {told.who} say"
            )
        ],
    )


def _offered(node: Node, rules: Rules) -> dict[str, int]:
    """Resource -> replicas, of those resources of ours that the kubelet offers any of."""
    allocatable = (node.status.allocatable if node.status else None) or {}
    offered: dict[str, int] = {}
    for resource, quantity in allocatable.items():
        if rules.manages(resource):
            try:
                count = parse_bytes(str(quantity))
            except BadQuantity:
                count = 0
            if count > 0:
                offered[resource] = count
    return offered


def _gfd(labels: Mapping[str, str]) -> _Told | None:
    product = labels.get(f"{_GFD}product", "")
    count, replicas, memory = (
        _number(labels.get(_GFD + name)) for name in ("count", "replicas", "memory")
    )
    sharing = _SHARING.get(labels.get(f"{_GFD}sharing-strategy", ""))
    # Compute instances of one GPU instance share the memory that each of them is said to have.
    if not count or not replicas or not memory or not sharing or re.search(r"-MIG-\d+c\.", product):
        return None
    memory_bytes = memory if memory >= _BYTES_FROM else memory * MIB
    return _Told("GPU feature discovery", count, memory_bytes, replicas, sharing, product)


def _gke(labels: Mapping[str, str]) -> _Told | None:
    model = labels.get(f"{_GKE}accelerator", "")
    partition = labels.get(f"{_GKE}gpu-partition-size")
    size = re.search(r"([0-9]{1,6})gb$", model if partition is None else partition)
    size_gb = int(size[1]) if size else _GKE_GB.get(model) if partition is None else None
    strategy = labels.get(f"{_GKE}gpu-sharing-strategy", "none")
    clients = labels.get(f"{_GKE}max-shared-clients-per-gpu", "1" if strategy == "none" else None)
    sharing, replicas = _SHARING.get(strategy), _number(clients)
    if not size_gb or not sharing or not replicas:
        return None
    count = None if partition else _number(labels.get(f"{_GKE}accelerator-count"))
    return _Told("GKE", count, size_gb * GB, replicas, sharing, model)


def _karpenter(labels: Mapping[str, str]) -> _Told | None:
    for who, prefix in _KARPENTERS.items():
        count, memory_mib = (_number(labels.get(prefix + name)) for name in ("count", "memory"))
        if count and memory_mib and labels.get(f"{prefix}manufacturer", "nvidia") == "nvidia":
            # 16384 stands for a card that is sold as 16 GB; 22888 is what 24 GB are in MiB.
            sold = memory_mib % 1024 == 0
            memory_bytes = memory_mib // 1024 * GB if sold else memory_mib * MIB
            model = labels.get(f"{prefix}name", "")
            return _Told(who, count, memory_bytes, 1, "none", model, tells_sharing=False)
    return None


def _instance(labels: Mapping[str, str]) -> _Told | None:
    name = labels.get(TYPE, "")
    gpus = gpus_of(name)
    if gpus is None:
        return None
    memory_bytes = gpus.memory_gb * GB
    model = f"{gpus.model} ({name})"
    return _Told(
        "the instance type", gpus.count, memory_bytes, 1, "none", model, tells_sharing=False
    )


def _number(text: str | None) -> int | None:
    """A whole number from 1; None for anything else, absence included."""
    if text is None or not re.fullmatch(r"[0-9]{1,15}", text, re.ASCII):
        return None
    return int(text) or None
