"""Simulates adding and removing pods and nodes on a copy of the cluster (what-if)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Any

from fastapi import APIRouter, HTTPException
from starlette.requests import Request
from starlette.responses import Response

from headroom.console.responses import ask_view, encoded, obstacle_view, reason_view
from headroom.console.view_context import Context, InContext, Newest
from headroom.console.views.capacity import space_view
from headroom.console.views.requested_pods import (
    NewPod,
    made_up,
    new_pods,
    of_size,
    understood,
    usual_resource,
)
from headroom.console.views.whatif_bodies import (
    WhatifAsked,
    WhatifBody,
    WhatifPlacementView,
    WhatifRejectionView,
    WhatifSpaceView,
)
from headroom.console.views.whatif_totals import before_and_after
from headroom.contract.gpunode import MAX_REPLICAS
from headroom.core.cluster.cluster import Cluster
from headroom.core.placement.capacity import space
from headroom.core.placement.fit import fit
from headroom.core.placement.request import Unreadable, VramRequest
from headroom.core.placement.snapshot import Snapshot
from headroom.core.rules.eligible_nodes import (
    AMOUNTS,
    Eligible,
    eligibility_key,
    eligible_nodes,
    not_modeled,
)
from headroom.core.rules.pod_requests import QuotaUse
from headroom.core.whatif.simulation import NotPlaced, Placed, Simulation

#: Maximum number of pods in one call, and of nodes in each change. They are limited because each
#: takes a few milliseconds.
MOST_PODS, MOST_NODES = 1000, 200

#: Additional responses for /openapi.json.
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request exceeds a limit"},
    413: {"description": "The body is too large"},
}
#: Maximum number of namespaces whose ResourceQuotas are read for one call.
MOST_NAMESPACES = 32
#: Entry of ``not_checked`` if the quotas of all pods were read.
SOME_QUOTAS = "ResourceQuotas with scopes or for other resources than GPUs"


#: The placement of a pod, or the nodes' reasons against it. It is a sentence if no scheduler tries
#: the pod, or if a ResourceQuota rejects it.
_Outcome = Placed | NotPlaced | str


routes = APIRouter()


@routes.post("/v1/whatif", response_model=WhatifBody, responses=_ERRORS)
def whatif(context: InContext, request: Request, asked: WhatifAsked, snap: Newest) -> Response:
    """Simulate changes to nodes and pods. Return where the given pods would be placed, and the
    totals and free memory before and after. Nothing is changed: the pods are placed one after
    another on a copy, by the code that places real pods. kube-scheduler may prefer other nodes."""
    cluster = context.cluster
    _check_limits(asked)
    now_s = context.monotonic_s()
    schedulers = context.schedulers()
    groups = [list(new_pods(cluster, some, n, schedulers)) for n, some in enumerate(asked.pods)]
    # Memory that is held for a pod counts if that pod precedes the least important pod to place.
    new = (each.pod for group in groups for each in group)
    least = min(new, key=attrgetter("priority"), default=None)
    snap = context.seen_by(None if asked.drain else least, snap)
    simulation = Simulation(cluster, snap, now_s)
    changes = _apply_changes(cluster, simulation, asked)
    pods = [*changes.moving, *(each for group in groups for each in group)]
    quotas = _quotas_left(context, pods, changes)
    outcomes = list(_placed(simulation, pods, quotas))
    one_of_each_size = [group[0] for group in groups] or [_default_pod(cluster)]
    after = simulation.snapshot()
    placed = [outcome.placement for _, outcome in outcomes if isinstance(outcome, Placed)]
    totals = before_and_after(request, cluster, asked, (snap, after), placed, now_s)
    placements = [_placement_view(c, p) for c, p in outcomes if isinstance(p, Placed)]
    rejections = _rejections(outcomes)
    body = WhatifBody(
        **context.head(snap),
        message=_message(len(placements), rejections),
        placed=len(placements),
        rejected=len(outcomes) - len(placements),
        before=totals[0],
        after=totals[1],
        placements=placements,
        rejections=rejections,
        added=changes.added,
        not_checked=_not_checked(pods, quotas),
        spaces=list(_free_space(cluster, simulation, one_of_each_size, snap, after, now_s)),
    )
    return encoded(body)


def _check_limits(asked: WhatifAsked) -> None:
    """Raise ``HTTPException`` 400 if the request exceeds a limit."""
    counts = {
        "pods": (sum(some.count for some in asked.pods), MOST_PODS),
        "add": (sum(some.count for some in asked.add), MOST_NODES),
        "drain": (len(asked.drain), MOST_NODES),
        "replicas": (len(asked.replicas), MOST_NODES),
        "device_choices": (len(asked.device_choices), MOST_NODES),
        "release": (len(asked.release), MOST_PODS),
    }
    for where, (count, limit) in counts.items():
        if count > limit:
            raise _too_many(where, f"{count} requested, the maximum is {limit}")


def _too_many(where: str, why: str) -> HTTPException:
    return HTTPException(400, f"body {where}: {why}; split the request")


@dataclass(frozen=True, slots=True)
class _Changes:
    """Nodes and pods that the requested changes add, remove or move."""

    #: Names of new nodes.
    added: list[str] = field(default_factory=list)
    #: Pods of drained nodes. They need another node.
    moving: list[NewPod] = field(default_factory=list)
    released: list[VramRequest] = field(default_factory=list)


def _apply_changes(cluster: Cluster, simulation: Simulation, asked: WhatifAsked) -> _Changes:
    """Apply the changes to the simulation.

    Raises ``HTTPException`` 422 if a pod, node or number is wrong, and 400 if too many pods would
    be moved.
    """
    changes = _Changes()
    for key in dict.fromkeys(asked.release):
        namespace, _, name = key.partition("/")
        pod = cluster.pod_named(namespace, name)
        if pod is None or not simulation.release(pod.metadata.uid):
            raise HTTPException(
                422, f"body release: pod {key} holds no GPU. Example: default/trainer"
            )
        request = cluster.understand(pod)
        if isinstance(request, VramRequest):
            changes.released.append(request)
    for node in dict.fromkeys(asked.drain):
        if node not in simulation.snapshot().row_of:
            raise _no_node("drain", node)
        for pod in simulation.drain(node):
            request = cluster.understand(pod)
            if not isinstance(request, Unreadable) and request.asks:
                changes.moving.append(NewPod(request, pod, node))
        if len(changes.moving) > MOST_PODS:
            raise _too_many("drain", f"more than {MOST_PODS} pods would be moved")
    for node, count in asked.replicas.items():
        if not 1 <= count <= MAX_REPLICAS:
            raise HTTPException(
                422, f"body replicas.{node}: {count} is not from 1 to {MAX_REPLICAS}. Example: 8"
            )
        try:
            simulation.set_replicas(node, count)
        except KeyError as err:
            raise _no_node("replicas", node) from err
        except ValueError as err:
            raise HTTPException(422, f"body replicas.{node}: {count}, but {err}") from err
    for node, choice in asked.device_choices.items():
        try:
            simulation.set_device_choice(node, choice)
        except KeyError as err:
            raise _no_node("device_choices", node) from err
        except ValueError as err:
            detail = f"body device_choices.{node}: {choice.value}, but {err}"
            raise HTTPException(422, detail) from err
    for new in asked.add:
        try:
            changes.added.extend(simulation.add(new.like, new.count))
        except KeyError as err:
            raise _no_node("add.like", new.like) from err
    return changes


def _no_node(where: str, node: str) -> HTTPException:
    return HTTPException(
        422, f"body {where}: node {node} has no known GPUs; GET /v1/nodes lists the known nodes"
    )


def _quotas_left(
    context: Context, pods: Sequence[NewPod], changes: _Changes
) -> dict[str, QuotaUse]:
    """Return the remaining quota of each namespace, not counting pods that are removed or moved.

    A namespace is missing if its quotas cannot be read, or if there are more than
    ``MOST_NAMESPACES``.
    """
    namespaces = dict.fromkeys(each.request.namespace for each in pods if each.counted)
    quotas: dict[str, QuotaUse] = {}
    for namespace in islice(namespaces, MOST_NAMESPACES):
        if (found := context.quotas(namespace)) is not None:
            quotas[namespace] = QuotaUse(found)
    for request in (*changes.released, *(each.request for each in changes.moving)):
        if request.namespace in quotas:
            quotas[request.namespace].give_back(request)
    return quotas


def _not_checked(pods: Sequence[NewPod], quotas: Mapping[str, QuotaUse]) -> list[str]:
    all_read = all(each.counted and each.request.namespace in quotas for each in pods)
    checks = [AMOUNTS, SOME_QUOTAS if all_read else "ResourceQuotas"]
    return list(dict.fromkeys([*checks, *(c for each in pods for c in not_modeled(each.pod))]))


def _placed(
    simulation: Simulation, pods: list[NewPod], quotas: Mapping[str, QuotaUse]
) -> Iterator[tuple[NewPod, _Outcome]]:
    """Place the pods one after another. Yield each pod with its outcome.

    Each pod gets its device before the next pod is placed, because on a steered node,
    kube-scheduler retries the next pod only after that.
    """
    eligible: dict[bytes, Eligible] = {}
    for each in pods:
        quota = quotas.get(each.request.namespace) if each.counted else None
        if why := each.not_tried or (quota.take(each.request) if quota else ""):
            yield each, why
            continue
        key = eligibility_key(each.pod)
        if key not in eligible:
            eligible[key] = simulation.eligible(each.pod)
        outcome = simulation.place(each.request, eligible[key])
        if isinstance(outcome, Placed):
            simulation.confirm(each.request.uid, outcome)
        yield each, outcome


def _placement_view(pod: NewPod, placed: Placed) -> WhatifPlacementView:
    charges = placed.placement.charges
    # The plugin would not choose these devices now. Only pods bound later can move the pod
    # there.
    beyond = {uuid for charge in charges for uuid in charge.beyond}
    bytes_on = {
        uuid: charged_bytes
        for charge in charges
        for uuid, charged_bytes in charge.candidates.items()
        if uuid not in beyond
    }
    return WhatifPlacementView(
        pod=pod.name,
        leaves=pod.leaves,
        node=placed.node,
        score_ratio=placed.score,
        devices=sorted(bytes_on),
        most_bytes=max(bytes_on.values(), default=0),
    )


def _rejections(outcomes: list[tuple[NewPod, _Outcome]]) -> list[WhatifRejectionView]:
    """Return one view for all equal pods that have the same reasons."""
    alike: dict[object, tuple[NotPlaced | str, list[NewPod]]] = {}
    for pod, outcome in outcomes:
        if isinstance(outcome, Placed):
            continue
        why: object = outcome
        if isinstance(outcome, NotPlaced):
            why = tuple(outcome.reasons.items()), tuple(outcome.ineligible)
        alike.setdefault((pod.leaves, why, pod.request.kind), (outcome, []))[1].append(pod)
    return [_rejection_view(outcome, pods) for outcome, pods in alike.values()]


def _rejection_view(outcome: NotPlaced | str, pods: list[NewPod]) -> WhatifRejectionView:
    view = WhatifRejectionView(
        pods=[each.name for each in pods],
        leaves=pods[0].leaves,
        not_tried=outcome if isinstance(outcome, str) else None,
        reasons=[],
        ineligible=[],
    )
    if isinstance(outcome, NotPlaced):
        reasons = sorted(outcome.reasons.items(), key=lambda pair: -pair[1])
        view.reasons = [reason_view(*pair) for pair in reasons]
        view.ineligible = [obstacle_view(*pair) for pair in outcome.ineligible]
    return view


def _message(placed: int, rejections: list[WhatifRejectionView]) -> str:
    rejected = sum(len(each.pods) for each in rejections)
    if not placed and not rejected:
        return "no pods to place: the request names none, and no pod has to move"
    if not rejected:
        which = "the pod is" if placed == 1 else "both pods are" if placed == 2 else ""
        return f"{which or f'all {placed} pods are'} placed"
    first_reasons = dict.fromkeys(_first_reason(each) for each in rejections)
    why = "; ".join(filter(None, first_reasons)) or "there are no nodes"
    if not placed:
        which = "the pod is not" if rejected == 1 else f"none of the {rejected} pods is"
        return f"{which} placed: {why}"
    are = "are" if placed > 1 else "is"
    return f"{placed} of {placed + rejected} pods {are} placed; main reasons for the others: {why}"


def _first_reason(rejection: WhatifRejectionView) -> str:
    if rejection.not_tried:
        return rejection.not_tried
    return next((each.message for each in (*rejection.reasons, *rejection.ineligible)), "")


def _default_pod(cluster: Cluster) -> NewPod:
    pod = made_up("asked", "", 1, usual_resource(cluster))
    return NewPod(of_size(understood(cluster, pod, "setting resources")), pod)


def _free_space(
    cluster: Cluster,
    simulation: Simulation,
    pods: list[NewPod],
    before: Snapshot,
    after: Snapshot,
    now_s: float,
) -> Iterator[WhatifSpaceView]:
    """Yield the free memory before and after the changes, for each of the pods."""
    for each in pods:
        request = each.request
        space_before, space_after = (
            space(fit(request, snap, rows, now_s))
            for snap, rows in (
                (before, eligible_nodes(each.pod, before, cluster.node).rows),
                (after, simulation.eligible(each.pod).rows),
            )
        )
        yield WhatifSpaceView(
            request=ask_view(request.containers[0]),
            before=space_view(space_before),
            after=space_view(space_after),
            fullness_before=space_before.fullness,
            fullness_after=space_after.fullness,
        )
