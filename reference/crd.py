"""The page of the custom resources GPUNode and VRAMProfile."""

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from reference.markdown import ROOT, code, head, sentence, table

_FILES = ("deploy/base/crd.yaml", "deploy/base/crd-vramprofile.yaml")
_INTRO = """\
You can read these objects; only Headroom writes them. `[]` marks the items of a list, and `{}` the
values of a map. Amounts are in bytes.

"""
_Schema = Mapping[str, Any]


def page() -> str:
    """Return docs/reference/crd.md."""
    kinds = (yaml.safe_load((ROOT / name).read_text(encoding="utf-8")) for name in _FILES)
    text = head("Custom resources", " and ".join(_FILES)) + _INTRO + "".join(map(_kind, kinds))
    return text.rstrip("\n") + "\n"


def _kind(definition: _Schema) -> str:
    spec = definition["spec"]
    (version,) = spec["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    names = spec["names"]
    of_whom = (
        "each namespace has its own" if spec["scope"] == "Namespaced" else "not in a namespace"
    )
    columns = [
        (column["name"], sentence(column["description"]), "yes" if column.get("priority") else "")
        for column in version["additionalPrinterColumns"]
    ]
    return (
        f"## `{names['kind']}`\n\n{' '.join(schema['description'].split())}\n\n"
        f"`{spec['group']}/{version['name']}`, {of_whom}. Short name: "
        f"`kubectl get {names['shortNames'][0]}`.\n\n"
        + table("field | type | description", _fields(schema, ""))
        + f"Columns of `kubectl get {names['plural']}`:\n\n"
        + table("column | description | only with `-o wide`", columns)
    )


def _fields(schema: _Schema, path: str) -> Iterator[tuple[str, str, str]]:
    """Yield path, type and description of each field below ``schema``."""
    required = schema.get("required", ())
    for name, below in schema.get("properties", {}).items():
        if not path and name in ("apiVersion", "kind", "metadata"):
            continue
        here = f"{path}.{name}" if path else name
        yield (
            code(here),
            _type(below) + (", required" if name in required else ""),
            below["description"],
        )
        yield from _below(below, here)


def _below(schema: _Schema, path: str) -> Iterator[tuple[str, str, str]]:
    yield from _fields(schema, path)
    for key, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(inner := schema.get(key), Mapping):
            yield from _below(inner, path + mark)


def _type(schema: _Schema) -> str:
    if "enum" in schema:
        return " or ".join(code(value) if value else "empty" for value in schema["enum"])
    if schema["type"] == "array":
        return f"list of {_type(schema['items'])}"
    if schema["type"] == "object" and "additionalProperties" in schema:
        return f"map to {_type(schema['additionalProperties'])}"
    return "time" if schema.get("format") == "date-time" else str(schema["type"])
