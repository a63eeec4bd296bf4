"""Formats lists of the debug API as tables, except those of `top`. Only pure functions."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from headroom.contract.quantity import for_people, gib
from headroom.kubectl.table import STATE, Row, Table
from headroom.kubectl.top import age, counted

Body = Mapping[str, Any]


def drift(body: Body, namespace: str | None, wide: bool = False) -> Table:
    """Return a row for each reservation, which shows whether its device was predicted correctly,
    and its measured use. On nodes of a DRA driver, return a row for each pod and device, with the
    bytes of its claims and its use.

    ``wide`` adds the predicted and the actual devices, the time and the uid.
    """
    columns = ["NAMESPACE", "POD", "NODE", "RESULT", "RESERVED", "USED"]
    columns += ["PREDICTED", "ACTUAL", "SINCE", "POD UID"] if wide else []
    table = Table((*columns, STATE))
    for pod in body["pods"]:
        if namespace not in (None, pod["namespace"]):
            continue
        observed, missed = pod["observed"], pod["result"] == "miss"
        actual = [each["uuid"] for each in observed]
        predicted = pod["choice"] or pod["predicted"]
        state = []
        if missed:
            devices = f"predicted {_abbreviated(predicted)}, got {_abbreviated(actual)}"
            state.append(f"{devices}: {pod['message']}" if pod["message"] else devices)
        if pod["overuse_bytes"]:
            state.append(f"uses {gib(pod['overuse_bytes'], up=True)} more than reserved")
        if pod.get("overcommitted_bytes"):  # an older console has none
            excess = gib(pod["overcommitted_bytes"], up=True)
            state.append(f"its GPU is overcommitted by {excess}")
        more = ", ".join(predicted) or "-", ", ".join(actual) or "-"
        table.add(
            *(pod["namespace"], pod["name"], pod["node"], pod["result"] or "-"),
            _sum_of_known(each["reserved_bytes"] for each in observed),
            _sum_of_known(each["measured_bytes"] for each in observed),
            *((*more, pod["since"] or "-", pod["uid"]) if wide else ()),
            "; ".join(state) or "ok",
            bad=bool(state),
        )
    for use in body.get("claims", ()):  # an older console has none
        if namespace in (None, use["namespace"]):
            excess = gib(use["excess_bytes"]) if use["excess_bytes"] else ""
            verdict = f"uses {excess} more than its claims" if excess else "ok"
            if not use["uid"]:
                verdict = f"processes of no known pod use {excess} of {use['uuid']}"
            claims = ", ".join(use["claims"]) or "-"
            table.add(
                *(use["namespace"] or "-", use["name"] or "-", use["node"]),
                *("claimed" if use["claims"] else "-", gib(use["claimed_bytes"])),
                "-" if use["measured_bytes"] is None else gib(use["measured_bytes"]),
                *((claims, use["uuid"], "-", use["uid"] or "-") if wide else ()),
                verdict,
                bad=bool(excess),
            )
    return table


def pending(body: Body, wide: bool = False) -> Table:
    """Return a row for each pending pod with the memory that it lacks on the nearest node. All pods
    of a group share a row.

    ``wide`` adds the resource, the number of nodes that fit, and the time of creation.
    """
    columns = ["NAMESPACE", "POD", "AGE", "REQUEST", "SHORT", "NEAREST"]
    columns += ["RESOURCE", "FITS", "SINCE"] if wide else []
    table = Table((*columns, STATE))
    table.pods = [pod["name"] for pod in body["pods"]]
    shown = set[tuple[str, str]]()
    for pod in body["pods"]:
        asks, group = pod["request"], pod.get("group")
        name, requests, message = pod["name"], _requests(asks), pod["message"]
        short, nearest, fits = _sum_of_known([pod["short_bytes"]]), pod["nearest"], str(pod["fits"])
        if group is not None:
            if (key := (pod["namespace"], group["name"])) in shown:
                continue
            shown.add(key)
            name = f"{group['name']} ({counted(group['waiting'], 'pod')})"
            requests, message = group["requests"], group["message"]
            short, nearest, fits = "-", None, "-"
        resources = ", ".join(dict.fromkeys(ask["resource"] for ask in asks)) or "-"
        table.add(
            *(pod["namespace"], name, _age_of(pod["since"], body), requests, short, nearest or "-"),
            *((resources, fits, pod["since"] or "-") if wide else ()),
            message,
        )
    return table


def _requests(asks: Sequence[Body]) -> str:
    amounts = ((ask["count"], for_people(ask["amount"])) for ask in asks)
    return ", ".join(f"{n} x {amount}" if n > 1 else amount for n, amount in amounts) or "-"


def decisions(body: Body, wide: bool = False) -> Table:
    """Return a row for each decision, newest first.

    ``wide`` adds the time, how many nodes fit, the ids, and the duration of each call.
    """
    columns = ["AGE", "NAMESPACE", "POD", "NODE", "RESULT"]
    columns += ["AT", "FITS", "DECISION", "FILTER", "PRIORITIZE", "BIND"] if wide else []
    table = Table((*columns, STATE))
    for each in body["decisions"]:
        filtered, bound = each["filter"], each["bind"]
        fits = f"{filtered['fits']} of {filtered['offered']}" if filtered else "-"
        rejected = bool(filtered and not filtered["fits"])
        why = "; ".join(reason_lines(filtered["reasons"])) if rejected else ""
        calls = (filtered, each["prioritize"], bound)
        state = (bound["message"] if bound else None) or why or "-"
        if would := each.get("would_reject"):  # missing from an older console
            done = "kept it waiting" if would == "filter" else "rejected this node"
            state = f"mode enforce would have {done}: {why or state}"
        table.add(
            *(_age_of(each["at"], body), each["namespace"], each["name"], each["node"] or "-"),
            "would reject"
            if would
            else (bound["outcome"] if bound else "rejected" if rejected else "fits"),
            *((_second(each["at"]), fits, each["decision_id"], *map(_took, calls)) if wide else ()),
            state,
            bad=bool(would) or (bool(bound) and bound["outcome"] != "bound"),
        )
    table.total = _would_reject(body)
    return table


def _would_reject(body: Body) -> list[str]:
    """Return how many pods mode enforce would have rejected; empty if the answer has no counts."""
    if not body.get("would_reject"):
        return []
    done = {"filter": "have waited", "bind": "not have been bound to its node"}
    lines = [
        f"in mode enforce, {counted(each['pods'], 'pod')} would {done[each['verb']]}: "
        f"{each['message']}"
        for each in body["would_reject"]
    ]
    since = _second(body["on_record_since"])
    return [*lines, f"decisions are on record since {since} (setting journal_age_s)"]


def ranking(body: Body, wide: bool = False) -> Table:
    """Return a row for each node from /v1/score, best first.

    ``wide`` adds the certainty, and what each term contributes to the score. If the weights of a
    past decision are not known, it adds the terms without weights.
    """
    terms = body["nodes"][0]["score_terms"] if body["nodes"] else ()
    parts = body["parts"] or dict.fromkeys(terms, 1.0)
    columns = ["NODE", "RANK", "SCORE"]
    columns += ["NEXT DEVICE", *(name.replace("_", " ").upper() for name in parts)] if wide else []
    table = Table((*columns, STATE))
    for node in body["nodes"]:
        score, terms = node["score_ratio"], node["score_terms"]
        contributions = [
            f"{parts[name] * terms[name]:.3f}" if name in terms else "-" for name in parts
        ]
        table.add(
            node["node"],
            "-" if node["rank"] is None else str(node["rank"]),
            "-" if score is None else f"{score:.3f}",
            *((node["certainty"] or "-", *contributions) if wide else ()),
            "fits" if node["fits"] else node["message"],
            bad=not node["fits"],
        )
    return table


def bound_note(body: Body) -> str:
    """Return where the pod of a score is, and how to see why, or an empty string if it is not
    bound. The score is computed now, and not when the pod was bound."""
    if body.get("source") == "decision" or not body.get("bound_to"):
        return ""
    command = f"kubectl headroom score {body['namespace']}/{body['name']} --decision last"
    return (
        f"the pod is on node {body['bound_to']}; this ranking is computed now, as if the pod were "
        f"not placed yet. To see why it is there: {command}"
    )


def ranking_notes(body: Body) -> list[str]:
    """Return sentences about the ranking as a whole: what decides between the first two nodes, and
    which nodes a past decision does not name."""
    notes = [bound_note(body), body["difference"], body["not_tried"]]
    if body["source"] == "decision":
        fit = f"{counted(body['fits'], 'node')} could take the pod"
        if body["unrecorded"]:
            fit += f", of which the best {body['matching']} are on record"
        notes.append(f"decided at {body['decided_at']} ({body['decision_id']}): {fit}")
        notes += reason_lines(body["reasons"])
        if not body["parts"] and body["nodes"]:
            notes.append("score_weights have changed since, so terms are shown without weights")
    return [note for note in notes if note]


def capacity_by_node(body: Body, wide: bool = False) -> Table:
    """Return how many pods fit on each node, or why none fits, from /v1/capacity.

    ``wide`` adds the free replicas that no such pod can use.
    """
    columns = ["NODE", "PODS", "HEADROOM", "STRANDED", "FREE REPLICAS"]
    columns += ["STRANDED REPLICAS"] if wide else []
    table = Table((*columns, STATE))
    for node in body["nodes"]:
        table.add(
            *(node["name"], str(node["pods"]) + ("" if node["counted"] else " or more")),
            *(gib(node["headroom_bytes"]), gib(node["stranded_bytes"])),
            *(str(node["replicas_free"]), *([str(node["replicas_stranded"])] if wide else [])),
            node["message"] or "ok",
        )
    return table


def classes(body: Body) -> Table:
    """Return the largest request that fits on each class of devices, from /v1/capacity."""
    table = Table(("MODEL", "MEMORY", "GPUS", "NODES", "LARGEST THAT FITS"))
    for each in body["classes"]:
        table.add(
            *(each["model"], gib(each["memory_bytes"]), str(each["devices"]), str(each["nodes"])),
            gib(each["largest_fitting_bytes"] or 0),
        )
    return table


def before_and_after(body: Body) -> Table:
    """Return a row for each total of a what-if, without and with the changes."""
    table = Table(("TOTAL", "BEFORE", "AFTER", "DIFFERENCE"))
    before, after = body["before"], body["after"]
    number = "{:,}".format
    rows = [
        ("Pods placed", before["pods"], after["pods"], number),
        ("Pods that would not fit", 0, body["rejected"], number),
        ("GPU memory reserved", before["reserved_bytes"], after["reserved_bytes"], gib),
        ("GPU memory free", before["headroom_bytes"], after["headroom_bytes"], gib),
        ("GPUs", before["devices"], after["devices"], number),
        ("GPUs in use", before["devices_in_use"], after["devices_in_use"], number),
        ("GPUs empty", before["devices_empty"], after["devices_empty"], number),
    ]
    for label, was, becomes, shown in rows:
        difference = f"{'+' if becomes > was else ''}{shown(becomes - was)}"
        is_bad = label == "Pods that would not fit" and becomes > 0
        table.add(label, shown(was), shown(becomes), difference, bad=is_bad)
    return table


def moves(body: Body) -> Table:
    """Return a row for each placed pod of a what-if, and one for equal pods that get no node."""
    moved = any(each["leaves"] for each in (*body["placements"], *body["rejections"]))
    table = Table(("POD", *(["FROM"] if moved else []), "TO", "SCORE", STATE))
    for each in body["placements"]:
        leaves = [each["leaves"] or "-"] if moved else []
        on = each["devices"]
        state = f"on {on[0]}" if len(on) == 1 else f"one of {counted(len(on), 'GPU')}"
        table.add(each["pod"], *leaves, each["node"], f"{each['score_ratio']:.2f}", state)
    for each in body["rejections"]:
        leaves = [each["leaves"] or "-"] if moved else []
        reasons = [*each["reasons"], *each["ineligible"]]
        why = each["not_tried"] or "; ".join(reason_lines(reasons))
        first, others = each["pods"][0], len(each["pods"]) - 1
        more = f"and {counted(others, 'more pod')}: " if others else ""
        table.add(first, *leaves, "-", "-", f"{more}{why}", bad=True)
    return table


def feed_events(body: Body, wide: bool = False) -> Table:
    """Return the rows of a log of events. ``wide`` adds a column for the device."""
    table = Table(("AT", "EVENT", "POD", "NODE", *(["DEVICE"] if wide else []), STATE))
    for each in body["events"]:
        *cells, state = feed_event(each)
        table.add(*cells, *([each["device"] or "-"] if wide else []), state)
    return table


def feed_event(event: Body) -> Row:
    message = event["message"] or event["device"]
    return (
        _second(event["at"]),
        event["kind"],
        f"{event['namespace']}/{event['name']}" if event["name"] else "-",
        event["node"] or "-",
        ": ".join(filter(None, (event["cause"], message))) or "-",
    )


def reason_lines(reasons: Iterable[Body]) -> list[str]:
    """Return a line for each reason, with its number of nodes."""
    return [f"{counted(each['nodes'], 'node')}: {each['message']}" for each in reasons]


def _age_of(since: str | None, body: Body) -> str:
    """Return the age that a timestamp had when the body was created."""
    if since is None:
        return "-"
    at = datetime.fromisoformat(since), datetime.fromisoformat(body["generated_at"])
    return age((at[1] - at[0]).total_seconds())


def _second(at: str) -> str:
    """Return a timestamp in UTC, to the second, in the form that `--since` accepts."""
    return f"{at[:19]}Z"


def _took(call: Body | None) -> str:
    return f"{call['took_ms']:.1f} ms" if call else "-"


def _abbreviated(uuids: list[str]) -> str:
    """Return the first UUID and the number of the others."""
    return "-" if not uuids else uuids[0] if len(uuids) == 1 else f"{uuids[0]} +{len(uuids) - 1}"


def _sum_of_known(counts: Iterable[int | None]) -> str:
    """Return the sum of the known bytes, or "-" if none is known."""
    known = [count for count in counts if count is not None]
    return gib(sum(known)) if known else "-"
