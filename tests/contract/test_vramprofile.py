"""Compares the VRAMProfile manifest with the types and with the recorder's limits."""

from pathlib import Path

import msgspec.inspect as mi
import pytest
import yaml

from headroom.contract.errors import BadReport
from headroom.contract.vramprofile import (
    MAX_CONTROLLERS,
    VRAMProfile,
    decode_profile,
    seconds,
    stamp,
)
from headroom.core.recommend.histogram import MAX_BUCKETS
from headroom.core.recommend.profile import MAX_CONTAINERS, MAX_PROGRAMS
from tests.contract.test_crd import KEYWORDS, differences, is_bounded_text, levels

CRD = yaml.load(
    (Path(__file__).parents[2] / "deploy/base/crd-vramprofile.yaml").read_text(), yaml.CSafeLoader
)
SCHEMA = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
LEVELS = dict(levels(SCHEMA))


def test_schema_and_types_are_equal() -> None:
    assert [*differences(mi.type_info(VRAMProfile), SCHEMA)] == []


def test_every_level_is_described_and_limited() -> None:
    for path, schema in LEVELS.items():
        if path in ("", ".metadata"):
            continue
        assert schema["description"], path
        assert {*schema} - {"type", "description", "required"} <= KEYWORDS[schema["type"]], path
        if schema["type"] == "array":
            assert schema["maxItems"], path
        if "additionalProperties" in schema:
            assert schema["maxProperties"] == MAX_BUCKETS == 64, path
        if schema["type"] == "string" and path not in (".apiVersion", ".kind"):
            assert is_bounded_text(schema), path
    assert LEVELS[".status.containers"]["maxItems"] == MAX_CONTAINERS == 16
    assert LEVELS[".status.controllers"]["maxItems"] == MAX_CONTROLLERS == 4
    assert LEVELS[".status.containers[].tracks"]["maxItems"] == MAX_PROGRAMS == 8


def test_there_is_no_spec_and_no_status_subresource() -> None:
    assert "spec" not in SCHEMA["properties"]
    assert "subresources" not in CRD["spec"]["versions"][0]
    assert CRD["spec"]["scope"] == "Namespaced"


def test_times_are_accepted_or_rejected_as_by_the_schema() -> None:
    assert stamp(1795644000.4) == "2026-11-25T22:00:00Z"
    assert stamp(0.0) == ""
    assert seconds("2026-11-25T22:00:00Z") == 1795644000.0
    assert [seconds(text) for text in ("", "yesterday", "2026-11-25T22:00:00")] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "text",
    [
        "0001-01-01T00:00:00+14:00",
        "1969-12-31T23:59:59Z",
        "9999-12-31T23:59:59-23:00",
        "9999-12-31T23:59:59.999999Z",
    ],
)
def test_a_parsed_time_can_be_written(text: str) -> None:
    assert seconds(stamp(seconds(text))) == int(seconds(text)) in (0, 253_402_300_799)


def test_an_invalid_profile_is_reported_with_the_field() -> None:
    with pytest.raises(BadReport, match=r"lives"):
        decode_profile(b'{"metadata": {"name": "x"}, "status": {"lives": "many"}}')
