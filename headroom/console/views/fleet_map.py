"""All devices of the fleet in columns, for the page's map. Later calls return only changed nodes.

With one object for each of 40,000 devices, the answer would have 20 MB. In columns, a value takes
only one number.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np
from fastapi import APIRouter, Query
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from headroom.console.responses import Body, encoded, stamp
from headroom.console.times import whole_second
from headroom.console.view_context import Context, InContext, Newest
from headroom.console.views.risks import risk_levels
from headroom.contract.printable import printable_json
from headroom.core.placement.device_accounting import DeviceTerms
from headroom.core.placement.explain import certainty
from headroom.core.placement.snapshot import REASONS, NodeTerms, Snapshot

#: Labels that name the pool of a node. The first label that a node has counts.
POOL_LABELS = (
    "cloud.google.com/gke-nodepool",
    "eks.amazonaws.com/nodegroup",
    "kubernetes.azure.com/agentpool",
    "karpenter.sh/nodepool",
    "node.kubernetes.io/instance-type",
)
#: Higher percentages, which overcommitted devices can have, are reported as this value.
MOST_PERCENT = 999
UNKNOWN = -1
#: Values of column ``state``.
HEALTHY, UNHEALTHY, CORDONED = range(3)

Label = Annotated[
    str,
    Query(
        max_length=317,
        description="Group the nodes by this label. Default: the pool that they belong to.",
        examples=["topology.kubernetes.io/zone"],
    ),
]
After = Annotated[
    str,
    Query(
        max_length=200,
        description="The ``version`` of an earlier answer. Return only nodes that changed since "
        "then.",
        examples=["6f0c.1a2b.17"],
    ),
]


class MapBody(Body):
    version: str
    """Send this value as ``after`` to get only the changes."""
    complete: bool
    """Whether all nodes are listed. If not, the other nodes are as in the earlier answer."""
    models: list[str]
    """Names of models, of groups and of device choices. Columns contain positions in these
    lists."""
    groups: list[str]
    choices: list[str]
    reasons: list[str]
    """Sentences that state why a node takes no pods. The first is empty."""
    node: list[str]
    """One value for each node: its name, group, reason, device choice, and number of devices."""
    group: list[int]
    reason: list[int]
    choice: list[int]
    devices: list[int]
    gpu: list[str]
    """One value for each device, in the order of the nodes. gpu is its name, as in the list of
    nodes. reserved and used are shares of the device's memory in percent, and sm is its SM activity
    in percent. -1 means unknown."""
    model: list[int]
    memory_gib: list[float]
    reserved: list[int]
    used: list[int]
    sm: list[int]
    state: list[int]
    """0: takes pods, 1: unhealthy, 2: cordoned."""
    risk: list[int]
    """0: none, 1: overuse, 2: unhealthy with pods, 3: full soon, 4: overcommitted."""
    stale: list[str]
    """Names of all nodes whose report is stale, and of all cordoned nodes. Always complete, even if
    only changes are listed."""
    cordoned: list[str]


routes = APIRouter()


@routes.get("/v1/map", response_model=MapBody)
def fleet_map(
    context: InContext,
    request: Request,
    snap: Newest,
    label: Label = "",
    after: After = "",
) -> Response:
    """Return all devices in columns, or only the devices of nodes that changed after a version."""
    return context.answers.of(
        request, context.monotonic_s(), lambda: _answer(context, snap, label, after)
    )


def _answer(context: Context, snap: Snapshot, label: str, after: str) -> Response:
    base = f"{context.replica}.{snap.names_hash & 0xFFFFFFFF:x}."
    generation = after.removeprefix(base)
    complete = not (after.startswith(base) and generation.isdecimal())
    nodes: Sequence[NodeTerms] = snap.nodes
    if not complete:
        rows = np.flatnonzero(snap.updated_in > int(generation)).tolist()
        nodes = [snap.nodes[row] for row in rows]
    devices = [each for node in nodes for each in node.devices]
    levels = risk_levels(context, snap)
    body = {
        "api_version": "headroom.gpu/v1",
        **context.head(snap),
        "generated_at": whole_second(stamp(context.wall_s())),
        "version": f"{base}{snap.generation}",
        "complete": complete,
        **_of_nodes(context, nodes, label),
        **_of_devices(devices),
        "risk": [levels.get(each.device.uuid, 0) for each in devices],
        **_flagged(context, snap),
    }
    return encoded(printable_json(msgspec.json.encode(body).decode()))


class _Names:
    """Numbers names in the order of their first appearance."""

    def __init__(self, *names: str) -> None:
        self.numbers = {name: number for number, name in enumerate(names)}

    def of(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))


def group_of(context: Context, node: str, label: str) -> str:
    """Return the value of the node's label, or its pool without a label; "" if it has none."""
    kube_node = context.cluster.node(node)
    labels = (kube_node.metadata.labels if kube_node else None) or {}
    wanted = (label,) if label else POOL_LABELS
    return next((labels[each] for each in wanted if each in labels), "")


