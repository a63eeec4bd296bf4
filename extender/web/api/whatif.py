"""What would happen if: pods come and go, nodes come and go, on a copy of the cluster."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, HTTPException
from starlette.responses import Response

from contract.gpunode import MAX_REPLICAS
from contract.kube import Pod
from extender.cluster.eligible import Eligible, eligible_nodes, sites
from extender.cluster.state import ClusterState
from extender.cluster.trial import NotPlaced, Placed, Trial
from extender.placement.capacity import space
from extender.placement.fit import fit
from extender.placement.request import Unreadable, VramRequest
from extender.placement.snapshot import Snapshot
from extender.web.api.answers import encoded
from extender.web.api.asked import (
    NAMESPACE,
    made_up,
    of_size,
    paced,
    understood,
    usual_resource,
)
from extender.web.api.context import Context
from extender.web.api.spaces import space_view
from extender.web.api.whatif_bodies import (
    MOST_NODES,
    MOST_PODS,
    PodsAsked,
    WhatifAsked,
    WhatifBody,
    WhatifPlacementView,
    WhatifRefusalView,
    WhatifSpaceView,
)
from extender.web.bodies import ask_view, counted, obstacle_view, reason_view, stamp

_LIMITS: dict[int | str, dict[str, Any]] = {
    400: {"description": "More is asked than one answer may cost"},
    413: {"description": "The body is too large"},
}


@dataclass(frozen=True, slots=True)
class _Coming:
    """A pod to be placed."""

    request: VramRequest
    #: The pod itself: its selectors, affinity and tolerations decide where it may run.
    pod: Pod
    leaves: str | None = None

    @property
    def name(self) -> str:
        return f"{self.request.namespace}/{self.request.name}"


def router(context: Context) -> APIRouter:
    routes = APIRouter()
    Newest = Annotated[Snapshot, Depends(context.newest)]
    cluster = context.cluster

    @routes.post("/v1/whatif", response_model=WhatifBody, responses=_LIMITS)
    def whatif(asked: WhatifAsked, snap: Newest) -> Response:
        """Where these pods would go if these nodes and pods came and went; what is left before and
        after. Nothing is changed: pods are placed one after another on a copy, by what places them
        for real. kube-scheduler may prefer other nodes for reasons of its own."""
        _bounded(asked)
        now_s = context.monotonic_s()
        kinds = [list(_pods(cluster, some, n)) for n, some in enumerate(asked.pods)]
        trial = Trial(cluster, snap, now_s)
        added: list[str] = []
        moving: list[_Coming] = []
        for _ in paced(context, _changes(cluster, trial, asked, added, moving)):
            pass
        coming = [*moving, *(each for kind in kinds for each in kind)]
        told = [*paced(context, _placed(trial, coming))]
        sizes = [kind[0] for kind in kinds] or [_usual(cluster)]
        after = trial.snapshot()
        placements = [_placement_view(c, p) for c, p in told if isinstance(p, Placed)]
        refusals = _refusals(told)
        body = WhatifBody(
            generatedAt=stamp(context.wall_s()),
            snapshot_generation=snap.generation,
            message=_message(len(placements), refusals),
            placed=len(placements),
            refused=len(told) - len(placements),
            placements=placements,
            refusals=refusals,
            added=added,
            spaces=[*paced(context, _spaces(cluster, trial, sizes, snap, after, now_s))],
        )
        return encoded(body)

    return routes


def _bounded(asked: WhatifAsked) -> None:
    """400 where it would take too long; each is told with its bound."""
    counts = {
        "pods": (sum(some.count for some in asked.pods), MOST_PODS),
        "add": (sum(some.count for some in asked.add), MOST_NODES),
        "drain": (len(asked.drain), MOST_NODES),
        "replicas": (len(asked.replicas), MOST_NODES),
        "release": (len(asked.release), MOST_PODS),
    }
    for where, (count, most) in counts.items():
        if count > most:
            raise _too_many(where, f"{count} are asked for, at most {most} may be")


def _too_many(where: str, why: str) -> HTTPException:
    return HTTPException(400, f"body {where}: {why}; right is to ask in parts")


def _pods(cluster: ClusterState, asked: PodsAsked, number: int) -> Iterator[_Coming]:
    where = f"body pods.{number}"
    if asked.manifest is None:
        name, resource = f"asked-{number}", asked.resource or usual_resource(cluster)
        pod = made_up(name, asked.vram, asked.gpus, resource, asked.policy)
    else:
        pod = _of_manifest(asked, number, where)
    request = understood(cluster, pod, where)
    if asked.manifest is None:
        request = of_size(request)
    for n in range(asked.count):
        # Another uid each: it settles equal scores.
        suffix = f"-{n}" if asked.count > 1 else ""
        one = replace(request, uid=f"{request.uid}{suffix}", name=f"{request.name}{suffix}")
        yield _Coming(one, pod)


def _of_manifest(asked: PodsAsked, number: int, where: str) -> Pod:
    if asked.vram or asked.resource or asked.policy or asked.gpus != 1:
        raise HTTPException(422, f"{where}: the manifest says the size; leave out all but count")
    try:
        pod = msgspec.convert(asked.manifest, Pod)
    except (msgspec.ValidationError, RecursionError) as err:
        raise HTTPException(
            422,
            f"{where}.manifest: {err}; right is a pod as kubectl get pod -o json prints it",
        ) from err
    if pod.node:
        raise HTTPException(422, f"{where}.manifest: spec.nodeName: no scheduler places such a pod")
    metadata = msgspec.structs.replace(
        pod.metadata,
        uid=f"asked-{number}",
        name=pod.metadata.name or f"asked-{number}",
        namespace=pod.metadata.namespace or NAMESPACE,
    )
    return msgspec.structs.replace(pod, metadata=metadata)


def _changes(
    cluster: ClusterState, trial: Trial, asked: WhatifAsked, added: list[str], moving: list[_Coming]
) -> Iterator[None]:
    """Change the copy step by step; fill in who is added and who has to move."""
    for key in dict.fromkeys(asked.release):
        namespace, _, name = key.partition("/")
        pod = cluster.pod_named(namespace, name)
        if pod is None or not trial.release(pod.metadata.uid):
            raise HTTPException(
                422, f"body release: pod {key} holds no GPU; right is, for example, default/trainer"
            )
        yield
    for node in dict.fromkeys(asked.drain):
        if node not in trial.snapshot().row_of:
            raise _no_node("drain", node)
        for pod in trial.drain(node):
            request = cluster.understand(pod)
            if not isinstance(request, Unreadable) and request.asks:
                moving.append(_Coming(request, pod, node))
        if len(moving) > MOST_PODS:
            raise _too_many("drain", f"more than {MOST_PODS} pods would have to move")
        yield
    for node, count in asked.replicas.items():
        if not 1 <= count <= MAX_REPLICAS:
            raise HTTPException(
                422, f"body replicas.{node}: {count}; right is 1 to {MAX_REPLICAS}, as in 8"
            )
        try:
            trial.set_replicas(node, count)
        except KeyError as err:
            raise _no_node("replicas", node) from err
        except ValueError as err:
            raise HTTPException(422, f"body replicas.{node}: {count}, but {err}") from err
        yield
    for new in asked.add:
        for _ in range(new.count):
            try:
                added += trial.add(new.like, 1)
            except KeyError as err:
                raise _no_node("add.like", new.like) from err
            yield


def _no_node(where: str, node: str) -> HTTPException:
    return HTTPException(
        422,
        f"body {where}: of node {node} no GPUs are known; GET /v1/nodes lists those that are",
    )


def _placed(trial: Trial, coming: list[_Coming]) -> Iterator[tuple[_Coming, Placed | NotPlaced]]:
    rows: dict[bytes, Eligible] = {}
    for each in coming:
        may_run = sites(each.pod)
        if may_run not in rows:
            rows[may_run] = trial.eligible(each.pod)
        yield each, trial.place(each.request, rows[may_run])


def _placement_view(coming: _Coming, placed: Placed) -> WhatifPlacementView:
    charges = placed.placement.charges
    beyond = {uuid for charge in charges for uuid in charge.beyond}
    sizes = {
        uuid: count
        for charge in charges
        for uuid, count in charge.candidates.items()
        if uuid not in beyond
    }
    return WhatifPlacementView(
        pod=coming.name,
        leaves=coming.leaves,
        node=placed.node,
        score_ratio=placed.score,
        devices=sorted(sizes),
        most_bytes=max(sizes.values(), default=0),
    )


def _refusals(told: list[tuple[_Coming, Placed | NotPlaced]]) -> list[WhatifRefusalView]:
    alike: dict[object, tuple[NotPlaced, list[_Coming]]] = {}
    for coming, outcome in told:
        if isinstance(outcome, NotPlaced):
            key = coming.leaves, tuple(outcome.reasons.items()), tuple(outcome.ineligible)
            alike.setdefault((key, coming.request.kind), (outcome, []))[1].append(coming)
    return [
        WhatifRefusalView(
            pods=[each.name for each in pods],
            leaves=pods[0].leaves,
            reasons=[
                reason_view(reason, n)
                for reason, n in sorted(outcome.reasons.items(), key=lambda pair: -pair[1])
            ],
            ineligible=[obstacle_view(*pair) for pair in outcome.ineligible],
        )
        for outcome, pods in alike.values()
    ]


def _message(placed: int, refusals: list[WhatifRefusalView]) -> str:
    refused = sum(len(each.pods) for each in refusals)
    if not placed and not refused:
        return "no pod is asked about, and none has to move"
    if not refused:
        return f"all {placed} pods are placed" if placed > 1 else "the pod is placed"
    first = [(each.reasons or each.ineligible)[:1] for each in refusals]
    whys = dict.fromkeys(reason.message for found in first for reason in found)
    why = "; ".join(whys) or "there is no node"
    return f"{placed} of {counted(placed + refused, 'pod')} are placed; most others meet: {why}"


def _usual(cluster: ClusterState) -> _Coming:
    pod = made_up("asked", "", 1, usual_resource(cluster))
    return _Coming(of_size(understood(cluster, pod, "setting resources")), pod)


def _spaces(
    cluster: ClusterState,
    trial: Trial,
    sizes: list[_Coming],
    before: Snapshot,
    after: Snapshot,
    now_s: float,
) -> Iterator[WhatifSpaceView]:
    for each in sizes:
        request = each.request
        was, will = (
            space(fit(request, snap, rows, now_s))
            for snap, rows in (
                (before, eligible_nodes(each.pod, before, cluster.node).rows),
                (after, trial.eligible(each.pod).rows),
            )
        )
        yield WhatifSpaceView(
            request=ask_view(request.containers[0]),
            before=space_view(was),
            after=space_view(will),
            fullness_before=was.fullness,
            fullness_after=will.fullness,
        )
