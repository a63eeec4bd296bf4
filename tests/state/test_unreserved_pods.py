"""Checks that pods bound without a reservation are charged on their node."""

from headroom.contract.annotations import DEFAULT_VRAM
from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Namespace, Node, Pod
from headroom.contract.watched import NamespaceGone, NamespaceSeen, PodGone
from headroom.core.placement.policy import Rules
from tests.builders import (
    GIB,
    container,
    gpunode,
    kube_node,
    namespace,
    pod,
    reservation,
    shared,
    use,
)
from tests.recording import RecordingState
from tests.state.states import EPOCH_S, STALE_AFTER_S, headroom, seen, state_of


class TestUnreserved:
    """Pods bound without a reservation."""

    def test_unreserved_pods_are_charged_until_they_are_deleted(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(shared("a"), shared("b"))))
        state.apply(seen(pod("8Gi", node="n")))
        assert headroom(state) == [16, 16]
        state.apply([PodGone("uid-p")])
        assert headroom(state) == [24, 24]

    def test_the_order_of_events_does_not_change_charges(self) -> None:
        what: list[Pod | Node | Namespace | GPUNode]
        what = [kube_node(), gpunode(shared("a")), pod(None, node="n")]
        what.append(namespace(annotations={DEFAULT_VRAM: "10Gi"}))
        for turn in range(4):
            assert headroom(state_of(*seen(*what[turn:], *what[:turn]))) == [14]
            state = RecordingState(Rules(), STALE_AFTER_S, EPOCH_S)
            for event in seen(*what[turn:], *what[:turn]):
                state.apply([event])
            assert headroom(state) == [14]

    def test_a_removed_namespace_default_no_longer_counts(self) -> None:
        state = state_of(
            *seen(kube_node(), gpunode(shared("a")), pod(None, node="n")),
            NamespaceSeen(namespace(annotations={DEFAULT_VRAM: "10Gi"})),
        )
        state.apply([NamespaceSeen(namespace())])
        assert headroom(state) == [18]
        state.apply([NamespaceSeen(namespace(annotations={DEFAULT_VRAM: "10Gi"}))])
        state.apply([NamespaceGone("default")])
        assert headroom(state) == [18]

    def test_a_pod_with_a_reservation_is_charged_once(self) -> None:
        held = {"uid-p": reservation({"a": 8 * GIB})}
        state = state_of(
            *seen(kube_node(), gpunode(shared("a"), reservations=held), pod("8Gi", node="n"))
        )
        assert headroom(state) == [16]

    def test_an_ended_pod_is_charged_its_measured_use(self) -> None:
        report = gpunode(shared("a", used_bytes=2 * GIB), pods=[use("uid-p", "a", 2 * GIB)])
        state = state_of(*seen(kube_node(), report, pod("8Gi", node="n", phase="Succeeded")))
        assert headroom(state) == [22]

    def test_unbound_pods_and_pods_without_a_gpu_are_not_charged(self) -> None:
        gpuless = pod(None, container(gpus=0), node="n", uid="other", name="other")
        state = state_of(*seen(kube_node(), gpunode(shared("a")), pod("8Gi"), gpuless))
        assert headroom(state) == [24]
        assert [p.metadata.uid for p in state.cluster.pods()] == ["uid-p"]

    def test_an_unreserved_pod_is_charged_even_if_it_overcommits_a_device(self) -> None:
        two = [pod("20Gi", node="n", uid=u, name=u) for u in "ab"]
        assert headroom(state_of(*seen(kube_node(), gpunode(shared("x")), *two))) == [-16]


class TestPods:
    def test_a_name_belongs_to_the_newest_pod_with_that_name(self) -> None:
        state = state_of(*seen(pod(uid="old"), pod(uid="new")), PodGone("old"))
        found = state.cluster.pod_named("default", "p")
        assert found is not None
        assert found.metadata.uid == "new"
        assert state.cluster.pod("old") is None

    def test_a_bound_pod_is_charged_on_its_node(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(shared("a")), pod("8Gi")))
        state.apply(seen(pod("8Gi", node="n", version="2")))
        assert headroom(state) == [16]
