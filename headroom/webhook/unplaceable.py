"""Warns at creation about GPU pods that no node could ever take, and about forgotten amounts."""

from collections.abc import Iterator

from headroom.contract.annotations import VRAM, VRAM_LIMIT, Bytes, ReplicaShare
from headroom.contract.foreign_keys import VISIBLE_DEVICES
from headroom.contract.gpunode import Device
from headroom.contract.kube import Pod
from headroom.contract.quantity import gib
from headroom.core.placement.request import VramRequest, asks_for_gpu, understand
from headroom.core.placement.visible_devices import Visible
from headroom.webhook.automatic import requests_auto
from headroom.webhook.context import AdmissionContext, GpuNode


def needs_attention(pod: Pod, context: AdmissionContext) -> Iterator[str]:
    """Yield warnings about a pod whose request is valid."""
    if context.is_exempt or not asks_for_gpu(pod, context.rules) or requests_auto(pod):
        return
    request = understand(pod, context.namespace.default_vram, context.rules)
    if not isinstance(request, VramRequest):
        return
    waits = "in mode enforce, the pod would wait" if context.settings.observes else "the pod waits"
    for ask in request.containers:
        if isinstance(ask.amount, Bytes) and (
            why := _too_large(pod, ask.resource, ask.amount, context)
        ):
            yield f"annotation {VRAM}: container {ask.name:.80} needs {why}, so {waits}"
            break
        if isinstance(ask.limit, Bytes) and (
            why := _too_large(pod, ask.resource, ask.limit, context)
        ):
            limits = f"annotation {VRAM_LIMIT}: container {ask.name:.80} may use {why}"
            yield f"{limits}, so the limit has no effect"
            break
    forgotten = [ask for ask in request.containers if isinstance(ask.amount, ReplicaShare)]
    if forgotten and (share_bytes := _share(forgotten[0].resource, context)):
        yield (
            f"annotation {VRAM} is missing: container {forgotten[0].name:.80} reserves the share "
            f"of one replica of its GPU, for example {gib(share_bytes)}. Example: {VRAM}: 8Gi"
        )
    if request.visible is Visible.REJECTED:
        yield (
            f"env {VISIBLE_DEVICES} of a container selects GPUs itself, so {waits} on nodes that "
            "honor it; remove the variable, also from envFrom"
        )


def _too_large(pod: Pod, resource: str, amount: Bytes, context: AdmissionContext) -> str:
    """Return why no GPU has the amount, or "" if one may have it.

    The search usually ends at the first node, because most requests fit on any GPU. It finds
    nothing as long as no node reports a GPU of the resource.
    """
    needs_bytes = amount.count_bytes
    for node in context.nodes:
        room_bytes = _largest(node, resource)
        is_enough = room_bytes is None or room_bytes >= needs_bytes
        if is_enough and context.may_run(pod, resource, node):
            return ""
    rooms = [_largest(node, resource) for node in context.candidates(pod, [resource])]
    if not (largest_bytes := max((each or 0 for each in rooms), default=0)):
        return ""  # no node may take the pod, or no agent reports
    return (
        f"{gib(needs_bytes, up=True)}, and the largest GPU that it may use has {gib(largest_bytes)}"
    )


def _share(resource: str, context: AdmissionContext) -> int:
    """Return the share of a replica of the first GPU that is shared, or 0 if no GPU is shared."""
    shares = (
        (_allocatable(each) or 0) // each.replicas.total
        for node in context.nodes
        for each in node.devices(resource)
        if each.replicas.total > 1
    )
    return next(shares, 0)


def _largest(node: GpuNode, resource: str) -> int | None:
    """Return the allocatable bytes of the node's largest GPU of the resource, 0 if it has none, and
    None if a size is unknown."""
    sizes = [_allocatable(each) for each in node.devices(resource)]
    return None if None in sizes else max((each or 0 for each in sizes), default=0)


def _allocatable(device: Device) -> int | None:
    if device.memory_bytes < 0:
        return None
    return device.memory_bytes - max(0, device.reserved_bytes)
