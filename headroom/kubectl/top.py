"""Formats `top`: the memory of nodes, GPUs and models. Only pure functions."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from headroom.contract.quantity import gib
from headroom.kubectl.table import STATE, Table

Body = Mapping[str, Any]
_BAR_WIDTH = 20


class SortBy(Enum):
    WORST = "worst"
    NAME = "name"
    HEADROOM = "headroom"
    RESERVED = "reserved"
    USED = "used"


@dataclass(frozen=True, slots=True)
class _Part:
    """A node or a device, with the values that `top` sorts and sums. All amounts are in bytes."""

    name: tuple[str, int]
    #: A name that is equal for devices that share one memory. Each of these devices has the figures
    #: of the whole memory.
    memory: str
    allocatable: int
    reserved: int
    unattributed: int
    used: int
    #: Memory that is free for reservation. A device with a problem counts as 0.
    headroom: int
    #: The smallest headroom of a device. It is negative if the device is overcommitted.
    worst: int
    #: Problems, worst first.
    problems: tuple[str, ...]
    #: 0 means overcommitted, 1 means unhealthy or closed to pods, 2 means cordoned, and 3 means no
    #: problem.
    severity: int
    #: The lowest headroom of a device, as a fraction of its memory.
    least_ratio: float


def nodes(body: Body, order: SortBy = SortBy.WORST, wide: bool = False) -> Table:
    """Return a row for each node, and the total.

    ``wide`` adds the free replicas, the models, the sharing, how certain it is which device the
    next pod gets, the age of the report, and the taints."""
    columns = ["NODE", "GPUS", "RESERVED", "USED", "HEADROOM", "WORST GPU"]
    if wide:
        columns += ["ALLOCATABLE", "UNATTRIBUTED", "FREE REPLICAS", "REPORT", "MODELS", "SHARING"]
        columns += ["NEXT DEVICE", "TAINTS"]
    table = Table((*columns, STATE))
    parts = {node["name"]: _of_node(node) for node in body["nodes"]}
    for node in sorted(body["nodes"], key=lambda node: _key(parts[node["name"]], order)):
        part, devices = parts[node["name"]], node["devices"]
        table.add(
            *(node["name"], str(len(devices)), gib(part.reserved), gib(part.used)),
            *(gib(part.headroom), gib(part.worst) if devices else "-"),
            *(_wide_cells(node, part) if wide else ()),
            _state(part, _no_replica(part, devices)),
            bad=bool(part.problems),
        )
    counts = counted(len(parts), "node"), counted(_devices_of(body), "GPU")
    table.total = total(", ".join(counts), list(parts.values()))
    return table


def devices(body: Body, order: SortBy = SortBy.WORST, wide: bool = False) -> Table:
    """Return a row for each GPU, and the total. ``wide`` adds model, sharing and UUID."""
    columns = ["NODE", "GPU", "RESERVED", "USED", "HEADROOM", "REPLICAS", "SM", "PODS"]
    if wide:
        columns += ["ALLOCATABLE", "UNATTRIBUTED", "MODEL", "SHARING", "RESOURCE", "UUID"]
    table = Table((*columns, STATE))
    found = [
        (_of_device(node, device), device) for node in body["nodes"] for device in node["devices"]
    ]
    for part, device in sorted(found, key=lambda each: _key(each[0], order)):
        amount = gib(part.unattributed)
        unattributed = "" if amount == gib(0) else f"{amount} unattributed"
        if (unreserved := gib(device["unreserved_pods_bytes"])) != gib(0):
            note = f"{unreserved} used by pods without a reservation"
            unattributed = "; ".join(filter(None, (note, unattributed)))
        wide_cells = (
            *(gib(part.allocatable), gib(part.unattributed), device["model"], device["sharing"]),
            *(device["resource"], device["uuid"]),
        )
        table.add(
            *(part.name[0], number(device), gib(part.reserved)),
            "-" if device["used_bytes"] < 0 else gib(part.used),
            *(gib(part.worst), f"{device['replicas_free']}/{_replicas(device)}"),
            *(percent(device["sm_activity_ratio"]), str(len(device["holders"]))),
            *(wide_cells if wide else ()),
            _state(part, unattributed or _no_replica(part, [device])),
            bad=bool(part.problems),
        )
    memories = _one_of_each_memory(part for part, _ in found)
    table.total = total(counted(len(found), "GPU"), memories)
    return table


def models(body: Body, wide: bool = False) -> Table:
    """Return a row for each GPU model from /v1/fleet, and the total.

    ``wide`` adds allocatable memory, unattributed use and free replicas.
    """
    columns = ["MODEL", "GPUS", "RESERVED", "USED", "HEADROOM"]
    columns += ["ALLOCATABLE", "UNATTRIBUTED", "FREE REPLICAS"] if wide else []
    table, parts = Table((*columns, STATE)), []
    for model in body["models"]:
        parts.append(part := _of_model(model))
        more = gib(part.allocatable), gib(part.unattributed), str(model["replicas_free"])
        table.add(
            *(model["model"], str(model["devices"]), gib(part.reserved), gib(part.used)),
            *(gib(part.headroom), *(more if wide else ())),
            _state(part),
            bad=bool(part.problems),
        )
    table.total = total(counted(sum(model["devices"] for model in body["models"]), "GPU"), parts)
    return table


def total(counts: str, parts: list[_Part]) -> list[str]:
    """Return the lines of a total: what was counted, then each amount with its percentage."""
    allocatable = sum(part.allocatable for part in parts)
    amounts = {
        "RESERVED": sum(part.reserved for part in parts),
        "USED": sum(part.used for part in parts),
        "HEADROOM": sum(part.headroom for part in parts),
    }
    lines = [f"TOTAL  {counts}, {gib(allocatable)} allocatable"]
    width = max(map(len, map(gib, amounts.values())))
    for name, amount in amounts.items():
        ratio = amount / allocatable if allocatable else 0.0
        lines.append(f"       {name:<8}  {gib(amount):>{width}}  {percent(ratio):>5}  {bar(ratio)}")
    return lines


def bar(ratio: float) -> str:
    """Return a ratio as a bar, which is empty only for 0 and full only from 1 on."""
    filled = round(_BAR_WIDTH * ratio)
    if 0 < ratio < 1:
        filled = min(max(filled, 1), _BAR_WIDTH - 1)
    filled = min(filled, _BAR_WIDTH)
    return f"[{'#' * filled}{'-' * (_BAR_WIDTH - filled)}]"


def percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.0f} %"


def number(device: Body) -> str:
    """Return the index of a device, or its UUID if the agent reports no index."""
    index = device["driver_index"]
    return str(device["uuid"] if index is None else index)


def place(device: Body) -> int:
    """Return a number that sorts devices by their index, and devices without an index first."""
    index: int | None = device["driver_index"]
    return -1 if index is None else index


def counted(count: int, noun: str) -> str:
    """Return the count with its noun, such as ``1 node`` or ``2,000 nodes``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def age(seconds: float | None) -> str:
    """Format an age as kubectl does: 12s, 3m, 5h, 2d."""
    if seconds is None:
        return "-"
    for unit, length_s in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length_s:
            return f"{int(seconds // length_s)}{unit}"
    return f"{max(0, int(seconds))}s"


