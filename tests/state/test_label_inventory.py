"""Tests reports derived from labels, without an agent."""

from typing import Any

import msgspec
import pytest

from extender.reconcile.queue import devices_known, uninitialised
from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Node, ObjectMeta
from headroom.contract.reasons import Reason
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from headroom.core.cluster.changes import BindBegun
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.cluster.label_inventory import GB, believed, why_not_believed
from headroom.core.placement.explain import explain
from headroom.core.placement.fit import Verdicts, fit
from headroom.core.placement.placement_record import Placement
from headroom.core.placement.policy import Rules, Weights
from tests.builders import GIB, GPU, NOW_S, device, gpunode, pod
from tests.state.labels import (
    ASSUMED_RESERVED_BYTES,
    LABELS_DO,
    MIB,
    SLICED,
    aks,
    aks_by_itself,
    by_mps,
    eks,
    gfd,
    gke,
    karpenter,
    node,
)
from tests.state.states import state_of


@pytest.mark.parametrize(
    ("given", "devices", "memory_bytes", "replicas", "sharing"),
    [
        pytest.param(node(gfd()), 4, 81559 * MIB, 1, "none", id="whole GPUs"),
        pytest.param(node(SLICED, gpu="16"), 4, 81559 * MIB, 4, "time-slicing", id="time-sliced"),
        pytest.param(
            node(SLICED, **{"gpu": "0", "gpu.shared": "16"}),
            4,
            81559 * MIB,
            4,
            "time-slicing",
            id="renamed resource",
        ),
        pytest.param(
            node(gfd(memory=str(81559 * MIB))), 4, 81559 * MIB, 1, "none", id="old GFD with bytes"
        ),
        pytest.param(node(gke(accelerator="nvidia-l4"), gpu="2"), 2, 24 * GB, 1, "none", id="GKE"),
        pytest.param(
            node(
                gke(
                    accelerator="nvidia-h100-80gb",
                    gpu_sharing_strategy="time-sharing",
                    max_shared_clients_per_gpu="3",
                ),
                gpu="24",
            ),
            8,
            80 * GB,
            3,
            "time-slicing",
            id="GKE, time-sharing",
        ),
        pytest.param(
            node(gke(accelerator="nvidia-tesla-a100", gpu_partition_size="1g.5gb"), gpu="7"),
            7,
            5 * GB,
            1,
            "none",
            id="GKE, partitions",
        ),
        pytest.param(node(karpenter("1", "16384"), gpu="1"), 1, 16 * GB, 1, "none", id="Karpenter"),
        pytest.param(
            node(karpenter("4", "22888")), 4, 22888 * MIB, 1, "none", id="Karpenter, exact MiB"
        ),
        pytest.param(
            node(karpenter("8", "40960", "eks.amazonaws.com"), gpu="8"),
            *(8, 40 * GB, 1, "none"),
            id="EKS Auto Mode",
        ),
        pytest.param(node(eks("g5.12xlarge")), 4, 24 * GB, 1, "none", id="EKS, by its type"),
        pytest.param(
            node(aks("Standard_NC4as_T4_v3"), gpu="1"), 1, 15 * GB, 1, "none", id="AKS, one T4"
        ),
        pytest.param(
            node(aks("Standard_NC24ads_A100_v4"), gpu="1"),
            *(1, 80 * GB, 1, "none"),
            id="AKS, by its type",
        ),
        pytest.param(
            node(aks_by_itself("Standard_NC48ads_A100_v4"), gpu="2"),
            *(2, 80 * GB, 1, "none"),
            id="AKS, node auto provisioning",
        ),
    ],
)
def test_sufficient_labels_give_a_report(
    given: Node, devices: int, memory_bytes: int, replicas: int, sharing: str
) -> None:
    status = believed(given, LABELS_DO)
    assert status is not None
    assert len({each.uuid for each in status.devices}) == devices
    for each in status.devices:
        assert (each.memory_bytes, each.replicas.free) == (memory_bytes, replicas)
        assert (each.sharing, each.reserved_bytes) == (sharing, ASSUMED_RESERVED_BYTES)
        # Unattributed use and the devices of pods are not measured.
        assert each.unattributed_bytes is None
    assert not status.shows_every_pod
    # Labels of shared GPUs are used only if the administrator allows it.
    assert (believed(given, Rules()) is None) == (sharing != "none")


