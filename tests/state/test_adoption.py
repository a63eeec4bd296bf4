"""Tests the charges of pods without a reservation."""

import pytest

from headroom.contract.gpunode import ADOPTED, Charge, Device, Replicas
from headroom.contract.kube import Pod
from headroom.core.cluster.adoption import AdoptingNode, adopt
from headroom.core.placement.policy import Rules
from headroom.core.placement.request_reader import RequestReader
from tests.builders import GIB, GPU, MIB, container, device, mig, pod, shared

MAX_DEVICE_BYTES = 1 << 44


def charges(of: Pod, *devices: Device, default: str | None = None, **rules: bool) -> list[Charge]:
    node = AdoptingNode("n", devices, GIB)
    adopted = adopt(of, default, node, Rules(**rules), RequestReader())  # type: ignore[arg-type]
    assert adopted.flags == [ADOPTED]
    assert (adopted.namespace, adopted.name) == ("default", "p")
    return adopted.charges


def test_a_pod_is_charged_on_free_and_full_devices_of_its_resource() -> None:
    full, other = shared("b", free=0, allocated=4), device("c", resource="nvidia.com/mig-1g.5gb")
    assert charges(pod("8Gi"), shared("a"), full, other) == [
        Charge(resource=GPU, count=1, candidates={"a": 8 * GIB, "b": 8 * GIB})
    ]


def test_a_share_is_computed_from_the_memory_without_the_reserve() -> None:
    (charge,) = charges(pod(None), shared("a", memory_bytes=25 * GIB), device("b"))
    assert charge.candidates == {"a": 6 * GIB, "b": 23 * GIB}


def test_a_pod_without_an_annotation_gets_the_default_of_its_namespace() -> None:
    (charge,) = charges(pod(None), shared("a"), default="3Gi")
    assert charge.candidates == {"a": 3 * GIB}


@pytest.mark.parametrize(
    "of",
    [
        pytest.param(pod("lots"), id="invalid annotation"),
        pytest.param(pod("sidecar=8Gi"), id="unknown container"),
        pytest.param(pod("8Gi", annotations={"headroom.gpu/policy": "best"}), id="invalid policy"),
    ],
)
def test_a_pod_with_an_invalid_annotation_is_charged_a_replicas_share(of: Pod) -> None:
    (charge,) = charges(of, shared("a", memory_bytes=25 * GIB), default="also nonsense")
    assert charge.candidates == {"a": 6 * GIB}


def test_pods_that_would_have_been_rejected_are_charged() -> None:
    (charge,) = charges(pod(None), device("a"), reject_unannotated=True)
    assert charge.candidates == {"a": 23 * GIB}


def test_several_containers_are_charged_as_in_a_normal_bind() -> None:
    of = pod("a=8Gi,b=1Gi", container("a"), container("b"))
    assert charges(of, shared("x"))[0].candidates == {"x": 9 * GIB}
    of = pod("4Gi", container(gpus=2))
    assert charges(of, mig("x", 1), mig("y", 1))[0].candidates == {"x": 8 * GIB, "y": 8 * GIB}


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"memory_bytes": -1}, id="absent memory"),
        pytest.param({"memory_bytes": 1 << 90}, id="memory beyond int64"),
        pytest.param({"replicas": Replicas(free=1 << 90)}, id="replicas beyond int64"),
    ],
)
def test_an_implausible_report_does_not_reduce_the_charge(wrong: dict[str, int]) -> None:
    absurd = device("a", **wrong)
    assert charges(pod("8Gi"), absurd)[0].candidates == {"a": 8 * GIB}
    assert charges(pod(None), absurd)[0].candidates == {"a": MAX_DEVICE_BYTES}


def test_a_node_without_a_report_charges_no_device() -> None:
    assert charges(pod("8Gi")) == [Charge(resource=GPU, count=1, candidates={})]
    assert charges(pod("1Mi"), device("a"))[0].candidates == {"a": MIB}


def test_a_pod_with_too_many_containers_is_charged_whole_devices() -> None:
    of = pod("1Gi", *(container(f"c{i}", gpus=1) for i in range(65)))
    (charge,) = charges(of, shared("a"), device("b", resource="nvidia.com/mig-1g.5gb"))
    assert charge == Charge(resource=GPU, count=65, candidates={"a": 24 * GIB})


def test_large_annotations_of_other_tools_do_not_change_the_charge() -> None:
    of = pod("3Gi", annotations={"example.com/notes": "x" * (260 << 10)})
    assert charges(of, shared("a"))[0].candidates == {"a": 3 * GIB}
