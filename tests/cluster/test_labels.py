"""What labels say where no agent reports."""

from typing import Any

import msgspec
import pytest

from contract.gpunode import GPUNode
from contract.kube import Node, NodeStatus, ObjectMeta
from contract.reasons import Reason
from extender.cluster.chores import knows_devices, uninitialised
from extender.cluster.events import BindBegun, GPUNodeSeen, NodeSeen, PodSeen
from extender.cluster.labels import ASSUMED_RESERVED_BYTES, GB, believed
from extender.cluster.state import ClusterState
from extender.placement.explain import explain
from extender.placement.fit import Verdicts, fit
from extender.placement.placed import Placement
from extender.placement.rules import MIB, Rules
from tests.builders import GIB, GPU, NOW_S, device, gpunode, pod
from tests.cluster.test_state import state_of

LABELS_DO = Rules(require_report=False)


def node(labels: dict[str, str], **allocatable: str) -> Node:
    offers = allocatable or {"gpu": "4"}
    status = NodeStatus(allocatable={f"nvidia.com/{k}": v for k, v in offers.items()})
    return Node(metadata=ObjectMeta(name="n", uid="n", labels=labels), status=status)


def gfd(**other: str) -> dict[str, str]:
    """Four H100 as the real GPU feature discovery labels them (facts D)."""
    written = {
        "count": "4",
        "replicas": "1",
        "memory": "81559",
        "product": "NVIDIA-H100-80GB-HBM3",
        "sharing-strategy": "none",
    }
    written |= {key.replace("_", "-"): value for key, value in other.items()}
    return {f"nvidia.com/gpu.{key}": value for key, value in written.items()}


def gke(**labels: str) -> dict[str, str]:
    return {f"cloud.google.com/gke-{k.replace('_', '-')}": v for k, v in labels.items()}


def karpenter(count: str, memory: str) -> dict[str, str]:
    prefix = "karpenter.k8s.aws/instance-gpu-"
    return {f"{prefix}count": count, f"{prefix}memory": memory, f"{prefix}name": "t4"}


SLICED = gfd(replicas="4", sharing_strategy="time-slicing")


def by_mps(replicas: str, **other: str) -> dict[str, str]:
    return gfd(replicas=replicas, sharing_strategy="mps", **other)


@pytest.mark.parametrize(
    ("given", "devices", "memory_bytes", "replicas", "sharing"),
    [
        pytest.param(node(gfd()), 4, 81559 * MIB, 1, "none", id="whole GPUs"),
        pytest.param(node(SLICED, gpu="16"), 4, 81559 * MIB, 4, "time-slicing", id="sliced"),
        pytest.param(
            node(SLICED, **{"gpu": "0", "gpu.shared": "16"}),
            4,
            81559 * MIB,
            4,
            "time-slicing",
            id="under another name",
        ),
        pytest.param(
            node(gfd(memory=str(81559 * MIB))), 4, 81559 * MIB, 1, "none", id="an old GFD: bytes"
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
    ],
)
def test_labels_that_are_enough(
    given: Node, devices: int, memory_bytes: int, replicas: int, sharing: str
) -> None:
    status = believed(given, LABELS_DO)
    assert status is not None
    assert len({each.uuid for each in status.devices}) == devices
    for each in status.devices:
        assert (each.memory_bytes, each.replicas.free) == (memory_bytes, replicas)
        assert (each.sharing, each.reserved_bytes) == (sharing, ASSUMED_RESERVED_BYTES)
        # Nobody measured what strangers use, and whose pods are where.
        assert each.unowned_bytes is None
    assert not status.shows_every_pod
    # Shared ones only where the administrator has said so.
    assert (believed(given, Rules()) is None) == (sharing != "none")


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(node({}), id="none"),
        pytest.param(node(gfd(count="2")), id="GPUs of two models: only one of them is told of"),
        pytest.param(node(gfd(), gpu="3"), id="an unhealthy GPU"),
        pytest.param(node(SLICED, gpu="15"), id="an unhealthy replica"),
        pytest.param(node(gfd(), gpu="0"), id="a plugin that is down"),
        pytest.param(node(gfd(replicas="0")), id="an invalid layout"),
        pytest.param(node(gfd(sharing_strategy="")), id="a strategy that is not told"),
        pytest.param(node(gfd(replicas="4"), gpu="16"), id="replicas that nobody shares"),
        pytest.param(node(gfd(memory="0")), id="no memory"),
        pytest.param(node(gfd(memory="lots")), id="no figure"),
        pytest.param(node(gfd(memory="512")), id="less than the driver may keep"),
        pytest.param(node(gfd(memory="9" * 15)), id="more than any device has"),
        pytest.param(
            node(gfd(product="NVIDIA-A100-MIG-1c.3g.20gb")), id="instances that share memory"
        ),
        pytest.param(
            node(gfd() | {"nvidia.com/mig.config.state": "pending"}), id="being reconfigured"
        ),
        pytest.param(node(gfd(), **{"gpu": "4", "mig-1g.5gb": "7"}), id="two resources"),
        pytest.param(node(gke(accelerator="nvidia-of-tomorrow")), id="a model not known"),
        pytest.param(
            node(gke(accelerator="nvidia-l4", gpu_sharing_strategy="mps")), id="clients not told"
        ),
        pytest.param(
            node(gke(accelerator="nvidia-l4", accelerator_count="2")),
            id="GKE's count does not agree",
        ),
        pytest.param(node(karpenter("1", "16384"), gpu="4"), id="shared, and nobody says how"),
        pytest.param(node({"kubernetes.azure.com/accelerator": "nvidia"}), id="AKS"),
        pytest.param(node({"k8s.amazonaws.com/accelerator": "nvidia-tesla-t4"}), id="EKS"),
    ],
)
def test_labels_that_are_not(given: Node) -> None:
    assert believed(given, LABELS_DO) is None
    assert believed(given, Rules()) is None


