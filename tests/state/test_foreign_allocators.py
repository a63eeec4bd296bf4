"""Tests the detection of other allocators of a node's GPUs."""

from typing import Any

import msgspec
import pytest

from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import (
    Container,
    Node,
    NodeStatus,
    ObjectMeta,
    Pod,
    ResourcePool,
    ResourceRequirements,
    ResourceSlice,
    ResourceSliceSpec,
    SliceDevice,
)
from headroom.contract.reasons import Reason
from headroom.contract.watched import (
    GPUNodeGone,
    GPUNodeSeen,
    NodeGone,
    NodeSeen,
    PodGone,
    PodSeen,
    Relisted,
    SliceGone,
    SliceSeen,
)
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.cluster.trackers.foreign_allocators import MANAGERS, node_of, of_node, of_pod
from headroom.core.placement.fit import fit
from tests.builders import GPU, NOW_S, device, gpunode, kube_node, pod
from tests.state.states import state_of

MOST_BYTES = 1 << 61
NO_DEVICE = -1

HANDSHAKE, REGISTER = "hami.io/node-handshake", "hami.io/node-nvidia-register"


def node(annotations: dict[str, str] | None = None, more: dict[str, str] | None = None) -> Node:
    given = kube_node("n", annotations)
    assert given.status is not None
    status = msgspec.structs.replace(given.status, allocatable={GPU: "1"} | (more or {}))
    return msgspec.structs.replace(given, status=status)


def marked(
    annotations: dict[str, str] | None = None,
    labels: dict[str, str] | None = None,
    limits: dict[str, str] | None = None,
    on: str | None = "n",
    phase: str = "Running",
) -> Pod:
    """Return a pod that requests no resource that Headroom manages."""
    resources = ResourceRequirements(limits=limits or {})
    bare = pod(None, Container(name="main", resources=resources), uid="x", node=on, phase=phase)
    metadata = msgspec.structs.replace(bare.metadata, annotations=annotations, labels=labels)
    return msgspec.structs.replace(bare, metadata=metadata)


def published(name: str = "s", **spec: Any) -> ResourceSlice:
    given = {"driver": "gpu.nvidia.com", "node_name": "n", "devices": [SliceDevice()]} | spec
    return ResourceSlice(metadata=ObjectMeta(name=name), spec=ResourceSliceSpec(**given))


@pytest.mark.parametrize(
    ("given", "managers"),
    [
        pytest.param(node(), set(), id="a node with the stock plugin has none"),
        pytest.param(
            node({HANDSHAKE: "Requesting_2026.11.21 10:00:00"}),
            {Reason.HAMI_MANAGES},
            id="HAMi's handshake is in progress",
        ),
        pytest.param(
            node({HANDSHAKE: "Deleted_2026.11.21 10:00:00", REGISTER: "GPU-0,10,24576,100:"}),
            set(),
            id="HAMi reports that it left",
        ),
        pytest.param(
            node({REGISTER: "GPU-0,10,24576,100:"}),
            {Reason.HAMI_MANAGES},
            id="a register without a handshake is still a register",
        ),
        pytest.param(
            node(more={"aliyun.com/gpu-mem": "22"}), {Reason.GPUSHARE_MANAGES}, id="gpushare"
        ),
        pytest.param(
            node(more={"aliyun.com/gpu-mem": "0"}), set(), id="gpushare that offers nothing"
        ),
    ],
)
def test_foreign_allocators_are_detected_on_nodes(given: Node, managers: set[Reason]) -> None:
    assert of_node(given) == managers


