"""Tests which resources of a node can be steered, and the reasons why others cannot."""

from typing import Any, Literal

import pytest

from agent.steering.choice import Eligibility, eligibility
from headroom.contract.gpunode import Device, GPUNodeStatus, Plugin

NOT_PERMITTED = (
    "not permitted: the agent can only read the kubelet's device plugin directory (chart "
    "value agent.steering.permitted, or component deploy/components/steering)"
)
NOTHING_SHARED = "no GPU of the node is shared, so the device plugin has no choice to make"
SHARING_UNKNOWN = "cannot read how the device plugin shares the GPUs"

GPU = "nvidia.com/gpu"
MIG = "nvidia.com/mig-1g.10gb"
Policy = Literal["distributed", "packed", "unknown"]


def device(uuid: str, **changes: Any) -> Device:
    fields = {"sharing": "time-slicing", "resource": GPU, "numa_node": 0} | changes
    return Device(uuid=uuid, **fields)


def found(
    *devices: Device,
    topology: str = "none",
    policy: Policy = "distributed",
    permitted: bool = True,
    kubelet: str = "v1.36.3",
) -> Eligibility:
    plugin = Plugin(allocation_policy=policy, topology_manager_policy=topology)
    return eligibility(GPUNodeStatus(devices=list(devices), plugin=plugin), permitted, kubelet)


def test_every_shared_resource_is_steered() -> None:
    devices = device("A"), device("B", numa_node=1), device("C", resource=MIG)
    assert found(*devices, device("D", resource="x", sharing="none")) == Eligibility(
        frozenset({GPU, MIG})
    )


def test_without_the_kubelets_folder_nothing_is_steered() -> None:
    assert found(device("A"), permitted=False) == Eligibility(obstacles=(NOT_PERMITTED,))


@pytest.mark.parametrize("version", ["v1.31.4+k3s1", "v1.36.3-gke.100", "1.36.0"])
def test_kubelets_before_1_37_are_steered(version: str) -> None:
    assert found(device("A"), kubelet=version) == Eligibility(frozenset({GPU}))


@pytest.mark.parametrize("version", ["v1.37.0-beta.0", "v1.37.2", "v1.100.0", "v2.0.0"])
def test_a_kubelet_from_1_37_on_is_not_steered_and_an_upgrade_ends_steering(version: str) -> None:
    seen = found(device("A"), device("C", resource=MIG), kubelet=version)
    assert (seen.resources, seen.excluded) == (set(), {GPU, MIG})
    assert seen.obstacles == (
        f"steering needs a kubelet older than 1.37, and this node has {version}, which lets the "
        "device plugin choose as soon as an agent is killed; use device choice predicted or gated",
    )


@pytest.mark.parametrize("version", ["", "v1", "latest"])
def test_steering_waits_until_the_version_of_the_kubelet_is_known(version: str) -> None:
    seen = found(device("A"), kubelet=version)
    assert seen == Eligibility(
        obstacles=("the version of the kubelet cannot be read from the Node's status",)
    )


@pytest.mark.parametrize(
    ("devices", "policy", "obstacle"),
    [
        pytest.param([device("A", sharing="none")], "distributed", NOTHING_SHARED, id="whole GPUs"),
        pytest.param([], "distributed", NOTHING_SHARED, id="no GPU"),
        pytest.param(
            [device("A", sharing="none")], "unknown", SHARING_UNKNOWN, id="plugin is unreadable"
        ),
    ],
)
def test_gpus_that_are_not_shared_are_not_steered(
    devices: list[Device], policy: Policy, obstacle: str
) -> None:
    assert found(*devices, policy=policy) == Eligibility(obstacles=(obstacle,))


def test_a_topology_policy_excludes_resources_on_several_numa_nodes() -> None:
    devices = device("A"), device("B", numa_node=1), device("C", resource=MIG)
    seen = found(*devices, topology="single-numa-node")
    assert (seen.resources, seen.excluded) == ({MIG}, {GPU})
    (obstacle,) = seen.obstacles
    assert obstacle.startswith(f"{GPU}: the kubelet's topology manager has policy single-numa-node")


def test_an_unreadable_policy_does_not_end_steering() -> None:
    seen = found(device("A"), device("B", numa_node=1), topology="")
    assert (seen.resources, seen.excluded) == (set(), set())
    assert "has a policy that cannot be read" in seen.obstacles[0]
