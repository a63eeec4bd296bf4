"""Checks that GPU resources which a node offers and the settings do not manage are found."""

from prometheus_client import CollectorRegistry

from headroom.console.metrics import FleetCollector
from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Node, NodeStatus, ObjectMeta
from headroom.core.cluster.unmanaged_gpus import unmanaged_gpus
from headroom.core.placement.policy import Rules
from headroom.core.whatif.pending_pods import Pending
from tests.builders import GPU, device, gpunode
from tests.state.states import STALE_AFTER_S, seen, state_of

GPU_LABELS = {"nvidia.com/gpu.count": "2"}


def offering(name: str, *resources: str, labels: dict[str, str] | None = None) -> Node:
    status = NodeStatus(allocatable=dict.fromkeys(resources, "1"))
    return Node(metadata=ObjectMeta(name=name, uid=name, labels=labels), status=status)


def found(*objects: Node | GPUNode, manages: tuple[str, ...] = (GPU,)) -> dict[str, list[str]]:
    return unmanaged_gpus(state_of(*seen(*objects), rules=Rules(resources=manages)).cluster)


def test_without_a_managed_resource_the_label_shows_that_the_node_has_gpus() -> None:
    nodes = (
        offering("b", "nvidia.com/a100", labels=GPU_LABELS),
        offering("a", "nvidia.com/a100", "cpu", labels=GPU_LABELS),
        offering("managed", GPU, "nvidia.com/hostdev", labels=GPU_LABELS),
        offering("no-gpu", "nvidia.com/hostdev"),
    )
    assert found(*nodes) == {"nvidia.com/a100": ["a", "b"]}
    assert found(*nodes, manages=("nvidia.com/*",)) == {}


def test_next_to_a_managed_resource_the_report_shows_which_resources_are_gpus() -> None:
    node = offering("n", GPU, "example.com/gpu", "nvidia.com/hostdev", labels=GPU_LABELS)
    report = gpunode(device("GPU-0"), device("GPU-1", resource="example.com/gpu"))
    assert found(node, report) == {"example.com/gpu": ["n"]}
    assert found(node, report, manages=(GPU, "example.com/gpu")) == {}


def test_the_metric_counts_the_nodes_by_resource() -> None:
    nodes = [offering(name, "nvidia.com/a100", labels=GPU_LABELS) for name in ("a", "b")]
    state = state_of(*seen(*nodes, offering("managed", GPU, labels=GPU_LABELS)))
    registry = CollectorRegistry()
    registry.register(
        FleetCollector(state.cluster, state.cluster.snapshot, Pending, 10, STALE_AFTER_S)
    )
    metric = "headroom_unmanaged_gpu_nodes"
    assert registry.get_sample_value(metric, {"resource": "nvidia.com/a100"}) == 2
    assert registry.get_sample_value(metric, {"resource": GPU}) is None


def test_a_resource_that_the_node_no_longer_offers_is_not_found() -> None:
    report = gpunode(device("GPU-0", resource="example.com/gpu"), device("GPU-1", resource=""))
    assert found(offering("n", GPU, labels=GPU_LABELS), report) == {}
