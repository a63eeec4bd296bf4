"""Decoding of successive versions of GPUNodes."""

import re

import msgspec
import pytest

from headroom.contract.errors import BadReport
from headroom.contract.gpunode_json import decode_gpunode
from headroom.runtime.kube.interning import GPUNodeReader

BODY = b"""{"metadata": {"name": "n", "uid": "u", "resourceVersion": "%d"},
    "spec": {"initialised": true, "reservations": {"p": {"namespace": "d", "name": "%s"}}},
    "status": {"observedAt": "%d", "devices": [{"uuid": "GPU-1", "memory": 7}]}}"""


def test_it_returns_the_same_as_plain_decoding() -> None:
    reader = GPUNodeReader()
    for version, name in ((1, b"a"), (2, b"a"), (3, b"b"), (4, b"a")):
        body = BODY % (version, name, version)
        assert reader.read(body) == decode_gpunode(body)
        assert reader.read(msgspec.Raw(body)) == decode_gpunode(body)
    for body in (b'{"metadata":{"name":"n"}}', b'{"metadata":{"name":"n"},"status":null}'):
        assert reader.read(body) == decode_gpunode(body)


def test_unchanged_reservations_are_the_same_object() -> None:
    reader = GPUNodeReader()
    first = reader.read(BODY % (1, b"a", 1))
    assert reader.read(BODY % (2, b"a", 2)).spec is first.spec
    assert reader.read(BODY % (3, b"b", 2)).spec is not first.spec


def test_unused_reservations_are_released() -> None:
    reader = GPUNodeReader()
    for version in range(10):
        reader.read(BODY % (version, b"%d" % version, 1))
    assert not reader._specs


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
def test_an_invalid_report_raises_with_the_field(body: bytes, field: str) -> None:
    with pytest.raises(BadReport, match=re.escape(field)):
        GPUNodeReader().read(body)
