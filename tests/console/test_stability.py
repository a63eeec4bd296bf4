"""Compares docs/reference/api-stability.md with the OpenAPI document."""

import re
from pathlib import Path
from typing import Any

import pytest

from headroom.console.views.index import INTERNAL
from tests.console.asking import Asked

PAGE = Path(__file__).parents[2] / "docs/reference/api-stability.md"
SNAKE = re.compile(r"[a-z0-9]+(_[a-z0-9]+)*")


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = Asked().get("/openapi.json").json()
    return found


def fields(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{model}.{field}": described
        for model, schema in document["components"]["schemas"].items()
        for field, described in schema.get("properties", {}).items()
    }


def test_the_page_lists_the_internal_views(document: dict[str, Any]) -> None:
    listed = set(re.findall(r"^\| `(/v1/\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == INTERNAL
    views = Asked().get("/v1").json()["views"]
    assert {view["path"] for view in views if view["stability"] == "internal"} == INTERNAL
    assert INTERNAL - {"/v1/journal"} <= set(document["paths"])


def test_names_of_fields_and_parameters_have_one_case(document: dict[str, Any]) -> None:
    names = {name.partition(".")[2] for name in fields(document)}
    names |= {
        each["name"]
        for operations in document["paths"].values()
        for operation in operations.values()
        for each in operation.get("parameters", ())
        if each["in"] != "header"
    }
    assert {name for name in names if not SNAKE.fullmatch(name)} == set()


def test_a_pod_is_never_part_of_a_path(document: dict[str, Any]) -> None:
    assert [path for path in document["paths"] if "{namespace}" in path] == []


def test_times_have_the_promised_form(document: dict[str, Any]) -> None:
    example = re.search(r"`(\d{4}-\d\d-\d\dT\S+)`", PAGE.read_text(encoding="utf-8"))
    assert example is not None
    shown = Asked().get("/v1/status").json()["generated_at"]
    assert re.sub(r"\d", "0", shown) == re.sub(r"\d", "0", example[1])


def test_nothing_is_deprecated_as_the_page_states(document: dict[str, Any]) -> None:
    """If this fails, send the header Deprecation, and change the page."""
    described = [
        *fields(document).values(),
        *(operation for each in document["paths"].values() for operation in each.values()),
    ]
    assert not [each for each in described if each.get("deprecated")]
    assert "nothing is deprecated" in PAGE.read_text(encoding="utf-8")


def test_amounts_of_a_device_have_names_that_cannot_be_confused(document: dict[str, Any]) -> None:
    """Only an object about a pod, or a sum over pods, has ``reserved_bytes``."""
    found = fields(document)
    for confusing in ("reserve_bytes", "reservation_bytes", "free_bytes", "unconfirmed_bytes"):
        assert not [name for name in found if name.endswith(f".{confusing}")]
    of_devices = {name.partition(".")[0] for name in found if name.endswith(".allocatable_bytes")}
    assert {"DeviceView", "ModelView"} <= of_devices
    assert not [model for model in of_devices if f"{model}.reserved_bytes" in found]


def test_the_table_of_amounts_names_fields_of_a_device(document: dict[str, Any]) -> None:
    page = (PAGE.parent / "debug-api.md").read_text(encoding="utf-8")
    section = page.split("## Names of amounts")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(\w+_bytes)` \|", section, re.MULTILINE)
    assert len(listed) == 7
    assert {f"DeviceView.{name}" for name in listed} <= set(fields(document))
