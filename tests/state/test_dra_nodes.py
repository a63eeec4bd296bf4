"""Tests fit and charges of pods on nodes where kube-scheduler serves extended resources by DRA."""

from collections.abc import Mapping
from typing import Any

import pytest

from extender.reconcile.queue import unreserved_pods
from headroom.contract.annotations import CORDON, DEFAULT_VRAM, MAX_SM, STARTUP
from headroom.contract.dra import DeviceClass, ResourceClaim
from headroom.contract.gpunode import ADOPTED, CLAIMED, Reservation
from headroom.contract.kube import (
    Namespace,
    ObjectMeta,
    Pod,
)
from headroom.contract.reasons import Reason
from headroom.contract.watched import (
    ClaimGone,
    ClassGone,
    GPUNodeSeen,
    NamespaceSeen,
    PodSeen,
    Relisted,
    SliceGone,
)
from headroom.core.placement.fit import fit
from headroom.core.placement.placement_record import Placement
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import VramRequest
from tests.builders import (
    DISTRIBUTED,
    GIB,
    GPU,
    NOW_S,
    choosing,
    container,
    gate,
    gpunode,
    namespace,
    pod,
    reservation,
    shared,
    use,
)
from tests.recording import RecordingState
from tests.state.dra import IMPLICIT, claim, claiming, class_of, node, slice_of
from tests.state.states import state_of

#: Without a device plugin, the kubelet removes the resource or keeps it with the value 0.
WITHOUT_PLUGIN: tuple[Mapping[str, str], ...] = ({"cpu": "64"}, {"cpu": "64", GPU: "0"})


def implicit(node: str | None = "n", vram: str | None = None) -> Pod:
    return pod(vram, container(resource=IMPLICIT), node=node)


def by_dra(**more: Any) -> RecordingState:
    """A node without a device plugin, whose agent reports two devices."""
    state = state_of(node(**more), slice_of(), class_of())
    state.apply([GPUNodeSeen(reported(), NOW_S)])
    return state


def reported(**more: Any) -> Any:
    devices = [shared(uuid, 0, resource="") for uuid in ("GPU-0", "GPU-1")]
    return gpunode(*devices, plugin=DISTRIBUTED, **more)


def reason(state: RecordingState, of: Pod, name: str = "n") -> Reason | None:
    request = state.cluster.understand(of)
    assert isinstance(request, VramRequest)
    snap = state.cluster.snapshot()
    return fit(request, snap, snap.rows([name]), NOW_S).reason(0)


@pytest.mark.parametrize("allocatable", WITHOUT_PLUGIN)
def test_a_pod_without_a_memory_request_fits_without_a_reservation(
    allocatable: Mapping[str, str],
) -> None:
    state = by_dra(allocatable=allocatable)
    whole = pod(None)
    assert reason(state, whole) is None
    held = state.cluster.gpunode("n")
    assert held is not None
    assert state.cluster.judge(whole, held, NOW_S) == Placement((), {})
    assert state.cluster.likely_reservation(whole, held) is None
    assert state.cluster.adopt(whole, held) is None


def test_a_pod_without_a_memory_request_fits_on_a_node_without_an_agent() -> None:
    state = state_of(node(), slice_of(), class_of())
    assert reason(state, pod(None)) is None


@pytest.mark.parametrize(
    "of",
    [
        pod("8Gi"),
        pod("main=8Gi", container("main"), container("other")),
        pod(None, annotations={MAX_SM: "50%"}),
        pod(None, annotations={STARTUP: "alone"}),
        pod(None, init=[gate()]),
        pod(None, choosing(container())),
    ],
)
def test_a_pod_with_a_requirement_that_only_headroom_checks_does_not_fit(of: Pod) -> None:
    assert reason(by_dra(), of) is Reason.DRA_MANAGES


def test_a_pod_with_the_implicit_resource_name_fits_on_nodes_with_only_dra() -> None:
    """Headroom's own scheduler calls filter for each pod."""
    assert reason(by_dra(), implicit(node=None)) is None
    assert reason(by_dra(), implicit(node=None, vram="8Gi")) is Reason.DRA_MANAGES
    both = by_dra(allocatable={GPU: "1"})
    assert reason(both, implicit(node=None)) is Reason.DRA_AND_PLUGIN
    plugin = state_of(node(allocatable={GPU: "1"}), class_of())
    plugin.apply([GPUNodeSeen(gpunode(shared("GPU-0"), plugin=DISTRIBUTED), NOW_S)])
    assert reason(plugin, implicit(node=None)) is Reason.NO_SUCH_RESOURCE


