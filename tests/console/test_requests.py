"""Tests what all views make of a request: unknown parameters and paths, HEAD, gzip and values."""

from typing import Any

import pytest

from headroom.contract.watched import PodSeen
from tests.builders import pod
from tests.console.asking import Asked


@pytest.fixture(scope="module")
def fleet() -> Asked:
    asked = Asked()
    for number in range(30):
        asked.add_node(f"gpu-{number:02d}")
    asked.writer.apply([PodSeen(pod("8Gi", uid="u", name="p"))])
    return asked


def listed(fleet: Asked) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = fleet.get("/v1").json()["views"]
    return found


@pytest.mark.parametrize(
    ("path", "detail"),
    [
        (
            "/v1/decisions?limt=5",
            "query limt: /v1/decisions has no such parameter; did you mean limit?",
        ),
        ("/v1/nodes?serch=x", "query serch: /v1/nodes has no such parameter; did you mean search?"),
        ("/v1/status?verbose=1", "query verbose: /v1/status has no parameters; remove it"),
        (
            "/v1/quotas?team=ml",
            "query team: /v1/quotas has no such parameter; it has namespace",
        ),
    ],
)
def test_an_unknown_parameter_is_an_error_with_a_suggestion(
    fleet: Asked, path: str, detail: str
) -> None:
    answer = fleet.get(path)
    assert (answer.status_code, answer.json()["detail"]) == (422, detail)


def test_every_view_rejects_unknown_parameters(fleet: Asked) -> None:
    paths = [each["path"] for each in listed(fleet) if each["method"] == "GET"]
    views = [path for path in paths if path.startswith("/v1")]
    assert len(views) > 25
    accepted = [
        path
        for path in views
        if fleet.get(path.replace("{", "").replace("}", "") + "?surely_unknown=1").status_code
        != 422
    ]
    assert accepted == []


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/nodes/", "did you mean /v1/nodes?"),
        ("/v1/", "did you mean /v1?"),
        ("/v1/node", "did you mean /v1/nodes?"),
        ("/v1/score/default/p", "did you mean /v1/score?pod=default/p?"),
        ("/v1/score/pods/default/p", "did you mean /v1/score?pod=default/p?"),
        ("/docs", "GET /v1 lists all views"),
    ],
)
def test_an_unknown_path_gets_the_nearest_view(fleet: Asked, path: str, hint: str) -> None:
    answer = fleet.get(path)
    assert (answer.status_code, answer.json()["detail"]) == (
        404,
        f"{path} is not a view; {hint}",
    )


def test_the_list_of_views_has_one_line_for_each(fleet: Asked) -> None:
    views = {(each["method"], each["path"]): each for each in listed(fleet)}
    described = fleet.get("/openapi.json").json()["paths"]
    assert set(views) == {
        (method.upper(), path) for path, methods in described.items() for method in methods
    }
    assert views["GET", "/v1/pending"] == {
        "method": "GET",
        "path": "/v1/pending",
        "parameters": ["namespace", "steering", "limit", "continue"],
        "stability": "stable",
        "description": "List pending pods that request a managed GPU, by namespace and name; 50 by "
        "default.",
    }
    assert all(each["description"].endswith(".") for each in views.values())


def test_head_returns_the_headers_of_get_without_a_body(fleet: Asked) -> None:
    for path in ("/v1", "/v1/nodes", "/v1/status", "/v1/events?follow=true", "/", "/healthz"):
        head = fleet.get(path, method="HEAD")
        assert (head.status_code, head.content) == (200, b""), path
    got, head = fleet.get("/v1/status"), fleet.get("/v1/status", method="HEAD")
    assert head.headers["content-length"] == got.headers["content-length"]
    assert fleet.get("/v1/nodes/none", method="HEAD").status_code == 404
    assert fleet.get("/v1/whatif", method="HEAD").status_code == 405


def test_json_is_compressed_if_the_client_accepts_gzip(fleet: Asked) -> None:
    for path in ("/openapi.json", "/v1/nodes", "/v1/map", "/v1/nodes?limit=9"):
        plain = fleet.get(path, {"Accept-Encoding": "identity"})
        packed = fleet.get(path, {"Accept-Encoding": "gzip"})
        assert "content-encoding" not in plain.headers
        assert packed.headers["content-encoding"] == "gzip"
        assert {plain.headers["vary"], packed.headers["vary"]} == {"Accept-Encoding"}
        assert packed.json() == plain.json()
        assert int(packed.headers.get("content-length", 0)) < len(plain.content) / 2
    small = fleet.get("/v1/nodes/none", {"Accept-Encoding": "gzip"})
    assert "content-encoding" not in small.headers
    stream = fleet.get("/metrics", {"Accept-Encoding": "gzip"})
    assert "content-encoding" not in stream.headers


@pytest.mark.parametrize(
    ("path", "detail"),
    [
        ("/v1/nodes?limit=x", "query limit: 'x' is not a whole number. Example: limit=100"),
        ("/v1/nodes?limit=0", "query limit: '0' is less than 1, the minimum. Example: limit=100"),
        (
            "/v1/nodes?order=best",
            "query order: 'best' is not 'name' or 'fullest'. Example: order=fullest",
        ),
        (
            "/v1/events?follow=maybe",
            "query follow: 'maybe' is not true or false. Example: follow=false",
        ),
        (
            "/v1/score?pod=p0",
            "query pod: 'p0' does not have the form of the example. Example: pod=default/trainer-0",
        ),
        ("/v1/score", "query pod: it is required. Example: pod=default/trainer-0"),
    ],
)
def test_a_wrong_value_is_described_in_words(fleet: Asked, path: str, detail: str) -> None:
    answer = fleet.get(path)
    assert (answer.status_code, answer.json()["detail"]) == (422, detail)


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({"pod": []}, "body pod: there is no such field; did you mean pods?. Example: "),
        ({"drain": "gpu-a"}, "body drain: 'gpu-a' is not a list. Example: "),
        ({"pods": [{"count": "many"}]}, "body pods.0.count: 'many' is not a whole number. "),
        (
            {"device_choices": {"gpu-a": "quick"}},
            "body device_choices.gpu-a: 'quick' is not 'predicted', ",
        ),
    ],
)
def test_a_wrong_field_is_described_in_words(fleet: Asked, body: object, detail: str) -> None:
    answer = fleet.post("/v1/whatif", body)
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith(detail)
