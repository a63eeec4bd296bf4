"""Derives a GPU report from a node's labels if no agent has ever reported the node.

A label describes all GPUs of the node together. If the GPUs differ, GPU feature discovery (GFD)
describes a random GPU among them. So labels are used only if they agree with the resources that the
kubelet offers: ``count x replicas == allocatable``. For this reason the node is not usable while
the device plugin is down or a replica is unhealthy.

* GFD: ``nvidia.com/gpu.{count,replicas,memory,sharing-strategy}``. The memory of one whole GPU or
  one MIG device is in MiB. Older versions of GFD wrote bytes.
* GKE: ``gke-accelerator`` and, if shared, ``gke-max-shared-clients-per-gpu``. The name of a
  partition contains its memory.
* Karpenter and EKS Auto Mode: ``instance-gpu-count`` and ``instance-gpu-memory``. The memory of one
  GPU is in MiB.
* The cloud's instance type, if there are no other labels, as in EKS node groups and AKS node pools.

Only GFD and GKE labels describe sharing. The other labels are ignored if the device plugin offers
more than one replica of each GPU, parts of GPUs, or a resource whose name implies sharing. Other
labels of AKS and EKS are not sufficient, because they contain a vendor or a model but neither a
count nor memory. Sizes in names are nominal, and devices have slightly more or less memory. One GB
in a name counts as 10**9 bytes, which all but the smallest devices have. No label contains the
memory that the driver reserves for itself, so ``ASSUMED_RESERVED_BYTES`` is subtracted, which is
more than drivers are known to reserve.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from headroom.contract.errors import BadQuantity
from headroom.contract.gpunode import (
    MAX_DEVICES,
    MAX_REPLICAS,
    Device,
    GPUNodeStatus,
    Replicas,
    Sharing,
    Source,
)
from headroom.contract.kube import Node
from headroom.contract.quantity import MAX_DEVICE_BYTES, gib, parse_bytes
from headroom.contract.reasons import Reason
from headroom.core.cluster.instance_types import TYPE, gpus_of
from headroom.core.placement.policy import MIB, Rules

GIB = 1 << 30
GB = 10**9
ASSUMED_RESERVED_BYTES = GIB
#: Name of the report's source, which replaces an agent's probes.
SOURCE = "labels"

_WHOLE = "nvidia.com/gpu"
#: A memory label of at least this value is in bytes, because in MiB it would mean a device of 1
#: TiB.
_BYTES_FROM = 1 << 20
_GFD = "nvidia.com/gpu."
_GKE = "cloud.google.com/gke-"
_KARPENTERS = {
    "Karpenter": "karpenter.k8s.aws/instance-gpu-",
    "EKS Auto Mode": "eks.amazonaws.com/instance-gpu-",
}
#: Labels that are not sufficient, with the component that sets them and their content.
_TOO_LITTLE = {
    "kubernetes.azure.com/accelerator": ("AKS", "a vendor"),
    "karpenter.azure.com/sku-gpu-name": ("AKS", "a model and a count"),
    "k8s.amazonaws.com/accelerator": ("EKS", "a model"),
    "cloud.google.com/gke-accelerator": ("GKE", "an unknown model or sharing strategy"),
    f"{_GFD}product": ("GPU feature discovery", "a model"),
}
_EXAMPLE = "Example: nvidia.com/gpu.count: 4, .replicas: 1, .memory: 81559, .sharing-strategy: none"
#: GB of GKE's accelerators whose names do not end in their size.
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
class _LabelledGPUs:
    """The GPUs of a node according to one kind of labels."""

    set_by: str
    #: Number of devices. None if the labels contain no count, so that the kubelet's allocatable is
    #: used instead.
    devices: int | None
    memory_bytes: int
    replicas: int
    sharing: Sharing
    model: str
    #: Whether the labels contain the number of replicas. Otherwise one replica is assumed.
    describes_sharing: bool = True


def believed(node: Node, rules: Rules) -> GPUNodeStatus | None:
    """Return the report derived from labels, or None if they are incomplete or contradictory.

    With ``require_report`` only labels of unshared GPUs are used, because an unshared GPU belongs
    to a single pod even if everything else is unknown.
    """
    found = _read(node, rules)
    return None if isinstance(found, str) else _status(*found, node.metadata.labels or {})


def why_not_believed(node: Node, rules: Rules) -> str:
    """Return why the labels are not used, or an empty string if they are used."""
    found = _read(node, rules)
    return found if isinstance(found, str) else ""


def _read(node: Node, rules: Rules) -> tuple[_LabelledGPUs, str, int] | str:
    """Return the labelled GPUs, their resource and the number of devices, or why the labels are not
    used."""
    labels = node.metadata.labels or {}
    gpus = _gfd(labels) or _gke(labels) or _karpenter(labels) or _instance(labels)
    if gpus is None:
        return _missing(labels)
    if (obstacle := mig_obstacle(node)) is not None:
        return obstacle[1]
    offered = _offered(node, rules)
    if len(offered) != 1:
        names = " and ".join(sorted(offered)) or "no managed resource"
        return f"labels describe devices of one resource, but the node offers {names}"
    ((resource, replicas),) = offered.items()
    subject = f"labels of {gpus.set_by}"
    if not gpus.describes_sharing and resource != _WHOLE:
        return f"{subject} describe only whole GPUs, not {resource}. {_EXAMPLE}"
    devices, rest = divmod(replicas, gpus.replicas)
    if rest or not 0 < devices <= MAX_DEVICES or gpus.devices not in (None, devices):
        count = "GPUs" if gpus.devices is None else _counted(gpus.devices, "GPU")
        per_gpu = _counted(gpus.replicas, "replica")
        shared = f"with {per_gpu} each" if gpus.describes_sharing else "without sharing"
        return f"{subject} describe {count} {shared}, but the node offers {replicas} of {resource}"
    if (gpus.replicas > 1) != (gpus.sharing != "none") or gpus.replicas > MAX_REPLICAS:
        per_gpu = _counted(gpus.replicas, "replica")
        return f"{subject} are not valid: {per_gpu} with sharing strategy {gpus.sharing}"
    if rules.require_report and gpus.sharing != "none":
        return (
            f"{subject} describe shared GPUs, which without an agent's report require the setting "
            "require_report: false"
        )
    if not ASSUMED_RESERVED_BYTES < gpus.memory_bytes <= MAX_DEVICE_BYTES:
        return f"{subject} are not valid: a GPU with {gib(gpus.memory_bytes)} of memory"
    return gpus, resource, devices


def _missing(labels: Mapping[str, str]) -> str:
    for label, (set_by, content) in _TOO_LITTLE.items():
        if label in labels:
            return f"labels of {set_by} contain only {content}. {_EXAMPLE}"
    return f"no label describes the GPUs of the node. {_EXAMPLE}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _status(
    gpus: _LabelledGPUs, resource: str, devices: int, labels: Mapping[str, str]
) -> GPUNodeStatus:
    return GPUNodeStatus(
        devices=[
            Device(
                uuid=f"label-{index}",
                index=index,
                model=gpus.model,
                architecture=labels.get(f"{_GFD}family", ""),
                memory_bytes=gpus.memory_bytes,
                reserved_bytes=ASSUMED_RESERVED_BYTES,
                used_bytes=0,
                sharing=gpus.sharing,
                resource=resource,
                replicas=Replicas(free=gpus.replicas),
            )
            for index in range(devices)
        ],
        sources=[
            Source(
                name=SOURCE,
                state="degraded",
                message=f"not measured, but derived from labels of {gpus.set_by}",
            )
        ],
    )


def _offered(node: Node, rules: Rules) -> dict[str, int]:
    """Return the managed resources that the kubelet offers, with their numbers of replicas."""
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


def _gfd(labels: Mapping[str, str]) -> _LabelledGPUs | None:
    product = labels.get(f"{_GFD}product", "")
    count, replicas, memory = (
        _number(labels.get(_GFD + name)) for name in ("count", "replicas", "memory")
    )
    sharing = _SHARING.get(labels.get(f"{_GFD}sharing-strategy", ""))
    # Compute instances share the memory of their GPU instance, but each label contains the whole
    # memory.
    if not count or not replicas or not memory or not sharing or re.search(r"-MIG-\d+c\.", product):
        return None
    memory_bytes = memory if memory >= _BYTES_FROM else memory * MIB
    return _LabelledGPUs("GPU feature discovery", count, memory_bytes, replicas, sharing, product)


def _gke(labels: Mapping[str, str]) -> _LabelledGPUs | None:
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
    return _LabelledGPUs("GKE", count, size_gb * GB, replicas, sharing, model)


def _karpenter(labels: Mapping[str, str]) -> _LabelledGPUs | None:
    for set_by, prefix in _KARPENTERS.items():
        count, memory_mib = (_number(labels.get(prefix + name)) for name in ("count", "memory"))
        if count and memory_mib and labels.get(f"{prefix}manufacturer", "nvidia") == "nvidia":
            # A multiple of 1024 is a nominal size, because a card with 16384 is sold as 16 GB.
            # Other values are real MiB, such as 22888 for 24 GB.
            nominal = memory_mib % 1024 == 0
            memory_bytes = memory_mib // 1024 * GB if nominal else memory_mib * MIB
            model = labels.get(f"{prefix}name", "")
            return _LabelledGPUs(
                set_by, count, memory_bytes, 1, "none", model, describes_sharing=False
            )
    return None


def _instance(labels: Mapping[str, str]) -> _LabelledGPUs | None:
    name = labels.get(TYPE, "")
    gpus = gpus_of(name)
    if gpus is None:
        return None
    memory_bytes = gpus.memory_gb * GB
    model = f"{gpus.model} ({name})"
    return _LabelledGPUs(
        "the instance type", gpus.count, memory_bytes, 1, "none", model, describes_sharing=False
    )


def _number(text: str | None) -> int | None:
    """Parse a whole number of at least 1. Return None for any other text, or if there is no
    text."""
    if text is None or not re.fullmatch(r"[0-9]{1,15}", text, re.ASCII):
        return None
    return int(text) or None


STATE = "nvidia.com/mig.config.state"
PRODUCT = "nvidia.com/gpu.product"
_DONE = "success"
_FAILED = "failed"
_INVALID = "-MIG-INVALID"


def mig_obstacle(node: Node) -> tuple[Reason, str] | None:
    """Return why MIG makes the node unusable, and the label that shows this, or None if it is
    usable."""
    labels = node.metadata.labels or {}
    state = labels.get(STATE, _DONE)
    if state != _DONE:
        reason = Reason.MIG_FAILED if state == _FAILED else Reason.MIG_CHANGING
        return reason, f"label {STATE} is {state!r}"
    product = labels.get(PRODUCT, "")
    if product.endswith(_INVALID):
        return Reason.MIG_INVALID, f"label {PRODUCT} is {product!r}"
    return None
