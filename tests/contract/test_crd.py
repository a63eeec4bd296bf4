"""Compares the GPUNode manifest with the types that read and write it."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import jsonschema_rs
import msgspec.inspect as mi
import pytest
import yaml

from headroom.contract import gpunode as g
from headroom.contract.gpunode_json import encode_gpunode
from headroom.contract.kube import ObjectMeta
from headroom.contract.quantity import MAX_DEVICE_BYTES

Schema = dict[str, Any]

CRD = yaml.load((Path(__file__).parents[2] / "deploy/base/crd.yaml").read_text(), yaml.CSafeLoader)
VERSION = CRD["spec"]["versions"][0]
SCHEMA: Schema = VERSION["schema"]["openAPIV3Schema"]

#: Keywords that our manifests may use in a structural schema.
KEYWORDS = {
    "object": {"properties", "required", "additionalProperties", "maxProperties"},
    "array": {"items", "maxItems", "x-kubernetes-list-type"},
    "string": {"enum", "format", "minLength", "maxLength", "pattern"},
    "integer": {"format", "minimum", "maximum"},
    "number": {"minimum", "maximum"},
    "boolean": set(),
}
JSON_TYPES = {
    mi.BoolType: "boolean",
    mi.FloatType: "number",
    mi.IntType: "integer",
    mi.StrType: "string",
    mi.LiteralType: "string",
    mi.ListType: "array",
    mi.DictType: "object",
    mi.StructType: "object",
}


def levels(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Yield every schema inside ``schema`` with its path, such as .status.devices[].uuid."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from levels(inner, f"{path}.{name}")
    if "items" in schema:
        yield from levels(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from levels(schema["additionalProperties"], f"{path}{{}}")


LEVELS = dict(levels(SCHEMA))
#: Control characters, right-to-left text, and invisible characters.
HOSTILE = (
    *("GPU-1\x1b[2J", "8Gi\n", "2026-11-21T00:00:00Z\n", "\x9b31m", "a\x7f", "\0"),
    *("\u202e24", "\u2066a", "\u200f", "\u05d0", "\u0663", "2026-11-21T00:00:00Z\u202e"),
    *("\u200b", "\ufeff", "\u00ad", "\u3164", "\u2800", "a\ufe0f", "\U000e0041", "\u2028"),
)


def is_bounded_text(schema: Schema) -> bool:
    """Return whether the schema limits the length of a string and permits only visible characters
    in reading order.
    """
    if "enum" in schema or schema.get("format") == "date-time":
        return True
    accepts = jsonschema_rs.Draft7Validator(schema)
    return "maxLength" in schema and not any(map(accepts.is_valid, HOSTILE))


def differences(kind: mi.Type, schema: Schema, path: str = "") -> Iterator[str]:
    """Yield differences between the type and the schema."""
    if isinstance(kind, mi.UnionType):
        (kind,) = (one for one in kind.types if not isinstance(one, mi.NoneType))
    if schema["type"] != JSON_TYPES[type(kind)]:
        yield f"{path} has another type"
    elif isinstance(kind, mi.LiteralType):
        if {*kind.values} != {*schema["enum"]}:
            yield f"{path} has other values"
    elif isinstance(kind, mi.ListType):
        yield from differences(kind.item_type, schema["items"], f"{path}[]")
    elif isinstance(kind, mi.DictType):
        yield from differences(kind.value_type, schema["additionalProperties"], f"{path}{{}}")
    elif isinstance(kind, mi.StructType) and kind.cls is not ObjectMeta:
        yield from struct_differences(kind, schema, path)


def struct_differences(kind: mi.StructType, schema: Schema, path: str) -> Iterator[str]:
    fields = {field.encode_name: field for field in kind.fields}
    properties = schema["properties"]
    yield from (f"{path}.{name} is on one side only" for name in fields.keys() ^ properties.keys())
    # Ignore metadata, because every object must have it and a schema must not require it.
    required = {name for name, field in fields.items() if field.required} - {"metadata"}
    if required != {*schema.get("required", [])}:
        yield f"{path} requires other fields"
    for name in fields.keys() & properties.keys():
        yield from differences(fields[name].type, properties[name], f"{path}.{name}")


def test_schema_and_types_agree() -> None:
    assert list(differences(mi.type_info(g.GPUNode), SCHEMA)) == []


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (lambda s: s["properties"]["status"]["properties"].pop("pods"), ".status.pods is on one"),
        (lambda s: s["properties"].update(extra={"type": "string"}), ".extra is on one side only"),
        (lambda s: s["properties"]["kind"].update(type="integer"), ".kind has another type"),
        (
            lambda s: s["properties"]["status"]["properties"]["devices"]["items"].pop("required"),
            ".status.devices[] requires other fields",
        ),
    ],
)
def test_a_difference_between_schema_and_type_is_reported(change: Any, shown: str) -> None:
    changed = copy.deepcopy(SCHEMA)
    change(changed)
    (difference,) = differences(mi.type_info(g.GPUNode), changed)
    assert difference.startswith(shown)


def test_the_crd_has_the_names_of_the_contract() -> None:
    spec = CRD["spec"]
    assert CRD["metadata"]["name"] == f"{g.PLURAL}.{g.GROUP}" == "gpunodes.headroom.gpu"
    assert (spec["group"], VERSION["name"], spec["scope"]) == (g.GROUP, g.VERSION, "Cluster")
    assert (spec["names"]["kind"], spec["names"]["plural"]) == (g.KIND, g.PLURAL)
    assert spec["names"]["shortNames"] == ["gn"]
    assert VERSION["subresources"] == {"status": {}}


def test_printer_columns_refer_to_existing_fields() -> None:
    columns = {c["name"]: (c["jsonPath"], c["type"]) for c in VERSION["additionalPrinterColumns"]}
    assert columns.pop("Reported") == (".status.observedAt", "date")
    of_driver = '.status.conditions[?(@.type=="DriverReady")]'
    assert columns.pop("Driver") == (f"{of_driver}.status", "string")
    assert columns.pop("Why") == (f"{of_driver}.message", "string")
    assert columns.pop("Steered") == (
        ".status.plugin.steered",
        "string",
    )  # This column shows a list.
    assert [*columns] == [
        *("Devices", "Memory", "Reserved", "Used", "Free"),
        *("Sharing", "Device-choice", "Obstacle"),
    ]
    assert all(LEVELS[path]["type"] == kind for path, kind in columns.values())
    wide = {c["name"] for c in VERSION["additionalPrinterColumns"] if c.get("priority")}
    assert wide == {"Sharing", "Why", "Device-choice", "Steered", "Obstacle"}


@pytest.mark.parametrize("path", LEVELS, ids=lambda path: path or "root")
def test_every_level_of_the_schema_is_structural_limited_and_described(path: str) -> None:
    schema = LEVELS[path]
    if path == ".metadata":
        assert schema == {"type": "object"}  # The API server permits no other schema for metadata.
        return
    kind = schema["type"]
    assert schema.keys() <= {"type", "description"} | KEYWORDS[kind]
    assert schema["description"].endswith((".", ")"))
    assert not ("properties" in schema and "additionalProperties" in schema)
    if kind == "integer":
        assert schema["format"] == "int64"
        assert -1 <= schema["minimum"] < schema["maximum"] <= MAX_DEVICE_BYTES
    elif kind == "number":
        assert schema.keys() >= {"minimum", "maximum"}
    elif kind == "array":
        assert schema["maxItems"] <= 4096
        # With a list that is keyed by uuid, the API server would reject a report that contains a
        # device twice.
        assert schema["x-kubernetes-list-type"] == "atomic"
    elif kind == "object":
        assert ("maxProperties" in schema) == ("additionalProperties" in schema)
    elif kind == "string" and path not in {".apiVersion", ".kind"}:
        assert is_bounded_text(schema)


def test_memory_is_in_bytes_and_limited() -> None:
    assert MAX_DEVICE_BYTES == 16 << 40
    memory = [
        *(f".status.devices[].{name}" for name in ("memory", "reserved", "used", "unattributed")),
        *(f".status.pods[].{name}" for name in ("used", "peak", "startupPeak")),
        ".spec.reservations{}.charges[].candidates{}",
    ]
    for path in memory:
        assert (LEVELS[path]["minimum"], LEVELS[path]["maximum"]) == (0, MAX_DEVICE_BYTES)
        assert "bytes" in LEVELS[path]["description"].lower()
    assert LEVELS[".status.devices"]["maxItems"] == g.MAX_DEVICES == 256
    for name in ("free", "allocated", "unhealthy"):
        assert LEVELS[f".status.devices[].replicas.{name}"]["maximum"] == g.MAX_REPLICAS == 1024


def node() -> Schema:
    charge = g.Charge(resource="nvidia.com/gpu", count=1, candidates={"GPU-1": 8 << 30})
    device = g.Device(
        uuid="GPU-1",
        index=0,
        memory_bytes=141 << 30,
        reserved_bytes=1 << 30,
        used_bytes=8 << 30,
        unattributed_bytes=0,
        sm_activity=g.SmActivity(ratio=0.5, source="gpm"),
        sharing="time-slicing",
        replicas=g.Replicas(free=3, allocated=1),
    )
    body = encode_gpunode(
        g.GPUNode(
            metadata=ObjectMeta(name="n1"),
            spec=g.GPUNodeSpec(
                reservations={"u": g.Reservation(namespace="d", name="p", charges=[charge])}
            ),
            status=g.GPUNodeStatus(
                devices=[device],
                pods=[
                    g.PodUse(
                        uid="u",
                        device="GPU-1",
                        used_bytes=5,
                        peak_bytes=8,
                        startup_peak_bytes=7,
                        peak_source="nvml",
                        peak_partial=True,
                        started_at="2026-11-21T11:05:00Z",
                        settled_at="2026-11-21T11:06:00Z",
                    )
                ],
            ),
        )
    )
    return dict(json.loads(body))


def valid(instance: Schema) -> bool:
    return bool(jsonschema.Draft202012Validator(SCHEMA).is_valid(instance))


def test_encoded_objects_are_accepted() -> None:
    assert valid(node())
    assert valid({"metadata": {"name": "n1"}})


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"used": 200 << 30}, id="more used than its memory"),
        pytest.param({"reserved": 200 << 30}, id="more reserved than its memory"),
        pytest.param({"memory": 0}, id="no memory"),
        pytest.param({"kind": "mig"}, id="a MIG device without a parent"),
    ],
)
def test_a_contradictory_report_is_accepted(change: Schema) -> None:
    instance = node()
    instance["status"]["devices"][0] |= change
    instance["status"]["devices"] *= 2
    assert valid(instance)


@pytest.mark.parametrize(
    "change",
    [
        *({name: -1} for name in ("memory", "reserved", "used", "unattributed", "gpuInstance")),
        *({name: MAX_DEVICE_BYTES + 1} for name in ("memory", "reserved", "used", "unattributed")),
        {"memory": "8Gi"},
        {"memory": 1.5},
        {"uuid": ""},
        {"index": -2},
        {"kind": "card"},
        {"sharing": "vgpu"},
        {"smActivity": {"ratio": 1.5}},
        {"smActivity": {"source": "gpm"}},
        {"replicas": {"free": -1}},
        {"replicas": {"allocated": g.MAX_REPLICAS + 1}},
        {"model": "x" * 129},
    ],
    ids=str,
)
def test_an_impossible_device_is_rejected(change: Schema) -> None:
    instance = node()
    instance["status"]["devices"][0] |= change
    assert not valid(instance)


@pytest.mark.parametrize(
    "charges",
    [
        [{"resource": "r", "count": -1}],
        [{"resource": "r"}],
        [{"resource": "r", "count": 1, "candidates": {"GPU-1": -1}}],
        [{"resource": "r", "count": 1, "candidates": {"GPU-1": MAX_DEVICE_BYTES + 1}}],
        [{"resource": "r", "count": 1, "candidates": dict.fromkeys(map(str, range(257)), 1)}],
    ],
    ids=lambda charges: str(charges)[:80],
)
def test_an_impossible_charge_is_rejected(charges: list[Schema]) -> None:
    instance = node()
    instance["spec"]["reservations"]["u"]["charges"] = charges
    assert not valid(instance)


def test_a_charge_for_a_container_has_at_least_one_replica() -> None:
    instance = node()
    (charge,) = instance["spec"]["reservations"]["u"]["charges"]
    charge["containers"] = [{"name": "main", "count": 1}]
    assert valid(instance)
    charge["containers"] = [{"name": "main", "count": 0}]
    assert not valid(instance)
