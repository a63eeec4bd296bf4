"""Tests ``filter_best_only``. With this setting, filter returns only the node that prioritize would
rank first.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import starts_processes
from tests.serving import Server, offer, pod, serving
from tests.waiting import until

FLEET = """
nodes:
  - {name: small, gpus: 1, memory: 24Gi, sharing: time-slicing, replicas: 4}
  - {name: large, gpus: 1, memory: 80Gi, sharing: time-slicing, replicas: 4}
  - {name: pair, gpus: 2, memory: 40Gi, sharing: time-slicing, replicas: 4}
"""
NAMES = ("small", "large", "pair")
TOO_SMALL = "insufficient GPU memory on any device"
SPREAD = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}


@pytest.fixture
@starts_processes
def best_only(tmp_path: Path) -> Iterator[Server]:
    config = tmp_path / "headroom.yaml"
    config.write_text("filter_best_only: true\n", encoding="utf-8")
    with serving(FLEET, "--config", str(config)) as running:
        yield running


def asked(server: Server, shown: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = server.post("/filter", offer(shown, *NAMES)).json()
    assert answer["Error"] == ""
    return answer


@pytest.mark.parametrize("vram", ["4Gi", "20Gi", "30Gi"])
def test_filter_returns_the_node_that_prioritize_would_rank_first(
    best_only: Server, vram: str
) -> None:
    with serving(FLEET) as other:
        shown = pod("p", vram)
        passed = asked(other, shown)["NodeNames"]
        (winner,) = other.post("/prioritize", offer(shown, *passed)).json()
    assert len(passed) > 1
    answer = asked(best_only, shown)
    assert answer["NodeNames"] == [winner["Host"]]
    assert answer["FailedAndUnresolvableNodes"] == answer["FailedNodes"] == {}
    nodes = {"items": [{"metadata": {"name": name, "labels": {"of": name}}} for name in NAMES]}
    whole = {"Pod": shown, "Nodes": nodes, "NodeNames": None}
    (kept,) = best_only.post("/filter", whole).json()["Nodes"]["items"]
    assert kept == {"metadata": {"name": winner["Host"], "labels": {"of": winner["Host"]}}}


def test_the_best_node_is_returned_only_if_it_is_offered(best_only: Server) -> None:
    """In one case, another node with a name of the same length is offered, so that the offered
    names have as many bytes as the names of all nodes.
    """
    shown = pod("p", "20Gi")
    (best,) = asked(best_only, shown)["NodeNames"]
    others = [name for name in NAMES if name != best]
    args = {"Pod": shown, "Nodes": None, "NodeNames": [*others, "x" * len(best)]}
    body = json.dumps(args, separators=(",", ":")).encode()
    (second,) = best_only.post("/filter", body).json()["NodeNames"]
    assert second in others


def test_a_known_node_is_not_preferred_to_a_template_of_an_autoscaler(best_only: Server) -> None:
    new = {
        "metadata": {"name": "new", "labels": {"node.kubernetes.io/instance-type": "g4dn.xlarge"}},
        "status": {"allocatable": {"nvidia.com/gpu": "1"}},
    }
    nodes = [new, {"metadata": {"name": "small"}}]
    args = {"Pod": pod("p", "4Gi"), "Nodes": {"items": nodes}, "NodeNames": None}
    assert best_only.post("/filter", args).json()["Nodes"]["items"] == nodes


def test_rejected_nodes_have_reasons_if_at_most_one_node_fits(best_only: Server) -> None:
    answer = asked(best_only, pod("one", "60Gi"))
    assert answer["NodeNames"] == ["large"]
    assert answer["FailedAndUnresolvableNodes"] == {"small": TOO_SMALL, "pair": TOO_SMALL}
    answer = asked(best_only, pod("none", "90Gi"))
    assert answer["NodeNames"] == []
    assert answer["FailedAndUnresolvableNodes"] == dict.fromkeys(NAMES, TOO_SMALL)


def test_all_fitting_nodes_are_returned_for_preferences_or_pods_without_a_gpu(
    best_only: Server,
) -> None:
    spread = pod("spread", "4Gi")
    spread["spec"]["topologySpreadConstraints"] = [SPREAD]
    assert asked(best_only, spread)["NodeNames"] == list(NAMES)
    assert asked(best_only, pod("plain", gpus=0))["NodeNames"] == list(NAMES)


def test_the_ranking_is_recorded(best_only: Server) -> None:
    (winner,) = asked(best_only, pod("p", "20Gi"))["NodeNames"]

    def decision() -> dict[str, Any]:
        found: dict[str, Any] = best_only.get("/v1/decisions").json()["decisions"][0]
        return found

    until(lambda: bool(decision()["prioritize"]["candidates"]), "who came next is kept")
    made = decision()
    assert made["node"] == winner
    assert (made["filter"]["offered"], made["filter"]["fits"]) == (3, 3)
    ranked = made["prioritize"]
    assert (ranked["winner"], ranked["offered"], ranked["by_filter"]) == (winner, 3, True)
    assert ranked["candidates"][0]["node"] == winner
    assert {each["node"] for each in ranked["candidates"]} == set(NAMES)
    scores = [each["score_ratio"] for each in ranked["candidates"]]
    assert scores == sorted(scores, reverse=True)
