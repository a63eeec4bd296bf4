"""Reads the data of a plan from API objects: pods, nodes and agents' reports."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headroom.contract.annotations import Bytes
from headroom.contract.errors import BadQuantity
from headroom.contract.gpunode import GPUNodeStatus
from headroom.contract.kube import Node, Pod
from headroom.contract.quantity import parse_bytes
from headroom.contract.vramprofile import seconds
from headroom.core.cluster.label_inventory import believed
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import Unreadable, asks_for_gpu, replicas_requested, understand
from headroom.planner.workload import Machine, workload_name

RULES = Rules()


def gpu_pod(pod: Pod, now_s: float) -> dict[str, Any] | None:
    """Return the fields of ``RecordedPod``, or None for a pod without a GPU.

    A pod without a start time counts as started at ``now_s``.
    """
    if not asks_for_gpu(pod, RULES):
        return None
    metadata, status = pod.metadata, pod.status
    controller = metadata.controller
    created_s = seconds(metadata.creation_timestamp or "") or now_s
    started_s = seconds((status.start_time if status else None) or "") or now_s
    request = understand(pod, None, RULES, enforce_limits=False)
    asks = () if isinstance(request, Unreadable) else request.containers
    sizes = [each.amount.count_bytes for each in asks if isinstance(each.amount, Bytes)]
    resources = [each.resources for each in pod.spec.containers or ()]
    requests = [each.requests or {} for each in resources if each]
    return {
        "name": f"{metadata.namespace}/{metadata.name}",
        "workload": workload_name(
            metadata.namespace, controller.name if controller else metadata.name
        ),
        "node": pod.node,
        "created_s": created_s,
        "started_s": max(created_s, started_s),
        "gpus": max(1, sum(replicas_requested(pod, RULES).values())),
        "request_bytes": max(sizes, default=None),
        "cpu_milli": sum(cpu_milli(each.get("cpu")) or 0 for each in requests),
        "host_bytes": sum(count_of(each.get("memory")) or 0 for each in requests),
    }


def machine_of(node: Node, status: GPUNodeStatus | None) -> Machine | None:
    """Return a node with its GPUs, or None if it has no GPU.

    The GPUs come from the agent's report, or from the node's labels if there is no report. If they
    differ, all count as GPUs of the first model with the smallest memory. GPUs that are split by
    MIG are left out.
    """
    status = status or believed(node, RULES)
    devices = [
        each for each in (status.devices if status else ()) if each.kind == "gpu" and each.model
    ]
    sizes = [each.memory_bytes - each.reserved_bytes for each in devices]
    if not sizes or min(sizes) <= 0:
        return None
    allocatable = (node.status.allocatable if node.status else None) or {}
    return Machine(
        name=node.metadata.name,
        model=devices[0].model,
        gpus=len(devices),
        memory_bytes=min(sizes),
        cpu_milli=cpu_milli(allocatable.get("cpu")),
        host_bytes=count_of(allocatable.get("memory")),
    )


class Use(NamedTuple):
    """Memory and activity of the devices of a pod. A value is None if it is unknown."""

    #: Maximum memory on one of the devices.
    peak_bytes: int | None
    #: The mean SM activity and utilization over the devices that no other pod holds.
    sm_ratio: float | None
    utilization_ratio: float | None


def uses_of(status: GPUNodeStatus) -> Mapping[str, Use]:
    """Return the use of each pod, by uid."""
    peaks: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    holders: dict[str, set[str]] = defaultdict(set)
    for row in status.pods:
        peak_bytes = row.peak_bytes if row.peak_bytes is not None else row.used_bytes
        holders[row.device].add(row.uid)
        peaks[row.uid]  # this adds the pod even if it has no figure
        if peak_bytes is not None and peak_bytes >= 0:
            peaks[row.uid][row.device] += peak_bytes
    active: dict[str, list[float]] = defaultdict(list)
    utilized: dict[str, list[float]] = defaultdict(list)
    for device in status.devices:
        if len(holders[device.uuid]) == 1:
            (uid,) = holders[device.uuid]
            if device.sm_activity is not None:
                active[uid].append(device.sm_activity.ratio)
            if device.utilization_ratio is not None:
                utilized[uid].append(device.utilization_ratio)
    return {
        uid: Use(max(by_device.values(), default=None), _mean(active[uid]), _mean(utilized[uid]))
        for uid, by_device in peaks.items()
    }


def _mean(ratios: Sequence[float]) -> float | None:
    return sum(ratios) / len(ratios) if ratios else None


def cpu_milli(quantity: str | int | None) -> int | None:
    """Return a CPU quantity in thousandths of a core, or None if it is missing or invalid."""
    text = str(quantity or "")
    # The suffix k multiplies a number of cores by 1000: "0.5k" is 500.
    return count_of(text.removesuffix("m") if text.endswith("m") else f"{text}k")


def count_of(quantity: str | int | None) -> int | None:
    """Return a quantity as a whole number, such as bytes, or None if it is missing or invalid."""
    try:
        return parse_bytes(str(quantity or ""))
    except BadQuantity:
        return None
