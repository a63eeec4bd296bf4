"""Builds checkpoints of the kubelet's device manager."""

from typing import Any

GPU = "nvidia.com/gpu"


def record(*entries: dict[str, Any], **registered: list[str]) -> dict[str, Any]:
    data = {"PodDeviceEntries": list(entries) or None, "RegisteredDevices": {GPU: ["GPU-a::0"]}}
    return {"Data": data | registered, "Checksum": 0}


def entry(uid: str = "u", **changes: Any) -> dict[str, Any]:
    return {
        "PodUID": uid,
        "ContainerName": "main",
        "ResourceName": GPU,
        "DeviceIDs": {"-1": ["GPU-a::0"]},
        "AllocResp": None,
    } | changes
