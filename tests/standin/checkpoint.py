"""Writes the device manager's checkpoint as Go does: JSON with a checksum.

The checksum is the FNV-1a hash of go-spew's output, including type names
(pkg/kubelet/checkpointmanager/checksum, pkg/util/hash). Therefore it depends on the order of every
list.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.standin.allocations import RESOURCE, Checkpoint

NAME = "kubelet_internal_checkpoint"


def render(checkpoint: Checkpoint) -> bytes:
    """Return the content of the file."""
    entries = [
        {
            "PodUID": entry.uid,
            "ContainerName": entry.container,
            "ResourceName": RESOURCE,
            "DeviceIDs": {str(numa): sorted(ids) for numa, ids in entry.by_numa},
            "AllocResp": base64.b64encode(allocate_response(dict(entry.environment))).decode(),
        }
        for entry in checkpoint.entries
    ]
    registered = checkpoint.registered
    data = {
        "PodDeviceEntries": entries or None,
        "RegisteredDevices": {} if registered is None else {RESOURCE: sorted(registered)},
    }
    content = {"Data": data, "Checksum": checksum(data)}
    return json.dumps(content, separators=(",", ":")).encode()


def checksum(data: Mapping[str, Any]) -> int:
    """Return the checksum of the decoded ``Data`` of a checkpoint."""
    digest = 0x811C9DC5
    for byte in spew(data).encode():
        digest = (digest ^ byte) * 0x01000193 & 0xFFFFFFFF
    return digest


def spew(data: Mapping[str, Any]) -> str:
    """Format a value like ``spew.ConfigState{SortKeys, SpewKeys,
    DisableMethods}.Sprintf("%#v")``.
    """
    entries = data["PodDeviceEntries"]
    shown = "<nil>" if entries is None else f"[{' '.join(map(_spew_entry, entries))}]"
    registered = _spew_map(sorted(data["RegisteredDevices"].items()))
    return (
        f"(checkpoint.checkpointData){{PodDeviceEntries:([]checkpoint.PodDevicesEntry){shown} "
        f"RegisteredDevices:(map[string][]string){registered}}}"
    )


def _spew_entry(entry: Mapping[str, Any]) -> str:
    by_numa = sorted((int(numa), ids) for numa, ids in entry["DeviceIDs"].items())
    answer = " ".join(str(byte) for byte in base64.b64decode(entry["AllocResp"]))
    return (
        f"{{PodUID:(string){entry['PodUID']} ContainerName:(string){entry['ContainerName']} "
        f"ResourceName:(string){entry['ResourceName']} "
        f"DeviceIDs:(checkpoint.DevicesPerNUMA){_spew_map(by_numa)} "
        f"AllocResp:([]uint8)[{answer}]}}"
    )


def _spew_map(items: Sequence[tuple[object, list[str] | None]]) -> str:
    shown = (
        f"{key}:{'<nil>' if values is None else '[' + ' '.join(values) + ']'}"
        for key, values in items
    )
    return f"map[{' '.join(shown)}]"


def allocate_response(environment: Mapping[str, str]) -> bytes:
    """Return a ContainerAllocateResponse of the device plugin API that has only ``envs`` (field
    1).
    """
    pairs = (_text(1, key) + _text(2, value) for key, value in sorted(environment.items()))
    return b"".join(_field(1, pair) for pair in pairs)


def _text(number: int, value: str) -> bytes:
    return _field(number, value.encode())


def _field(number: int, content: bytes) -> bytes:
    size, length = len(content), b""
    while size > 0x7F:
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content
