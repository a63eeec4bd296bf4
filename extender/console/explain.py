"""Explains why a pod is pending, or where it is placed."""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Depends, Path
from starlette.responses import Response

from extender.console.bodies import stamp
from extender.console.context import Context
from extender.console.decision_bodies import DecisionView
from extender.console.decisions import Sought, decisions
from extender.console.explanation_bodies import ExplainBody, Explained, explain_body
from extender.console.requested_pods import pod_named
from extender.console.responses import UNKNOWN, encoded
from extender.console.visible_pods import Sees, unnamed
from extender.placement.device_accounting import DeviceTerms
from extender.placement.explain import explain, verdict_digest
from extender.placement.fit import fit
from extender.placement.request import VramRequest
from extender.placement.snapshot import Snapshot
from extender.state.device_occupants import Held
from extender.state.eligible_nodes import eligible_nodes, feasible
from extender.state.pod_requests import exceeded
from extender.state.suggestions import Suggestion, blockers, suggest, within_quotas

Namespace = Annotated[str, Path(examples=["default"])]
PodName = Annotated[str, Path(examples=["trainer-0"])]

#: Number of the latest decisions that are searched for victims of the pod.
MAX_DECISIONS = 8


def router(context: Context) -> APIRouter:
    routes = APIRouter()
    Newest = Annotated[Snapshot, Depends(context.newest)]
    Visible = Annotated[Sees, Depends(context.visible)]
    cluster = context.cluster

    @routes.get(
        "/v1/explain/pods/{namespace}/{name}", response_model=ExplainBody, responses=UNKNOWN
    )
    def explain_pod(
        namespace: Namespace,
        name: PodName,
        snap: Newest,
        sees: Visible,
    ) -> Response:
        """Explain why the pod is pending, or where it is placed: its request, the reasons with node
        counts, the nearest nodes with their devices, suggestions, and the last decision."""
        pod = pod_named(context, namespace, name)
        request = cluster.understand(pod)
        found, unanswered = decisions(
            context,
            # By uid, because a StatefulSet reuses the names of its pods.
            Sought(uid=pod.metadata.uid, offered_nodes=True),
            MAX_DECISIONS,
            sees,
        )
        last, offered = _last(found), _offered(found)
        explanation, helps, digest, where = None, list[Suggestion](), "", None
        holding: list[list[Held]] = []
        if isinstance(request, VramRequest):
            rows = np.arange(len(snap.nodes), dtype=np.int64)
            everywhere = fit(request, snap, rows, context.monotonic_s())
            digest = verdict_digest(everywhere)
            may_run = eligible_nodes(pod, snap, cluster.node)
            where = feasible(pod, may_run, everywhere, offered)
            verdicts = fit(request, snap, where.rows, everywhere.now_s)
            market = cluster.usual.market
            explanation = explain(verdicts, cluster.rules.weights, market=market)
            holding = [blockers(cluster, verdicts, node) for node in explanation.nearest]
            if not pod.node:
                helps = suggest(cluster, pod, verdicts, explanation, holding, where)
        if any(each.recreates for each in helps):
            quotas = context.quotas(namespace)
            helps = within_quotas(helps, None if quotas is None else exceeded(quotas))
        now_s, at_s = context.monotonic_s(), context.wall_s()

        def age_of(terms: DeviceTerms) -> float | None:
            return cluster.activities.age_s(terms, now_s, at_s)

        why = Explained(
            pod=pod,
            request=request,
            explanation=explanation,
            changed=cluster.edits.of(pod.metadata.uid),
            digest=digest,
            advice=[unnamed(one, sees) for one in helps],
            blockers=holding,
            last=last,
            unanswered=unanswered,
            sees=sees,
            where=where,
            schedulers=context.schedulers(),
            nodes=len(snap.nodes),
            generation=snap.generation,
        )
        return encoded(explain_body(why, age_of, stamp(at_s)))

    return routes


def _offered(found: Sequence[DecisionView]) -> list[str] | None:
    """Return the nodes of the last filter call, None if they are not on record."""
    last = next((each.filter for each in found if each.filter), None)
    return last.offered_nodes if last else None


def _last(found: Sequence[DecisionView]) -> DecisionView | None:
    """Return the last decision, with the preemption of an earlier one if it has none itself.

    kube-scheduler retries the pod when its victims have ended, which makes a new decision. The
    names of the offered nodes are left out, because there can be thousands.
    """
    if not found:
        return None
    last = found[0]
    if last.filter is not None:
        filtered = last.filter.model_copy(update={"offered_nodes": None})
        last = last.model_copy(update={"filter": filtered})
    if last.preempt is not None:
        return last
    before = (each.preempt for each in found if each.uid == last.uid and each.preempt is not None)
    return last.model_copy(update={"preempt": next(before, None)})
