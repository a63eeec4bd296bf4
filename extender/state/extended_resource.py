"""What the rest of Kubernetes is shown of a node's GPU memory: an extended resource, in MiB.

Promised or not is not part of it: who asks for the resource is counted by Kubernetes itself. Of a
node that nobody knows the devices of, what it shows stays as it is.
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
    """What a node is to show from now on; None: nothing any more."""

    node: str
    mib: int | None


def to_show(cluster: ClusterState, wanted: bool) -> Iterator[Shown]:
    """The nodes that show something else than they are to."""
    snap = cluster.snapshot()
    for node in cluster.nodes():
        name, shows = node.metadata.name, _shows(node)
        if not wanted:
            if shows is not None:
                yield Shown(name, None)
            continue
        row = snap.row_of.get(name)
        mib = None if row is None else capacity_mib(snap.nodes[row], cluster)
        if mib is not None and shows != mib:
            yield Shown(name, mib)


def capacity_mib(terms: NodeTerms, cluster: ClusterState) -> int | None:
    """Of the devices that pods are given, less reserves and what is broken; None where no device
    of the node is known. Devices that share a memory count as one."""
    devices = [each for each in terms.devices if cluster.rules.manages(each.device.resource)]
    if not devices:
        return None
    sound = (each for each in devices if each.health_issue is None)
    return sum(each.allocatable_bytes // max(each.sharers, 1) // MIB for each in sound)


def _shows(node: Node) -> int | None:
    """-1 for what cannot be read, which is none of ours."""
    allocatable = (node.status and node.status.allocatable) or {}
    if (quantity := allocatable.get(MIRROR)) is None:
        return None
    try:
        return parse_bytes(str(quantity))  # 80000 comes back as 80k
    except BadQuantity:
        return -1
