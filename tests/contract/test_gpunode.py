"""Tests how GPUNodes are encoded and decoded."""

import gc
import json
from typing import Any

import msgspec
import pytest

from headroom.contract.errors import BadReport
from headroom.contract.gpunode import Charge, ContainerCharge, Device, GPUNode, PodUse
from headroom.contract.gpunode_json import decode_gpunode, encode_gpunode
from headroom.contract.gpunode_summary import summary_of
from headroom.contract.kube import ObjectMeta


def test_an_encoded_node_has_kind_and_version() -> None:
    """The API server rejects an object without a kind."""
    body = json.loads(encode_gpunode(GPUNode(metadata=ObjectMeta(name="n1"))))
    assert body["apiVersion"] == "headroom.gpu/v1alpha1"
    assert body["kind"] == "GPUNode"
    assert "status" not in body


def test_absent_memory_is_not_zero() -> None:
    body = b'{"metadata":{"name":"n1"},"status":{"devices":[{"uuid":"GPU-1"}]}}'
    status = decode_gpunode(body).status
    assert status is not None
    assert status.devices[0].memory_bytes == status.devices[0].used_bytes == -1
    assert status.devices[0].unattributed_bytes is None


@pytest.mark.parametrize("body", [b"", b"[]", b'{"metadata":{}', b"[" * 100_000, b"\xff"])
def test_an_unreadable_object_is_a_bad_report(body: bytes) -> None:
    with pytest.raises(BadReport):
        decode_gpunode(body)


def test_the_collector_does_not_visit_decoded_objects() -> None:
    """There are tens of thousands of permanent objects, and visiting them would pause every
    call.
    """
    node = decode_gpunode(b'{"metadata": {"name": "n"}, "spec": {}, "status": {"devices": []}}')
    assert node.status is not None
    assert not any(map(gc.is_tracked, (node, node.metadata, node.status)))
    # The collector visits objects that support weak references, but there are only a few thousand.
    assert not any(map(gc.is_tracked, (node.spec.reservations, *node.spec.reservations.values())))


GIB = 1 << 30


def gpu(used_gib: int, **others: Any) -> Device:
    """Return a 24 GiB GPU of which the driver reserves 1 GiB. A ``used_gib`` of -1 means that the
    use is unknown.
    """
    used_bytes = used_gib * GIB if used_gib >= 0 else -1
    memory = Device(uuid="GPU-a", memory_bytes=24 * GIB, reserved_bytes=GIB, used_bytes=used_bytes)
    return msgspec.structs.replace(memory, **others)


@pytest.mark.parametrize(
    ("devices", "memory", "used", "free"),
    [
        pytest.param(
            [gpu(10), gpu(0, uuid="GPU-b")], "48.0 GiB", "10.0 GiB", "36.0 GiB", id="two devices"
        ),
        pytest.param([gpu(-1)], "24.0 GiB", "", "", id="unknown use"),
        pytest.param(
            [gpu(-1), gpu(5, uuid="GPU-b")],
            "48.0 GiB",
            "5.0 GiB",
            "18.0 GiB",
            id="known use of one device",
        ),
        pytest.param(
            [
                gpu(8, uuid=f"MIG-{number}", kind="mig", parent="GPU-a", gpu_instance=1)
                for number in range(3)
            ],
            *("24.0 GiB", "8.0 GiB", "15.0 GiB"),
            id="compute instances that share their memory",
        ),
        pytest.param([], "0.0 GiB", "", "", id="no device"),
        pytest.param([gpu(1, memory_bytes=1 << 60)], "0.0 GiB", "", "", id="impossible values"),
    ],
)
def test_a_summary_is_text_for_people(
    devices: list[Device], memory: str, used: str, free: str
) -> None:
    summary = summary_of(devices)
    assert (summary.devices, summary.memory) == (len(devices), memory)
    assert (summary.used, summary.free) == (used, free)


@pytest.mark.parametrize("count", [-1, 0])
def test_a_container_without_a_replica_lowers_no_charge(count: int) -> None:
    """The schema rejects such a charge, but an older version of the schema permitted it."""
    charge = Charge(
        "nvidia.com/gpu", 1, {"GPU-1": 8}, containers=[ContainerCharge("main", count, 4)]
    )
    rows = [PodUse("u", "GPU-1", container="other", replica="r")]
    assert charge.bytes_on("GPU-1", rows) == charge.bytes_on("GPU-1") == 8
