"""Checks that a pod with more containers than the limit causes little work."""

from headroom.contract.kube import Container, InitContainer
from headroom.contract.pod_limits import MAX_CONTAINERS
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import Unreadable
from tests.builders import GPU, container, gpunode, kube_node, pod, shared
from tests.state.states import seen, state_of

MANY = 1000


class CountingRules(Rules):
    """Counts the containers that are read, each of which requests one resource."""

    looks: list[str] = []  # noqa: RUF012 - shared by copies

    def manages(self, resource: str) -> bool:
        self.looks.append(resource)
        return super().manages(resource)


def many() -> list[Container | InitContainer]:
    return [container(f"c{index}") for index in range(MANY)]


def test_only_the_charge_reads_all_containers() -> None:
    """In mode observe, such a pod is bound and charged. Meanwhile, other calls of kube-scheduler
    would wait."""
    rules = CountingRules()
    state = state_of(*seen(kube_node(), gpunode(shared("a"))), rules=rules)
    large = pod("1Gi", *many())

    rules.looks.clear()
    assert isinstance(state.cluster.understand(large), Unreadable)
    assert len(rules.looks) <= MAX_CONTAINERS

    held = state.cluster.gpunode("n")
    assert held is not None
    rules.looks.clear()
    adopted = state.cluster.adopt(large, held)
    assert adopted is not None
    assert adopted.charges[0].resource == GPU
    assert len(rules.looks) <= MANY + MAX_CONTAINERS
