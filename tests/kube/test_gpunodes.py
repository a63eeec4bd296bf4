"""Tests how invalid GPUNodes are decoded."""

import re

import pytest

from headroom.contract.errors import BadReport
from headroom.contract.gpunode_json import decode_gpunode


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
        decode_gpunode(body)
