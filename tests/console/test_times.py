"""Tests that all times in answers have the form that Kubernetes uses, which jq can parse."""

import re
from typing import Any

import pytest

from headroom.console.times import whole_second
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from tests.builders import DISTRIBUTED, GIB, gpunode, kube_node, pod, reservation, shared, use
from tests.console.asking import Asked

#: The format of jq's fromdateiso8601.
FORM = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d")
NAMED = re.compile(r"at|\w+_at|since|\w+_since|until")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("2026-11-28T17:52:28.271+00:00", "2026-11-28T17:52:28Z"),
        ("2026-11-28T17:52:28Z", "2026-11-28T17:52:28Z"),
        ("2026-11-28T17:52:28.999999Z", "2026-11-28T17:52:28Z"),
        ("2026-11-28T18:52:28+01:00", "2026-11-28T17:52:28Z"),
        ("soon", "soon"),
        ("", ""),
    ],
)
def test_a_time_has_whole_seconds_and_z(text: str, shown: str) -> None:
    assert whole_second(text) == shown


def test_every_field_with_the_name_of_a_time_is_described_as_a_time() -> None:
    schemas = Asked().get("/openapi.json").json()["components"]["schemas"]
    others = {
        f"{model}.{field}"
        for model, schema in schemas.items()
        for field, described in schema.get("properties", {}).items()
        if NAMED.fullmatch(field) and "date-time" not in str(described)
    }
    assert others == set()


def _texts(value: Any, where: str) -> Any:
    match value:
        case dict():
            for key, each in value.items():
                yield from _texts(each, f"{where}.{key}")
        case list():
            for each in value:
                yield from _texts(each, where)
        case str():
            yield where, value


def test_jq_can_parse_every_time_of_every_view() -> None:
    asked = Asked()
    node = gpunode(
        shared("A", free=3, allocated=1, used_bytes=9 * GIB),
        name="busy",
        reservations={"u": reservation({"A": 8 * GIB}, name="p")},
        pods=[use("u", "A", 9 * GIB, replica="A::0")],
        plugin=DISTRIBUTED,
    )
    asked.add_node("other")
    asked.writer.apply([NodeSeen(kube_node("busy")), GPUNodeSeen(node, 0.0)])
    asked.writer.apply([PodSeen(pod("8Gi", uid="u", name="p", node="busy"))])
    asked.writer.apply([PodSeen(pod("90Gi", uid="w", name="waits"))])
    wrong, seen = [], 0
    queries = {"/v1/capacity": "?vram=8Gi"} | {
        f"/v1/{view}": "?pod=default/p" for view in ("explain", "score", "timeline")
    }
    for view in asked.get("/v1").json()["views"]:
        path = view["path"]
        if view["method"] != "GET" or "{" in path or path in ("/v1/journal", "/v1/events"):
            continue
        answer = asked.get(path + queries.get(path, ""))
        if answer.status_code != 200 or "json" not in answer.headers["content-type"]:
            continue
        for where, text in _texts(answer.json(), path):
            if TIME.match(text) and view["stability"] == "stable":
                seen += 1
                wrong += [] if FORM.fullmatch(text) else [(where, text)]
    assert (wrong, seen > 20) == ([], True)
