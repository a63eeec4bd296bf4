"""Simulates pods that are created again with other requests, with the product's own placement."""

from headroom.console.facts.request_whatif import Amounts, Outcome, simulate_requests, with_amounts
from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Pod
from headroom.core.cluster.cluster_writer import ClusterWriter
from tests.builders import (
    DISTRIBUTED,
    GIB,
    NOW_S,
    container,
    gpunode,
    kube_node,
    pod,
    reservation,
    shared,
    use,
)
from tests.state.labels import LABELS_DO, gfd
from tests.state.labels import node as labelled_node
from tests.state.states import seen, state_of


def node(name: str, size_gib: int = 16) -> tuple[GPUNode, list[Pod]]:
    """Return a node with a pod on each of its two GPUs of 24 GiB."""
    uuids = [f"{name}-0", f"{name}-1"]
    pods = [pod(f"{size_gib}Gi", uid=f"u-{uuid}", name=uuid, node=name) for uuid in uuids]
    report = gpunode(
        *(shared(uuid, free=3, allocated=1, used_bytes=GIB) for uuid in uuids),
        name=name,
        uid=f"gn-{name}",
        plugin=DISTRIBUTED,
        reservations={
            each.metadata.uid: reservation({uuid: size_gib * GIB})
            for each, uuid in zip(pods, uuids, strict=True)
        },
        pods=[use(f"u-{uuid}", uuid, GIB, replica=f"{uuid}::0") for uuid in uuids],
    )
    return report, pods


def cluster(*pending: Pod) -> ClusterWriter:
    """Return a cluster of two nodes with two GPUs each, and a pod of 16 GiB on each GPU."""
    (a, of_a), (b, of_b) = node("a"), node("b")
    return state_of(*seen(kube_node("a"), kube_node("b"), a, b, *of_a, *of_b, *pending))


def lowered(state: ClusterWriter, size_gib: int = 6) -> list[Amounts]:
    return [
        Amounts(each, {"main": size_gib * GIB}, (16 - size_gib) * GIB)
        for each in state.cluster.pods()
        if each.node
    ]


def outcome(state: ClusterWriter, amounts: list[Amounts], **most: int) -> Outcome:
    return simulate_requests(state.cluster, state.cluster.snapshot(), NOW_S, amounts, **most)


def test_smaller_requests_free_two_of_four_gpus() -> None:
    state = cluster()
    found = outcome(state, lowered(state))
    assert (found.pods, found.left_out, found.unschedulable) == (4, 0, 0)
    # Two pods of 16 GiB never share a GPU of 24 GiB.
    assert (found.empty_devices, found.empty_devices_again) == (0, 0)
    assert found.empty_devices_after == 2
    assert found.headroom_bytes_after - found.headroom_bytes == 4 * 10 * GIB


def test_pending_pods_that_fit_afterwards_are_counted() -> None:
    state = cluster(*(pod("20Gi", uid=f"w-{i}", name=f"w-{i}") for i in range(3)))
    found = outcome(state, lowered(state))
    assert (found.pending, found.pending_fit, found.pending_fit_after) == (3, 0, 2)


def test_a_pending_pod_gets_its_own_recommendation() -> None:
    waiting = pod("30Gi", uid="w", name="w")
    state = cluster(waiting)
    assert outcome(state, [Amounts(waiting, {"main": 4 * GIB}, 0)]).pending_fit_after == 1


def test_the_effect_of_replacement_alone_is_shown_separately() -> None:
    # The pods would already fit next to each other, but their order of creation spread them.
    (a, of_a), (b, of_b) = node("a", 8), node("b", 8)
    state = state_of(*seen(kube_node("a"), kube_node("b"), a, b, *of_a, *of_b))
    amounts = [Amounts(each, {"main": 6 * GIB}, 2 * GIB) for each in state.cluster.pods()]
    found = outcome(state, amounts)
    assert (found.empty_devices, found.empty_devices_again, found.empty_devices_after) == (0, 2, 2)


def test_a_pod_can_fit_on_a_node_that_has_labels_but_no_report() -> None:
    waiting = pod("60Gi", uid="w", name="w")
    labelled = labelled_node(gfd())
    events = seen(labelled, gpunode(name=labelled.metadata.name), waiting)
    state = state_of(*events, rules=LABELS_DO)
    assert outcome(state, []).pending_fit == 1


def test_larger_requests_that_fit_nowhere_are_reported() -> None:
    state = cluster()
    found = outcome(state, lowered(state, size_gib=30))
    assert (found.pods, found.unschedulable) == (4, 4)


def test_the_pods_that_free_the_most_are_simulated_first() -> None:
    state = cluster()
    most, *others = lowered(state)
    found = outcome(state, [*others, Amounts(most.pod, {"main": GIB}, 15 * GIB)], most_pods=1)
    assert (found.pods, found.left_out) == (1, 3)
    assert found.headroom_bytes_after - found.headroom_bytes == 15 * GIB


def test_other_containers_keep_their_requests() -> None:
    both = pod("main=8Gi,side=2Gi", container(), container("side"))
    found = with_amounts(state_of().cluster, Amounts(both, {"main": 4 * GIB}, 0))
    assert found is not None
    assert [(each.name, each.amount_text) for each in found[1].containers] == [
        ("main", "4Gi"),
        ("side", "2Gi"),
    ]
    share = pod(None, container(), container("side"))
    found = with_amounts(state_of().cluster, Amounts(share, {"main": 4 * GIB}, 0))
    assert found is not None
    assert [each.amount_text for each in found[1].containers] == ["4Gi", "1 replica"]


def test_the_cluster_itself_stays_unchanged() -> None:
    state = cluster()
    before = state.cluster.snapshot()
    outcome(state, lowered(state))
    assert state.cluster.snapshot() is before
