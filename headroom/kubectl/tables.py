"""Formats bodies of the debug API as tables: pure functions; bytes are shown as GiB."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from contract.quantity import gib

Body = Mapping[str, Any]
Row = tuple[str, ...]
_RESERVED = ("reservation_bytes", "unconfirmed_bytes", "unreserved_pods_bytes")


@dataclass(slots=True)
class Table:
    columns: tuple[str, ...]
    rows: list[Row] = field(default_factory=list)
    #: Indices of rows to highlight because of a problem.
    bad: set[int] = field(default_factory=set)

    def add(self, *cells: str, bad: bool = False) -> None:
        if bad:
            self.bad.add(len(self.rows))
        self.rows.append(cells)


def nodes(body: Body, wide: bool = False) -> Table:
    """Return a row for each node: the sums of its devices, and why it takes no pods.

    ``wide`` adds the models, the sharing, how certain the next pod's device is, the time of the
    report, and the taints.
    """
    columns: tuple[str, ...] = (
        *("NODE", "GPUS", "ALLOCATABLE", "RESERVED", "UNATTRIBUTED", "USED", "HEADROOM"),
        *("FREE REPLICAS", "REPORT", "STATE"),
    )
    if wide:
        columns = (*columns, "MODELS", "SHARING", "NEXT DEVICE", "OBSERVED AT", "TAINTS")
    table = Table(columns)
    for node in body["nodes"]:
        devices, memories = node["devices"], _one_of_each_memory(node["devices"])
        over = any(device["headroom_bytes"] < 0 for device in devices)
        states = ["overcommitted"] if over else []
        states += ["cordoned"] if node["cordoned"] else []
        states += [_reason_of(node)] if node["message"] else []
        state = "; ".join(states) or "ok"
        table.add(
            node["name"],
            str(len(devices)),
            gib(_sum(memories, "allocatable_bytes")),
            gib(_sum(memories, *_RESERVED)),
            gib(_sum(memories, "unattributed_bytes")),
            gib(_sum(memories, "used_bytes")),
            signed(_sum(memories, "headroom_bytes")),
            str(_sum(devices, "replicas_free")),
            age(node["report_age_s"]),
            state,
            *(_wide_cells(node) if wide else ()),
            bad=bool(states),
        )
    return table


def devices(body: Body, wide: bool = False) -> Table:
    """Return a row for each GPU; ``wide`` adds its uuid and resource."""
    columns: tuple[str, ...] = (
        *("NODE", "GPU", "MODEL", "SHARING", "ALLOCATABLE", "RESERVED", "UNATTRIBUTED", "USED"),
        *("HEADROOM", "REPLICAS", "SM", "PODS", "STATE"),
    )
    if wide:
        columns = (*columns, "UUID", "RESOURCE")
    table = Table(columns)
    for node in body["nodes"]:
        for device in node["devices"]:
            over = "overcommitted" if device["headroom_bytes"] < 0 else ""
            unhealthy = device["unhealthy_detail"] or device["unhealthy"]
            state = "; ".join(filter(None, (_reason_of(node), unhealthy or over))) or "ok"
            table.add(
                node["name"],
                str(device["index"]),
                device["model"],
                device["sharing"],
                gib(device["allocatable_bytes"]),
                gib(_sum([device], *_RESERVED)),
                gib(device["unattributed_bytes"]),
                gib(device["used_bytes"]),
                signed(device["headroom_bytes"]),
                f"{device['replicas_free']}/{_replicas(device)} free",
                percent(device["sm_activity_ratio"]),
                str(len(device["holders"])),
                state,
                *((device["uuid"], device["resource"]) if wide else ()),
                bad=state != "ok",
            )
    return table


def pods(body: Body, namespace: str | None, wide: bool = False) -> Table:
    """Return a row for each pod in each memory, of one namespace or of all (None).

    If several GPUs share the memory, the row has the indices of all of them.

    ``wide`` adds the model and the uids.
    """
    columns: tuple[str, ...] = (
        *("NAMESPACE", "POD", "NODE", "GPU", "RESERVED", "MEASURED", "OBSERVED"),
    )
    if wide:
        columns = (*columns, "MODEL", "GPU UUID", "POD UID")
    table = Table(columns)
    for node in body["nodes"]:
        for device in _one_of_each_memory(node["devices"]):
            mates = [each for each in node["devices"] if _memory_of(each) == _memory_of(device)]
            for holder in device["holders"]:
                if namespace not in (None, holder["namespace"]):
                    continue
                measured = holder["measured_bytes"]
                table.add(
                    holder["namespace"],
                    holder["name"],
                    node["name"],
                    _joined([str(each["index"]) for each in mates]),
                    gib(holder["requested_bytes"]),
                    _sum_of_known([measured]),
                    "yes" if holder["observed"] else "no",
                    *(_wide_holder_cells(mates, holder) if wide else ()),
                    bad=measured is not None and measured > holder["requested_bytes"],
                )
    return table


def drift(body: Body, namespace: str | None, wide: bool = False) -> Table:
    """Return a row for each reservation: predicted and actual devices, reserved and measured use.

    ``wide`` names every device, and adds the time, the uid and the reason of a missed prediction.
    """
    columns: tuple[str, ...] = (
        *("NAMESPACE", "POD", "NODE", "RESULT", "PREDICTED", "ACTUAL", "RESERVED", "MEASURED"),
        "OVERUSE",
    )
    if wide:
        columns = (*columns, "SINCE", "POD UID", "MISSED BECAUSE")
    names = _joined if wide else _abbreviated
    table = Table(columns)
    for pod in body["pods"]:
        if namespace not in (None, pod["namespace"]):
            continue
        observed = pod["observed"]
        table.add(
            pod["namespace"],
            pod["name"],
            pod["node"],
            pod["result"] or "-",
            names(pod["choice"] or pod["predicted"]),
            names([each["uuid"] for each in observed]),
            _sum_of_known(each["reservation_bytes"] for each in observed),
            _sum_of_known(each["measured_bytes"] for each in observed),
            gib(pod["overuse_bytes"]) if pod["overuse_bytes"] else "-",
            *((pod["since"] or "-", pod["uid"], pod["message"] or "-") if wide else ()),
            bad=pod["result"] == "miss" or bool(pod["overuse_bytes"]),
        )
    return table


def models(body: Body) -> Table:
    """Return a row for each GPU model: the sums of its devices, from /v1/fleet."""
    columns = (
        *("MODEL", "GPUS", "ALLOCATABLE", "RESERVED", "UNATTRIBUTED", "USED", "HEADROOM"),
        *("FREE REPLICAS", "UNHEALTHY", "OVERCOMMITTED"),
    )
    sums = ("allocatable", "reservation", "unattributed", "used", "headroom")
    counts = ("replicas_free", "unhealthy", "overcommitted")
    table = Table(columns)
    for model in body["models"]:
        table.add(
            *(model["model"], str(model["devices"])),
            *(signed(model[f"{name}_bytes"]) for name in sums),
            *(str(model[name]) for name in counts),
            bad=bool(model["unhealthy"] or model["overcommitted"]),
        )
    return table


def pending(body: Body) -> Table:
    """Return a row for each pending pod, with what it lacks on the nearest node."""
    columns = ("NAMESPACE", "POD", "SINCE", "REQUEST", "FITS", "NEAREST", "SHORT", "STATE")
    rows: list[Row] = [
        (
            *(pod["namespace"], pod["name"], pod["since"] or "-"),
            ", ".join(
                f"{ask['count']} x {ask['amount']} {ask['resource']}" for ask in pod["request"]
            )
            or "-",
            *(
                str(pod["fits"]),
                pod["nearest"] or "-",
                _sum_of_known([pod["short_bytes"]]),
                pod["message"],
            ),
        )
        for pod in body["pods"]
    ]
    return Table(columns, rows)


def decisions(body: Body, wide: bool = False) -> Table:
    """Return a row for each decision, the newest first.

    ``wide`` adds their ids and the duration of each call.
    """
    columns: tuple[str, ...] = (
        *("AT", "NAMESPACE", "POD", "OFFERED", "FITS", "NODE", "BIND", "STATE"),
    )
    if wide:
        columns = (*columns, "DECISION", "FILTER", "PRIORITIZE", "BIND TOOK")
    table = Table(columns)
    for each in body["decisions"]:
        filtered, bound = each["filter"], each["bind"]
        why = "; ".join(reason_lines(filtered["reasons"])) if filtered else ""
        calls = (filtered, each["prioritize"], bound)
        table.add(
            *(_to_seconds(each["at"]), each["namespace"], each["name"]),
            *((str(filtered["offered"]), str(filtered["fits"])) if filtered else ("-", "-")),
            *(each["node"] or "-", bound["outcome"] if bound else "-"),
            (bound["message"] if bound else None) or why or "-",
            *((each["decision_id"], *map(_took, calls)) if wide else ()),
            bad=bool(bound) and bound["outcome"] != "bound",
        )
    return table


def capacity_by_node(body: Body) -> Table:
    """Return how many pods fit on each node, and why none fits, from /v1/capacity."""
    columns = (
        *("NODE", "PODS THAT FIT", "HEADROOM", "STRANDED", "FREE REPLICAS"),
        *("STRANDED REPLICAS", "STATE"),
    )
    rows: list[Row] = [
        (
            *(node["name"], str(node["pods"]) + ("" if node["counted"] else " or more")),
            *(signed(node["headroom_bytes"]), signed(node["stranded_bytes"])),
            *(str(node["replicas_free"]), str(node["replicas_stranded"]), node["message"] or "-"),
        )
        for node in body["nodes"]
    ]
    return Table(columns, rows)


def classes(body: Body) -> Table:
    """Return the largest request that fits on each class of devices, from /v1/capacity."""
    columns = ("MODEL", "MEMORY", "GPUS", "NODES", "LARGEST THAT FITS")
    rows: list[Row] = [
        (
            each["model"],
            gib(each["memory_bytes"]),
            str(each["devices"]),
            str(each["nodes"]),
            gib(each["largest_fitting_bytes"] or 0),
        )
        for each in body["classes"]
    ]
    return Table(columns, rows)


def moves(body: Body) -> Table:
    """Return a row for each pod of a what-if: the node that it would get, or why it gets none."""
    columns = ("POD", "FROM", "TO", "SCORE", "STATE")
    table = Table(columns)
    for each in body["placements"]:
        state = f"up to {gib(each['most_bytes'])} of {_abbreviated(each['devices'])}"
        leaves, score = each["leaves"] or "-", f"{each['score_ratio']:.2f}"
        table.add(each["pod"], leaves, each["node"], score, state)
    for each in body["rejections"]:
        reasons = [*each["reasons"], *each["ineligible"]]
        why = each["not_tried"] or "; ".join(reason_lines(reasons))
        for pod in each["pods"]:
            table.add(pod, each["leaves"] or "-", "-", "-", why, bad=True)
    return table


def feed_events(body: Body, wide: bool = False) -> Table:
    """Return the rows of a log of events; ``wide`` adds the device in its own column."""
    columns: tuple[str, ...] = ("AT", "EVENT", "CAUSE", "POD", "NODE", "STATE")
    if wide:
        columns = (*columns, "DEVICE")
    events = body["events"]
    rows = [(*feed_event(each), *((each["device"] or "-",) if wide else ())) for each in events]
    return Table(columns, rows)


def feed_event(event: Body) -> Row:
    return (
        _to_seconds(event["at"]),
        event["kind"],
        event["cause"] or "-",
        f"{event['namespace']}/{event['name']}" if event["name"] else "-",
        event["node"] or "-",
        event["message"] or event["device"] or "",
    )


def _to_seconds(at: str) -> str:
    """Return a timestamp to the second, without its time zone (UTC)."""
    return at.replace("T", " ")[:19]


def _took(call: Body | None) -> str:
    return f"{call['took_ms']:.1f} ms" if call else "-"


def _reason_of(node: Body) -> str:
    """Return why the node takes no pods, with the evidence; empty if its devices decide."""
    message, detail = node["message"] or "", node["detail"] or ""
    return f"{message} ({detail})" if message and detail else message


def signed(count_bytes: int) -> str:
    return f"-{gib(-count_bytes)}" if count_bytes < 0 else gib(count_bytes)


def age(seconds: float | None) -> str:
    """Format an age like kubectl: 12s, 3m, 5h, 2d."""
    if seconds is None:
        return "-"
    for unit, length_s in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length_s:
            return f"{int(seconds // length_s)}{unit}"
    return f"{max(0, int(seconds))}s"


def percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.0f} %"


def _memory_of(device: Body) -> str:
    return str(device["memory_id"])


def _one_of_each_memory(devices: Iterable[Body]) -> list[Body]:
    """Return the first device of each memory: those that share one have the same figures."""
    first: dict[str, Body] = {}
    for device in devices:
        first.setdefault(_memory_of(device), device)
    return list(first.values())


def _wide_holder_cells(mates: Sequence[Body], holder: Body) -> Row:
    models = sorted({str(each["model"]) for each in mates})
    return _joined(models), _joined([str(each["uuid"]) for each in mates]), holder["uid"]


def _sum(devices: Iterable[Body], *keys: str) -> int:
    return sum(device[key] for device in devices for key in keys)


def _replicas(device: Body) -> int:
    return _sum([device], "replicas_free", "replicas_allocated", "replicas_unhealthy")


def _wide_cells(node: Body) -> Row:
    devices = node["devices"]
    models = sorted({device["model"] for device in devices})
    sharing = sorted({device["sharing"] for device in devices})
    return (
        *(_joined(models), _joined(sharing), node["certainty"] or "-", node["observed_at"] or "-"),
        _joined(node["taints"]),
    )


def reason_lines(reasons: Iterable[Body]) -> list[str]:
    """Return a line for each reason, with its number of nodes."""
    return [f"{nodes_of(each['nodes'])}: {each['message']}" for each in reasons]


def nodes_of(count: int) -> str:
    return f"{count:,} node" if count == 1 else f"{count:,} nodes"


def _joined(names: list[str]) -> str:
    return ", ".join(names) or "-"


def _abbreviated(uuids: list[str]) -> str:
    """Return the first uuid, and the number of further ones."""
    return "-" if not uuids else uuids[0] if len(uuids) == 1 else f"{uuids[0]} +{len(uuids) - 1}"


def _sum_of_known(counts: Iterable[int | None]) -> str:
    """Return the sum of the known numbers of bytes; "-" if none is known."""
    known = [count for count in counts if count is not None]
    return gib(sum(known)) if known else "-"
