"""GPUNode on the wire."""

import gc
import json

import pytest

from contract.errors import BadReport
from contract.gpunode import GPUNode, decode_gpunode, encode_gpunode
from contract.kube import ObjectMeta


def test_an_encoded_node_has_kind_and_version() -> None:
    """The API server refuses to create an object without its kind."""
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
def test_what_cannot_be_read_is_a_bad_report(body: bytes) -> None:
    with pytest.raises(BadReport):
        decode_gpunode(body)


def test_no_collector_walks_what_was_decoded() -> None:
    """Tens of thousands of objects, held for good: each walk over them would stop every call."""
    node = decode_gpunode(b'{"metadata": {"name": "n"}, "spec": {}, "status": {"devices": []}}')
    assert node.status is not None
    assert not any(map(gc.is_tracked, (node, node.metadata, node.status)))
    # But what a reader refers to weakly is: a few thousand.
    assert not any(map(gc.is_tracked, (node.spec.reservations, *node.spec.reservations.values())))
