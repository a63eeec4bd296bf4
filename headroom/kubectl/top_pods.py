"""Formats `top pod`: the memory of pods. Only pure functions."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headroom.contract.quantity import gib
from headroom.kubectl.table import STATE, Table
from headroom.kubectl.top import SortBy, joined, number, place

Body = Mapping[str, Any]
#: Maximum number of GPUs of a pod without a report that are listed by number.
_FEW = 2


@dataclass(frozen=True, slots=True)
class _Held:
    """A pod that holds memory of a device. Several devices are possible until a report shows which
    one it uses."""

    node: Body
    #: For each memory that may hold the pod, the devices that share it.
    places: tuple[tuple[Body, ...], ...]
    #: The entries of the pod, one for each place.
    entries: tuple[Body, ...]

    @property
    def used(self) -> int:
        return int(self.entries[0]["measured_bytes"] or 0)

    @property
    def is_unreserved(self) -> bool:
        """Whether the pod uses the memory without a reservation."""
        return bool(self.entries[0].get("unreserved"))

    @property
    def overcommits(self) -> bool:
        """Whether the pod has no reservation and its device is overcommitted."""
        return self.is_unreserved and any(each["headroom_bytes"] < 0 for each in self.devices)

    @property
    def requested(self) -> int:
        return max(int(entry["requested_bytes"]) for entry in self.entries)

    @property
    def overuse(self) -> int:
        if self.is_unreserved:
            return 0
        return max(0, self.used - self.requested)

    @property
    def overuse_text(self) -> str:
        """How much more than reserved the pod uses, and whether it is evicted because of that."""
        uuids, uid = {device["uuid"] for device in self.devices}, self.entries[0]["uid"]
        messages = (
            f"; {each['message']}"
            for each in self.node["overuse"]
            if each["uid"] == uid and each["device"] in uuids
        )
        return f"uses {gib(self.overuse)} more than reserved{next(messages, '')}"

    @property
    def limit(self) -> Body | None:
        """The limit of the pod, or None if it has none. An older console reports no limits."""
        uuids, uid = {device["uuid"] for device in self.devices}, self.entries[0]["uid"]
        found = (
            each
            for each in self.node.get("pod_limits", ())
            if each["uid"] == uid and each["device"] in uuids
        )
        return max(found, key=lambda each: int(each["limit_bytes"]), default=None)

    @property
    def devices(self) -> list[Body]:
        return [device for place in self.places for device in place]


def pods(
    body: Body,
    namespace: str | None,
    order: SortBy = SortBy.WORST,
    wide: bool = False,
    names: Collection[str] = (),
) -> Table:
    """Return a row for each pod in each memory, for one namespace or for all (None). If
    ``names`` is not empty, return only pods with these names.

    A pod that no report shows yet has one row for all GPUs on which it may be. If several GPUs
    share the memory, the row has the numbers of all of them. ``wide`` adds the model and the uids.
    Pods that use memory without a reservation are shown too. If a pod has a limit, the limits and
    classes of all pods are shown.
    """
    held = (
        each for each in _held(body, namespace) if not names or each.entries[0]["name"] in names
    )
    shown = sorted(held, key=_pod_key(order))
    has_limits = any(each.limit for each in shown)
    columns = ["NAMESPACE", "POD", "NODE", "GPU", "RESERVED"]
    columns += ["LIMIT", "USED", "CLASS"] if has_limits else ["USED"]
    columns += ["MODEL", "GPU UUID", "POD UID"] if wide else []
    table = Table((*columns, STATE))
    for each in shown:
        pod, models = each.entries[0], {str(device["model"]) for device in each.devices}
        state = "ok" if pod["observed"] else "unconfirmed"
        if each.is_unreserved:
            state = "no reservation"
            state += "; its GPU is overcommitted" if each.overcommits else ""
        uuids, limit = ", ".join(device["uuid"] for device in each.devices), each.limit
        table.add(
            *(
                pod["namespace"] or "-",
                pod["name"] or pod["uid"],
                each.node["name"],
                _numbers(each.places),
            ),
            "-" if each.is_unreserved else gib(each.requested),
            *((gib(limit["limit_bytes"]) if limit else "-",) if has_limits else ()),
            "-" if pod["measured_bytes"] is None else gib(each.used),
            *((limit["memory_class"] if limit else "unlimited",) if has_limits else ()),
            *((joined(models), uuids, pod["uid"]) if wide else ()),
            each.overuse_text if each.overuse else state,
            bad=bool(each.overuse) or each.overcommits,
        )
    return table


def _pod_key(order: SortBy) -> Callable[[_Held], Any]:
    def key(held: _Held) -> Any:
        pod = held.entries[0]
        name = pod["namespace"], pod["name"], place(held.devices[0])
        amounts = {
            SortBy.WORST: (-(held.used if held.overcommits else held.overuse), -held.used),
            SortBy.RESERVED: (-held.requested,),
            SortBy.USED: (-held.used,),
        }
        return *amounts.get(order, ()), *name

    return key


def _held(body: Body, namespace: str | None) -> Iterator[_Held]:
    for node in body["nodes"]:
        memories: dict[str, list[Body]] = {}
        for device in node["devices"]:
            memories.setdefault(device["memory_id"], []).append(device)
        unconfirmed: dict[str, list[tuple[tuple[Body, ...], Body]]] = {}
        for mates in map(tuple, memories.values()):
            for entry in mates[0]["holders"]:
                if namespace not in (None, entry["namespace"]):
                    continue
                if entry["observed"]:
                    yield _Held(node, (mates,), (entry,))
                else:
                    unconfirmed.setdefault(entry["uid"], []).append((mates, entry))
        for each in node.get("unreserved_pods", ()):  # an older console has none
            if namespace in (None, each["namespace"]):
                yield _unreserved(node, each, memories.values())
        for found in unconfirmed.values():
            yield _Held(node, *zip(*found, strict=True))


def _unreserved(node: Body, pod: Body, memories: Iterable[list[Body]]) -> _Held:
    mates = next(
        tuple(each) for each in memories if any(one["uuid"] == pod["device"] for one in each)
    )
    entry = {"requested_bytes": 0, "measured_bytes": pod["used_bytes"], "observed": True}
    return _Held(node, (mates,), ({**pod, **entry, "unreserved": True},))


def _numbers(places: tuple[tuple[Body, ...], ...]) -> str:
    if len(places) > _FEW:
        return f"any of {sum(map(len, places))}"
    return " or ".join(", ".join(map(number, place)) for place in places)
