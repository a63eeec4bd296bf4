"""GPU memory by namespace and by owner: reserved, used, peak and unused memory, and waiting
pods."""

from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest, nsmallest
from operator import add
from threading import Lock
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from headroom.console.facts.gpu_pods import GpuPod, GpuPods
from headroom.console.responses import Body, InNamespace, joined
from headroom.console.view import View
from headroom.console.view_context import Context, InContext, Newest, shared
from headroom.console.views.pods import shared_rows
from headroom.core.cluster.cluster import Cluster
from headroom.core.placement.per_node import PerNode, Sums
from headroom.core.placement.snapshot import Snapshot

Limit = Annotated[
    int, Query(ge=1, le=10_000, description="Maximum number of owners.", examples=[200])
]


class UseOfMemoryView(View):
    """Sums over pods and over all devices of each pod."""

    pods: int
    waiting_pods: int
    """Number of unbound pods, and the bytes that they request. They are not in the other sums. A
    share of a device counts as 0, because its size is not known yet."""
    waiting_bytes: int
    reserved_bytes: int
    used_bytes: int
    peak_bytes: int
    """Sum of the peaks of the containers since they started."""
    unused_bytes: int
    """Memory that is reserved and not in use."""
    overuse_bytes: int
    """Memory in use beyond the reservations."""
    unmeasured_pods: int
    """Number of pods whose use is not measured. Their reservations count as neither used nor
    unused."""


class TeamView(UseOfMemoryView):
    namespace: str


class OwnerView(UseOfMemoryView):
    namespace: str
    kind: str
    """Kind and name of the controller. For a pod without a controller, Pod and the pod's name."""
    name: str


class TeamsBody(Body):
    teams: list[TeamView]
    """Namespaces, sorted by unused memory, most first."""
    matching: int
    """Number of all owners."""
    owners: list[OwnerView]
    """Sorted by unused memory, most first."""


#: The fields of the sums, in their order, and the index of the unused bytes.
_FIELDS = tuple(UseOfMemoryView.model_fields)
_UNUSED = _FIELDS.index("unused_bytes")
#: Key of a sum: the namespace, or the namespace with kind and name of an owner.
_Key = tuple[str, ...]

routes = APIRouter()


@routes.get("/v1/teams", response_model=TeamsBody)
def teams(
    context: InContext,
    request: Request,
    snap: Newest,
    namespace: InNamespace = "",
    limit: Limit = 200,
) -> Response:
    """Return the memory that namespaces and owners reserve and use, most unused memory first."""
    return context.answers.of(
        request,
        context.monotonic_s(),
        lambda: _answer(context, request, snap, namespace, limit),
    )


def _answer(
    context: Context, request: Request, snap: Snapshot, namespace: str, limit: int
) -> Response:
    kept, rows = _shared_sums(request), shared_rows(request)
    with kept.lock:
        kept.update(context.cluster, snap, rows)
        owners = kept.of(namespace)
        body = TeamsBody(
            **context.head(snap),
            matching=len(owners),
            teams=[
                TeamView(namespace=of, **dict(zip(_FIELDS, sums, strict=True)))
                for (of,), sums in sorted(kept.namespaces.totals.items(), key=_most_unused)
            ],
            owners=[],
        )
        views = (
            OwnerView(namespace=of, kind=kind, name=name, **dict(zip(_FIELDS, sums, strict=True)))
            for (of, kind, name), sums in _largest(owners, limit)
        )
        return joined(body, "owners", views)


def _shared_sums(request: Request) -> "TeamSums":
    """Return the sums over all pods, which all readers of the application share."""
    return shared(request, TeamSums)


def _largest(owners: Mapping[_Key, Sequence[int]], limit: int) -> list[tuple[_Key, Sequence[int]]]:
    """Return the owners with the most unused memory, most first.

    A large fleet has tens of thousands of owners, so most of them are excluded before the rest is
    sorted.
    """
    unused = [sums[_UNUSED] for sums in owners.values()]
    least = nlargest(limit, unused)[-1] if unused else 0
    found = [each for each, count in zip(owners.items(), unused, strict=True) if count >= least]
    return nsmallest(limit, found, key=_most_unused)


def _most_unused(each: tuple[_Key, Sequence[int]]) -> tuple[int, _Key]:
    return -each[1][_UNUSED], each[0]


def _numbers(pod: GpuPod) -> tuple[int, ...]:
    """Return the values of a pod in the order of ``_FIELDS``."""
    if not pod.node:
        return (0, 1, pod.waiting_bytes, *([0] * (len(_FIELDS) - 3)))
    is_measured = pod.used_bytes is not None
    return (
        *(1, 0, 0, pod.reserved_bytes, pod.used_bytes or 0, pod.peak_bytes),
        *(pod.unused_bytes, pod.overuse_bytes, 0 if is_measured else 1),
    )


class TeamSums:
    """Sums by namespace and by owner.

    The sums are kept, because a large fleet has 100,000 pods. Only the pods of nodes that changed
    are subtracted and added again. Hold ``lock`` while you call a method or read the sums.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self._nodes = PerNode[Sequence[GpuPod]]()
        #: The rows of the pods on no node of the snapshot.
        self._elsewhere: Sequence[GpuPod] = ()
        self.namespaces, self._owners = Sums[_Key, int](), Sums[_Key, int]()

    def update(self, cluster: Cluster, snap: Snapshot, rows: GpuPods) -> None:
        """Update the sums to this snapshot."""
        changes = self._nodes.update(
            snap, lambda node: (rows.on_node(cluster, node),), lambda _, pods: pods
        )
        for _, before, after in changes:
            self._replace(before or (), after or ())
        elsewhere = rows.without_node(cluster, snap)
        self._replace(self._elsewhere, elsewhere)
        self._elsewhere = elsewhere

    def of(self, namespace: str) -> Mapping[_Key, Sequence[int]]:
        """Return the sums of the owners in a namespace, or of all owners for ""."""
        owners = self._owners.totals
        if not namespace:
            return owners
        return {key: sums for key, sums in owners.items() if key[0] == namespace}

    def _replace(self, before: Sequence[GpuPod], after: Sequence[GpuPod]) -> None:
        if before == after:
            return
        for sums, parts in (self.namespaces, 1), (self._owners, 3):
            sums.replace(_summed(before, parts), _summed(after, parts))


def _summed(pods: Iterable[GpuPod], parts: int) -> Mapping[_Key, Sequence[int]]:
    """Sum the values of pods by the first ``parts`` of namespace, kind and name of their owner."""
    found: dict[_Key, Sequence[int]] = {}
    for pod in pods:
        key = (pod.namespace, pod.owner_kind, pod.owner_name)[:parts]
        numbers = _numbers(pod)
        found[key] = list(map(add, found[key], numbers)) if key in found else numbers
    return found
