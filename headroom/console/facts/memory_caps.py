"""Reports which mechanism limits the GPU memory of a pod, and whether a reading proves the limit.

Headroom itself does not limit memory. Three mechanisms of NVIDIA do:

* The driver, from r615 on, limits each container's cgroup. The agent reads these limits back.
* MIG gives each instance its own memory, whose size the driver reports. This is a limit if no other
  pod shares the instance.
* MPS limits each process. No call reads these limits back, so they never count as proven.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from headroom.contract.annotations import SHARE, ShareMode, parse_share
from headroom.contract.errors import BadAnnotation
from headroom.contract.gpunode import ContainerLimit, GPUNodeStatus, PodUse
from headroom.contract.kube import Pod
from headroom.contract.quantity import gib
from headroom.core.cluster.cluster import Cluster
from headroom.core.placement.amounts import MIB_BITS
from headroom.core.placement.device_accounting import DeviceTerms


@dataclass(frozen=True, slots=True)
class MemoryCap:
    """The limit on a pod's memory on one device, if there is one."""

    uid: str
    device: str
    #: The mechanism that limits the pod, or None if no mechanism does.
    enforcer: Literal["driver", "mig", "mps"] | None
    #: Maximum bytes of the pod on the device. With MPS, the maximum of each of its processes.
    limit_bytes: int | None
    #: Whether a reading proves that the pod cannot allocate more.
    capped: bool
    message: str


def caps_on(cluster: Cluster, node: str, terms: DeviceTerms) -> dict[str, MemoryCap]:
    """Return the cap of each pod that a report shows on the device, by uid."""
    gpunode = cluster.gpunode(node)
    status = gpunode.status if gpunode else None
    if status is None:
        return {}
    uses_of: dict[str, list[PodUse]] = {}
    for use in status.pods:
        if use.device == terms.device.uuid:
            uses_of.setdefault(use.uid, []).append(use)
    return {
        uid: _cap(terms, uid, uses, _limits(status, uid, terms), _asks_limit(cluster, uid))
        for uid, uses in uses_of.items()
    }


def caps_of(cluster: Cluster, pod: Pod, devices: Sequence[DeviceTerms]) -> Iterator[MemoryCap]:
    """Yield a bound pod's cap on each device of its node on which a report shows the pod."""
    for terms in devices:
        if cap := caps_on(cluster, pod.node, terms).get(pod.metadata.uid):
            yield cap


def _limits(status: GPUNodeStatus, uid: str, terms: DeviceTerms) -> list[ContainerLimit]:
    return [each for each in status.limits if (each.uid, each.device) == (uid, terms.device.uuid)]


def _asks_limit(cluster: Cluster, uid: str) -> bool:
    """Return whether the pod, or otherwise its namespace, has annotation ``SHARE`` with value
    limit."""
    pod = cluster.pod(uid)
    if pod is None:
        return False
    of_namespace = cluster.namespaces.annotation(pod.metadata.namespace, SHARE)
    own = pod.annotation(SHARE)
    text = of_namespace if own is None else own
    if not text:
        return False
    try:
        return parse_share(text) is ShareMode.LIMIT
    except BadAnnotation:
        return False


def _cap(
    terms: DeviceTerms,
    uid: str,
    uses: Sequence[PodUse],
    limits: Sequence[ContainerLimit],
    asks_limit: bool,
) -> MemoryCap:
    device = terms.device
    hard = [each.hard_bytes for each in limits if each.hard_bytes is not None]
    # The agent reports a row for each container that has a limit or uses memory. So a container
    # without a limit either has a row in which the limit is missing, or no row at all.
    if hard and len(hard) == len(limits) and len(hard) >= len({use.container for use in uses}):
        message = f"capped at {gib(sum(hard))} by the driver"
        return MemoryCap(uid, device.uuid, "driver", sum(hard), True, message)
    if terms.believed and device.kind == "mig" and device.sharing == "none" and terms.sharers == 1:
        message = f"capped at {gib(device.memory_bytes)}, the memory of its MIG device"
        return MemoryCap(uid, device.uuid, "mig", device.memory_bytes, True, message)
    if terms.believed and device.sharing == "mps" and device.replicas.total:
        limit_bytes = device.memory_bytes // device.replicas.total >> MIB_BITS << MIB_BITS
        message = (
            f"not certain to be capped: MPS limits each process to at most {gib(limit_bytes)}, but "
            "no reading confirms this"
        )
        return MemoryCap(uid, device.uuid, "mps", limit_bytes, False, message)
    message = "not capped: it can allocate more than it requests"
    if asks_limit:
        message = (
            f"not capped: {SHARE} is limit, but the driver reports no limit for all containers; "
            "see docs/how-to/limit-memory.md#check-the-limit"
        )
    return MemoryCap(uid, device.uuid, None, None, False, message)