def _of_nodes(
    context: Context, nodes: Iterable[NodeTerms], label: str
) -> Mapping[str, list[str] | list[int]]:
    groups, choices = _Names(), _Names()
    names: list[str] = []
    group: list[int] = []
    reason: list[int] = []
    choice: list[int] = []
    devices: list[int] = []
    codes = {each: code for code, each in enumerate(REASONS)}
    for node in nodes:
        names.append(node.name)
        group.append(groups.of(group_of(context, node.name, label)))
        reason.append(codes[node.reason])
        choice.append(choices.of(certainty(node) if node.devices else ""))
        devices.append(len(node.devices))
    return {
        "groups": list(groups.numbers),
        "choices": list(choices.numbers),
        "reasons": [each.sentence if each else "" for each in REASONS],
        "node": names,
        "group": group,
        "reason": reason,
        "choice": choice,
        "devices": devices,
    }


def _of_devices(
    terms: Sequence[DeviceTerms],
) -> Mapping[str, list[str] | list[int] | list[float]]:
    models = _Names()
    memory = np.array([each.device.memory_bytes for each in terms], np.float64)
    reserved = [each.reservation_bytes + each.unconfirmed_bytes for each in terms]
    used = [each.device.used_bytes for each in terms]
    activities = [each.device.sm_activity for each in terms]
    sm = [UNKNOWN if each is None else round(100 * each.ratio) for each in activities]
    numbers = [models.of(each.device.model) for each in terms]
    return {
        "models": list(models.numbers),
        "gpu": [each.device.name for each in terms],
        "model": numbers,
        "memory_gib": np.round(np.maximum(memory, 0) / (1 << 30), 1).tolist(),
        "reserved": _percent(reserved, memory),
        "used": _percent(used, memory),
        "sm": sm,
        "state": [
            CORDONED if each.cordoned else UNHEALTHY if each.health_issue else HEALTHY
            for each in terms
        ],
    }


def _percent(parts: Sequence[int], memory: NDArray[np.float64]) -> list[int]:
    shares = np.array(parts, np.float64)
    percent = np.rint(100 * shares / np.maximum(memory, 1))
    known = (shares >= 0) & (memory > 0)
    found: list[int] = (
        np.where(known, np.minimum(percent, MOST_PERCENT), UNKNOWN).astype(np.int64).tolist()
    )
    return found


def _flagged(context: Context, snap: Snapshot) -> Mapping[str, list[str]]:
    stale = np.flatnonzero((snap.node_reason == 0) & (snap.fresh_until_s < context.monotonic_s()))
    return {
        "stale": [snap.nodes[row].name for row in stale.tolist()],
        "cordoned": [name for name in context.cluster.cordoned_nodes() if name in snap.row_of],
    }
