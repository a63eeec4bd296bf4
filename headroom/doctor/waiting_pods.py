"""Counts the pods that wait for a GPU, on each node on which they may run."""

from collections import Counter
from collections.abc import Mapping

from headroom.contract.annotations import Amount, ReplicaShare
from headroom.contract.kube import Node, Pod
from headroom.core.cluster.cluster import Cluster
from headroom.core.placement.request import VramRequest
from headroom.core.rules.eligible_nodes import eligibility_key, eligible

#: For each resource, the amounts of the GPU containers that wait for one of its devices.
Amounts = Mapping[str, Counter[Amount]]


class WaitingPods:
    """The GPU containers of unbound pods that request one device and an amount of its memory.

    A resource is left out if its free unshared devices are at least as many as these containers,
    because then the pods wait for something else.
    """

    def __init__(self, state: Cluster) -> None:
        #: For pods with the same eligible nodes, one of these pods and the amounts of all of them,
        #: by the key that these pods share.
        self._groups: dict[bytes, tuple[Pod, dict[str, Counter[Amount]]]] = {}
        counts: Counter[str] = Counter()
        for pod in state.unbound():
            request = state.understand(pod)
            if not isinstance(request, VramRequest) or pod.spec.scheduling_gates:
                continue
            _, amounts = self._groups.setdefault(eligibility_key(pod), (pod, {}))
            for each in request.containers:
                if each.count == 1 and not isinstance(each.amount, ReplicaShare):
                    amounts.setdefault(each.resource, Counter())[each.amount] += 1
                    counts[each.resource] += 1
        free: Counter[str] = Counter()
        for node in state.snapshot().nodes:
            for terms in node.devices:
                if not terms.shared and terms.health_issue is None:
                    free[terms.device.resource] += terms.device.replicas.free
        self._resources = {name for name, count in counts.items() if count > free[name]}

    def on(self, node: Node) -> Amounts:
        """Return the amounts of the pods that may run on the node."""
        found: dict[str, Counter[Amount]] = {}
        for pod, amounts in self._groups.values():
            if eligible(pod, node):
                for resource in amounts.keys() & self._resources:
                    found.setdefault(resource, Counter()).update(amounts[resource])
        return found