NO_LABELS = "no label describes the GPUs of the node. Example: nvidia.com/gpu.count: 4,"
OF_GFD = "labels of GPU feature discovery "


@pytest.mark.parametrize(
    ("given", "why"),
    [
        pytest.param(node({}), NO_LABELS, id="none"),
        pytest.param(
            node(gfd(count="2")),
            f"{OF_GFD}describe 2 GPUs with 1 replica each, but the node offers 4 of nvidia.com/gpu",
            id="GPUs of two models: the label describes one of them",
        ),
        pytest.param(
            node(gfd(), gpu="3"), "the node offers 3 of nvidia.com/gpu", id="an unhealthy GPU"
        ),
        pytest.param(node(SLICED, gpu="15"), "the node offers 15", id="an unhealthy replica"),
        pytest.param(
            node(gfd(), gpu="0"), "the node offers no managed resource", id="no running plugin"
        ),
        pytest.param(
            node(gfd(replicas="0")), "contain only a model. Example", id="an invalid layout"
        ),
        pytest.param(
            node(gfd(sharing_strategy="")), "contain only a model. Example", id="no strategy"
        ),
        pytest.param(
            node(gfd(replicas="4"), gpu="16"),
            f"{OF_GFD}are not valid: 4 replicas with sharing strategy none",
            id="unshared replicas",
        ),
        pytest.param(node(gfd(memory="0")), "contain only a model. Example", id="no memory"),
        pytest.param(
            node(gfd(memory="lots")), "contain only a model. Example", id="memory is not a number"
        ),
        pytest.param(
            node(gfd(memory="512")),
            f"{OF_GFD}are not valid: a GPU with 0.5 GiB of",
            id="too little memory",
        ),
        pytest.param(
            node(gfd(memory="9" * 15)), "a GPU with 931,322.5 GiB of memory", id="too much memory"
        ),
        pytest.param(
            node(gfd(product="NVIDIA-A100-MIG-1c.3g.20gb")),
            "contain only a model. Example",
            id="instances that share memory",
        ),
        pytest.param(
            node(gfd() | {"nvidia.com/mig.config.state": "pending"}), "'pending'", id="reconfigured"
        ),
        pytest.param(
            node(gfd(), **{"gpu": "4", "mig-1g.5gb": "7"}),
            "the node offers nvidia.com/gpu and nvidia.com/mig-1g.5gb",
            id="two resources",
        ),
        pytest.param(
            node(gke(accelerator="nvidia-of-tomorrow")),
            "labels of GKE contain only an unknown model or sharing strategy. Example",
            id="unknown model",
        ),
        pytest.param(
            node(gke(accelerator="nvidia-l4", gpu_sharing_strategy="mps")),
            "labels of GKE contain only",
            id="number of clients missing",
        ),
        pytest.param(
            node(gke(accelerator="nvidia-l4", accelerator_count="2")),
            "labels of GKE describe 2 GPUs with 1 replica each, but the node offers 4",
            id="GKE's count differs",
        ),
        pytest.param(
            node(karpenter("1", "16384"), gpu="4"),
            "labels of Karpenter describe 1 GPU without sharing, but the node offers 4",
            id="shared, but the strategy is missing",
        ),
        pytest.param(
            node(karpenter("1", "16384"), **{"gpu": "0", "gpu.shared": "1"}),
            "labels of Karpenter describe only whole GPUs, not nvidia.com/gpu.shared",
            id="shared by its name",
        ),
        pytest.param(
            node(karpenter("1", "81920"), **{"gpu": "0", "mig-3g.40gb": "1"}),
            "labels of Karpenter describe only whole GPUs, not nvidia.com/mig-3g.40gb",
            id="a part of each GPU",
        ),
        pytest.param(
            node(aks("Standard_NV6ads_A10_v5"), gpu="1"),
            "labels of AKS contain only a vendor. Example: nvidia.com/gpu.count: 4",
            id="AKS, a type with a part of a GPU",
        ),
        pytest.param(
            node(aks_by_itself("Standard_NC_of_tomorrow"), gpu="2"),
            "labels of AKS contain only a model and a count. Example",
            id="AKS, unknown type",
        ),
        pytest.param(
            node(aks("Standard_ND96asr_v4"), gpu="56"),
            "labels of the instance type describe 8 GPUs without sharing, but the node offers 56",
            id="AKS, GPUs cut by MIG",
        ),
        pytest.param(
            node({"k8s.amazonaws.com/accelerator": "nvidia-tesla-t4"}),
            "labels of EKS contain only a model. Example",
            id="EKS",
        ),
    ],
)
def test_insufficient_labels_report_what_is_missing(given: Node, why: str) -> None:
    assert believed(given, LABELS_DO) is None
    assert believed(given, Rules()) is None
    assert why in why_not_believed(given, LABELS_DO)


