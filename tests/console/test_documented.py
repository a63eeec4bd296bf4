"""Checks that docs/reference/api.md lists every endpoint, parameter and field of the debug API, and
that the OpenAPI document describes them.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

from tests.console.asking import Asked

PAGE = Path(__file__).parents[2] / "docs/reference/api.md"
OF_EVERY_BODY = {"api_version", "generated_at", "snapshot_generation"}


def documented() -> dict[str, tuple[set[str], set[str]]]:
    """Return the parameters and body fields of each endpoint."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition("\n## Endpoints\n")
    sections = rest.partition("\n## ")[0].split("\n### ")[1:]
    found = {}
    for section in sections:
        title, _, text = section.partition("\n")
        found[title.strip("`")] = _column(text, "parameter"), _column(text, "field of the body")
    assert len(found) == len(sections)
    return found


def _column(text: str, heading: str) -> set[str]:
    """Return the names in the first column of all tables with this heading."""
    tables = [rest.partition("\n\n")[0] for rest in text.split(f"| {heading} |")[1:]]
    return {name for each in tables for name in re.findall(r"^\| `(\w+)` \|", each, re.MULTILINE)}


@cache
def openapi() -> dict[str, Any]:
    """The OpenAPI document that a console serves. It takes a second to compute."""
    found: dict[str, Any] = Asked().get("/openapi.json").json()
    return found


def described() -> dict[str, tuple[set[str], set[str]]]:
    document = openapi()
    found = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parameters = {
                parameter["name"]
                for parameter in operation.get("parameters", ())
                if parameter["in"] == "query"
            }
            found[f"{method.upper()} {path}"] = parameters, _fields(operation, document)
    return found


def _fields(operation: dict[str, Any], document: dict[str, Any]) -> set[str]:
    schema = operation["responses"]["200"]["content"].get("application/json", {}).get("schema", {})
    found: set[str] = set()
    for each in schema.get("anyOf", [schema]):
        if name := each.get("$ref", "").rpartition("/")[2]:
            fields = set(document["components"]["schemas"][name]["properties"])
            # The list of views contains no data of the cluster.
            complete = fields >= OF_EVERY_BODY or name == "IndexBody"
            assert complete, f"{name} lacks one of {OF_EVERY_BODY}"
            found |= fields
    return found - OF_EVERY_BODY


def test_the_page_and_the_openapi_document_agree() -> None:
    there, shown = described(), documented()
    assert set(shown) == set(there)
    for endpoint, (parameters, fields) in there.items():
        assert shown[endpoint] == (parameters, fields), endpoint


def test_docstrings_of_fields_are_descriptions_in_the_openapi_document() -> None:
    schemas = openapi()["components"]["schemas"]

    def message(schema: str, field: str) -> str:
        return str(schemas[schema]["properties"][field].get("description"))

    # The cases are docstrings with one and several lines, fields whose type is a model, inherited
    # fields, and fields with an alias.
    assert message("DeviceView", "next_pod_free_bytes").startswith("Memory free for the next pod")
    assert message("DeviceView", "sm_activity_ratio").endswith("It is not the device utilization.")
    assert message("ExplainBody", "last_decision").startswith("The last decision")
    assert message("FilterView", "replica") == "The replica that served it."
    assert message("NodesBody", "continue").startswith("Value of the query parameter")
    assert message("HeldView", "phase").startswith("waiting (reserved")
    # The cases are a description that several models share, a list to which it does not apply, and
    # a missing description.
    assert message("FilterView", "took_ms") == "Duration of the call."
    assert message("MapBody", "model") == "None"
    assert message("DeviceView", "replicas_allocated") == "None"