SILENT = GPUNode(metadata=ObjectMeta(name="n", uid="gn", resource_version="1"))


def state(labels: dict[str, str], gpu: str, rules: Rules, silent: GPUNode = SILENT) -> ClusterState:
    spec = msgspec.structs.replace(silent.spec, initialised=True)
    ready = msgspec.structs.replace(silent, spec=spec)
    return state_of(NodeSeen(node(labels, gpu=gpu)), GPUNodeSeen(ready, NOW_S), rules=rules)


def verdict(given: ClusterState, vram: str | None) -> Verdicts:
    request: Any = given.understand(pod(vram))
    snap = given.snapshot()
    return fit(request, snap, snap.rows(["n"]), NOW_S)


@pytest.mark.parametrize(
    ("labels", "gpu", "rules", "vram", "reason"),
    [
        pytest.param(gfd(), "4", Rules(), None, None, id="a whole GPU"),
        pytest.param(gfd(), "4", Rules(), "60Gi", None, id="one that has enough"),
        pytest.param(gfd(), "4", Rules(), "79Gi", Reason.MEMORY_ON_ANY, id="the driver's part"),
        pytest.param(SLICED, "16", Rules(), "8Gi", Reason.NO_REPORT, id="no shared ones"),
        pytest.param(SLICED, "16", LABELS_DO, "8Gi", None, id="unless labels will do"),
        pytest.param(
            {}, "16", LABELS_DO, "8Gi", Reason.LABELS_SAY_TOO_LITTLE, id="and say something"
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
            id="more than it has on an old GPU",
        ),
    ],
)
def test_placing_by_label(
    labels: dict[str, str], gpu: str, rules: Rules, vram: str | None, reason: Reason | None
) -> None:
    given = state(labels, gpu, rules)
    verdicts = verdict(given, vram)
    assert verdicts.reason(0) is reason
    request: Any = given.understand(pod(vram))
    (nearest,) = explain(request, given.snapshot(), verdicts).nearest
    told = reason not in (Reason.NO_REPORT, Reason.LABELS_SAY_TOO_LITTLE)
    assert nearest.unmeasured == (
        "not measured: as labels of GPU feature discovery say" if told else ""
    )


def test_promises_add_up_and_never_exceed_what_one_gpu_has() -> None:
    """Nobody observes who is where: each of them may be on any GPU."""
    given = state(SLICED, "16", LABELS_DO)
    held = given.gpunode("n")
    assert held is not None
    bound = 0
    while isinstance(placed := given.judge(pod("30Gi", uid=f"u{bound}"), held, NOW_S), Placement):
        assert placed.charges
        given.apply([PodSeen(pod("30Gi", uid=f"u{bound}", name=f"p{bound}", node="n"))])
        bound += 1
    # 78.6 GiB hold two; a third might land on the same device.
    assert (bound, placed) == (2, Reason.MEMORY_ON_ANY)


def test_four_whole_gpus_take_four_pods_and_no_more() -> None:
    given = state(gfd(), "4", Rules())
    for i in range(4):
        assert verdict(given, None).reason(0) is None
        given.apply([BindBegun(pod(None, uid=f"u{i}", name=f"p{i}"), "n")])
    assert verdict(given, None).reason(0) is Reason.NO_REPLICA


def test_an_agents_word_stands_above_labels_even_when_it_is_old() -> None:
    given = state(gfd(), "4", Rules())
    given.apply([GPUNodeSeen(gpunode(device(memory_bytes=24 * GIB), version="2"), NOW_S)])
    assert verdict(given, "60Gi").reason(0) is Reason.MEMORY_ON_ANY
    request: Any = given.understand(pod("8Gi"))
    snap = given.snapshot()
    late = fit(request, snap, snap.rows(["n"]), NOW_S + 3600.0)
    assert late.reason(0) is Reason.STALE_REPORT


def test_a_ledger_is_set_up_where_labels_are_enough() -> None:
    given = state_of(NodeSeen(node(gfd())))
    assert uninitialised(given) == [node(gfd())]  # it needs an object
    assert verdict(given, None).reason(0) is Reason.NOT_INITIALISED
    given.apply([GPUNodeSeen(SILENT, NOW_S)])
    assert uninitialised(given) == [node(gfd())]
    assert knows_devices(given, SILENT)
    shared = state_of(NodeSeen(node(SLICED, gpu="16")), GPUNodeSeen(SILENT, NOW_S))
    assert uninitialised(shared) == []
    assert not knows_devices(shared, SILENT)


def test_a_pod_that_was_there_before_is_charged() -> None:
    given = state(SLICED, "16", LABELS_DO)
    given.apply([PodSeen(pod("70Gi", uid="old", node="n"))])
    assert verdict(given, "20Gi").reason(0) is Reason.MEMORY_ON_ANY
    assert GPU in {each.device.resource for each in given.snapshot().nodes[0].devices}
