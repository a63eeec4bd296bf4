"""Random nodes and pods for hypothesis, with all features mixed and mostly valid."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from headroom.contract.annotations import MAX_SM, PROCESSES
from headroom.contract.gpunode import (
    Charge,
    Device,
    GPUNodeStatus,
    PodUse,
    Replicas,
    Reservation,
    SmActivity,
)
from headroom.contract.kube import Container, Pod
from headroom.core.placement.snapshot import NodeTerms
from tests.builders import FRESH_S, GIB, GPU, MIB, container, pod, status, weighed_anew

#: Strategies for use inside draws are built once, because that takes longer than drawing.
one = functools.lru_cache(maxsize=None, typed=True)(lambda *values: st.sampled_from(values))
SHARED = "nvidia.com/gpu.shared"
MIG = "nvidia.com/mig-1c.3g.20gb"
OTHER_MIG = "nvidia.com/mig-2c.3g.20gb"
RESOURCES = (GPU, SHARED, MIG, OTHER_MIG)

#: The last source is device utilisation, which does not count as SM activity.
ACTIVITIES = (None, SmActivity(0.5, "gpm"), SmActivity(0.0, "dcgm"), SmActivity(0.0, "nvml"))

_gib_used = st.integers(0, 24).map(lambda gib: gib * GIB)
_activities = st.sampled_from(ACTIVITIES)
amounts_bytes = st.one_of(
    st.integers(0, 26).map(lambda gib: gib * GIB),
    st.sampled_from([1, MIB, 12 * GIB - 1, 12 * GIB + 1, 1 << 44]),
)
_used_bytes = st.one_of(st.none(), amounts_bytes, st.just(-GIB))


@dataclass(frozen=True)
class DrawnNode:
    """A node with a report, reservations, a reserve, a tolerance and cordoned devices."""

    status: GPUNodeStatus
    reservations: dict[str, Reservation]
    reserve_bytes: int
    tolerance_bytes: int
    #: UUIDs of devices or GPUs that take no new pods.
    cordoned: frozenset[str] = frozenset()

    def weighed(self, name: str = "n", fresh_until_s: float = FRESH_S) -> NodeTerms:
        devices = weighed_anew(
            self.status,
            self.reservations,
            self.reserve_bytes,
            self.tolerance_bytes,
            cordoned=self.cordoned,
        )
        return NodeTerms(name, None, fresh_until_s, devices)


@st.composite
def devices(draw: DrawFn, index: int, mps: bool) -> Device:
    resource = draw(one(*RESOURCES))
    memory = draw(one(24 * GIB, 24 * GIB, 16 * GIB + 5))
    used = min(draw(_gib_used), memory)
    is_mig = resource in (MIG, OTHER_MIG)
    sharing = draw(one("none", "time-slicing") if is_mig else one("none"))
    if resource == SHARED:
        sharing = draw(one("time-slicing", "mps") if mps else one("time-slicing"))
    most = 4 if sharing != "none" else 1
    free = draw(st.integers(0, most))
    sane = Device(
        uuid=f"D{index}",
        kind="mig" if is_mig else "gpu",
        parent=draw(one("P0", "D0")) if is_mig else None,
        gpu_instance=draw(one(0, 1, None)) if is_mig else None,
        memory_bytes=memory,
        reserved_bytes=draw(one(0, 0, GIB, memory)),
        used_bytes=used,
        unattributed_bytes=draw(one(None, 0, 0, min(used, MIB), used // 2)),
        sm_activity=draw(_activities),
        sharing=sharing,  # type: ignore[arg-type]
        resource=resource,
        replicas=Replicas(free=free, allocated=most - free),
        healthy=draw(st.integers(0, 9)) > 0,
    )
    if draw(st.integers(0, 14)):
        return sane
    wrong: dict[str, Any] = draw(
        st.sampled_from(
            [
                {"uuid": "D0"},
                {"uuid": ""},
                {"memory_bytes": -1},
                {"memory_bytes": 1 << 80},
                {"used_bytes": memory + 1},
                {"used_bytes": -1},
                {"reserved_bytes": memory + 1},
                {"unattributed_bytes": memory + 1},
                {"replicas": Replicas(free=-1)},
                {"replicas": Replicas(free=0, allocated=-1)},
                {"replicas": Replicas(free=1 << 70)},
            ]
        )
    )
    return Device(**{**{f: getattr(sane, f) for f in sane.__struct_fields__}, **wrong})


@st.composite
def worlds(draw: DrawFn, mps: bool = True) -> DrawnNode:
    seen = [draw(devices(index, mps)) for index in range(draw(st.integers(0, 4)))]
    uuids = [*{d.uuid for d in seen}, "gone"]
    reservations = {
        f"u{i}": Reservation(
            namespace="default",
            name=f"q{i}",
            charges=[
                Charge(
                    resource=resource,
                    count=draw(st.integers(1, 3)),
                    candidates={
                        uuid: draw(amounts_bytes)
                        for uuid in draw(st.lists(one(*uuids), unique=True, max_size=3))
                    },
                )
                for resource in draw(st.lists(one(*RESOURCES), unique=True, max_size=2))
            ],
        )
        for i in range(draw(st.integers(0, 3)))
    }
    rows = [
        PodUse(
            uid=draw(one("u0", "u1", "u2", "stray")),
            device=draw(one(*uuids)),
            container=draw(one("init", "main")),
            replica=draw(one("", "0", "1")),
            used_bytes=draw(_used_bytes),
        )
        for _ in range(draw(st.integers(0, 5)))
    ]
    parents = {d.parent for d in seen if d.parent}
    cordonable = [*uuids, *parents] if draw(st.booleans()) else ["gone"]
    return DrawnNode(
        status(*seen, pods=rows),
        reservations,
        reserve_bytes=draw(one(0, 0, GIB, 1 << 44)),
        tolerance_bytes=draw(one(0, 64 * MIB)),
        cordoned=draw(st.frozensets(one(*cordonable), max_size=2)),
    )


vrams: SearchStrategy[str | None] = st.sampled_from(
    [None, "1M", "4Gi", "6Gi", "8Gi", "12Gi", "16Gi", "24Gi", "25%", "100%", "0.0001%", "a=6Gi"]
)


@st.composite
def pods(
    draw: DrawFn, vram: SearchStrategy[str | None] = vrams, offered: Sequence[str] = RESOURCES
) -> Pod:
    """Draw a pod whose containers request one or two of the ``offered`` resources."""

    def some(name: str, sidecar: bool = False) -> Container:
        return container(
            name,
            gpus=draw(one(1, 1, 1, 2)),
            resource=draw(one(*resources)),
            restart_policy="Always" if sidecar else None,
        )

    resources = draw(st.lists(one(*offered), min_size=1, max_size=2))
    init = [some(f"i{i}", draw(st.booleans())) for i in range(draw(one(0, 0, 1, 2)))]
    more = [some("b")] if draw(st.integers(0, 3)) == 0 else []
    annotations = {}
    if draw(st.integers(0, 5)) == 0:
        annotations[MAX_SM] = draw(one("50%", "80%"))
    if draw(st.integers(0, 5)) == 0:
        annotations[PROCESSES] = "2"
    return pod(draw(vram), some("a"), *more, init=init, annotations=annotations)


#: Mostly small, so that about half of the pods fit.
small_vrams: SearchStrategy[str | None] = st.sampled_from(["1M", "1M", "1%", "1Gi", "4Gi", "12Gi"])


@st.composite
def nodes_and_pods(draw: DrawFn) -> tuple[DrawnNode, Pod]:
    """Draw a node and a pod that requests resources of this node, so that many of these pods
    fit.
    """
    world = draw(worlds())
    offered = sorted({device.resource for device in world.status.devices}) or RESOURCES
    return world, draw(pods(small_vrams, offered))