@pytest.mark.parametrize(
    ("given", "managers"),
    [
        pytest.param(pod("8Gi", node="n"), set(), id="a pod of Headroom"),
        pytest.param(
            marked(labels={"runai-gpu-group": "g"}), {Reason.KAI_MANAGES}, id="KAI: a fraction"
        ),
        pytest.param(
            marked(labels={"runai-gpu-group/g": "g"}), {Reason.KAI_MANAGES}, id="KAI: several"
        ),
        pytest.param(
            marked({"run.ai/reserve_for_gpu_index": "GPU-0"}),
            {Reason.KAI_MANAGES},
            id="KAI: a reservation",
        ),
        pytest.param(
            marked({"nvidia.com/container.main.gpus.devices": "GPU-0"}),
            {Reason.KAI_MANAGES},
            id="KAI: nvFractions that were bound",
        ),
        pytest.param(
            marked({"gpu-fraction": "0.5"}),
            set(),
            id="KAI: a request that is not granted yet",
        ),
        pytest.param(
            marked({"hami.io/vgpu-devices-allocated": "GPU-0,NVIDIA,3000,30:;"}),
            {Reason.HAMI_MANAGES},
            id="HAMi: an allocation",
        ),
        pytest.param(
            marked({"hami.io/vgpu-devices-allocated": "", "hami.io/vgpu-node": "another"}),
            set(),
            id="HAMi: a manifest copied from a pod of another node",
        ),
        pytest.param(
            marked(limits={"nvidia.com/gpumem": "3000"}),
            {Reason.HAMI_MANAGES},
            id="HAMi: resources",
        ),
        pytest.param(
            marked({"ALIYUN_COM_GPU_MEM_IDX": "0"}),
            {Reason.GPUSHARE_MANAGES},
            id="gpushare: a device",
        ),
        pytest.param(
            marked(limits={"aliyun.com/gpu-mem": "3"}),
            {Reason.GPUSHARE_MANAGES},
            id="gpushare: resources",
        ),
        pytest.param(marked(labels={"runai-gpu-group": "g"}, on=None), set(), id="not bound yet"),
        pytest.param(marked(labels={"runai-gpu-group": "g"}, phase="Succeeded"), set(), id="ended"),
    ],
)
def test_foreign_allocators_are_detected_on_pods(
    given: Pod, managers: set[Reason], state: ClusterWriter
) -> None:
    assert of_pod(given) == managers
    before = reason(state)
    state.apply([PodSeen(given)])
    kept = state.cluster.pod(given.metadata.uid) is not None
    assert state.cluster.concerns(given) == (kept or reason(state) != before)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        pytest.param(published(), "n", id="of the node"),
        pytest.param(
            published(node_name=None, pool=ResourcePool(name="n")), "n", id="of the node's pool"
        ),
        pytest.param(published(devices=None), "", id="no devices"),
        pytest.param(published(driver="compute-domain.nvidia.com"), "", id="no GPUs"),
    ],
)
def test_foreign_allocators_are_detected_in_slices(given: ResourceSlice, name: str) -> None:
    assert node_of(given) == name


def reason(state: ClusterWriter) -> Reason | None:
    request = state.cluster.understand(pod("8Gi"))
    snap = state.cluster.snapshot()
    judged = state.cluster.judge(
        pod("8Gi"), state.cluster.gpunode("n") or GPUNode(metadata=ObjectMeta(name="n")), NOW_S
    )
    found = fit(request, snap, snap.rows(["n"]), NOW_S).reason(0)  # type: ignore[arg-type]
    # Filter and bind agree.
    assert (judged if isinstance(judged, Reason) else None) == found
    return found


@pytest.fixture
def state() -> ClusterWriter:
    return state_of(NodeSeen(kube_node("n")), GPUNodeSeen(gpunode(device()), NOW_S))


def test_a_node_is_rejected_while_it_has_a_trace_of_a_foreign_allocator(
    state: ClusterWriter,
) -> None:
    assert reason(state) is None
    state.apply([NodeSeen(node({HANDSHAKE: "Reported 2026"}))])
    assert reason(state) is Reason.HAMI_MANAGES
    state.apply([NodeSeen(kube_node("n"))])
    assert reason(state) is None
    state.apply([PodSeen(marked(labels={"runai-gpu-group": "g"}))])
    assert reason(state) is Reason.KAI_MANAGES
    state.apply([PodSeen(marked(labels={"runai-gpu-group": "g"}, phase="Succeeded"))])
    assert reason(state) is None
    state.apply([SliceSeen(published("a")), SliceSeen(published("b"))])
    assert reason(state) is Reason.DRA_AND_PLUGIN
    state.apply([SliceGone("a")])
    assert reason(state) is Reason.DRA_AND_PLUGIN
    state.apply([SliceGone("b")])
    assert reason(state) is None


