"""Amounts in MiB that limit a container or are counted for it.

Before the pod has a device, the amount is known only for a request in bytes, and not for a share of
a device or a replica. Limits are rounded down, so that the limits of pods without
``headroom.gpu/vram-limit`` never exceed their reservations. The mirrored resource is rounded up, so
that it never allows more memory than there is.
"""

from collections.abc import Sequence

from headroom.contract.annotations import Bytes
from headroom.core.placement.policy import MIB
from headroom.core.placement.request import ContainerAsk
from headroom.webhook.context import GpuNode

#: Major version of the first driver that limits memory per cgroup.
LIMITING_DRIVER = 615
#: The source in the agent that reads these limits.
LIMITS_SOURCE = "limits"


def mirrored_mib(requests: Sequence[ContainerAsk]) -> int | None:
    """Return the MiB of a container on all its devices, or None if an amount is not known yet."""
    total = 0
    for ask in requests:
        if not isinstance(ask.amount, Bytes):
            return None
        total += -(-ask.amount.count_bytes // MIB) * ask.count
    return total


def cap_mib(
    requests: Sequence[ContainerAsk], candidates: Sequence[GpuNode]
) -> tuple[int, int] | None:
    """Return the driver's hard and soft memory limits in MiB for each device of a container.

    The hard limit is the container's limit, or its request if it has no limit. The soft limit is
    its request. Return None unless both are in bytes, the container has exactly one of each, and
    all candidate nodes can enforce them.
    """
    hard_bytes, soft_bytes = _most_bytes(requests), _single_amount_bytes(requests)
    if hard_bytes is None or soft_bytes is None or not candidates:
        return None
    if not all(_enforces(candidate, requests[0].resource) for candidate in candidates):
        return None
    hard_mib, soft_mib = hard_bytes // MIB, soft_bytes // MIB
    return (hard_mib, soft_mib) if soft_mib else None


def mps_mib(
    requests: Sequence[ContainerAsk], candidates: Sequence[GpuNode], processes: int
) -> int | None:
    """Return MPS's memory limit in MiB for each process of a container with one device.

    The processes share the container's limit, or its request if it has no limit.
    Return None unless the limit is below MPS's own limit on each device that the container could
    get, because MPS ignores a larger limit.
    """
    amount_bytes = _most_bytes(requests)
    if amount_bytes is None or requests[0].count != 1 or not candidates:
        return None
    each_mib = amount_bytes // processes // MIB
    for candidate in candidates:
        devices = candidate.devices(requests[0].resource)
        if not devices or any(device.sharing != "mps" for device in devices):
            return None
        if any(d.memory_bytes // max(d.replicas.total, 1) // MIB <= each_mib for d in devices):
            return None
    return each_mib or None


def _single_amount_bytes(requests: Sequence[ContainerAsk]) -> int | None:
    """Return the bytes per device of a container with one request in bytes, otherwise None."""
    if len(requests) != 1 or not isinstance(requests[0].amount, Bytes):
        return None
    return requests[0].amount.count_bytes


def _most_bytes(requests: Sequence[ContainerAsk]) -> int | None:
    """Return the bytes per device that a container may use, or None if they are not known yet.

    These are its limit, or its request if it has no limit.
    """
    if len(requests) != 1 or requests[0].limit is None:
        return _single_amount_bytes(requests)
    limit = requests[0].limit
    return limit.count_bytes if isinstance(limit, Bytes) else None


def _enforces(candidate: GpuNode, resource: str) -> bool:
    """Return whether the node's driver can limit memory per cgroup, according to its agent.

    This requires the driver, cgroup v2, devices that are injected with CDI, and no MIG. The agent
    cannot see the versions of the container toolkit and the device plugin.
    """
    status = candidate.status
    if status is None:
        return False
    major = status.driver_version.partition(".")[0]
    devices = candidate.devices(resource)
    return (
        major.isdecimal()
        and len(major) < 6
        and int(major) >= LIMITING_DRIVER
        and any(each.name == LIMITS_SOURCE and each.state == "ok" for each in status.sources)
        and "cdi" in status.plugin.device_list_strategy
        and bool(devices)
        and all(device.kind == "gpu" for device in devices)
    )
