"""Tests the behavior that all views of the debug API share: errors, ETags and paging."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from headroom.console.views import nodes
from headroom.contract.annotations import DEVICE_CHOICE
from headroom.contract.device_choice import STEERING_NOT_PERMITTED, STEERING_UNKNOWN
from headroom.contract.gpunode import Plugin
from headroom.contract.watched import GPUNodeSeen, NodeSeen
from tests.builders import GIB, gpunode, kube_node, mig, reservation, shared, use
from tests.console.asking import STALE_AFTER_S, Asked


@pytest.fixture
def fleet() -> Asked:
    asked = Asked()
    for name in ("gpu-c", "gpu-a", "another", "gpu-b", "gpu-d"):
        asked.add_node(name)
    return asked


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        pytest.param("GET", "/v1/nodes/nowhere", 404, "GET /v1/nodes lists", id="unknown node"),
        pytest.param("GET", "/v1/explain?pod=a/b", 404, "is not known", id="unknown pod"),
        pytest.param(
            "GET", "/v1/nothing", 404, "/v1/nothing is not a view; GET /v1 ", id="unknown view"
        ),
        pytest.param("POST", "/v1/nodes", 405, "does not support POST; use GET", id="wrong method"),
        pytest.param("GET", "/v1/nodes?limit=0", 422, "query limit: ", id="too small"),
        pytest.param(
            "GET",
            "/v1/nodes?limit=x",
            422,
            "query limit: 'x' is not a whole number. Example: limit=100",
            id="not a number",
        ),
        pytest.param("GET", "/v1/nodes?order=best", 422, "query order: ", id="unknown word"),
        pytest.param(
            "GET",
            "/v1/nodes?limit=x&order=y",
            422,
            "; query order: ",
            id="two misspelled parameters",
        ),
    ],
)
def test_all_errors_are_problem_details(
    fleet: Asked, method: str, path: str, status: int, message: str
) -> None:
    answer = fleet.get(path, method=method)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert (answer.status_code, answer.headers["content-type"]) == (
        status,
        "application/problem+json",
    )
    body = answer.json()
    assert (body["status"], message in body["detail"]) == (status, True), body
    assert body["type"].startswith("urn:headroom:problem:")
    assert body["title"]


def test_an_internal_error_is_logged_and_answered_without_details(fleet: Asked) -> None:
    def broken() -> None:
        raise RuntimeError("internal details")

    fleet.app.add_api_route("/broken", broken)
    with capture_logs() as logged:
        answer = fleet.get("/broken")
    assert (answer.status_code, answer.json()["type"]) == (500, "urn:headroom:problem:internal")
    assert "internal details" not in answer.text
    assert [(entry["event"], entry["path"]) for entry in logged] == [("view_failed", "/broken")]


def parameters(fleet: Asked) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each parameter with a request path that has all required parameters."""
    for path, operations in fleet.get("/openapi.json").json()["paths"].items():
        given = [one for each in operations.values() for one in each.get("parameters", ())]
        needed = {
            f"{one['name']}={one['schema']['examples'][0]}"
            for one in given
            if one["required"] and one["in"] == "query"
        }
        for parameter in given:
            yield f"{path}?{'&'.join(sorted(needed))}", parameter


def test_the_example_of_every_parameter_is_valid(fleet: Asked) -> None:
    """The error about an invalid value contains this example."""
    for path, parameter in parameters(fleet):
        if parameter["in"] == "header":
            continue
        where = f"{path} {parameter['name']}"
        assert parameter["schema"].get("examples"), where
        example = parameter["schema"]["examples"][0]
        if parameter["in"] == "query":
            filled = re.sub(r"\{\w+\}", "x", path)
            answer = fleet.get(f"{filled}&{parameter['name']}={example}")
            assert answer.status_code in (200, 404), f"{where}: {answer.text}"


@pytest.mark.parametrize("path", ["/v1/nodes", "/v1/nodes/gpu-a", "/v1/drift"])
def test_an_unchanged_response_is_not_sent_again(fleet: Asked, path: str) -> None:
    first = fleet.get(path)
    fleet.now_s += 1.0
    held = {"If-None-Match": f'"another", {first.headers["etag"]}'}
    again = fleet.get(path, held)
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert fleet.get(path, {"If-None-Match": '"another"'}).status_code == 200

    fleet.add_node("gpu-a")  # The node is reported again.
    newer = fleet.get(path, held)
    assert newer.status_code == 200
    assert newer.headers["etag"] != first.headers["etag"]


def test_a_report_that_becomes_stale_changes_the_etag(fleet: Asked) -> None:
    first = fleet.get("/v1/nodes/gpu-a")
    fleet.now_s += STALE_AFTER_S + 1
    later = fleet.get("/v1/nodes/gpu-a", {"If-None-Match": first.headers["etag"]})
    assert (first.json()["node"]["fresh"], later.json()["node"]["fresh"]) == (True, False)
    assert first.json()["snapshot_generation"] == later.json()["snapshot_generation"]


