"""Checks that a node takes no pods if its MIG layout is unusable or is changing."""

from typing import Any

import pytest

from headroom.contract.kube import Node, NodeStatus, ObjectMeta
from headroom.contract.reasons import Reason
from headroom.contract.watched import GPUNodeSeen, NodeSeen
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.cluster.label_inventory import mig_obstacle
from headroom.core.placement.explain import explain
from headroom.core.placement.fit import fit
from headroom.core.placement.policy import Weights
from tests.builders import GPU, NOW_S, gpunode, mig, pod
from tests.state.states import state_of

PRODUCT = "nvidia.com/gpu.product"
STATE = "nvidia.com/mig.config.state"


def node(labels: dict[str, str]) -> Node:
    status = NodeStatus(allocatable={GPU: "7"})
    return Node(metadata=ObjectMeta(name="n", uid="n", labels=labels), status=status)


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        pytest.param({}, None, id="no MIG"),
        pytest.param({STATE: "success"}, None, id="done"),
        pytest.param({STATE: "pending"}, Reason.MIG_CHANGING, id="in progress"),
        pytest.param({STATE: "rebooting"}, Reason.MIG_CHANGING, id="reboot required"),
        pytest.param({STATE: "of tomorrow"}, Reason.MIG_CHANGING, id="unknown state"),
        pytest.param({STATE: ""}, Reason.MIG_CHANGING, id="empty state"),
        pytest.param({STATE: "failed"}, Reason.MIG_FAILED, id="failed"),
        pytest.param(
            {STATE: "success", PRODUCT: "NVIDIA-A100-SXM4-40GB-MIG-INVALID"},
            Reason.MIG_INVALID,
            id="a layout that strategy single cannot offer",
        ),
        pytest.param(
            {PRODUCT: "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb"},
            None,
            id="a layout that strategy single can offer",
        ),
    ],
)
def test_the_labels_decide_whether_the_mig_layout_is_usable(
    labels: dict[str, str], reason: Reason | None
) -> None:
    found = mig_obstacle(node(labels))
    assert (found and found[0]) is reason


def verdict(state: ClusterWriter) -> tuple[Reason | None, str]:
    """Return the reason and its details, and assert that bind agrees."""
    request: Any = state.cluster.understand(pod("4Gi"))
    snap = state.cluster.snapshot()
    verdicts = fit(request, snap, snap.rows(["n"]), NOW_S)
    held = state.cluster.gpunode("n")
    assert held is not None
    judged = state.cluster.judge(pod("4Gi"), held, NOW_S)
    (nearest,) = explain(verdicts, Weights()).nearest
    assert (judged if isinstance(judged, Reason) else None) is nearest.reason
    return nearest.reason, nearest.detail


def test_a_node_takes_no_pods_while_mig_changes_and_shows_the_label() -> None:
    reported = GPUNodeSeen(gpunode(mig("M0", 1), mig("M1", 2)), NOW_S)
    state = state_of(NodeSeen(node({STATE: "success"})), reported)
    assert verdict(state) == (None, "")
    state.apply([NodeSeen(node({STATE: "pending"}))])
    assert verdict(state) == (Reason.MIG_CHANGING, f"label {STATE} is 'pending'")
    state.apply([NodeSeen(node({STATE: "success"}))])
    assert verdict(state) == (None, "")
