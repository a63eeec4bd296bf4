"""Why a pod waits, or where it is, as lines to read from top to bottom: pure."""

from collections.abc import Mapping
from typing import Any

#: Nodes whose devices are shown without -o wide.
NEAREST = 3


def why(body: Mapping[str, Any], wide: bool = False) -> list[str]:
    """``body`` is that of /v1/explain/pods."""
    lines = [f"Pod {body['namespace']}/{body['name']}: {body['message']}"]
    if body["changed"]:
        lines.append(f"  {body['changed']}")
    lines += _request(body["request"])
    if body["bound_to"]:
        return lines + [f"  {key}: {value}" for key, value in sorted(body["annotations"].items())]
    if body["reasons"]:
        lines += ["", "Refused"]
        lines += [f"  {each['nodes']} nodes: {each['message']}" for each in body["reasons"]]
    if body["suggestions"]:
        lines += ["", "What would help"]
        lines += [f"  {each}" for each in body["suggestions"]]
    nearest = body["nearest"] if wide else body["nearest"][:NEAREST]
    if nearest:
        lines += ["", "Nearest nodes"]
        lines += [f"  {line}" for node in nearest for line in node["told"]]
    return lines + _asked(body["last_decision"])


def _request(asks: list[Mapping[str, Any]]) -> list[str]:
    source = {
        "annotation": "its annotation",
        "namespace": "its namespace's default",
        "replica": "nobody says how much: what a replica is worth",
    }
    return [
        f"  asks for {ask['amount']} on each of {ask['count']} {ask['resource']} "
        f"(container {ask['container']}; {source.get(ask['source'], ask['source'])})"
        for ask in asks
    ]


def _asked(decision: Mapping[str, Any] | None) -> list[str]:
    if decision is None:
        return ["", "kube-scheduler has not asked about it since this extender began to remember."]
    when = decision["at"].replace("T", " ")[:19]
    return [
        "",
        f"kube-scheduler asked last at {when} UTC: {decision['offered']} nodes were offered, "
        f"{decision['fits']} could take it (decision {decision['decision_id']}).",
    ]