SILENT = GPUNode(metadata=ObjectMeta(name="n", uid="gn", resource_version="1"))


def state(
    labels: dict[str, str], gpu: str, rules: Rules, silent: GPUNode = SILENT
) -> ClusterWriter:
    spec = msgspec.structs.replace(silent.spec, initialised=True)
    ready = msgspec.structs.replace(silent, spec=spec)
    return state_of(NodeSeen(node(labels, gpu=gpu)), GPUNodeSeen(ready, NOW_S), rules=rules)


def verdict(given: ClusterWriter, vram: str | None) -> Verdicts:
    request: Any = given.cluster.understand(pod(vram))
    snap = given.cluster.snapshot()
    return fit(request, snap, snap.rows(["n"]), NOW_S)


@pytest.mark.parametrize(
    ("labels", "gpu", "rules", "vram", "reason"),
    [
        pytest.param(gfd(), "4", Rules(), None, None, id="a whole GPU"),
        pytest.param(gfd(), "4", Rules(), "60Gi", None, id="enough memory"),
        pytest.param(
            gfd(), "4", Rules(), "79Gi", Reason.MEMORY_ON_ANY, id="memory reserved by the driver"
        ),
        pytest.param(
            SLICED, "16", Rules(), "8Gi", Reason.NO_REPORT, id="shared GPUs without the setting"
        ),
        pytest.param(SLICED, "16", LABELS_DO, "8Gi", None, id="shared GPUs with the setting"),
        pytest.param(
            {},
            "16",
            LABELS_DO,
            "8Gi",
            Reason.LABELS_INCOMPLETE,
            id="incomplete labels with the setting",
        ),
        pytest.param(by_mps("48"), "192", LABELS_DO, "1Gi", None, id="MPS"),
        pytest.param(
            by_mps("48"), "192", LABELS_DO, "2Gi", Reason.ABOVE_MPS_LIMIT, id="MPS, above its cap"
        ),
        pytest.param(
            by_mps("49"),
            "196",
            LABELS_DO,
            "1Gi",
            Reason.CONTRADICTORY_REPORT,
            id="more replicas by MPS than it has clients",
        ),
        pytest.param(
            by_mps("17", family="volta"),
            "68",
            LABELS_DO,
            "1Gi",
            Reason.CONTRADICTORY_REPORT,
            id="more replicas than clients on an old GPU",
        ),
    ],
)
def test_pods_are_placed_on_nodes_with_sufficient_labels(
    labels: dict[str, str], gpu: str, rules: Rules, vram: str | None, reason: Reason | None
) -> None:
    given = state(labels, gpu, rules)
    verdicts = verdict(given, vram)
    assert verdicts.reason(0) is reason
    (nearest,) = explain(verdicts, Weights()).nearest
    shown = reason not in (Reason.NO_REPORT, Reason.LABELS_INCOMPLETE)
    assert nearest.unmeasured == (
        "not measured, but derived from labels of GPU feature discovery" if shown else ""
    )
    missing = {
        Reason.NO_REPORT: f"{OF_GFD}describe shared GPUs, which without an agent's report require "
        "the setting require_report: false",
        Reason.LABELS_INCOMPLETE: NO_LABELS,
    }
    assert nearest.detail.startswith(missing.get(reason, "")) if reason else not nearest.detail