def test_the_default_of_the_namespace_counts_as_a_memory_request() -> None:
    state = by_dra()
    state.apply([NamespaceSeen(namespace(annotations={DEFAULT_VRAM: "4Gi"}))])
    assert reason(state, pod(None)) is Reason.DRA_MANAGES


def test_pods_of_exempt_namespaces_can_use_dra() -> None:
    """The cluster's default scheduler calls Headroom for their pods, too."""
    rules = Rules(reject_unannotated=True)
    state = state_of(node(), slice_of(), class_of(), rules=rules)
    labels = {"headroom.gpu/scheduler": "none"}
    metadata = ObjectMeta(name="default", labels=labels, annotations={DEFAULT_VRAM: "4Gi"})
    state.apply([NamespaceSeen(Namespace(metadata))])
    assert reason(state, pod("8Gi")) is None
    assert reason(state, pod(None)) is None
    state.apply([NamespaceSeen(namespace())])
    assert reason(state, pod("8Gi")) is Reason.DRA_MANAGES


def test_a_device_class_must_name_the_resource() -> None:
    state = state_of(node(), slice_of(), class_of("nvidia.com/mig-1g.5gb"))
    assert reason(state, pod(None)) is Reason.NO_SUCH_RESOURCE
    state.apply([class_of(GPU, "other")])
    assert reason(state, pod(None)) is None
    state.apply([ClassGone("other")])
    assert reason(state, pod(None)) is Reason.NO_SUCH_RESOURCE
    state.apply([class_of()])
    assert reason(state, pod(None)) is None
    state.apply([Relisted(DeviceClass, (), NOW_S)])
    assert reason(state, pod(None)) is Reason.NO_SUCH_RESOURCE


def test_a_class_that_names_the_resource_requeues_pending_pods() -> None:
    state = state_of(node(), slice_of(), class_of(None))
    state.cluster.snapshot()
    before = state.cluster.headroom_gains.of("n")
    state.apply([class_of()])
    assert state.cluster.headroom_gains.of("n") > before


def test_a_node_that_offers_gpus_by_plugin_and_by_dra_is_closed() -> None:
    state = by_dra(allocatable={GPU: "1"})
    for of in (pod(None), pod("8Gi")):
        assert reason(state, of) is Reason.DRA_AND_PLUGIN
    state.apply([SliceGone("of-n")])
    assert reason(state, pod(None)) is Reason.NO_SUCH_RESOURCE  # The report has none.


def test_a_node_with_dra_is_closed_while_a_pod_of_the_plugin_runs() -> None:
    """DRA would allocate the GPU that the pod uses."""
    state = by_dra()
    held = {"old": reservation({"GPU-0": 8 * GIB})}
    state.apply([GPUNodeSeen(reported(version="2", reservations=held), NOW_S)])
    assert reason(state, pod(None)) is Reason.DRA_AND_PLUGIN
    state.apply([GPUNodeSeen(reported(version="3"), NOW_S)])
    assert reason(state, pod(None)) is None


def test_a_cordoned_device_closes_a_node_with_dra() -> None:
    state = by_dra(**{CORDON: "GPU-0"})
    assert reason(state, pod(None)) is Reason.CORDONED_DEVICE
    state.apply([claim(), PodSeen(claiming(pod(None, node="n")))])
    assert unreserved_pods(state.cluster) == []


