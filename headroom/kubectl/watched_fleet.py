"""The GPUs that `top --watch` lists, from answers of /v1/map. No I/O.

The first answer has all nodes in columns, later ones only the nodes that changed.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

Body = Mapping[str, Any]

#: Words for the values of column ``risk``, as on the page's map; they fit narrow terminals.
RISKS = ("no risk", "overuse", "unhealthy", "full soon", "overcommitted")
#: Kinds of risks in /v1/overview and /v1/nodes/NODE/devices/UUID with another word on the page.
KINDS = {"growing": "full soon"}
_OVERCOMMITTED = 4
_UNHEALTHY, _CORDONED = 1, 2
#: (risk, state) -> the problems of a GPU, the worst first.
_PROBLEMS = {
    (risk, state): tuple(dict.fromkeys(filter(None, (RISKS[risk] if risk else "", of_state))))
    for risk in range(len(RISKS))
    for state, of_state in ((0, ""), (_UNHEALTHY, "unhealthy"), (_CORDONED, "cordoned"))
}
_STALE = "GPU report of the node is stale"


class Order(Enum):
    """Orders of the list; the value is the name that is shown."""

    WORST = "worst"
    NAME = "name"
    RESERVED = "reserved"
    USED = "used"
    SM = "SM"


@dataclass(frozen=True, slots=True)
class Row:
    """A GPU, or a node with the sums of its GPUs. Shares are in percent; -1: unknown."""

    node: str
    #: Name of the GPU; for a node, of its GPU with the highest risk, of several the fullest. None:
    #: the node reports no GPU.
    gpu: str | None
    model: str
    devices: int
    memory_gib: float
    reserved: int
    used: int
    sm: int
    #: The highest risk, a position in ``RISKS``.
    risk: int
    #: Problems, the worst first.
    problems: tuple[str, ...]

    @property
    def severity(self) -> int:
        """0: overcommitted, 1: another risk, 2: another problem, 3: none."""
        if self.risk:
            return 0 if self.risk == _OVERCOMMITTED else 1
        return 2 if self.problems else 3


class WatchedFleet:
    """All GPUs as the last answers showed them."""

    def __init__(self) -> None:
        #: Send it as ``after``.
        self.version = ""
        #: Node -> why it takes no pods (empty if it does), and its GPUs without that reason.
        self._nodes: dict[str, tuple[str, list[Row]]] = {}
        self._stale: set[str] = set()
        self._cordoned: set[str] = set()

    def take(self, body: Body) -> None:
        """Apply an answer of /v1/map."""
        if body["complete"]:
            self._nodes.clear()
        end = 0
        for name, reason, count in zip(body["node"], body["reason"], body["devices"], strict=True):
            begin, end = end, end + count
            found = [_gpu(body, name, position) for position in range(begin, end)]
            self._nodes[name] = body["reasons"][reason], found
        self._stale, self._cordoned = set(body["stale"]), set(body["cordoned"])
        self.version = body["version"]

    def gpus(self) -> list[Row]:
        """Return a row for each GPU; its problems include those of its node."""
        rows: list[Row] = []
        for name, (reason, devices) in self._nodes.items():
            of_node = self._of_node(name, reason)
            rows += (
                [_with(each, (*of_node, *each.problems)) for each in devices]
                if of_node
                else devices
            )
        return rows

    def nodes(self) -> list[Row]:
        """Return a row for each node. Its problems are those of the node, then of its GPUs."""
        return [
            _sum(name, self._of_node(name, reason), devices)
            for name, (reason, devices) in self._nodes.items()
        ]

    def _of_node(self, name: str, reason: str) -> tuple[str, ...]:
        closed = reason or (_STALE if name in self._stale else "")
        return tuple(filter(None, (closed, "node cordoned" if name in self._cordoned else "")))


def ordered(rows: list[Row], order: Order, search: str = "", troubled: bool = False) -> list[Row]:
    """Return the rows to list, in order. ``search``: a part of the name, model or a problem."""
    text = search.lower()
    found = [
        row
        for row in rows
        if (not troubled or row.problems)
        and (not text or any(text in word.lower() for word in (row.node, row.model, *row.problems)))
    ]
    match order:
        case Order.WORST:
            return sorted(
                found, key=lambda row: (row.severity, -row.risk, -row.reserved, *_at(row))
            )
        case Order.RESERVED:
            return sorted(found, key=lambda row: (-row.reserved, *_at(row)))
        case Order.USED:
            return sorted(found, key=lambda row: (-row.used, *_at(row)))
        case Order.SM:
            return sorted(found, key=lambda row: (-row.sm, *_at(row)))
    return sorted(found, key=_at)


def _at(row: Row) -> tuple[str, int, str]:
    """Return a key that sorts by node and then by index; GPUs without one come last."""
    name = row.gpu or ""
    return row.node, int(name) if name.isdecimal() else sys.maxsize, name


def _gpu(body: Body, name: str, position: int) -> Row:
    state, risk = body["state"][position], body["risk"][position]
    return Row(
        node=name,
        gpu=body["gpu"][position],
        model=body["models"][body["model"][position]],
        devices=1,
        memory_gib=body["memory_gib"][position],
        reserved=body["reserved"][position],
        used=body["used"][position],
        sm=body["sm"][position],
        risk=risk,
        problems=_PROBLEMS[risk, state],
    )


def _with(row: Row, problems: tuple[str, ...]) -> Row:
    """Return the row with other problems; a copy by ``replace`` takes three times as long."""
    fields = (row.node, row.gpu, row.model, row.devices, row.memory_gib, row.reserved, row.used)
    return Row(*fields, row.sm, row.risk, problems)


def _sum(name: str, of_node: tuple[str, ...], devices: list[Row]) -> Row:
    worst = max(devices, key=lambda row: (row.risk, row.reserved), default=None)
    return Row(
        node=name,
        gpu=worst.gpu if worst else None,
        model=", ".join(sorted({row.model for row in devices})),
        devices=len(devices),
        memory_gib=sum(row.memory_gib for row in devices),
        reserved=_mean([(row.reserved, row.memory_gib) for row in devices]),
        used=_mean([(row.used, row.memory_gib) for row in devices]),
        sm=_mean([(row.sm, 1.0) for row in devices]),
        risk=worst.risk if worst else 0,
        problems=(*of_node, *_counted(devices)),
    )


def _mean(shares: list[tuple[int, float]]) -> int:
    """Return the mean share by weight; -1 if any is unknown."""
    whole = sum(weight for _, weight in shares)
    if not whole or any(share < 0 for share, _ in shares):
        return -1
    return round(sum(share * weight for share, weight in shares) / whole)


def _counted(devices: list[Row]) -> list[str]:
    """Return each problem of the GPUs, with their number if it is not that of all."""
    counts: dict[str, int] = {}
    for row in sorted(devices, key=lambda row: -row.risk):
        for problem in row.problems:
            counts[problem] = counts.get(problem, 0) + 1
    whole = len(devices)
    return [
        problem if count == whole else f"{count} of {whole} GPUs: {problem}"
        for problem, count in counts.items()
    ]