def test_processes_have_different_etags(fleet: Asked) -> None:
    """ETags must differ, because each process counts its generations from its start."""
    other = Asked()
    for name in ("gpu-c", "gpu-a", "another", "gpu-b", "gpu-d"):
        other.add_node(name)
    one, two = (asked.get("/v1/nodes") for asked in (fleet, other))
    assert one.json()["snapshot_generation"] == two.json()["snapshot_generation"]
    assert one.headers["etag"] != two.headers["etag"]


def test_pages_contain_every_node_even_if_nodes_disappear_meanwhile(fleet: Asked) -> None:
    seen, after = [], ""
    while after is not None:
        body = fleet.get(f"/v1/nodes?limit=2&continue={after}").json()
        page = [node["name"] for node in body["nodes"]]
        seen.append((page, body["matching"], body["remaining"]))
        after = body["continue"]
    assert seen == [
        (["another", "gpu-a"], 5, 3),
        (["gpu-b", "gpu-c"], 5, 1),
        (["gpu-d"], 5, 0),
    ]
    # A page continues after a name, even if the node with this name was deleted.
    page = fleet.get("/v1/nodes?limit=2&continue=gpu-bb").json()
    assert [node["name"] for node in page["nodes"]] == ["gpu-c", "gpu-d"]


@pytest.mark.parametrize(
    ("query", "shown"),
    [("", 3), ("?limit=4", 4), ("?limit=9", 5)],
    ids=["default", "a limit", "at most"],
)
def test_a_page_has_a_default_and_a_maximum_number_of_nodes(
    monkeypatch: pytest.MonkeyPatch, query: str, shown: int
) -> None:
    monkeypatch.setattr(nodes, "NODES", 3)
    monkeypatch.setattr(nodes, "MOST_NODES", 5)
    asked = Asked()
    for number in range(7):
        asked.add_node(f"n{number}")
    body = asked.get(f"/v1/nodes{query}").json()
    assert (len(body["nodes"]), body["remaining"]) == (shown, 7 - shown)
    assert body["continue"] == body["nodes"][-1]["name"]


def test_nodes_that_take_no_pods_come_first_and_then_the_fullest_across_pages(
    fleet: Asked,
) -> None:
    half = reservation({"GPU-gpu-c-0": 12 * GIB}, name="p")
    unhealthy = shared("GPU-gpu-d-0", healthy=False)
    for node in (
        gpunode(shared("GPU-gpu-c-0"), name="gpu-c", version="9", reservations={"uid-p": half}),
        gpunode(unhealthy, name="gpu-d", version="9"),
    ):
        fleet.writer.apply([GPUNodeSeen(node, 0.0)])
    fleet.writer.apply([NodeSeen(kube_node("closed", {"headroom.gpu/reserve": "much"}))])
    order, after = [], ""
    while after is not None:
        body = fleet.get(f"/v1/nodes?order=fullest&limit=2&continue={after}").json()
        order += [node["name"] for node in body["nodes"]]
        after = body["continue"]
    assert order == ["closed", "gpu-d", "gpu-c", "another", "gpu-a", "gpu-b"]


def test_fleet_totals_are_the_sums_over_nodes(fleet: Asked) -> None:
    sums_add_up(fleet)
    reserved = {"uid-p": reservation({"GPU-gpu-c-0": 12 * GIB}, name="p")}
    for node in (
        gpunode(shared("GPU-gpu-c-0"), name="gpu-c", version="9", reservations=reserved),
        gpunode(shared("GPU-gpu-d-0", healthy=False), name="gpu-d", version="9"),
    ):
        fleet.writer.apply([GPUNodeSeen(node, 0.0)])
    fleet.writer.apply([NodeSeen(kube_node("gpu-a", {"headroom.gpu/reserve": "much"}))])
    sums_add_up(fleet)


def test_nodes_with_stale_reports_add_no_headroom_to_the_totals(fleet: Asked) -> None:
    fleet.now_s = 2 * STALE_AFTER_S
    new = gpunode(shared("GPU-new"), name="new", observed_at="2026-11-21T00:03:00Z")
    fleet.writer.apply([NodeSeen(kube_node("new")), GPUNodeSeen(new, fleet.now_s)])
    sums_add_up(fleet)
    body = fleet.get("/v1/fleet").json()
    (closed,) = body["closed"]
    assert (closed["reason"], closed["nodes"]) == ("stale_report", 5)
    assert sum(model["headroom_bytes"] for model in body["models"]) == 24 * GIB


def sums_add_up(fleet: Asked) -> None:
    shown, nodes = fleet.get("/v1/fleet").json(), fleet.get("/v1/nodes").json()["nodes"]
    assert shown["nodes"] == len(nodes)
    assert sum(each["nodes"] for each in shown["closed"]) == sum(
        node["reason"] is not None for node in nodes
    )
    for model in shown["models"]:
        devices = [
            (node, device)
            for node in nodes
            for device in node["devices"]
            if device["model"] == model["model"]
        ]
        assert model["devices"] == len(devices)
        assert model["unhealthy"] == sum(device["unhealthy"] is not None for _, device in devices)
        assert model["allocatable_bytes"] == sum(d["allocatable_bytes"] for _, d in devices)
        assert model["used_bytes"] == sum(d["used_bytes"] for _, d in devices)
        assert model["overcommitted"] == sum(d["headroom_bytes"] < 0 for _, d in devices)
        assert model["headroom_bytes"] == sum(
            max(0, device["headroom_bytes"])
            for node, device in devices
            if node["reason"] is None and device["unhealthy"] is None
        )
    assert sum(model["devices"] for model in shown["models"]) == sum(
        len(node["devices"]) for node in nodes
    )


