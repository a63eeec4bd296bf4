"""What the admission webhook looks at besides the pod: the cluster as this replica knows it now."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from contract.kube import Node
from extender.admission.around import Around, GpuNode, OfNamespace, Wishes
from extender.cluster.state import ClusterState


@dataclass(frozen=True, slots=True)
class Nodes:
    """Looked at anew each time: of most pods nobody asks where they could go."""

    cluster: ClusterState
    held: Callable[[], Iterable[Node]]

    def __iter__(self) -> Iterator[GpuNode]:
        for node in self.held():
            gpunode = self.cluster.gpunode(node.metadata.name)
            yield GpuNode(node, gpunode.status if gpunode else None)


def around(cluster: ClusterState, wishes: Wishes, namespace: str) -> Around:
    """On the event loop. Of a namespace that is not known yet nothing is known."""
    known = cluster.namespaces.get(namespace)
    metadata = known.metadata if known else None
    of_namespace = OfNamespace(
        namespace,
        (metadata and metadata.annotations) or {},
        (metadata and metadata.labels) or {},
    )
    return Around(
        cluster.rules,
        wishes,
        of_namespace,
        Nodes(cluster, cluster.nodes),
        Nodes(cluster, cluster.nodes_with_choice),
    )
