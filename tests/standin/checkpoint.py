"""Writes the device manager's checkpoint in the kubelet's format, but without a checksum, because
agents ignore it.
"""

import base64
import json
from collections.abc import Iterable

from tests.kubelet.relay import api
from tests.standin.allocations import RESOURCE, Checkpoint

NAME = "kubelet_internal_checkpoint"


def render(checkpoint: Checkpoint) -> bytes:
    """Return the content of the checkpoint file."""
    entries = [
        {
            "PodUID": entry.uid,
            "ContainerName": entry.container,
            "ResourceName": RESOURCE,
            "DeviceIDs": {str(numa): sorted(ids) for numa, ids in entry.by_numa},
            "AllocResp": base64.b64encode(response(entry.environment)).decode(),
        }
        for entry in checkpoint.entries
    ]
    registered = checkpoint.registered
    data = {
        "PodDeviceEntries": entries or None,
        "RegisteredDevices": {} if registered is None else {RESOURCE: sorted(registered)},
    }
    return json.dumps({"Data": data, "Checksum": 0}, separators=(",", ":")).encode()


def response(environment: Iterable[tuple[str, str]]) -> bytes:
    """Return the plugin's encoded response to Allocate."""
    answer: bytes = api.ContainerAllocateResponse(envs=dict(environment)).SerializeToString()
    return answer
