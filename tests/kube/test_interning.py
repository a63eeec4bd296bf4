"""Values that are shared by many objects: each object stays equal to the original."""

from typing import Any

import msgspec
import pytest

from headroom.contract.gpunode import GPUNode
from headroom.contract.gpunode_json import decode_gpunode
from headroom.contract.kube import Node, Pod
from headroom.runtime.kube.interning import GPUNodeReader, Interned
from headroom.runtime.kube.resources import Kind, watched_kinds

MOST_KEPT = 4096


def kinds() -> dict[str, Kind]:
    return {kind.name: kind for kind in watched_kinds("headroom-system")}


def raw(of: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(of))


def manifest(name: str, image: str = "1", node: str = "") -> dict[str, Any]:
    """JSON of a pod of a Deployment."""
    limits = {"nvidia.com/gpu.shared": image, "cpu": "2"}
    return {
        "metadata": {"name": name, "namespace": "d", "uid": name, "labels": {"app": "a"}},
        "spec": {
            "containers": [{"name": "main", "resources": {"limits": limits}}],
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            **({"nodeName": node} if node else {}),
        },
        "status": {"phase": "Running"},
    }


def test_pods_of_one_deployment_share_equal_values() -> None:
    decode = kinds()["pods"].decode
    a, b, other = (decode(raw(manifest(*of))) for of in (("a",), ("b",), ("c", "2")))
    assert isinstance(a, Pod)
    assert isinstance(b, Pod)
    assert isinstance(other, Pod)
    assert a.spec.containers is b.spec.containers
    assert a.spec.tolerations is b.spec.tolerations is other.spec.tolerations
    assert a.metadata.labels is b.metadata.labels
    assert a.metadata.name == "a"
    assert b.metadata.name == "b"
    assert other.spec.containers != a.spec.containers


@pytest.mark.parametrize("of", [manifest("p"), manifest("p", "7", "n"), {"metadata": {}}])
def test_an_interned_pod_is_unchanged(of: dict[str, Any]) -> None:
    decode = kinds()["pods"].decode
    decode(raw(manifest("another")))
    assert decode(raw(of)) == msgspec.convert(of, Pod)


@pytest.mark.parametrize(
    "of",
    [
        {"metadata": {"name": "n"}},
        {
            "metadata": {"name": "n", "labels": {}, "annotations": {"headroom.gpu/reserve": "1Gi"}},
            "status": {},
        },
        {
            "metadata": {"name": "n", "labels": {"nvidia.com/gpu.product": "A100", "x": ""}},
            "spec": {"unschedulable": True},
            "status": {"allocatable": {"cpu": "64", "nvidia.com/gpu": 8}},
        },
    ],
)
def test_an_interned_node_is_unchanged(of: dict[str, Any]) -> None:
    assert kinds()["nodes"].decode(raw(of)) == msgspec.convert(of, Node)


def test_nodes_of_one_pool_share_label_strings() -> None:
    def node(name: str) -> Node:
        labels = {"nvidia.com/gpu.product": "NVIDIA-A100", "kubernetes.io/hostname": name}
        found = decode(raw({"metadata": {"name": name, "labels": labels}, "status": of}))
        assert isinstance(found, Node)
        return found

    decode, of = kinds()["nodes"].decode, {"allocatable": {"cpu": "64"}}
    a, b = node("a"), node("b")
    assert a.metadata.labels
    assert b.metadata.labels
    assert a.status
    assert b.status
    assert [*a.metadata.labels.values()] == ["NVIDIA-A100", "a"]
    product = "nvidia.com/gpu.product"
    assert a.metadata.labels[product] is b.metadata.labels[product]
    assert a.status.allocatable is b.status.allocatable


def of_gpunode(name: str) -> dict[str, Any]:
    charge = {"resource": "nvidia.com/gpu.shared", "count": 1, "candidates": {f"G-{name}": 7}}
    device = {"uuid": f"G-{name}", "model": "NVIDIA A100-SXM4-80GB", "memory": 80}
    device |= {"resource": "nvidia.com/gpu.shared", "architecture": "ampere"}
    use = {"uid": "u", "device": f"G-{name}", "namespace": "team-a", "container": "main"}
    reservation = {"namespace": "team-a", "name": "p", "charges": [charge]}
    return {
        "metadata": {"name": name},
        "spec": {"initialised": True, "reservations": {"u": reservation}},
        "status": {"devices": [device], "pods": [use]},
    }


def test_an_interned_report_is_unchanged_and_shares_equal_values() -> None:
    reader = GPUNodeReader()

    def read(name: str) -> GPUNode:
        found = reader.read(raw(of_gpunode(name)))
        assert found == decode_gpunode(raw(of_gpunode(name)))
        return found

    a, b = read("a"), read("b")
    assert a.status
    assert b.status
    (of_a,), (of_b,) = a.status.devices, b.status.devices
    for field in ("model", "resource", "architecture"):
        assert getattr(of_a, field) is getattr(of_b, field), field
    (use_a,), (use_b,) = a.status.pods, b.status.pods
    assert use_a.namespace is use_b.namespace
    assert use_a.device is of_a.uuid
    (reserved,) = a.spec.reservations.values()
    assert [*reserved.charges[0].candidates] == [of_a.uuid]
    assert next(iter(reserved.charges[0].candidates)) is of_a.uuid


def test_the_number_of_interned_values_is_bounded() -> None:
    alike = Interned()
    first = alike.one(["x"])
    assert alike.one(["x"]) is first
    for number in range(MOST_KEPT):
        alike.one([str(number)])
    assert len(alike._kept) <= MOST_KEPT
    assert alike.one(["x"]) == ["x"]
    assert alike.one([]) == []
    assert alike.one(None) is None


def test_interned_values_are_bounded_in_bytes() -> None:
    alike = Interned()
    for number in range(300):
        value = {"label": f"{number:06}" + "x" * 10_000}
        assert alike.one(value) is value
        assert alike.one(dict(value)) is value
        assert alike._kept_bytes <= 1 << 20
    longest = {"label": "x" * 100_000}
    assert alike.one(dict(longest)) == longest
    assert alike._kept_bytes < 1 << 20
