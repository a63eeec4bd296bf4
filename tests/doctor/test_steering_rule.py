"""Tests the doctor's finding about pods that steering would place."""

from typing import Any

import msgspec
import pytest

from headroom.contract.device_choice import STEERING_NOT_PERMITTED
from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Node, NodeStatus, ObjectMeta, Pod
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from headroom.doctor.findings import Weight, line
from headroom.doctor.node_rules import examine
from tests.builders import GIB, GPU, NOW_S, container, gpunode, pod, shared
from tests.doctor.test_node_rules import SOUND
from tests.state.states import state_of

COMMAND = "kubectl annotate --overwrite node a headroom.gpu/device-choice=steered"


def uneven(name: str, **how: Any) -> GPUNode:
    """Return a node with two 24 GiB GPUs. The plugin's next choice has 4 GiB free, and the other
    GPU has 24 GiB free.
    """
    full = {"used_bytes": 20 * GIB, "unattributed_bytes": 20 * GIB}
    devices = shared(f"{name}-1", 3, 0, **full), shared(f"{name}-2", 2, 1)
    plugin = msgspec.structs.replace(SOUND, **{"steering_permitted": True, **how})
    return gpunode(*devices, name=name, uid=f"gn-{name}", plugin=plugin)


def found(*pods: Pod, names: tuple[str, ...] = ("a", "b"), **how: Any) -> list[str]:
    status = NodeStatus(allocatable={GPU: "6"})
    state = state_of(
        *(NodeSeen(Node(metadata=ObjectMeta(name=n, uid=n), status=status)) for n in names),
        *(GPUNodeSeen(uneven(name, **how), NOW_S) for name in names),
        *map(PodSeen, pods),
    )
    findings = [each for each in examine(state.cluster, NOW_S) if "would place" in each.found]
    assert all(each.weight is Weight.ADVICE for each in findings)
    return [line(each) for each in findings]


def pending(*sizes: str) -> list[Pod]:
    return [pod(size, uid=f"u{i}", name=f"p{i}") for i, size in enumerate(sizes)]


def test_the_pods_and_bytes_that_steering_would_place_are_reported() -> None:
    assert found(*pending("16Gi", "16Gi", "16Gi")) == [
        "advice: a, b: 3 pending pods with 48.0 GiB wait although a GPU has enough free memory for "
        "each of them, because the device plugin chooses the device; steering 2 nodes would place "
        f"2 of them (32.0 GiB). To do: begin with one node: {COMMAND}; "
        "docs/concepts/device-choice.md compares the choices."
    ]


def test_one_node_and_one_pod_are_described_in_the_singular() -> None:
    assert found(*pending("16Gi"), names=("a",)) == [
        "advice: a: 1 pending pod with 16.0 GiB waits although a GPU has enough free memory for "
        "it, because the device plugin chooses the device; steering 1 node would place it. To do: "
        f"{COMMAND}; docs/concepts/device-choice.md compares the choices."
    ]


def test_the_finding_contains_the_missing_permission() -> None:
    (shown,) = found(*pending("16Gi"), names=("a",), steering_permitted=False)
    assert f"To do: steering node a is {STEERING_NOT_PERMITTED}; permit it, then {COMMAND}" in shown


@pytest.mark.parametrize("sizes", [(), ("3Gi",), ("25Gi",)])
def test_there_is_no_finding_if_steering_places_nothing(sizes: tuple[str, ...]) -> None:
    assert found(*pending(*sizes)) == []


def test_pods_with_several_gpus_that_the_plugin_rejects_are_counted() -> None:
    def counted(*pods: Pod, **plugin: Any) -> list[str]:
        gpunodes = (uneven("a", fail_requests_greater_than_one=True, **plugin),)
        node = Node(metadata=ObjectMeta(name="a", uid="a"), status=NodeStatus())
        state = state_of(
            NodeSeen(node), *(GPUNodeSeen(each, NOW_S) for each in gpunodes), *map(PodSeen, pods)
        )
        found = examine(state.cluster, NOW_S)
        return [line(each) for each in found if "several shared GPUs" in each.found]

    wide = [pod("2Gi", container(gpus=2), uid=f"w{i}", name=f"w{i}") for i in range(2)]
    to_do = (
        "steer the nodes and set failRequestsGreaterThanOne: false in the device plugin's "
        "configuration: docs/how-to/one-pool.md."
    )
    rejects = (
        "several shared GPUs for one container, which the device plugin rejects "
        "(failRequestsGreaterThanOne)"
    )
    assert counted(*wide, *pending("2Gi")) == [
        f"advice: a: 2 pending pods with 8.0 GiB request {rejects}. To do: {to_do}"
    ]
    assert counted(wide[0]) == [
        f"advice: a: 1 pending pod with 4.0 GiB requests {rejects}. To do: {to_do}"
    ]
    assert counted(*pending("2Gi")) == []
