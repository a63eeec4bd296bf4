"""Explains a pending pod in a small fleet."""

import msgspec

from headroom.contract.gpunode import Reservation
from headroom.contract.kube import OwnerReference, Pod
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from headroom.core.cluster.changes import Event
from tests.builders import DISTRIBUTED, GIB, gpunode, kube_node, pod, reservation, shared, use
from tests.console.asking import Asked
from tests.console.test_devices import since

WAITS = pod("16Gi", uid="uw", name="waits")


def node(name: str, free: int = 2, **sizes: int) -> list[Event]:
    """Return the events of a node with one GPU of 24 GiB on which pods of these sizes have
    reservations.
    """
    uuid = f"GPU-{name}"
    reservations: dict[str, Reservation] = {
        f"u-{who}": since(reservation({uuid: gib * GIB}, name=who)) for who, gib in sizes.items()
    }
    rows = [use(f"u-{who}", uuid, replica=f"{uuid}::{n}") for n, who in enumerate(sizes)]
    held = gpunode(
        shared(uuid, free=free, allocated=len(sizes)),
        name=name,
        reservations=reservations,
        pods=rows,
        plugin=DISTRIBUTED,
    )
    pods = [
        PodSeen(pod(f"{gib}Gi", uid=f"u-{who}", name=who, node=name, phase="Running", priority=5))
        for who, gib in sizes.items()
    ]
    return [NodeSeen(kube_node(name)), *pods, GPUNodeSeen(held, 0.0)]


def owned(who: Pod, kind: str, name: str, deleted: bool = False, **labels: str) -> Pod:
    owners = [OwnerReference("apps/v1", kind, name, controller=True)]
    labels = {key.replace("_", "-"): value for key, value in labels.items()}
    deletion = "2026-11-21T00:00:00Z" if deleted else None
    metadata = msgspec.structs.replace(
        who.metadata, owner_references=owners, labels=labels, deletion_timestamp=deletion
    )
    return msgspec.structs.replace(who, metadata=metadata)


def asked(*events: Event, waits: Pod = WAITS) -> Asked:
    found = Asked()
    found.writer.apply([*events, PodSeen(waits)])
    return found


def explained(fleet: Asked) -> dict[str, object]:
    answer = fleet.get("/v1/explain?pod=default/waits")
    assert answer.status_code == 200, answer.text
    body: dict[str, object] = answer.json()
    return body


def kinds(body: dict[str, object]) -> list[str]:
    given = body["advice"]
    assert isinstance(given, list)
    assert body["suggestions"] == [one["sentence"] for one in given]
    return [one["kind"] for one in given]
