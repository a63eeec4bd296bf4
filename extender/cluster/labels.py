"""What the labels of a node say of its GPUs, where no agent ever reported them: not measured.

A label is a claim about all GPUs of the node at once. Where they differ GPU feature discovery tells
of one of them, at random, so labels are believed only where what they say adds up to what the
kubelet offers: ``count x replicas == allocatable``. A plugin that is down, or a replica that is
unhealthy, then closes the node too.

=========  ====================================================================================
GFD        ``nvidia.com/gpu.{count,replicas,memory,sharing-strategy}``; memory in MiB, of one whole
           GPU or one MIG device (older ones wrote bytes)
GKE        ``gke-accelerator`` and, where shared, ``gke-max-shared-clients-per-gpu``; of a
           partition the memory that its name says
Karpenter  ``instance-gpu-count`` and ``instance-gpu-memory``; nothing on sharing, so nothing is
           believed where the plugin offers more than one replica of each
=========  ====================================================================================

The labels of AKS and EKS name a vendor or a model and neither count nor sharing: not enough. The
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
from extender.cluster.mig import mig_obstacle
from extender.placement.rules import MIB, Rules

GIB = 1 << 30
GB = 10**9
ASSUMED_RESERVED_BYTES = GIB
#: Name of the source that stands in the place of an agent's probes.
SOURCE = "labels"

#: A figure in MiB from here on would be a device of 1 TiB: it is one in bytes.
_BYTES_FROM = 1 << 20
_GFD = "nvidia.com/gpu."
_GKE = "cloud.google.com/gke-"
_KARPENTER = "karpenter.k8s.aws/instance-gpu-"
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


def believed(node: Node, rules: Rules) -> GPUNodeStatus | None:
    """The report that labels make up; None where they do not say enough, or contradict.

    With ``require_report`` only GPUs that nobody shares are believed: who gets one has it alone,
    whatever else is not known.
    """
    labels = node.metadata.labels or {}
    offered = _offered(node, rules)
    told = _gfd(labels) or _gke(labels) or _karpenter(labels)
    if told is None or len(offered) != 1 or mig_obstacle(node) is not None:
        return None
    ((resource, replicas),) = offered.items()
    devices, rest = divmod(replicas, told.replicas)
    if rest or not 0 < devices <= MAX_DEVICES or told.devices not in (None, devices):
        return None
    if (told.replicas > 1) != (told.sharing != "none"):
        return None
    if rules.require_report and told.sharing != "none":
        return None
    if told.replicas > MAX_REPLICAS:
        return None
    if not ASSUMED_RESERVED_BYTES < told.memory_bytes <= MAX_DEVICE_BYTES:
        return None
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
    size = re.search(r"(\d+)gb$", model if partition is None else partition)
    size_gb = int(size[1]) if size else _GKE_GB.get(model) if partition is None else None
    strategy = labels.get(f"{_GKE}gpu-sharing-strategy", "none")
    clients = labels.get(f"{_GKE}max-shared-clients-per-gpu", "1" if strategy == "none" else None)
    sharing, replicas = _SHARING.get(strategy), _number(clients)
    if not size_gb or not sharing or not replicas:
        return None
    count = None if partition else _number(labels.get(f"{_GKE}accelerator-count"))
    return _Told("GKE", count, size_gb * GB, replicas, sharing, model)


def _karpenter(labels: Mapping[str, str]) -> _Told | None:
    count, memory = (_number(labels.get(_KARPENTER + name)) for name in ("count", "memory"))
    if not count or not memory or labels.get(f"{_KARPENTER}manufacturer", "nvidia") != "nvidia":
        return None
    # 16384 stands for a card that is sold as 16 GB.
    model = labels.get(f"{_KARPENTER}name", "")
    return _Told("Karpenter", count, memory * GB // 1024, 1, "none", model)


def _number(text: str | None) -> int | None:
    """A whole number from 1; None for anything else, absence included."""
    if text is None or not re.fullmatch(r"[0-9]{1,15}", text, re.ASCII):
        return None
    return int(text) or None
