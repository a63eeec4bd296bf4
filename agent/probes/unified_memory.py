"""Memory of GPUs that share the memory of their host, such as GB10 and Jetson. Pure.

The driver reports no memory for such a GPU, so the host's figures replace it:

    memory = the pool: the node's annotation, or else ``--unified-memory``; an amount, or the host's
             memory less a reserve
    free   = the smaller of pool - use by listed processes, and the host's available memory

So use by the host beyond the reserve counts as unattributed use of the GPU. Without annotation and
flag, a GPU that pods share is unhealthy, because the size of the pool is not confirmed. A GPU that
only one pod can get has the memory of the default pool in that case, and only the use of its pod
counts, because the pod may use all memory of the host.
"""

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from agent.probes.cause import Cause
from agent.probes.nvml import Memory
from agent.probes.readings import DeviceReading, HostMemoryReading
from headroom.contract.annotations import UNIFIED_MEMORY

#: The default pool leaves the host the total memory divided by this number.
_RESERVE_DIVISOR = 10
#: Minimum number of bytes that the default pool leaves the host.
_LEAST_RESERVE_BYTES = 2 << 30

UNSET = Cause(
    f"uses unified memory of the host: annotate the node. Example: {UNIFIED_MEMORY}: auto", "memory"
)
SEVERAL = Cause("several GPUs use unified memory of the host, which cannot be divided", "memory")


def is_unified(device: DeviceReading) -> bool:
    """Return whether the driver answers but reports no memory for a whole GPU."""
    is_absent = device.memory is None or device.memory.total_bytes == 0
    return device.kind == "gpu" and not device.fault and is_absent


def with_host_memory(
    devices: Sequence[DeviceReading],
    host: HostMemoryReading | None,
    is_shared: Callable[[str], bool],
) -> tuple[list[DeviceReading], str]:
    """Return the devices, with the host's figures for a GPU with unified memory.

    ``is_shared`` returns whether the plugin shares a device among pods. Also return the UUID of the
    GPU for which only the use of its pod counts, or an empty string if there is no such GPU.
    """
    unified = [device for device in devices if is_unified(device)]
    if host is None or not unified or len(unified) < len(devices):
        return [*devices], ""  # A host with unified memory has no other GPUs.
    if len(unified) > 1:
        return [replace(device, fault=SEVERAL) for device in devices], ""
    (device,) = unified
    if host.pool_error:
        return [replace(device, fault=Cause(host.pool_error, "memory"))], ""
    if host.pool_bytes is None and is_shared(device.uuid):
        return [replace(device, fault=UNSET)], ""
    of_pod_only = device.uuid if host.pool_bytes is None else ""
    return [replace(device, memory=_memory(device, host))], of_pod_only


def _memory(device: DeviceReading, host: HostMemoryReading) -> Memory:
    """Return the memory of a GPU from the figures of its host."""
    reserve_bytes = max(host.total_bytes // _RESERVE_DIVISOR, _LEAST_RESERVE_BYTES)
    pool_bytes = host.pool_bytes or max(0, host.total_bytes - reserve_bytes)
    total_bytes = min(pool_bytes, host.total_bytes)
    # If the use of a process is unknown, the host's available memory still accounts for it.
    used_bytes = sum(figure or 0 for figure in (device.processes or {}).values())
    free_bytes = max(0, min(total_bytes - used_bytes, host.available_bytes))
    return Memory(total_bytes, free_bytes, 0)