def test_objects_missing_from_a_new_list_leave_no_trace(state: ClusterWriter) -> None:
    state.apply([PodSeen(marked(labels={"runai-gpu-group": "g"})), SliceSeen(published())])
    state.apply([Relisted(ResourceSlice, (), NOW_S)])
    assert reason(state) is Reason.KAI_MANAGES
    state.apply([Relisted(Pod, (), NOW_S)])
    assert reason(state) is None


def test_a_node_takes_pods_again_after_the_last_pod_of_a_foreign_allocator_ended(
    state: ClusterWriter,
) -> None:
    state.apply([PodSeen(marked({"ALIYUN_COM_GPU_MEM_IDX": "0"}))])
    assert reason(state) is Reason.GPUSHARE_MANAGES
    state.apply([PodGone("x")])
    assert reason(state) is None


def test_a_node_with_dra_is_not_rejected_for_a_missing_report() -> None:
    """KEP-5004: the node has no device plugin, so it has no allocatable resource, no reported
    devices and no ledger."""
    state = state_of(NodeSeen(msgspec.structs.replace(kube_node("n"), status=None)))
    state.apply([SliceSeen(published())])
    assert reason(state) is Reason.DRA_MANAGES


def test_a_slice_may_arrive_before_its_node_and_outlive_it() -> None:
    state = state_of(SliceSeen(published()), NodeSeen(kube_node("n")))
    state.apply([GPUNodeSeen(gpunode(device()), NOW_S)])
    assert reason(state) is Reason.DRA_AND_PLUGIN
    state.apply([SliceGone("s"), NodeSeen(node({HANDSHAKE: "x"})), NodeGone("n")])
    state.apply([NodeSeen(kube_node("n"))])
    assert reason(state) is None


def test_a_node_of_a_foreign_allocator_counts_as_a_node_with_gpus(state: ClusterWriter) -> None:
    """Pods without a GPU prefer nodes without GPUs, and must not prefer a node whose GPUs no agent
    reports."""
    bare = msgspec.structs.replace(kube_node("n"), status=None)
    state.apply([NodeSeen(bare), GPUNodeGone("n")])
    assert state.cluster.snapshot().spare_bytes.tolist() == [NO_DEVICE]
    state.apply([PodSeen(marked(limits={"nvidia.com/gpumem": "3000"}))])
    assert state.cluster.snapshot().spare_bytes.tolist() == [MOST_BYTES]


@pytest.mark.parametrize("shown", [{GPU: "0"}, {"nvidia.com/mig-1g.10gb": "7"}], ids=str)
def test_a_node_that_offers_gpus_without_a_report_counts_as_a_node_with_gpus(
    shown: dict[str, str],
) -> None:
    silent = msgspec.structs.replace(kube_node("n"), status=NodeStatus(allocatable=shown))
    plain = msgspec.structs.replace(kube_node("p"), status=NodeStatus(allocatable={"cpu": "8"}))
    found = state_of(NodeSeen(silent), NodeSeen(plain)).cluster.snapshot()
    assert found.spare_bytes.tolist() == [MOST_BYTES, NO_DEVICE]
    held = state_of(NodeSeen(plain), GPUNodeSeen(gpunode(name="p"), NOW_S)).cluster.snapshot()
    assert held.spare_bytes.tolist() == [MOST_BYTES]


def test_every_foreign_allocator_has_a_position_in_the_order() -> None:
    assert {r for r in Reason if r.code.endswith("_manages")} == set(MANAGERS)


def test_a_foreign_pod_on_an_unknown_node_has_no_effect(state: ClusterWriter) -> None:
    state.apply([PodSeen(marked({"ALIYUN_COM_GPU_MEM_IDX": "0"}, on="elsewhere"))])
    assert reason(state) is None