class TestBoundPods:
    """Charges of pods that hold a GPU by a claim."""

    def charged(self, state: RecordingState, of: Pod) -> Reservation | None:
        state.apply([PodSeen(of)])
        held = state.cluster.gpunode("n")
        assert held is not None
        return state.cluster.adopt(of, held)

    def test_a_pod_without_a_memory_request_is_not_in_the_ledger(self) -> None:
        state = by_dra()
        state.apply([claim()])
        bound = claiming(pod(None, node="n"))
        assert self.charged(state, bound) is None
        assert unreserved_pods(state.cluster) == []
        assert reason(state, pod(None, uid="next")) is None

    def test_a_pod_with_a_memory_request_is_charged_the_memory_of_its_claim(self) -> None:
        """Such a pod is bound in mode observe or by another scheduler."""
        state = by_dra()
        state.apply([claim(device="gpu-1")])
        found = self.charged(state, claiming(pod("1Gi", node="n")))
        assert found is not None
        assert found.flags == [ADOPTED, CLAIMED]
        (charge,) = found.charges
        assert charge.candidates == {"GPU-1": 24 * GIB}
        # The pod holds a device by DRA, so the node still takes other pods that DRA serves.
        assert reason(state, pod(None, uid="next")) is None

    def test_a_pod_is_not_charged_before_its_claim_is_known(self) -> None:
        state = by_dra()
        bound = claiming(pod("1Gi", node="n"))
        assert self.charged(state, bound) is None
        assert unreserved_pods(state.cluster) == []
        state.apply([claim()])
        assert [each.pod.metadata.uid for each in unreserved_pods(state.cluster)] == ["uid-p"]
        state.apply([ClaimGone("default", "p-extended")])
        assert unreserved_pods(state.cluster) == []

    def test_a_pod_with_a_memory_request_is_not_charged_before_it_has_a_claim(self) -> None:
        """In the mode observe, the pod is bound although it does not fit. The pod is not charged
        for the devices that a plugin would allocate.
        """
        state = by_dra()
        plugins = gpunode(shared("GPU-0"), shared("GPU-1"), plugin=DISTRIBUTED, version="2")
        state.apply([GPUNodeSeen(plugins, NOW_S)])
        held = state.cluster.gpunode("n")
        assert held is not None
        assert state.cluster.adopt(pod("1Gi"), held) is None

    def test_a_partial_claim_of_a_device_is_charged_its_bytes(self) -> None:
        state = by_dra()
        state.apply([claim(consumedCapacity={"memory": "10Gi"})])
        found = self.charged(state, claiming(pod("1Gi", node="n")))
        assert found is not None
        assert found.charges[0].candidates == {"GPU-0": 10 * GIB}

    def test_a_pod_with_the_implicit_resource_name_is_charged_on_nodes_with_a_plugin(self) -> None:
        """The default scheduler calls no extender for it."""
        devices = [shared(uuid) for uuid in ("GPU-0", "GPU-1")]
        held = {"other": reservation({"GPU-0": 24 * GIB})}
        report = gpunode(*devices, reservations=held, pods=[use("other", "GPU-0", replica="r")])
        state = state_of(node(allocatable={GPU: "8"}), slice_of(), class_of())
        state.apply([GPUNodeSeen(report, NOW_S), claim()])
        bound = claiming(implicit(), IMPLICIT)
        found = self.charged(state, bound)
        assert found is not None
        assert found.charges[0].candidates == {"GPU-0": 24 * GIB}
        row = state.cluster.snapshot().row_of["n"]
        assert state.cluster.snapshot().nodes[row].devices[0].headroom_bytes == -24 * GIB
        assert state.cluster.concerns(bound)

    def test_a_pod_is_not_charged_on_nodes_with_only_dra(self) -> None:
        state = by_dra()
        state.apply([claim()])
        assert self.charged(state, claiming(implicit(), IMPLICIT)) is None

    def test_claims_for_other_drivers_are_not_charged(self) -> None:
        state = by_dra()
        state.apply([claim(driver="nic.example.com")])
        assert self.charged(state, claiming(pod("1Gi", node="n"))) is None

    def test_a_claim_for_another_device_leaves_the_gpu_to_the_plugin(self) -> None:
        state = state_of(node(allocatable={GPU: "4"}), class_of())
        state.apply([GPUNodeSeen(gpunode(shared("GPU-0"), plugin=DISTRIBUTED), NOW_S)])
        found = self.charged(state, claiming(pod("8Gi", node="n"), "example.com/nic"))
        assert found is not None
        assert found.flags == [ADOPTED]
        assert found.charges[0].candidates == {"GPU-0": 8 * GIB}

    def test_a_list_of_claims_replaces_the_known_claims(self) -> None:
        state = by_dra()
        state.apply([claim(), PodSeen(claiming(pod("1Gi", node="n")))])
        assert len(unreserved_pods(state.cluster)) == 1
        state.apply([Relisted(ResourceClaim, (), NOW_S)])
        assert unreserved_pods(state.cluster) == []
        state.apply([Relisted(ResourceClaim, (claim().claim,), NOW_S)])
        assert len(unreserved_pods(state.cluster)) == 1
