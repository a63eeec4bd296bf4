"""Builds DRA objects: a node without a device plugin, its ResourceSlice, a DeviceClass and
claims.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from headroom.contract.dra import DeviceClass, ResourceClaim
from headroom.contract.kube import (
    ExtendedResourceClaimStatus,
    ExtendedResourceRequest,
    Node,
    NodeStatus,
    ObjectMeta,
    Pod,
    PodStatus,
    ResourceSlice,
)
from headroom.contract.watched import ClaimSeen, ClassSeen, NodeSeen, SliceSeen
from tests.builders import GPU

IMPLICIT = "deviceclass.resource.kubernetes.io/gpu.nvidia.com"


def node(
    name: str = "n", allocatable: Mapping[str, str] | None = None, **annotations: str
) -> NodeSeen:
    offered = {"cpu": "64"} if allocatable is None else allocatable
    metadata = ObjectMeta(name=name, uid=name, annotations=annotations or None)
    return NodeSeen(Node(metadata=metadata, status=NodeStatus(allocatable=offered)))


def slice_of(name: str = "n", *uuids: str) -> SliceSeen:
    devices = [
        {"name": f"gpu-{i}", "attributes": {"uuid": {"string": uuid}}}
        for i, uuid in enumerate(uuids or ("GPU-0", "GPU-1"))
    ]
    spec = {"driver": "gpu.nvidia.com", "nodeName": name, "pool": {"name": name}}
    given = {"metadata": {"name": f"of-{name}"}, "spec": spec | {"devices": devices}}
    return SliceSeen(msgspec.convert(given, ResourceSlice))


def class_of(resource: str | None = GPU, name: str = "gpu.nvidia.com") -> ClassSeen:
    spec = {"extendedResourceName": resource} if resource else {}
    return ClassSeen(msgspec.convert({"metadata": {"name": name}, "spec": spec}, DeviceClass))


def claim(
    uid: str = "uid-p", device: str = "gpu-0", name: str = "p-extended", **result: Any
) -> ClaimSeen:
    """Return the claim that kube-scheduler creates for a pod that requests an extended resource."""
    place = {"driver": "gpu.nvidia.com", "pool": "n", "device": device} | result
    status = {
        "allocation": {"devices": {"results": [place]}},
        "reservedFor": [{"resource": "pods", "name": "p", "uid": uid}],
    }
    given = {"metadata": {"namespace": "default", "name": name}, "status": status}
    return ClaimSeen(msgspec.convert(given, ResourceClaim))


def claiming(of: Pod, *resources: str) -> Pod:
    """Return the pod with its claim in the status, as kube-scheduler writes it before it binds the
    pod.
    """
    served = [ExtendedResourceRequest(each) for each in resources or (GPU,)]
    claimed = ExtendedResourceClaimStatus("p-extended", served)
    status = PodStatus(phase="Running", extended_resource_claim_status=claimed)
    return msgspec.structs.replace(of, status=status)
