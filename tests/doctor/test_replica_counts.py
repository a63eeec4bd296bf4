"""The advised replicas, and the device plugin's ConfigMap with them."""

from collections.abc import Sequence

import msgspec
import pytest
import yaml

from contract.gpunode import GPUNode
from contract.kube import Node, NodeStatus, ObjectMeta, Pod
from extender.config.settings import Settings
from extender.doctor.node_rules import advised_plugin_config
from extender.state.changes import GPUNodeSeen, NodeSeen, PodSeen
from tests.builders import GPU, NOW_S, container, gpunode, pod, shared
from tests.doctor.test_node_rules import asking, findings, sliced


def config(gpunodes: dict[str, GPUNode], pods: Sequence[Pod], resource: str = GPU) -> str:
    nodes = [
        NodeSeen(
            Node(
                metadata=ObjectMeta(name=name, uid=name),
                status=NodeStatus(allocatable={resource: "8"}),
            )
        )
        for name in gpunodes
    ]
    named = [
        GPUNodeSeen(msgspec.structs.replace(each, metadata=ObjectMeta(name=name, uid=name)), NOW_S)
        for name, each in gpunodes.items()
    ]
    return advised_plugin_config(Settings(), [*nodes, *named, *map(PodSeen, pods)])


def test_small_pods_decide_how_many_replicas_are_enough() -> None:
    """A device of 24 GiB holds 2 median pods of 10 GiB, but 6 small pods of 4 GiB."""
    mixed = asking(*["4Gi"] * 3, *["10Gi"] * 3, "20Gi")
    (found,) = findings(sliced(4), pods=mixed)
    assert (
        "at least a quarter of 7 GPU containers (from 7 pods that exist now) request 4Gi"
        in found.found
    )
    assert found.do.startswith("set replicas: 6 in the device plugin's configuration")
    assert findings(sliced(5), pods=mixed) == []


@pytest.mark.parametrize("policy", ["distributed", "packed"])
def test_no_more_replicas_are_advised_than_pods_can_run_on_a_node(policy: str) -> None:
    """The author of these pods has left out the unit: 25 bytes."""
    found = findings(sliced(4, allocation_policy=policy), pods=asking(*["25"] * 6))
    advised = [each.do for each in found if "replicas run out" in each.found]
    assert [do.partition(" in ")[0] for do in advised] == ["set replicas: 110"]


def test_the_configmap_has_one_configuration_for_each_advice() -> None:
    nodes = {"b": sliced(2), "a": sliced(2), "small": gpunode(shared("s", 1, memory_bytes=8 << 30))}
    text = config(nodes, asking(*["4Gi"] * 6))
    found = yaml.safe_load(text)
    assert (found["kind"], list(found["data"])) == ("ConfigMap", ["gpu-6", "gpu-2"])
    assert yaml.safe_load(found["data"]["gpu-6"]) == {
        "version": "v1",
        "sharing": {
            "timeSlicing": {
                "failRequestsGreaterThanOne": True,
                "resources": [{"name": "nvidia.com/gpu", "replicas": 6}],
            }
        },
    }
    command = "# kubectl label --overwrite node a b nvidia.com/device-plugin.config=gpu-6\n"
    assert command in text


def test_renamed_resources_keep_their_name() -> None:
    resource = f"{GPU}.shared"
    node = gpunode(shared("a", 2, resource=resource))
    pods = [pod("4Gi", container(resource=resource), uid=f"u{i}", name=f"p{i}") for i in range(6)]
    (text,) = yaml.safe_load(config({"n": node}, pods, resource))["data"].values()
    slicing = yaml.safe_load(text)["sharing"]["timeSlicing"]
    assert slicing["renameByDefault"] is True
    assert slicing["resources"] == [{"name": "nvidia.com/gpu", "replicas": 6}]


def test_nothing_is_printed_if_the_replicas_match() -> None:
    assert config({"n": sliced(6)}, asking(*["4Gi"] * 6)) == ""
