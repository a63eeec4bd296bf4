"""GPU memory by namespace and by owner: reserved, used, peak and unused memory, and waiting
pods."""

from collections.abc import Mapping, Sequence
from heapq import nlargest, nsmallest
from threading import Lock
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from headroom.console.facts.gpu_pods import GpuPod, GpuPods
from headroom.console.responses import Body, InNamespace, joined
from headroom.console.view import View
from headroom.console.view_context import Context, InContext, Newest, shared
from headroom.console.views.pods import shared_rows
from headroom.core.cluster.cluster import Cluster
from headroom.core.placement.snapshot import Snapshot
from headroom.core.placement.updated_nodes import UpdatedNodes

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
                TeamView(namespace=of, **msgspec.structs.asdict(sums))
                for (of,), sums in sorted(kept.namespaces.items(), key=_most_unused)
            ],
            owners=[],
        )
        views = (
            OwnerView(namespace=of, kind=kind, name=name, **msgspec.structs.asdict(sums))
            for (of, kind, name), sums in _largest(owners, limit)
        )
        return joined(body, "owners", views)


def _shared_sums(request: Request) -> "TeamSums":
    """Return the sums over all pods, which all readers of the application share."""
    return shared(request, TeamSums)


def _largest(owners: Mapping[_Key, "_Sums"], limit: int) -> list[tuple[_Key, "_Sums"]]:
    """Return the owners with the most unused memory, most first.

    A large fleet has tens of thousands of owners, so most of them are excluded before the rest is
    sorted.
    """
    unused = [sums.unused_bytes for sums in owners.values()]
    least = nlargest(limit, unused)[-1] if unused else 0
    found = [each for each, count in zip(owners.items(), unused, strict=True) if count >= least]
    return nsmallest(limit, found, key=_most_unused)


def _most_unused(each: tuple[_Key, "_Sums"]) -> tuple[int, _Key]:
    return -each[1].unused_bytes, each[0]


class _Sums(msgspec.Struct, gc=False):
    """Running sums of the fields of ``UseOfMemoryView``, for fleets of 100,000 pods."""

    pods: int = 0
    waiting_pods: int = 0
    waiting_bytes: int = 0
    reserved_bytes: int = 0
    used_bytes: int = 0
    peak_bytes: int = 0
    unused_bytes: int = 0
    overuse_bytes: int = 0
    unmeasured_pods: int = 0

    def add(self, pod: GpuPod, times: int) -> None:
        """Add the pod if ``times`` is 1, subtract it if ``times`` is -1."""
        if not pod.node:
            self.waiting_pods += times
            self.waiting_bytes += times * pod.waiting_bytes
            return
        self.pods += times
        self.reserved_bytes += times * pod.reserved_bytes
        self.peak_bytes += times * pod.peak_bytes
        self.unmeasured_pods += times * (pod.used_bytes is None)
        self.used_bytes += times * (pod.used_bytes or 0)
        self.unused_bytes += times * pod.unused_bytes
        self.overuse_bytes += times * pod.overuse_bytes


class TeamSums:
    """Sums by namespace and by owner.

    The sums are kept, because a large fleet has 100,000 pods. Only the pods of nodes that changed
    are subtracted and added again. Hold ``lock`` while you call a method or read the sums.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self._updated = UpdatedNodes()
        #: Node -> its rows, which the sums include. "" has the pods on no node of the snapshot.
        self._nodes: dict[str, Sequence[GpuPod]] = {}
        self.namespaces: dict[_Key, _Sums] = {}
        self.owners: dict[_Key, _Sums] = {}

    def update(self, cluster: Cluster, snap: Snapshot, rows: GpuPods) -> None:
        """Update the sums to this snapshot."""
        for row in self._updated.since_last(snap):
            node = snap.nodes[row]
            self._replace(node.name, rows.on_node(cluster, node))
        if len(self._nodes) > 1 + len(snap.nodes):
            for name in self._nodes.keys() - snap.row_of.keys() - {""}:
                self._replace(name, ())
                del self._nodes[name]
        rows.forget_others(snap)
        self._replace("", rows.without_node(cluster, snap))

    def of(self, namespace: str) -> Mapping[_Key, _Sums]:
        """Return the sums of the owners in a namespace, or of all owners for ""."""
        if not namespace:
            return self.owners
        return {key: sums for key, sums in self.owners.items() if key[0] == namespace}

    def _replace(self, node: str, pods: Sequence[GpuPod]) -> None:
        before = self._nodes.get(node, ())
        if pods == before:
            return
        for pod in before:
            self._add(pod, -1)
        for pod in pods:
            self._add(pod, 1)
        self._nodes[node] = pods

    def _add(self, pod: GpuPod, times: int) -> None:
        """Add the pod if ``times`` is 1, subtract it if ``times`` is -1."""
        owner = pod.namespace, pod.owner_kind, pod.owner_name
        for found, key in (self.namespaces, owner[:1]), (self.owners, owner):
            sums = found.get(key)
            if sums is None:
                sums = found[key] = _Sums()
            sums.add(pod, times)
            if not sums.pods and not sums.waiting_pods:
                del found[key]
