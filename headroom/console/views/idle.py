"""The pods that hold GPU memory and use no SM, by owner and namespace, with their costs."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query
from starlette.responses import Response

from headroom.console.responses import UNKNOWN, Body, InNamespace, encoded, listed
from headroom.console.times import Time
from headroom.console.view import View
from headroom.console.view_context import Context, InContext, Newest
from headroom.contract.errors import BadQuantity
from headroom.contract.quantity import parse_bytes
from headroom.core.cluster.idle_pods import (
    IDLE_AFTER_S,
    IdlePod,
    devices_of_pod,
    idle_pods,
)
from headroom.core.placement.snapshot import Snapshot

_DAY_S, _HOUR_S = 86_400.0, 3600.0


class IdleSumView(View):
    """Sums over idle pods. A pod counts once on each of its devices."""

    pods: int
    held_bytes: int
    gpus_ratio: float
    """GPUs that the pods hold. A pod with half of a GPU's memory counts as 0.5."""
    gpu_days: float
    """Days for which the pods have been idle, each multiplied by the pod's share of a GPU."""
    cost: float | None
    """Cost of these GPU days, in the currency of setting gpu_hour_price; null if it is not set."""


class IdleTeamView(IdleSumView):
    namespace: str


class IdleOwnerView(IdleSumView):
    namespace: str
    kind: str
    """Kind and name of the controller. For a pod without a controller, Pod and the pod's name."""
    name: str


class IdleView(View):
    """A pod on one device."""

    namespace: str
    name: str
    uid: str
    node: str
    device: str
    owner_kind: str | None
    owner_name: str | None
    used_bytes: int | None
    """Memory in use; null if it is not measured."""
    reserved_bytes: int
    held_bytes: int
    gpu_ratio: float
    idle_since: Time
    idle_s: float
    gpu_days: float
    cost: float | None


class IdleBody(Body):
    after_s: float
    """Minimum idle time and minimum memory of this list."""
    least_held_bytes: int
    gpu_hour_price: float | None
    """Setting gpu_hour_price; null if it is not set."""
    devices_without_sm_activity: int
    """Number of devices whose SM activity is not known. Their pods are not listed."""
    teams: list[IdleTeamView]
    """Sorted by GPU days, most first."""
    owners: list[IdleOwnerView]
    pods: list[IdleView]


class IdlePodBody(Body):
    namespace: str
    name: str
    uid: str
    idle: bool | None
    """Whether it has been idle on all its devices for at least ``after_s``; null if unknown."""
    after_s: float
    idle_since: Time | None
    """When it became idle on the last of its devices; null unless it is idle on all of them."""
    idle_s: float | None
    held_bytes: int
    devices: list[str]


Hours = Annotated[
    float, Query(ge=0, le=100_000, description="Minimum idle time in hours.", examples=[2])
]
Held = Annotated[
    str,
    Query(
        max_length=64,
        description="Minimum memory that a pod holds on a device, as a quantity.",
        examples=["4Gi"],
    ),
]
AskedPod = Annotated[
    str | None,
    Query(
        pattern="^[^/]+/[^/]+$",
        max_length=512,
        description="Return whether this pod is idle, instead of the list.",
        examples=["default/notebook-0"],
    ),
]

routes = APIRouter()


