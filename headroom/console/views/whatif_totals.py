"""Totals of the cluster before and after a what-if."""

from collections import Counter
from collections.abc import Iterable, Sequence

from starlette.requests import Request

from headroom.console.facts.gpu_pods import bytes_of
from headroom.console.views.fleet import headroom_bytes
from headroom.console.views.pods import shared_rows
from headroom.console.views.whatif_bodies import WhatifAsked, WhatifTotalsView
from headroom.core.cluster.cluster import Cluster
from headroom.core.placement.placement_record import Placement
from headroom.core.placement.snapshot import NodeTerms, Snapshot


def before_and_after(
    request: Request,
    cluster: Cluster,
    asked: WhatifAsked,
    snapshots: tuple[Snapshot, Snapshot],
    placements: Iterable[Placement],
    now_s: float,
) -> tuple[WhatifTotalsView, WhatifTotalsView]:
    """Return the totals without and with the changes, from the snapshots without and with them.

    ``placements`` are the placements of all pods that the what-if placed or moved.
    """
    drained, released = set(asked.drain), set(asked.release)
    bound = [pod for pod in shared_rows(request).of(cluster, snapshots[0]) if pod.node]
    staying = [
        pod.reserved_bytes
        for pod in bound
        if pod.node not in drained and f"{pod.namespace}/{pod.name}" not in released
    ]
    placed = [bytes_of(each.charges) for each in placements]
    return (
        _totals(snapshots[0], [pod.reserved_bytes for pod in bound], now_s),
        _totals(snapshots[1], [*staying, *placed], now_s),
    )


def _totals(snap: Snapshot, reserved_bytes: Sequence[int], now_s: float) -> WhatifTotalsView:
    """Return the totals of the snapshot. ``reserved_bytes`` has an item for each pod."""
    devices = Counter[str]()
    for node in snap.nodes:
        devices.update(_devices(node))
    return WhatifTotalsView(
        pods=len(reserved_bytes),
        reserved_bytes=sum(reserved_bytes),
        headroom_bytes=headroom_bytes(snap, now_s),
        devices=sum(len(node.devices) for node in snap.nodes),
        devices_in_use=devices["in use"],
        devices_empty=devices["empty"],
    )


def _devices(node: NodeTerms) -> Counter[str]:
    """Count the devices of the node that are in use or empty. Implausible devices count as neither.

    If unconfirmed pods could get empty devices, at most one such device for each replica counts as
    in use.
    """
    found, possible, replicas = Counter[str](), Counter[str](), dict[str, int]()
    for terms in node.devices:
        if terms.device.replicas.allocated or terms.committed_bytes > terms.unconfirmed_bytes:
            found["in use"] += 1
        elif terms.unconfirmed_bytes:
            possible[terms.device.resource] += 1
            replicas[terms.device.resource] = terms.unconfirmed_replicas
        elif terms.believed:
            found["empty"] += 1
    for resource, count in possible.items():
        taken = min(count, replicas[resource])
        found.update({"in use": taken, "empty": count - taken})
    return found
