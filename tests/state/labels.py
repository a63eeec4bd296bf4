"""Builds the node labels of GPU feature discovery and of cloud providers."""

from headroom.contract.kube import Node, NodeStatus, ObjectMeta
from headroom.core.placement.policy import Rules

MIB = 1 << 20
ASSUMED_RESERVED_BYTES = 1 << 30

LABELS_DO = Rules(require_report=False)


def node(labels: dict[str, str], **allocatable: str) -> Node:
    offers = allocatable or {"gpu": "4"}
    status = NodeStatus(allocatable={f"nvidia.com/{k}": v for k, v in offers.items()})
    return Node(metadata=ObjectMeta(name="n", uid="n", labels=labels), status=status)


def gfd(**other: str) -> dict[str, str]:
    """Return the labels that the real GPU feature discovery writes for four H100 GPUs."""
    written = {
        "count": "4",
        "replicas": "1",
        "memory": "81559",
        "product": "NVIDIA-H100-80GB-HBM3",
        "sharing-strategy": "none",
    }
    written |= {key.replace("_", "-"): value for key, value in other.items()}
    return {f"nvidia.com/gpu.{key}": value for key, value in written.items()}


def gke(**labels: str) -> dict[str, str]:
    return {f"cloud.google.com/gke-{k.replace('_', '-')}": v for k, v in labels.items()}


def karpenter(count: str, memory: str, prefix: str = "karpenter.k8s.aws") -> dict[str, str]:
    written = {"count": count, "memory": memory, "name": "t4", "manufacturer": "nvidia"}
    return {f"{prefix}/instance-gpu-{key}": value for key, value in written.items()}


def aks(instance_type: str) -> dict[str, str]:
    """Return the labels of an AKS node pool. Its GPU label names only the vendor."""
    return {
        "accelerator": "nvidia",
        "kubernetes.azure.com/accelerator": "nvidia",
        "kubernetes.azure.com/agentpool": "gpu",
        "node.kubernetes.io/instance-type": instance_type,
    }


def aks_by_itself(instance_type: str) -> dict[str, str]:
    """Return the labels of a node that AKS node auto provisioning created."""
    named = {"name": "A100", "manufacturer": "nvidia", "count": "2"}
    written = {f"karpenter.azure.com/sku-gpu-{key}": value for key, value in named.items()}
    return written | {"node.kubernetes.io/instance-type": instance_type}


def eks(instance_type: str) -> dict[str, str]:
    """Return the labels of an EKS managed node group, including the labels that an administrator
    adds for the autoscaler.
    """
    return {
        "eks.amazonaws.com/nodegroup": "gpu",
        "eks.amazonaws.com/capacityType": "ON_DEMAND",
        "k8s.amazonaws.com/accelerator": "nvidia-tesla-t4",
        "node.kubernetes.io/instance-type": instance_type,
    }


SLICED = gfd(replicas="4", sharing_strategy="time-slicing")


def by_mps(replicas: str, **other: str) -> dict[str, str]:
    return gfd(replicas=replicas, sharing_strategy="mps", **other)
