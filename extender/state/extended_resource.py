"""Computes the extended resource, in MiB, that shows a node's GPU memory to all of Kubernetes.

It is the capacity, not the free memory: Kubernetes itself subtracts the requests of pods. A node
whose devices are unknown keeps its value.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from contract.annotations import MIRROR
from contract.errors import BadQuantity
from contract.kube import Node
from contract.quantity import parse_bytes
from extender.placement.policy import MIB
from extender.placement.snapshot import NodeTerms
from extender.state.cluster_state import ClusterState


@dataclass(frozen=True, slots=True)
class Shown:
    """The value to write to a node; None: remove the resource."""

    node: str
    mib: int | None


def to_show(cluster: ClusterState, wanted: bool) -> Iterator[Shown]:
    """Yield the nodes whose value must change. ``wanted``: whether nodes have the resource."""
    snap = cluster.snapshot()
    for node in cluster.nodes():
        name, current_mib = node.metadata.name, _current_mib(node)
        if not wanted:
            if current_mib is not None:
                yield Shown(name, None)
            continue
        row = snap.row_of.get(name)
        mib = None if row is None else capacity_mib(snap.nodes[row], cluster)
        if mib is not None and current_mib != mib:
            yield Shown(name, mib)


def capacity_mib(terms: NodeTerms, cluster: ClusterState) -> int | None:
    """Return the allocatable memory of the node's healthy managed devices, in MiB.

    Devices that share one memory count once. Return None if no managed device is known.
    """
    devices = [each for each in terms.devices if cluster.rules.manages(each.device.resource)]
    if not devices:
        return None
    healthy = (each for each in devices if each.health_issue is None)
    return sum(each.allocatable_bytes // max(each.sharers, 1) // MIB for each in healthy)


def _current_mib(node: Node) -> int | None:
    """Return the current value in MiB; None if there is none, -1 if it is no quantity."""
    allocatable = (node.status and node.status.allocatable) or {}
    if (quantity := allocatable.get(MIRROR)) is None:
        return None
    try:
        return parse_bytes(str(quantity))  # the API server returns 80000 as 80k
    except BadQuantity:
        return -1