def test_reservations_add_up_and_never_exceed_one_gpu() -> None:
    """The devices of pods are not measured, so each pod may be on any GPU."""
    given = state(SLICED, "16", LABELS_DO)
    held = given.cluster.gpunode("n")
    assert held is not None
    bound = 0
    while isinstance(
        placed := given.cluster.judge(pod("30Gi", uid=f"u{bound}"), held, NOW_S), Placement
    ):
        assert placed.charges
        given.apply([PodSeen(pod("30Gi", uid=f"u{bound}", name=f"p{bound}", node="n"))])
        bound += 1
    # 78.6 GiB suffice for two pods. A third pod could get the same device.
    assert (bound, placed) == (2, Reason.MEMORY_ON_ANY)


def test_four_whole_gpus_take_exactly_four_pods() -> None:
    given = state(gfd(), "4", Rules())
    for i in range(4):
        assert verdict(given, None).reason(0) is None
        given.apply([BindBegun(pod(None, uid=f"u{i}", name=f"p{i}"), "n")])
    assert verdict(given, None).reason(0) is Reason.NO_REPLICA


def test_an_old_report_of_an_agent_takes_precedence_over_labels() -> None:
    given = state(gfd(), "4", Rules())
    given.apply([GPUNodeSeen(gpunode(device(memory_bytes=24 * GIB), version="2"), NOW_S)])
    assert verdict(given, "60Gi").reason(0) is Reason.MEMORY_ON_ANY
    request: Any = given.cluster.understand(pod("8Gi"))
    snap = given.cluster.snapshot()
    late = fit(request, snap, snap.rows(["n"]), NOW_S + 3600.0)
    assert late.reason(0) is Reason.STALE_REPORT


def test_a_ledger_is_initialised_if_labels_are_sufficient() -> None:
    given = state_of(NodeSeen(node(gfd())))
    assert uninitialised(given.cluster) == [node(gfd())]  # It needs a GPUNode.
    assert verdict(given, None).reason(0) is Reason.NOT_INITIALISED
    given.apply([GPUNodeSeen(SILENT, NOW_S)])
    assert uninitialised(given.cluster) == [node(gfd())]
    assert devices_known(given.cluster, SILENT)
    shared = state_of(NodeSeen(node(SLICED, gpu="16")), GPUNodeSeen(SILENT, NOW_S))
    assert uninitialised(shared.cluster) == []
    assert not devices_known(shared.cluster, SILENT)


def test_a_previously_bound_pod_is_charged() -> None:
    given = state(SLICED, "16", LABELS_DO)
    given.apply([PodSeen(pod("70Gi", uid="old", node="n"))])
    assert verdict(given, "20Gi").reason(0) is Reason.MEMORY_ON_ANY
    assert GPU in {each.device.resource for each in given.cluster.snapshot().nodes[0].devices}


@pytest.mark.parametrize(
    ("labels", "whose"),
    [
        pytest.param(karpenter("1", "16384"), "Karpenter", id="Karpenter"),
        pytest.param(
            karpenter("1", "16384", "eks.amazonaws.com"), "EKS Auto Mode", id="EKS Auto Mode"
        ),
        pytest.param(eks("g4dn.xlarge"), "the instance type", id="a node group of EKS"),
        pytest.param(aks("Standard_NC4as_T4_v3"), "the instance type", id="a pool of AKS"),
    ],
)
def test_whole_gpus_of_a_cloud_are_used_and_reported_as_unmeasured(
    labels: dict[str, str], whose: str
) -> None:
    given = state(labels, "1", Rules())
    (nearest,) = explain(verdict(given, "12Gi"), Weights()).nearest
    assert nearest.reason is None
    assert nearest.unmeasured == f"not measured, but derived from labels of {whose}"
    assert verdict(given, "15Gi").reason(0) is Reason.MEMORY_ON_ANY
