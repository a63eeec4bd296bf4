"""Checks that requests of real kube-schedulers are answered in their format, and only with offered
nodes.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.controlplane import ROOT
from tests.processes import starts_processes
from tests.serving import Reply, Server, serving

RECORDED = sorted((ROOT / "tests/recorded/kube-scheduler").glob("*.json.gz"))
SENTENCES = {"node is not known to Headroom", "no free GPU replica"}
#: The recorded names begin with gpu-a100-0001 and end with gpu-a100-5000. The fleet begins with
#: 0000.
FLEET = "nodes: [{name: gpu-a100, count: 5001, gpus: 8, memory: 80Gi}]"


@pytest.fixture(scope="module")
@starts_processes
def server() -> Iterator[Server]:
    with serving(FLEET) as running:
        yield running


def recorded(path: Path) -> tuple[str, dict[str, str], bytes, dict[str, Any]]:
    """Return the path, the headers, the body as bytes, and the decoded body of a recorded
    request.
    """
    request = json.loads(gzip.decompress(path.read_bytes()))
    first, *lines = request["request_line_and_headers"]
    skipped = ("Host", "Content-Length")
    headers = dict(line.split(": ", 1) for line in lines if not line.startswith(skipped))
    body = json.dumps(request["body"]).encode()
    return first.split()[1], headers, body, request["body"]


def offered_names(body: dict[str, Any]) -> list[str]:
    if body["NodeNames"] is not None:
        return list(body["NodeNames"])
    return [node["metadata"]["name"] for node in body["Nodes"]["items"]]


def send(server: Server, path: Path) -> tuple[dict[str, Any], Reply]:
    target, headers, raw, body = recorded(path)
    reply = server.post(target, raw, headers)
    assert reply.status == 200
    assert b"%" not in reply.body
    return body, reply


def of_verb(verb: str) -> list[Any]:
    return [pytest.param(path, id=path.name) for path in RECORDED if path.name.startswith(verb)]


def test_all_recorded_requests_are_present() -> None:
    assert len(RECORDED) == 45


@pytest.mark.parametrize("path", of_verb("filter"))
def test_filter_passes_or_rejects_each_offered_node(server: Server, path: Path) -> None:
    body, reply = send(server, path)
    answer = reply.json()
    assert set(answer) == {
        "Nodes", "NodeNames", "FailedNodes", "FailedAndUnresolvableNodes", "Error",
    }  # fmt: skip
    assert answer["Error"] == ""
    assert answer["FailedNodes"] == {}
    names = offered_names(body)
    rejected = answer["FailedAndUnresolvableNodes"]
    if body["NodeNames"] is None:
        # Complete nodes are returned unchanged, because kube-scheduler then reads only Nodes.
        assert answer["NodeNames"] is None
        passed = [node["metadata"]["name"] for node in answer["Nodes"]["items"]]
        by_name = {node["metadata"]["name"]: node for node in body["Nodes"]["items"]}
        assert answer["Nodes"]["items"] == [by_name[name] for name in passed]
    else:
        assert answer["Nodes"] is None
        passed = answer["NodeNames"]
    assert passed == [name for name in names if name not in rejected]
    assert set(rejected) <= set(names)
    assert set(rejected.values()) <= SENTENCES
    assert passed, "the fleet is nearly empty: a pod for one GPU fits"


@pytest.mark.parametrize("path", of_verb("prioritize"))
def test_prioritize_scores_only_the_best_node(server: Server, path: Path) -> None:
    body, reply = send(server, path)
    # kube-scheduler assumes 0 for missing nodes.
    (crowned,) = reply.json()
    assert crowned.keys() == {"Host", "Score"}
    assert crowned["Host"] in offered_names(body)
    assert crowned["Score"] == 10


@pytest.mark.parametrize("path", of_verb("bind"))
def test_bind_binds_to_the_given_node(server: Server, path: Path) -> None:
    send(server, path.with_name(path.name.replace("bind-", "filter-")))
    body, reply = send(server, path)
    assert reply.json() == {"Error": ""}
    pods = server.get(f"/v1/explain?pod=default/{body['PodName']}").json()
    assert pods["bound_to"] == body["Node"]
    assert pods["uid"] == body["PodUID"]
    # If a response is lost, kube-scheduler calls bind again and gets the same response.
    assert send(server, path)[1].json() == {"Error": ""}


@pytest.mark.parametrize("path", of_verb("preempt"))
def test_preempt_returns_victims_by_uid_on_offered_nodes_only(server: Server, path: Path) -> None:
    body, reply = send(server, path)
    answer = reply.json()
    assert set(answer) == {"NodeNameToMetaVictims"}
    offered = body["NodeNameToMetaVictims"] or body["NodeNameToVictims"]
    for node, victims in answer["NodeNameToMetaVictims"].items():
        assert set(victims) == {"Pods", "NumPDBViolations"}
        uids = [victim.get("UID") or victim["metadata"]["uid"] for victim in offered[node]["Pods"]]
        assert [victim["UID"] for victim in victims["Pods"]] == uids