def reason_of(node: Body) -> str:
    """Return why the node takes no pods, with the evidence; "" if it depends on the device."""
    message, detail = node["message"] or "", node["detail"] or ""
    return f"{message} ({detail})" if message and detail else message


def _of_device(node: Body, device: Body) -> _Part:
    headroom, allocatable = device["headroom_bytes"], device["allocatable_bytes"]
    unhealthy = device["unhealthy"] or ""
    if unhealthy and device["unhealthy_detail"]:
        unhealthy = device["unhealthy_detail"]
    cordoned = "cordoned" if node["cordoned"] or device["cordoned"] else ""
    problems, severity = _judged(headroom < 0, (reason_of(node), unhealthy), cordoned)
    return _Part(
        name=(node["name"], place(device)),
        memory=device["memory_id"],
        allocatable=allocatable,
        reserved=device["reserved_total_bytes"],
        unattributed=device["unattributed_bytes"],
        used=max(0, device["used_bytes"]),
        headroom=0 if problems else headroom,
        worst=min(0, headroom) if problems else headroom,
        problems=problems,
        severity=severity,
        least_ratio=headroom / allocatable if allocatable > 0 else 0.0,
    )


def _of_node(node: Body) -> _Part:
    parts = [_of_device(node, device) for device in node["devices"]]
    details = [d["unhealthy_detail"] or d["unhealthy"] for d in node["devices"] if d["unhealthy"]]
    unhealthy = ""
    if details:
        which = f"{len(details)} of {len(parts)} GPUs unhealthy" if len(parts) > 1 else "unhealthy"
        unhealthy = f"{which}: {'; '.join(dict.fromkeys(details))}"
    over = any(part.worst < 0 for part in parts)
    devices = sum(device["cordoned"] for device in node["devices"])
    cordoned = f"{devices} of {len(parts)} GPUs cordoned" if devices else ""
    problems, severity = _judged(
        over, (reason_of(node), unhealthy), "cordoned" if node["cordoned"] else cordoned
    )
    memories = _one_of_each_memory(parts)
    return _Part(
        name=(node["name"], 0),
        memory=node["name"],
        allocatable=sum(part.allocatable for part in memories),
        reserved=sum(part.reserved for part in memories),
        unattributed=sum(part.unattributed for part in memories),
        used=sum(part.used for part in memories),
        headroom=sum(part.headroom for part in memories),
        worst=min((part.worst for part in parts), default=0),
        problems=problems,
        severity=severity,
        least_ratio=min((part.least_ratio for part in parts), default=0.0),
    )


