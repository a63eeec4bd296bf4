"""Builds small clusters in which pods must be evicted. A test gives the pods on each device
in GiB.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headroom.contract.annotations import MIRROR
from headroom.contract.gpunode import Plugin
from headroom.contract.kube import NodeStatus, Pod, PodStatus, ResourceRequirements
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from headroom.core.cluster.changes import Event
from tests.builders import (
    DISTRIBUTED,
    GIB,
    GPU,
    NOW_S,
    container,
    gpunode,
    kube_node,
    pod,
    reservation,
    shared,
    use,
)


@dataclass(frozen=True, slots=True)
class On:
    """A running pod. Its UID is its name."""

    name: str
    gib: int
    priority: int = 0
    cpu: str = "1"
    deleted: str | None = None
    annotations: Mapping[str, str] | None = None
    labels: Mapping[str, str] | None = None
    started: str = "2026-11-21T00:00:00Z"


def asking(of: Pod, cpu: str, mirrored_mib: int = 0) -> Pod:
    """Return the pod with a request for CPU. If ``mirrored_mib`` is not 0, the pod also requests
    the extended resource for GPU memory.
    """
    mirror = {MIRROR: str(mirrored_mib)} if mirrored_mib else {}
    resources = ResourceRequirements(limits={GPU: "1", "cpu": cpu} | mirror)
    main = msgspec.structs.replace(container(), resources=resources)
    return msgspec.structs.replace(of, spec=msgspec.structs.replace(of.spec, containers=[main]))


def newcomer(gib: int, priority: int = 100, name: str = "new", **other: Any) -> Pod:
    created = other.pop("created", "2026-11-21T01:00:00Z")
    policy = other.pop("preemption_policy", None)
    nominated = other.pop("nominated", None)
    of = pod(f"{gib}Gi", uid=name, name=name, priority=priority, created=created, **other)
    of = asking(of, "1", gib * 1024)
    spec = msgspec.structs.replace(of.spec, preemption_policy=policy)
    status = PodStatus(phase="Pending", nominated_node_name=nominated)
    return msgspec.structs.replace(of, spec=spec, status=status)


def running(on: On, node: str) -> Pod:
    of = pod(
        f"{on.gib}Gi",
        uid=on.name,
        name=on.name,
        node=node,
        phase="Running",
        priority=on.priority,
        deleted=on.deleted,
        annotations=on.annotations,
    )
    of = asking(of, on.cpu, on.gib * 1024)
    metadata = msgspec.structs.replace(of.metadata, labels=on.labels)
    status = PodStatus(phase="Running", start_time=on.started)
    return msgspec.structs.replace(of, metadata=metadata, status=status)


def full_node(
    name: str,
    *devices: Sequence[On],
    gib: int = 24,
    replicas: int = 4,
    plugin: Plugin = DISTRIBUTED,
    annotations: Mapping[str, str] | None = None,
) -> list[Event]:
    """Return the events of a node with shared devices. Each pod uses exactly the memory that it
    requested.
    """
    made, uses, reservations, pods = [], [], {}, []
    for index, holders in enumerate(devices):
        uuid = f"{name}-{index}"
        used_bytes = sum(on.gib for on in holders) * GIB
        free = replicas - len(holders)
        made.append(shared(uuid, free, len(holders), memory_bytes=gib * GIB, used_bytes=used_bytes))
        for on in holders:
            uses.append(
                use(on.name, uuid, on.gib * GIB, name=on.name, replica=f"{uuid}::{on.name}")
            )
            reservations[on.name] = reservation({uuid: on.gib * GIB}, name=on.name)
            pods.append(running(on, name))
    of_node = kube_node(name, annotations)
    amounts = {GPU: str(replicas * len(devices)), "cpu": "64"}
    amounts[MIRROR] = str(gib * 1024 * len(devices))
    of_node = msgspec.structs.replace(of_node, status=NodeStatus(allocatable=amounts))
    ledger = gpunode(*made, name=name, reservations=reservations, pods=uses, plugin=plugin)
    return [NodeSeen(of_node), GPUNodeSeen(ledger, NOW_S), *map(PodSeen, pods)]
