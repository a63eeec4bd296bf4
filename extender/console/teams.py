"""GPU memory by namespace and by owner: reserved, in use, peak, unused, and pods that wait."""

from collections.abc import Iterable, Iterator
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel
from starlette.responses import Response

from extender.console.responses import Body, InNamespace, listed
from extender.console.view_context import Context, InContext, Newest
from extender.placement.snapshot import Snapshot
from extender.state.idle_pods import owner_of
from extender.state.overuse import first_of_each_memory

Limit = Annotated[
    int, Query(ge=1, le=10_000, description="Maximum number of owners.", examples=[200])
]


class UseOfMemoryView(BaseModel):
    """Sums over pods, and over all devices of each pod."""

    pods: int
    #: Pods that are not bound; they are not in the other sums.
    waiting_pods: int
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
    context: InContext, snap: Newest, namespace: InNamespace = "", limit: Limit = 200
) -> Response:
    """Return the memory that namespaces and owners reserve and use, the most wasteful first."""
    by_owner = _by_owner(context, snap)
    by_namespace: dict[str, UseOfMemoryView] = {}
    for (of, _, _), sums in by_owner.items():
        _add(by_namespace.setdefault(of, _nothing()), sums)
    owners = [each for each in by_owner.items() if namespace in ("", each[0][0])]
    owners.sort(key=lambda each: (-each[1].unused_bytes, each[0]))
    body = TeamsBody(
        **context.head(snap),
        matching=len(owners),
        teams=[
            TeamView(namespace=of, **sums.model_dump())
            for of, sums in sorted(by_namespace.items(), key=lambda e: (-e[1].unused_bytes, e[0]))
        ],
        owners=[],
    )
    views = (
        OwnerView(namespace=of, kind=kind, name=name, **sums.model_dump())
        for (of, kind, name), sums in owners[:limit]
    )
    return listed(body, "owners", views)


def _nothing() -> UseOfMemoryView:
    return UseOfMemoryView(**dict.fromkeys(_FIELDS, 0))


def _add(to: UseOfMemoryView, sums: UseOfMemoryView) -> None:
    for name in _FIELDS:
        setattr(to, name, getattr(to, name) + getattr(sums, name))


def _by_owner(context: Context, snap: Snapshot) -> dict[_Owner, UseOfMemoryView]:
    found: dict[_Owner, UseOfMemoryView] = {}
    seen: set[str] = set()
    for uid, owner, requested_bytes, measured_bytes, peak_bytes in _held(context, snap):
        sums = found.setdefault(owner, _nothing())
        sums.pods += uid not in seen
        sums.reserved_bytes += requested_bytes
        sums.peak_bytes += peak_bytes
        if measured_bytes is None:
            sums.unmeasured_pods += uid not in seen
        else:
            sums.used_bytes += measured_bytes
            sums.unused_bytes += max(0, requested_bytes - measured_bytes)
            sums.overuse_bytes += max(0, measured_bytes - requested_bytes)
        seen.add(uid)
    for pod in context.cluster.unbound():
        kind, name = owner_of(pod)
        owner = (pod.metadata.namespace, kind or "Pod", name or pod.metadata.name)
        found.setdefault(owner, _nothing()).waiting_pods += 1
    return found


def _held(context: Context, snap: Snapshot) -> Iterator[tuple[str, _Owner, int, int | None, int]]:
    """Yield uid, owner, reservation, use and peak of each pod on each of its devices."""
    cluster = context.cluster
    for node in snap.nodes:
        gpunode = cluster.gpunode(node.name)
        rows: Iterable[tuple[tuple[str, str], int]] = (
            ((row.uid, row.device), row.peak_bytes or 0)
            for row in (gpunode.status.pods if gpunode and gpunode.status else ())
        )
        peaks: dict[tuple[str, str], int] = {}
        for key, peak_bytes in rows:
            peaks[key] = peaks.get(key, 0) + peak_bytes
        for terms in first_of_each_memory(node.devices):
            for holder in terms.holders:
                if not holder.observed:
                    continue  # it is on one of several candidate devices
                kind, name = owner_of(cluster.pod(holder.uid))
                yield (
                    holder.uid,
                    (holder.namespace, kind or "Pod", name or holder.name),
                    holder.requested_bytes,
                    holder.measured_bytes,
                    peaks.get((holder.uid, terms.device.uuid), 0),
                )
