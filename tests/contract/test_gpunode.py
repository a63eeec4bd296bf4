"""GPUNode on the wire."""

import gc
import json
import re

import msgspec
import pytest

from contract.errors import BadReport
from contract.gpunode import GPUNode, GPUNodeReader, decode_gpunode, encode_gpunode
from contract.kube import ObjectMeta


def test_an_encoded_node_says_what_it_is() -> None:
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
    assert status.devices[0].unowned_bytes is None


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


class TestReadingOneVersionAfterTheOther:
    BODY = b"""{"metadata": {"name": "n", "uid": "u", "resourceVersion": "%d"},
        "spec": {"initialised": true, "reservations": {"p": {"namespace": "d", "name": "%s"}}},
        "status": {"observedAt": "%d", "devices": [{"uuid": "GPU-1", "memory": 7}]}}"""

    def test_it_says_what_decoding_says(self) -> None:
        reader = GPUNodeReader()
        for version, name in ((1, b"a"), (2, b"a"), (3, b"b"), (4, b"a")):
            body = self.BODY % (version, name, version)
            assert reader.read(body) == decode_gpunode(body)
            assert reader.read(msgspec.Raw(body)) == decode_gpunode(body)
        for body in (b'{"metadata":{"name":"n"}}', b'{"metadata":{"name":"n"},"status":null}'):
            assert reader.read(body) == decode_gpunode(body)

    def test_promises_that_have_not_changed_are_the_same_object(self) -> None:
        reader = GPUNodeReader()
        first = reader.read(self.BODY % (1, b"a", 1))
        assert reader.read(self.BODY % (2, b"a", 2)).spec is first.spec
        assert reader.read(self.BODY % (3, b"b", 2)).spec is not first.spec

    def test_promises_that_nobody_has_any_more_are_forgotten(self) -> None:
        reader = GPUNodeReader()
        for version in range(10):
            reader.read(self.BODY % (version, b"%d" % version, 1))
        assert not reader.known

    @pytest.mark.parametrize(
        ("body", "field"),
        [
            (b'{"metadata":{"name":"n"},"spec":{"reservations":7}}', "$.spec.reservations"),
            (b'{"metadata":{"name":"n"},"status":{"devices":[7]}}', "$.status.devices"),
            (b'{"metadata":7}', "$.metadata"),
            (b'{"metadata":{"name":"n"},"spec":null}', "$.spec"),
            (b"[" * 100_000, "cannot be read"),
            (b"\xff", "cannot be read"),
        ],
    )
    def test_what_cannot_be_read_is_a_bad_report_that_names_the_field(
        self, body: bytes, field: str
    ) -> None:
        with pytest.raises(BadReport, match=re.escape(field)):
            GPUNodeReader().read(body)
