"""Builds a node with two devices, and asks for its gate's decisions."""

from collections.abc import Sequence
from typing import Any

from agent.gate_decision import Limits, Verdict, judge
from headroom.contract.gpunode import (
    Charge,
    Device,
    GPUNode,
    GPUNodeSpec,
    GPUNodeStatus,
    PodUse,
    Replicas,
    Reservation,
    Source,
)
from headroom.contract.kube import ObjectMeta

READ_EVERY_S = 1.0

GPU = "nvidia.com/gpu"
DEVICES = ("GPU-a", "GPU-b")
MEMORY = 100
SOURCES = [Source("checkpoint"), Source("proc")]


def device(uuid: str, **changes: Any) -> Device:
    shown = {
        "memory_bytes": MEMORY,
        "reserved_bytes": 0,
        "used_bytes": 0,
        "unattributed_bytes": 0,
        "sharing": "time-slicing",
        "resource": GPU,
        "replicas": Replicas(free=4),
    }
    return Device(uuid, **(shown | changes))


def reservation(asked: int, *candidates: str, count: int = 1, name: str = "p") -> Reservation:
    on = dict.fromkeys(candidates or DEVICES, asked)
    return Reservation("default", name, [Charge(GPU, count, on)])


def row(uid: str, uuid: str, used: int | None = 0, replica: str = "0", **more: str) -> PodUse:
    return PodUse(uid, uuid, replica=f"{uuid}::{uid}{replica}", used_bytes=used, **more)


def stray(used: int | None) -> PodUse:
    """Return the use of a pod that holds no replica."""
    return PodUse("s", "GPU-a", used_bytes=used)


def node(
    reservations: dict[str, Reservation], sample: GPUNodeStatus | None, initialised: bool = True
) -> GPUNode:
    spec = GPUNodeSpec(initialised=initialised, reservations=reservations)
    return GPUNode(ObjectMeta(name="n1"), spec=spec, status=sample)


def status(
    *rows: PodUse,
    devices: Sequence[Device] = tuple(map(device, DEVICES)),
    sources: Sequence[Source] = SOURCES,
) -> GPUNodeStatus:
    return GPUNodeStatus("now", list(devices), list(rows), sources=list(sources))


def ask(
    reservations: dict[str, Reservation],
    sample: GPUNodeStatus,
    uid: str = "p",
    written: GPUNodeStatus | None = None,
    reserve: int = 0,
    tolerance: int = 0,
    **more: Any,
) -> Verdict:
    held = node(reservations, sample if written is None else written, **more)
    return judge(held, sample, uid, Limits(reserve, tolerance))