def test_nodes_are_searched_by_their_visible_texts(fleet: Asked) -> None:
    def found(search: str) -> list[str]:
        return [node["name"] for node in fleet.get(f"/v1/nodes?search={search}").json()["nodes"]]

    assert found("ANOTHER") == ["another"]
    assert found("gpu-gpu-a-1") == ["gpu-a"]
    assert found("nvidia.com/gpu") == ["another", "gpu-a", "gpu-b", "gpu-c", "gpu-d"]
    assert found("unknown name") == []


def test_nodes_with_a_stale_report_are_sorted_first_and_found_by_their_reason(fleet: Asked) -> None:
    """A report becomes stale without a change of the node, so no snapshot records it."""
    fleet.now_s += STALE_AFTER_S + 1
    for name in ("fresh-a", "fresh-b"):
        devices = shared(f"GPU-{name}")
        node = gpunode(devices, name=name, observed_at="2026-11-21T00:01:31Z")
        fleet.writer.apply([NodeSeen(kube_node(name)), GPUNodeSeen(node, fleet.now_s)])
    stale = ["another", "gpu-a", "gpu-b", "gpu-c", "gpu-d"]

    def names(query: str) -> list[str]:
        return [node["name"] for node in fleet.get(f"/v1/nodes?{query}").json()["nodes"]]

    assert names("order=fullest") == [*stale, "fresh-a", "fresh-b"]
    first = fleet.get("/v1/nodes?order=fullest&limit=4").json()
    assert names(f"order=fullest&continue={first['continue']}") == ["gpu-d", "fresh-a", "fresh-b"]
    assert names("search=report of the node is stale") == stale
    assert names("troubled=true") == stale


def test_unknown_use_counts_as_zero_in_fleet_totals() -> None:
    """A device reports -1 if its driver does not report the use."""
    fleet = Asked()
    lost = shared("GPU-b", used_bytes=-1, memory_bytes=-1)
    node = gpunode(shared("GPU-a", used_bytes=5 * GIB), lost)
    fleet.writer.apply([NodeSeen(kube_node("n")), GPUNodeSeen(node, 0.0)])
    (model,) = fleet.get("/v1/fleet").json()["models"]
    assert (model["devices"], model["used_bytes"]) == (2, 5 * GIB)


def test_memory_shared_by_compute_instances_counts_once_in_fleet_totals() -> None:
    fleet = Asked()
    usage = {"model": "MIG 1c.3g.20gb", "used_bytes": 5 * GIB}
    node = gpunode(
        *(mig(f"MIG-{number}", 1, **usage) for number in range(3)),
        mig("MIG-other", 2, model="MIG 1c.3g.20gb"),
        reservations={"uid-p": reservation({"MIG-0": 4 * GIB}, name="p")},
        pods=[use("uid-p", "MIG-0", 5 * GIB, replica="MIG-0")],
    )
    fleet.writer.apply([NodeSeen(kube_node("n")), GPUNodeSeen(node, 0.0)])
    (model,) = fleet.get("/v1/fleet").json()["models"]
    assert (model["devices"], model["replicas_free"]) == (4, 4)
    in_gib = {name: model[f"{name}_bytes"] // GIB for name in ("allocatable", "used", "headroom")}
    assert in_gib == {"allocatable": 20, "used": 5, "headroom": 15}
    devices = fleet.get("/v1/nodes/n").json()["node"]["devices"]
    assert [each["memory_id"] for each in devices] == ["GPU-0/1"] * 3 + ["MIG-other"]


@pytest.mark.parametrize(
    ("plugin", "choice", "obstacle"),
    [
        pytest.param(Plugin(steering_permitted=True), "", None, id="permitted"),
        pytest.param(Plugin(steering_permitted=False), "", STEERING_NOT_PERMITTED, id="read-only"),
        pytest.param(Plugin(), "", STEERING_UNKNOWN, id="not reported"),
        pytest.param(Plugin(), "gated", STEERING_UNKNOWN, id="gated"),
        pytest.param(
            Plugin(choice_obstacle="no GPU is shared"), "steered", "no GPU is shared", id="obstacle"
        ),
    ],
)
def test_a_node_shows_what_prevents_steering_it(
    plugin: Plugin, choice: str, obstacle: str | None
) -> None:
    fleet = Asked()
    node = kube_node("n", {DEVICE_CHOICE: choice} if choice else None)
    status = gpunode(shared("a", 4), name="n", plugin=plugin)
    fleet.writer.apply([NodeSeen(node), GPUNodeSeen(status, 0.0)])
    assert fleet.get("/v1/nodes/n").json()["steering_obstacle"] == obstacle
