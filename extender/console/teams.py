"""GPU memory by namespace and by owner: reserved, in use, peak, unused, and pods that wait."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from extender.console.pods import shared_rows
from extender.console.responses import Body, InNamespace, joined
from extender.console.view_context import Context, InContext, Newest
from extender.placement.snapshot import Snapshot
from extender.state.gpu_pods import GpuPod, GpuPods

Limit = Annotated[
    int, Query(ge=1, le=10_000, description="Maximum number of owners.", examples=[200])
]


class UseOfMemoryView(BaseModel):
    """Sums over pods, and over all devices of each pod."""

    pods: int
    #: Pods that are not bound, and what they request; they are not in the other sums. A share of a
    #: device counts as 0, because its size is not known yet.
    waiting_pods: int
    waiting_bytes: int
    reserved_bytes: int
    used_bytes: int
    #: Sum of the peaks of the containers since they started.
    peak_bytes: int
    #: Reserved and not in use.
    unused_bytes: int
    #: In use beyond the reservations.
    overuse_bytes: int
    #: Pods whose use is not measured; their reservations are neither in use nor unused.
    unmeasured_pods: int


class TeamView(UseOfMemoryView):
    namespace: str


class OwnerView(UseOfMemoryView):
    namespace: str
    #: Kind and name of the controller; Pod and its own name without one.
    kind: str
    name: str


class TeamsBody(Body):
    #: By namespace, the most unused memory first.
    teams: list[TeamView]
    #: Number of all owners.
    matching: int
    #: The most unused memory first.
    owners: list[OwnerView]


#: Key of a sum: namespace, kind and name of the owner.
_Owner = tuple[str, str, str]
_FIELDS = tuple(UseOfMemoryView.model_fields)

routes = APIRouter()


@routes.get("/v1/teams", response_model=TeamsBody)
def teams(
    context: InContext,
    request: Request,
    snap: Newest,
    namespace: InNamespace = "",
    limit: Limit = 200,
) -> Response:
    """Return the memory that namespaces and owners reserve and use, the most wasteful first."""
    return context.answers.of(
        request,
        context.monotonic_s(),
        lambda: _answer(context, snap, shared_rows(request), namespace, limit),
    )


def _answer(
    context: Context, snap: Snapshot, rows: GpuPods, namespace: str, limit: int
) -> Response:
    by_owner = _by_owner(rows.of(context.cluster, snap))
    by_namespace: dict[str, _Sums] = {}
    for (of, _, _), sums in by_owner.items():
        by_namespace.setdefault(of, _Sums()).add(sums)
    owners = [each for each in by_owner.items() if namespace in ("", each[0][0])]
    owners.sort(key=lambda each: (-each[1].unused_bytes, each[0]))
    body = TeamsBody(
        **context.head(snap),
        matching=len(owners),
        teams=[
            TeamView(namespace=of, **asdict(sums))
            for of, sums in sorted(by_namespace.items(), key=lambda e: (-e[1].unused_bytes, e[0]))
        ],
        owners=[],
    )
    views = (
        OwnerView(namespace=of, kind=kind, name=name, **asdict(sums))
        for (of, kind, name), sums in owners[:limit]
    )
    return joined(body, "owners", views)


@dataclass(slots=True)
class _Sums:
    """The fields of ``UseOfMemoryView``, to add to: a large fleet has 100,000 pods."""

    pods: int = 0
    waiting_pods: int = 0
    waiting_bytes: int = 0
    reserved_bytes: int = 0
    used_bytes: int = 0
    peak_bytes: int = 0
    unused_bytes: int = 0
    overuse_bytes: int = 0
    unmeasured_pods: int = 0

    def add(self, sums: "_Sums") -> None:
        for name in _FIELDS:
            setattr(self, name, getattr(self, name) + getattr(sums, name))


def _by_owner(pods: Iterable[GpuPod]) -> dict[_Owner, _Sums]:
    found: dict[_Owner, _Sums] = {}
    for pod in pods:
        sums = found.setdefault((pod.namespace, pod.owner_kind, pod.owner_name), _Sums())
        if not pod.node:
            sums.waiting_pods += 1
            sums.waiting_bytes += pod.waiting_bytes
            continue
        sums.pods += 1
        sums.reserved_bytes += pod.reserved_bytes
        sums.peak_bytes += pod.peak_bytes
        sums.unmeasured_pods += pod.used_bytes is None
        sums.used_bytes += pod.used_bytes or 0
        sums.unused_bytes += pod.unused_bytes
        sums.overuse_bytes += pod.overuse_bytes
    return found