def _one_of_each_memory(parts: Iterable[_Part]) -> list[_Part]:
    """Return one device of each memory, preferably a device that takes pods."""
    found: dict[str, _Part] = {}
    for part in sorted(parts, key=lambda part: bool(part.problems)):
        found.setdefault(part.memory, part)
    return list(found.values())


def _judged(over: bool, closed: tuple[str, ...], cordoned: str) -> tuple[tuple[str, ...], int]:
    """Return the problems and the severity.

    ``closed`` has the reasons why no pods are taken. Empty texts are ignored. ``cordoned`` names
    what is cordoned, or is empty."""
    problems = ("overcommitted" if over else "", *closed, cordoned)
    severity = 0 if over else 1 if any(closed) else 2 if cordoned else 3
    return tuple(filter(None, problems)), severity


def _of_model(model: Body) -> _Part:
    names = "overcommitted", "unhealthy", "cordoned"
    counts = {name: model[name] for name in names if model[name]}
    return _Part(
        name=(model["model"], 0),
        memory=model["model"],
        allocatable=model["allocatable_bytes"],
        reserved=model["reserved_total_bytes"],
        unattributed=model["unattributed_bytes"],
        used=model["used_bytes"],
        headroom=model["headroom_bytes"],
        worst=0,
        problems=tuple(f"{counted(count, 'GPU')} {name}" for name, count in counts.items()),
        severity=3,
        least_ratio=0.0,
    )


def _key(part: _Part, order: SortBy) -> Any:
    match order:
        case SortBy.WORST:
            over = part.worst if part.severity == 0 else 0
            return part.severity, over, part.least_ratio, part.name
        case SortBy.NAME:
            return part.name
        case SortBy.HEADROOM:
            return part.headroom, part.worst, part.name
        case SortBy.RESERVED:
            return -part.reserved, part.name
        case SortBy.USED:
            return -part.used, part.name


def _state(part: _Part, note: str = "") -> str:
    return "; ".join(filter(None, (*part.problems, note))) or "ok"


def _no_replica(part: _Part, on: Iterable[Body]) -> str:
    """Return a note if pods cannot use the headroom because all replicas are taken."""
    taken = part.headroom > 0 and not any(device["replicas_free"] for device in on)
    return "no free replica" if taken else ""


def _wide_cells(node: Body, part: _Part) -> Iterator[str]:
    devices = node["devices"]
    yield gib(part.allocatable)
    yield gib(part.unattributed)
    yield str(sum(device["replicas_free"] for device in devices))
    yield age(node["report_age_s"])
    yield joined({device["model"] for device in devices})
    yield joined({device["sharing"] for device in devices})
    yield node["certainty"] or "-"
    yield joined(node["taints"])


def joined(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "-"


def _devices_of(body: Body) -> int:
    return sum(len(node["devices"]) for node in body["nodes"])


def _replicas(device: Body) -> int:
    return _sum(device, "replicas_free", "replicas_allocated", "replicas_unhealthy")


def _sum(device: Body, *keys: str) -> int:
    return sum(device[key] for key in keys)
