"""Validates objects with the OpenAPI v3 schemas of each Kubernetes version that the tests build.

The schemas are part of the Go module of the binaries. This module makes them strict, so that an
unknown field is an error. The API server would only warn.
"""

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema

from tests.deploy import go_modules
from tests.gobin import build
from tests.gobin.kubernetes import VERSIONS, minor_of

#: Folders of tests/gobin that pin a minor version each.
MINORS = tuple(f"kubernetes-{minor_of(version)}" for version in VERSIONS if "-" not in version)
_MODULE = "k8s.io/kubernetes"


def folder(minor: str) -> Path:
    """Return the folder with the schemas of a minor version. Download it if it is missing."""
    return go_modules.folder(build.MODULES / minor, _MODULE) / "api/openapi-spec/v3"


@functools.cache
def _served(minor: str, api_version: str) -> dict[str, Any] | None:
    group, _, version = api_version.rpartition("/")
    name = f"apis__{group}__{version}" if group else f"api__{version}"
    file = folder(minor) / f"{name}_openapi.json"
    if not file.exists():
        return None
    document: dict[str, Any] = json.loads(file.read_text())
    for schema in document["components"]["schemas"].values():
        if "properties" in schema and "additionalProperties" not in schema:
            schema["additionalProperties"] = False
    return document


@functools.cache
def _validator(minor: str, api_version: str, kind: str) -> jsonschema.Draft7Validator | None:
    document = _served(minor, api_version)
    if document is None:
        return None
    group, _, version = api_version.rpartition("/")
    wanted = {"group": group, "version": version, "kind": kind}
    for name, schema in document["components"]["schemas"].items():
        if wanted in schema.get("x-kubernetes-group-version-kind", ()):
            start = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
            # JSON Schema ignores "nullable" and x-kubernetes-*, and our objects need neither.
            return jsonschema.Draft7Validator(start)
    return None


def serves(minor: str, each: dict[str, Any]) -> bool:
    """Return whether the kind is built into API servers of this minor version."""
    return _validator(minor, each["apiVersion"], each["kind"]) is not None


def mistakes(minor: str, each: dict[str, Any]) -> list[str]:
    """Return the errors of the object according to the schema of its kind."""
    validator = _validator(minor, each["apiVersion"], each["kind"])
    assert validator is not None, f"{minor} does not serve {each['apiVersion']} {each['kind']}"
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(each)]
