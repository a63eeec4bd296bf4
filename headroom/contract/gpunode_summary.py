"""Computes the values of a GPUNode for kubectl's printer columns."""

from collections.abc import Sequence

from headroom.contract.gpunode import Device, Summary
from headroom.contract.quantity import MAX_DEVICE_BYTES, gib


def summary_of(devices: Sequence[Device]) -> Summary:
    """Return the summary of these devices. Memory that several devices share counts only once."""
    # Compute instances of one GPU instance share its memory.
    memories = {
        (d.parent, d.gpu_instance) if d.kind == "mig" else (d.uuid, None): d
        for d in devices
        if 0 < d.memory_bytes <= MAX_DEVICE_BYTES
    }.values()
    measured = [d for d in memories if d.used_bytes >= 0]
    used_bytes = sum(d.used_bytes for d in measured)
    free_bytes = sum(d.memory_bytes - max(0, d.reserved_bytes) - d.used_bytes for d in measured)
    return Summary(
        devices=len(devices),
        memory=gib(sum(d.memory_bytes for d in memories)),
        used=gib(used_bytes) if measured else "",
        free=gib(free_bytes) if measured else "",
        sharing=",".join(sorted({d.sharing for d in devices})),
    )
