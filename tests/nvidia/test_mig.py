"""Checks how the real plugin advertises MIG devices and how the real feature discovery
labels them.
"""

from collections.abc import Callable
from typing import Any

import pytest

from agent.probes.readings import DeviceReading, RegisteredReading
from agent.sharing import Share, SharingReadings, shares
from headroom.contract.gpunode import Replicas
from headroom.contract.kube import Node, NodeStatus, ObjectMeta
from headroom.contract.reasons import Reason
from headroom.core.cluster.label_inventory import believed, mig_obstacle
from headroom.core.placement.policy import Rules
from tests.builders import mig, reservation, terms, use
from tests.driver import GIB, Gpu, Instance
from tests.nvidia.conftest import Kubelet, sharing

SMALL, LARGE = "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
PART = "NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb"


def instance(number: int, model: str = SMALL, compute: int = 0, name: str = "") -> Instance:
    memory_bytes = (10 if model is SMALL else 40) * GIB
    return Instance(name or f"MIG-{number}", number, compute, memory_bytes, model=model)


def gpu(*instances: Instance, number: int = 0) -> Gpu:
    return Gpu(f"GPU-{number}", instances=instances)


def strategy(name: str) -> dict[str, Any]:
    return {"flags": {"migStrategy": name}}


ALIKE = [gpu(instance(1), instance(2), instance(3))]
MIXED = [gpu(instance(1), instance(2), instance(3, LARGE))]
#: A GPU with two compute instances that share the memory of one GPU instance.
PARTS = [gpu(instance(3, PART, 0, "MIG-3a"), instance(3, PART, 1, "MIG-3b"))]


def readings(gpus: list[Gpu]) -> list[DeviceReading]:
    return [
        DeviceReading(
            "nvml", each.uuid, 0, kind="mig", parent=one.uuid, gpu_instance=each.gpu_instance
        )
        for one in gpus
        for each in one.instances
    ]


@pytest.mark.parametrize(
    ("gpus", "uuids"),
    [
        pytest.param(ALIKE, ["MIG-1", "MIG-2", "MIG-3"], id="GPU instances"),
        pytest.param(PARTS, ["MIG-3a", "MIG-3b"], id="compute instances of one GPU instance"),
    ],
)
def test_with_strategy_single_an_instance_is_a_gpu_and_its_uuid_is_the_replica(
    start_plugin: Callable[..., Kubelet], gpus: list[Gpu], uuids: list[str]
) -> None:
    kubelet = start_plugin(gpus, strategy("single"))
    registered = kubelet.registered()
    advertised = kubelet.advertised(registered)
    assert advertised.resource == "nvidia.com/gpu"
    assert advertised.replicas == dict.fromkeys(uuids, "Healthy")
    # The variable contains this UUID, so a pod can also use the UUID.
    answer = kubelet.allocate(registered, uuids[-1])
    assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == uuids[-1]
    shown = RegisteredReading("podresources", advertised.resource, frozenset(advertised.replicas))
    found, complaints = shares(readings(gpus), SharingReadings(registered=[shown]), {})
    assert complaints == []
    share = Share("none", "nvidia.com/gpu", Replicas(free=1))
    assert found == dict.fromkeys(uuids, share)


def test_shared_instances_have_separate_replicas(start_plugin: Callable[..., Kubelet]) -> None:
    kubelet = start_plugin(ALIKE, strategy("single") | sharing("timeSlicing", 2))
    registered = kubelet.registered()
    advertised = kubelet.advertised(registered)
    shown = RegisteredReading("podresources", advertised.resource, frozenset(advertised.replicas))
    found, _ = shares(readings(ALIKE), SharingReadings(registered=[shown]), {})
    share = Share("time-slicing", "nvidia.com/gpu", Replicas(free=2))
    assert found == dict.fromkeys(["MIG-1", "MIG-2", "MIG-3"], share)
    assert kubelet.allocate(registered, "MIG-2::1").envs["NVIDIA_VISIBLE_DEVICES"] == "MIG-2"


def test_with_strategy_mixed_each_profile_is_a_resource(
    start_plugin: Callable[..., Kubelet],
) -> None:
    kubelet = start_plugin(MIXED, strategy("mixed"))
    advertised = [kubelet.advertised() for _ in range(2)]
    shown = [
        RegisteredReading("podresources", each.resource, frozenset(each.replicas))
        for each in advertised
    ]
    found, complaints = shares(readings(MIXED), SharingReadings(registered=shown), {})
    assert complaints == []
    assert {uuid: share.resource for uuid, share in found.items()} == {
        "MIG-1": "nvidia.com/mig-1g.10gb",
        "MIG-2": "nvidia.com/mig-1g.10gb",
        "MIG-3": "nvidia.com/mig-3g.40gb",
    }


def test_with_strategy_mixed_compute_instances_are_offered_as_if_each_had_all_memory(
    start_plugin: Callable[..., Kubelet],
) -> None:
    """The names of both devices contain 40 GB, but the devices share 40 GB of memory."""
    advertised = start_plugin(PARTS, strategy("mixed")).advertised()
    assert advertised.resource == "nvidia.com/mig-3g.40gb"
    assert sorted(advertised.replicas) == ["MIG-3a", "MIG-3b"]
    one = [mig(each, 3, resource=advertised.resource) for each in advertised.replicas]
    held = {"u": reservation({"MIG-3a": 8 * GIB}, resource=advertised.resource)}
    found = terms(*one, reservations=held, pods=[use("u", "MIG-3a", 0)])
    assert [each.headroom_bytes for each in found] == [2 * GIB] * 2


def labelled(labels: dict[str, str], **allocatable: str) -> Node:
    offered = {f"nvidia.com/{name}": count for name, count in allocatable.items()}
    return Node(
        metadata=ObjectMeta(name="n", labels=labels), status=NodeStatus(allocatable=offered)
    )


def test_labels_of_a_layout_with_equal_instances_are_sufficient_for_placement(
    discover: Callable[..., dict[str, str]],
) -> None:
    labels = discover(ALIKE, strategy("single"))
    assert labels["nvidia.com/gpu.product"] == "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb"
    node = labelled(labels, gpu="3")
    assert mig_obstacle(node) is None
    status = believed(node, Rules())
    assert status is not None
    assert [d.memory_bytes for d in status.devices] == [10 * GIB] * 3


@pytest.mark.parametrize(
    "gpus",
    [
        pytest.param([gpu(instance(1), instance(2, LARGE))], id="two profiles"),
        pytest.param([gpu(instance(1)), gpu(number=1)], id="an additional whole GPU"),
    ],
)
def test_a_layout_that_single_cannot_offer_is_labelled_invalid_and_closes_the_node(
    discover: Callable[..., dict[str, str]], gpus: list[Gpu]
) -> None:
    labels = discover(gpus, strategy("single"))
    obstacle = mig_obstacle(labelled(labels, gpu="2"))
    assert obstacle is not None
    assert obstacle[0] is Reason.MIG_INVALID


def test_with_strategy_mixed_labels_describe_profiles_and_not_gpus(
    discover: Callable[..., dict[str, str]],
) -> None:
    labels = discover(MIXED, strategy("mixed"))
    assert labels["nvidia.com/mig-1g.10gb.memory"] == str(10 * 1024)
    assert labels["nvidia.com/mig-1g.10gb.count"] == "2"
    # These labels alone are not enough, because there are several resources with different memory.
    assert believed(labelled(labels, **{"mig-1g.10gb": "1", "mig-3g.40gb": "1"}), Rules()) is None
