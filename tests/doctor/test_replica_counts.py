"""Tests the advised numbers of replicas, and the device plugin's ConfigMap that sets them."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import yaml

from headroom.contract.gpunode import GPUNode, Replicas
from headroom.contract.kube import Node, NodeStatus, ObjectMeta, Pod, SchedulingGate
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from headroom.doctor.findings import Weight
from headroom.doctor.node_rules import advised_plugin_config
from headroom.runtime.settings.settings import Settings
from tests.builders import GIB, GPU, NOW_S, container, device, gpunode, pod, shared
from tests.doctor.test_node_rules import SOUND, asking, findings, sliced


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


def test_the_advised_number_of_replicas_suffices_for_small_pods() -> None:
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
def test_at_most_as_many_replicas_are_advised_as_pods_can_run_on_a_node(policy: str) -> None:
    """The author of these pods has forgotten the unit, so each pod requests 25 bytes."""
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


def test_the_configuration_of_a_steered_node_lets_containers_request_several_replicas() -> None:
    steers = {"steered": [GPU], "steers_several": True, "fail_requests_greater_than_one": False}
    nodes = {"a": sliced(2), "s": sliced(2, **steers)}
    data = yaml.safe_load(config(nodes, asking(*["4Gi"] * 6)))["data"]
    rejects = {
        name: yaml.safe_load(text)["sharing"]["timeSlicing"]["failRequestsGreaterThanOne"]
        for name, text in data.items()
    }
    assert rejects == {"gpu-6": True, "gpu-6_several": False}


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


def whole(free: int = 2, **how: Any) -> GPUNode:
    """Return two unshared GPUs of 80 GiB, of which ``free`` have no pod."""
    return gpunode(
        *(
            device(
                name, memory_bytes=80 * GIB, replicas=Replicas(int(i < free), int(i >= free)), **how
            )
            for i, name in enumerate("ab")
        ),
        plugin=SOUND,
    )


def test_sharing_an_unshared_gpu_is_advised_if_small_pods_are_pending() -> None:
    (found,) = findings(whole(), pods=asking(*["8Gi"] * 5, "20Gi", "60Gi"), offers={GPU: "2"})
    assert found.weight is Weight.ADVICE
    assert found.found == (
        "each nvidia.com/gpu device of 80Gi is not shared, so it runs one pod; 6 GPU containers "
        "that wait request 20Gi or less"
    )
    assert found.do == (
        "set replicas: 10 in the device plugin's configuration (headroom doctor --plugin-config "
        "prints it): pods then share it by time-slicing, and a pod that needs all of its memory "
        "requests headroom.gpu/vram: 100%"
    )


@pytest.mark.parametrize(
    ("pods", "free"),
    [
        pytest.param(asking(*["8Gi"] * 2), 2, id="a free GPU for each pod"),
        pytest.param(asking("8Gi", *["60Gi"] * 5), 0, id="one small pod"),
        pytest.param(asking(*[None] * 6), 0, id="without an amount"),
        pytest.param([], 0, id="no pods"),
    ],
)
def test_other_pending_pods_give_no_reason_to_share_a_gpu(pods: list[Pod], free: int) -> None:
    assert findings(whole(free), pods=pods, offers={GPU: "2"}) == []


def test_only_pods_that_can_run_on_the_node_and_lack_memory_count() -> None:
    gated = [SchedulingGate("quota")]
    elsewhere = {"zone": "b"}
    for name, value in (("scheduling_gates", gated), ("node_selector", elsewhere)):
        pods = [
            msgspec.structs.replace(each, spec=msgspec.structs.replace(each.spec, **{name: value}))
            for each in asking(*["8Gi"] * 6)
        ]
        assert findings(whole(0), pods=pods, offers={GPU: "2"}) == []
    several = [pod("8Gi", container(gpus=2), uid=f"u{i}", name=f"p{i}") for i in range(6)]
    assert findings(whole(0), pods=several, offers={GPU: "2"}) == []
    bound = [pod("8Gi", uid=f"u{i}", name=f"p{i}", node="n") for i in range(6)]
    assert findings(whole(0), pods=bound, offers={GPU: "2"}) == []


def test_two_pending_pods_are_enough_and_shares_of_memory_count() -> None:
    (found,) = findings(whole(0), pods=asking("25%", "8Gi"), offers={GPU: "2"})
    assert "2 GPU containers that wait request 20Gi or less" in found.found
    assert found.do.startswith("set replicas: 10 in")


def test_the_configmap_shares_a_gpu_for_pending_small_pods() -> None:
    text = config({"n": whole(0)}, asking(*["8Gi"] * 6))
    (key,) = yaml.safe_load(text)["data"]
    slicing = yaml.safe_load(yaml.safe_load(text)["data"][key])["sharing"]["timeSlicing"]
    assert slicing["resources"] == [{"name": "nvidia.com/gpu", "replicas": 10}]


def test_sharing_an_unhealthy_gpu_is_not_advised() -> None:
    found = findings(whole(0, healthy=False), pods=asking(*["8Gi"] * 6), offers={GPU: "2"})
    assert [each for each in found if "not shared" in each.found] == []
