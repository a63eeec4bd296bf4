"""Checks the labels of the real GPU feature discovery, and how far a scheduler can rely on them.

The labels describe physical GPUs and not replicas, and describe only one model.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from headroom.contract.kube import Node, NodeStatus, ObjectMeta
from headroom.core.cluster.label_inventory import believed
from headroom.core.placement.policy import Rules
from tests.driver import GIB, Gpu
from tests.nvidia.conftest import Kubelet, sharing

MIB = 1 << 20
L4_MIB = 23034
H200_MIB = 143771

Discover = Callable[..., dict[str, str]]


def gpus(count: int, model: str, memory_bytes: int, first: int = 0) -> list[Gpu]:
    return [
        Gpu(f"GPU-{index}", memory_bytes, reserved_bytes=500 * MIB, model=model)
        for index in range(first, first + count)
    ]


L4S = gpus(3, "NVIDIA L4", L4_MIB * MIB + MIB // 2)
H200S = gpus(2, "NVIDIA H200", H200_MIB * MIB, first=3)


def of_gpu(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels that schedulers read."""
    names = ("count", "replicas", "memory", "product", "sharing-strategy")
    shown = {name: labels[f"nvidia.com/gpu.{name}"] for name in names}
    return shown | {"mps.capable": labels["nvidia.com/mps.capable"]}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param(
            {},
            {"replicas": "1", "sharing-strategy": "none", "product": "NVIDIA-L4"},
            id="not shared",
        ),
        pytest.param(
            sharing("timeSlicing", 4),
            {"replicas": "4", "sharing-strategy": "time-slicing", "product": "NVIDIA-L4-SHARED"},
            id="time-slicing, marked in the product's name",
        ),
        pytest.param(
            sharing("timeSlicing", 4, renameByDefault=True),
            {"replicas": "4", "sharing-strategy": "time-slicing", "product": "NVIDIA-L4"},
            id="time-slicing, marked in the resource's name and so not in the product's",
        ),
        pytest.param(
            sharing("mps", 5),
            {
                "replicas": "5",
                "sharing-strategy": "mps",
                "product": "NVIDIA-L4-SHARED",
                "mps.capable": "true",
            },
            id="mps",
        ),
        pytest.param(
            sharing("mps", 5, renameByDefault=True),
            {
                "replicas": "5",
                "sharing-strategy": "mps",
                "product": "NVIDIA-L4",
                "mps.capable": "true",
            },
            id="mps, renamed",
        ),
        pytest.param(
            {"sharing": sharing("mps", 5)["sharing"] | sharing("timeSlicing", 4)["sharing"]},
            {
                "replicas": "5",
                "sharing-strategy": "mps",
                "product": "NVIDIA-L4-SHARED",
                "mps.capable": "true",
            },
            id="both: mps wins silently",
        ),
    ],
)
def test_labels_describe_shared_gpus_as_if_they_were_not_shared(
    discover: Discover, config: dict[str, Any], expected: dict[str, str]
) -> None:
    whole = {"count": "3", "memory": str(L4_MIB), "mps.capable": "false"}
    labels = discover(L4S, config)
    assert of_gpu(labels) == whole | expected
    # The labels have the prefix nvidia.com/gpu, even if the resource has another name.
    assert not [name for name in labels if name.startswith("nvidia.com/gpu.shared")]


def test_labels_describe_a_random_model_if_there_are_several(
    discover: Discover,
) -> None:
    one = {"replicas": "4", "sharing-strategy": "time-slicing", "mps.capable": "false"}
    l4 = one | {"count": "3", "memory": str(L4_MIB), "product": "NVIDIA-L4-SHARED"}
    h200 = one | {"count": "2", "memory": str(H200_MIB), "product": "NVIDIA-H200-SHARED"}
    seen = []
    while not (
        l4 in seen and h200 in seen
    ):  # The same model 60 times in a row is practically impossible.
        assert len(seen) < 60, f"always {seen[0]}"
        seen.append(of_gpu(discover(L4S + H200S, sharing("timeSlicing", 4))))
    assert all(each in (l4, h200) for each in seen)


def test_memory_that_the_driver_does_not_report_has_no_label(discover: Discover) -> None:
    # An example is a GPU that uses the machine's memory.
    unsupported = "fail nvmlDeviceGetMemoryInfo 3"
    labels = discover(gpus(1, "NVIDIA GB10", 128 * GIB), {}, unsupported)
    assert labels["nvidia.com/gpu.product"] == "NVIDIA-GB10"
    assert "nvidia.com/gpu.memory" not in labels


def test_without_mig_no_strategy_is_reported(discover: Discover) -> None:
    capable = discover(H200S, {})
    assert capable["nvidia.com/mig.capable"] == "true"
    assert "nvidia.com/mig.strategy" not in capable
    not_capable = discover(gpus(1, "NVIDIA GeForce RTX 4090", 24564 * MIB), {})
    assert not_capable["nvidia.com/mig.capable"] == "false"


@pytest.mark.parametrize(
    ("config", "replicas", "shared"),
    [
        pytest.param({}, 1, "none", id="not shared"),
        pytest.param(sharing("timeSlicing", 4), 4, "time-slicing", id="time-slicing"),
        pytest.param(
            sharing("timeSlicing", 4, renameByDefault=True), 4, "time-slicing", id="renamed"
        ),
        pytest.param(sharing("mps", 5), 5, "mps", id="mps"),
    ],
)
def test_labels_and_the_plugins_resources_are_read_together(
    discover: Discover,
    start_plugin: Callable[..., Kubelet],
    config: dict[str, Any],
    replicas: int,
    shared: str,
) -> None:
    offered = start_plugin(L4S, config).advertised()
    node = Node(
        metadata=ObjectMeta(name="n", labels=discover(L4S, config)),
        status=NodeStatus(allocatable={offered.resource: str(len(offered.replicas))}),
    )
    status = believed(node, Rules(require_report=False))
    assert status is not None
    assert [(d.resource, d.sharing, d.replicas.free) for d in status.devices] == [
        (offered.resource, shared, replicas)
    ] * len(L4S)
    assert {d.memory_bytes for d in status.devices} == {L4_MIB * MIB}
    # There is one replica fewer, but it is unknown on which GPU.
    fewer = msgspec.structs.replace(
        node, status=NodeStatus(allocatable={offered.resource: str(len(offered.replicas) - 1)})
    )
    assert believed(fewer, Rules(require_report=False)) is None
