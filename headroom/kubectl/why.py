"""Formats why a pod waits, or why it is or would be on a node, as lines. Only pure functions."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from headroom.contract.device_names import nouns
from headroom.contract.quantity import for_people, gib
from headroom.kubectl.output import not_checked, unread
from headroom.kubectl.tables import bound_note, reason_lines
from headroom.kubectl.top import counted

PLACEMENT = "headroom.gpu/placement"
#: Number of nodes that are shown without -o wide.
NEAREST = 3


def why(body: Mapping[str, Any], wide: bool = False) -> list[str]:
    """Format the body of /v1/explain."""
    lines = [f"Pod {body['namespace']}/{body['name']}: {body['message']}"]
    if body["group"]:
        lines.append(f"  {body['group']}")
    if body["changed"]:
        lines.append(f"  {body['changed']}")
    lines += _request(body["request"])
    if (of_memory := body.get("memory_class")) not in (None, "unlimited"):
        lines.append(f"  class {of_memory}: {_CLASSES.get(str(of_memory), '')}")
    lines += [f"  {line}" for line in unread(body)]
    if body["bound_to"]:
        lines += [f"  on {nouns(body['devices'])}"] if body["devices"] else []
        lines += [f"  {line}" for line in _placed(body["annotations"])]
        lines += [f"  memory on {cap['device']}: {cap['message']}" for cap in body["caps"]]
        lines += [f"  {line}" for line in _overuse(body)]
        for kind in ("failed_containers", "overcommitted"):  # an older console has none
            lines += [f"  {each['message']}" for each in body.get(kind, ())]
        lines += [f"  {body['start']}"] if body["start"] else []
        if wide:
            lines += [f"  {key}: {value}" for key, value in sorted(body["annotations"].items())]
        return lines + _attempts(body, wide)
    if wide:
        lines.append(f"  {_source(body)}, generation {body['snapshot_generation']}")
    reasons = [*body["reasons"], *body["ineligible"]]
    if reasons or body["left_out_nodes"]:
        observes = body.get("observes")  # missing from an older console
        heading = (
            "Nodes that mode enforce would reject" if observes else "Nodes that cannot take it"
        )
        lines += ["", heading]
        lines += [f"  {line}" for line in reason_lines(reasons)]
    if left_out := body["left_out_nodes"]:
        lines.append(
            f"  {counted(left_out, 'node')}: excluded by kube-scheduler for other resources, "
            "volumes or affinity"
        )
    if body["advice"]:
        lines += ["", "Suggestions"]
        lines += [line for each in body["advice"] for line in _suggestion(each)]
    nearest = body["nearest"] if wide else body["nearest"][:NEAREST]
    if nearest:
        lines += ["", "Nearest nodes"]
        lines += [f"  {line}" for node in nearest for line in node["lines"]]
    if hidden := len(body["nearest"]) - len(nearest):
        lines.append(f"  {hidden} more with -o wide")
    return lines + _attempts(body, wide)


def _suggestion(one: Mapping[str, Any]) -> Iterator[str]:
    """Yield a suggestion, and the command or YAML to copy if the sentence does not contain it."""
    yield f"  {one['sentence']}"
    fix = one["fix"] or ""
    if fix not in one["sentence"]:
        yield from (f"      {line}" for line in fix.splitlines())


def _placed(annotations: Mapping[str, str]) -> Iterator[str]:
    """Describe what was reserved for each container when the pod was bound."""
    try:
        containers = json.loads(annotations[PLACEMENT])["containers"].items()
    except (KeyError, ValueError, AttributeError, TypeError):
        return  # bound without Headroom, or the annotation is from another release
    for name, reserved in containers:
        devices = reserved.get("bytes", {})
        if not devices:
            continue
        where = next(iter(devices))
        if len(devices) > 1:
            where = f"each of {len(devices)} GPUs that it could get, such as {where}"
        yield f"reserved {gib(max(devices.values()))} on {where} (container {name})"


def _overuse(body: Mapping[str, Any]) -> Iterator[str]:
    """Describe on which devices the pod uses more than it reserved, and whether it is evicted."""
    for each in body["overuse"]:
        used, reserved = gib(each["used_bytes"], up=True), gib(each["reserved_bytes"])
        yield (
            f"overuse on {each['device']}: uses {used}, but has reserved {reserved}; "
            f"{each['message']}"
        )


def _request(asks: list[Mapping[str, Any]]) -> list[str]:
    """Format the request of each container, with the source of its amount."""
    source = {
        "annotation": "its annotation",
        "namespace": "its namespace's default",
        "recommendation": "its recommendation",
        "replica": "no annotation, so the share of one replica",
    }
    return [
        f"  requests {ask['count']} {ask['resource']} with {for_people(ask['amount'])}"
        f"{' each' if ask['count'] > 1 else ''}{_limit(ask)} "
        f"(container {ask['container']}; {source.get(ask['source'], ask['source'])})"
        for ask in asks
    ]


#: The meanings of the classes of pods with a limit.
_CLASSES = {
    "guaranteed": "it is evicted if it uses more than it requests",
    "burstable": "it may use memory up to its limit while other pods do not need it, and is "
    "evicted if it uses more",
}


def _limit(ask: Mapping[str, Any]) -> str:
    limit = ask.get("limit")
    return f", limit {for_people(limit)}" if limit else ""


def _attempts(body: Mapping[str, Any], wide: bool) -> list[str]:
    """Format the message about kube-scheduler's attempts, and the last decision.

    ``wide`` adds the id of the decision.
    """
    decision, attempts = body["last_decision"], body["attempts"]
    if decision is None:
        return ["", attempts["message"]]
    which = f" {decision['decision_id']} ({_source(decision)})" if wide else ""
    lines = ["", attempts["message"], f"Last decision{which}"]
    return lines + [f"  {line}" for line in phases(decision)]


def _source(body: Mapping[str, Any]) -> str:
    """Return the source: ``decision`` (recorded by an extender) or ``recomputed`` (by the
    console)."""
    return f"source: {body['source']}"


def phases(decision: Mapping[str, Any]) -> list[str]:
    """Format the last call of each verb of a decision, with its result and duration."""
    lines = []
    if filtered := decision["filter"]:
        verb = "fits" if filtered["fits"] == 1 else "fit"
        found = f"{filtered['fits']} of {counted(filtered['offered'], 'node')}"
        if filtered.get("observed_only") and filtered["fits"] < filtered["offered"]:
            found = f"all of {counted(filtered['offered'], 'node')} passed in mode observe"
            verb = f"(mode enforce would pass {filtered['fits']:,})"
        lines.append(f"filter: {found} {verb}, in {filtered['took_ms']:.1f} ms")
    if ranked := decision["prioritize"]:
        best = f"{ranked['winner'] or 'any'} of {counted(ranked['offered'], 'node')}"
        if ranked["by_filter"]:
            lines.append(f"filter returned only the best: {best}")
        else:
            lines.append(f"prioritize: {best}, in {ranked['took_ms']:.1f} ms")
    if preempted := decision["preempt"]:
        lines.append(f"preempt: in {preempted['took_ms']:.1f} ms")
        lines += [f"  {each}" for each in preempted["lines"]]
    if bound := decision["bind"]:
        message, outcome = bound["message"], bound["outcome"]
        if message and outcome == "bound":  # in mode observe
            why_not = f" (mode enforce would have rejected the node: {message})"
        else:
            why_not = f": {message}" if message else ""
        lines.append(f"bind: {outcome} to {bound['node']}, in {bound['took_ms']:.1f} ms{why_not}")
    return lines


def score(body: Mapping[str, Any]) -> list[str]:
    """Format the body of /v1/score: one pod on one node, now and in the last attempt."""
    live = body["live"]
    lines = list(live["node"]["lines"])
    lines += [f"  {note}"] if (note := bound_note(body)) else []
    lines.append(f"  {_source(live)}, generation {body['snapshot_generation']}")
    lines += [f"  fails: {each['message']}" for each in live["failing"]]
    if live["not_tried"]:
        lines.append(f"  {live['not_tried']}")
    for term in live["terms"]:
        lines.append(
            f"  {term['name']:<16} {term['value_ratio']:5.2f} x {term['part_ratio']:.2f}"
            f" = {term['contribution_ratio']:.3f}"
        )
    if live["rank"] is not None:
        tied = f", tied with {live['tied']}" if live["tied"] else ""
        fit = "that fits" if live["fits"] == 1 else "that fit"
        lines.append(f"  rank {live['rank']} of {counted(live['fits'], 'node')} {fit}{tied}")
    if live["winner"] and live["winner"] != live["node"]["node"]:
        lines.append(f"  {live['winner']} wins, with {live['winner_score_ratio']:.3f}")
    if difference := live.get("difference"):  # missing from an older console
        lines.append(f"  {difference}")
    lines.append(f"  {not_checked(live)}")
    lines += [f"  {line}" for line in unread(body)]
    return lines + _stored(body["stored"], live["node"]["node"])


def _stored(decision: Mapping[str, Any] | None, node: str) -> list[str]:
    """Format the last decision, and the rank of this node if it was one of the best."""
    if decision is None:
        return []
    source = f"decision {decision['decision_id']}, {_source(decision)}"
    lines = ["", f"Decided at {decision['at']} ({source})"]
    lines += [f"  {line}" for line in phases(decision)]
    candidates = decision["prioritize"]["candidates"] if decision["prioritize"] else ()
    for rank, each in enumerate(candidates, 1):
        if each["node"] == node:
            lines.append(f"  {node} had rank {rank}, with score {each['score_ratio']:.3f}")
    return lines