@routes.get("/v1/idle", response_model=IdleBody | IdlePodBody, responses=UNKNOWN)
def idle(
    context: InContext,
    snap: Newest,
    hours: Hours = IDLE_AFTER_S / _HOUR_S,
    held: Held = "1Gi",
    namespace: InNamespace = "",
    pod: AskedPod = None,
) -> Response:
    """List the pods that hold memory of a device and have not used its SMs for some time, with sums
    by namespace and owner. No pod is evicted because it is idle. With ``pod``, return whether this
    pod is idle, for tools that stop idle notebooks: ``idle`` is true only if this is known for all
    its devices."""
    if pod is not None:
        return _one_pod(context, snap, pod, hours * _HOUR_S)
    least_bytes = _bytes(held)
    found = [
        each
        for each in idle_pods(
            context.cluster,
            snap,
            context.monotonic_s(),
            context.wall_s(),
            hours * _HOUR_S,
            least_bytes,
        )
        if namespace in ("", each.namespace)
    ]
    price = context.gpu_hour_price()
    teams: dict[str, list[IdlePod]] = defaultdict(list)
    owners: dict[tuple[str, str, str], list[IdlePod]] = defaultdict(list)
    for each in found:
        teams[each.namespace].append(each)
        # A pod without a controller counts as its own owner.
        owner = (each.owner_kind, each.owner_name) if each.owner_kind else ("Pod", each.name)
        owners[each.namespace, *owner].append(each)
    body = IdleBody(
        **context.head(snap),
        after_s=hours * _HOUR_S,
        least_held_bytes=least_bytes,
        gpu_hour_price=price,
        devices_without_sm_activity=sum(
            terms.device.sm_activity is None for node in snap.nodes for terms in node.devices
        ),
        teams=[IdleTeamView(namespace=name, **_sums(e, price)) for name, e in teams.items()],
        owners=[
            IdleOwnerView(namespace=name, kind=kind, name=owner, **_sums(each, price))
            for (name, kind, owner), each in owners.items()
        ],
        pods=[],
    )
    for sums in (body.teams, body.owners):
        sums.sort(key=lambda each: -each.gpu_days)
    return listed(body, "pods", (_view(each, price) for each in found))


def _one_pod(context: Context, snap: Snapshot, pod: str, after_s: float) -> Response:
    namespace, _, name = pod.partition("/")
    now_s, wall_s = context.monotonic_s(), context.wall_s()
    devices = devices_of_pod(context.cluster, snap, now_s, wall_s, namespace, name)
    if not devices:
        raise HTTPException(
            404,
            f"no fresh report of a node shows pod {namespace}/{name} on a device; "
            "GET /v1/nodes lists the nodes and the age of their reports",
        )
    last = min(devices, key=lambda each: each.idle_s)
    is_idle = bool(last.idle_since)
    return encoded(
        IdlePodBody(
            **context.head(snap),
            namespace=namespace,
            name=name,
            uid=last.uid,
            idle=_is_idle(devices, snap, after_s),
            after_s=after_s,
            idle_since=last.idle_since if is_idle else None,
            idle_s=round(last.idle_s, 1) if is_idle else None,
            held_bytes=sum(each.held_bytes for each in devices),
            devices=[each.device for each in devices],
        )
    )


def _is_idle(devices: Iterable[IdlePod], snap: Snapshot, after_s: float) -> bool | None:
    """Return whether a pod is idle on all of these devices, or None if that is not known."""
    measured = {
        terms.device.uuid
        for node in snap.nodes
        for terms in node.devices
        if terms.device.sm_activity is not None
    }
    # If the pod is active on one device, the others do not matter.
    if any(each.device in measured and each.idle_s < after_s for each in devices):
        return False
    return None if any(each.device not in measured for each in devices) else True


def _bytes(held: str) -> int:
    """Return a quantity from the query in bytes. Raises ``HTTPException``."""
    try:
        return parse_bytes(held)
    except BadQuantity as err:
        raise HTTPException(422, f"query held: {err}. Example: held=4Gi") from err


def _sums(pods: Iterable[IdlePod], price: float | None) -> dict[str, Any]:
    pods = list(pods)
    gpu_s = sum(each.gpu_s for each in pods)
    return {
        "pods": len({each.uid for each in pods}),
        "held_bytes": sum(each.held_bytes for each in pods),
        "gpus_ratio": round(sum(each.gpu_ratio for each in pods), 4),
        "gpu_days": round(gpu_s / _DAY_S, 4),
        "cost": _cost(gpu_s, price),
    }


def _cost(gpu_s: float, price: float | None) -> float | None:
    return None if price is None else round(gpu_s / _HOUR_S * price, 2)


def _view(each: IdlePod, price: float | None) -> IdleView:
    return IdleView.of(
        each,
        gpu_ratio=round(each.gpu_ratio, 4),
        idle_s=round(each.idle_s, 1),
        gpu_days=round(each.gpu_s / _DAY_S, 4),
        cost=_cost(each.gpu_s, price),
    )
