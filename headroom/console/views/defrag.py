"""Advice on which pods to move so that waiting pods fit, or so that the GPUs of a node are free."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, HTTPException, Query
from starlette.responses import Response

from headroom.console.facts.defrag import MOST_FOR_A_POD, Advice, Effort, for_node, for_pod
from headroom.console.facts.movable_pods import Move, Movers, Stays
from headroom.console.responses import UNKNOWN, Body, encoded, unknown_node
from headroom.console.view import View
from headroom.console.view_context import Context, InContext, Newest
from headroom.console.views.pending import not_tried
from headroom.console.views.requested_pods import pod_named, understood
from headroom.contract.kube import Pod
from headroom.core.cluster.idle_pods import owner_of
from headroom.core.placement.request import VramRequest
from headroom.core.rules.eligible_nodes import AMOUNTS, eligibility_key, not_modeled
from headroom.core.rules.pod_requests import exceeded

#: Maximum time of the search for one call, in seconds.
MOST_S = 2.0
#: Maximum number of different waiting pods for which one call searches moves.
MOST_KINDS = 20
#: Maximum number of nodes named for each move, if the answer is about one pod or node, and if it is
#: about several pods.
MOST_PLACES, FEW_PLACES = 1000, 10
#: Maximum number of namespaces whose ResourceQuotas are read for one call.
MOST_NAMESPACES = 32

Outcome = Literal["bound", "fits", "free", "soon", "move", "none"]


class DefragMoveView(View):
    namespace: str
    name: str
    uid: str
    owner_kind: str
    """Its controller, which creates the successor."""
    owner_name: str
    priority: int
    reserved_bytes: int
    """The memory that its reservation frees."""
    places: int
    """Number of other nodes on which the successor fits after the earlier moves. Their names, best
    first, are limited to 1,000, or to 10 if the answer is about all waiting pods."""
    nodes: list[str]


class DefragStayView(View):
    reason: str
    """controller, priority, annotation, ending, scheduler, unmodeled, unreadable, budget, quota
    or places."""
    message: str
    pods: int


class DefragAnswerView(View):
    """The advice for one waiting pod, or for a node."""

    pod: str | None
    """namespace/name of the waiting pod; null if the answer is about a node."""
    alike: int
    """Number of waiting pods with the same requests, eligible nodes and priority, including this
    pod."""
    node: str | None
    """The node on which the pod fits, or whose GPUs become free; null if none was found."""
    outcome: Outcome
    """bound: the pod has a node. fits: it fits now. free: the GPUs of the node hold no pod. soon:
    the pod fits, or the GPUs are free, as soon as terminating pods have ended. move: the pod fits,
    or the GPUs are free, after the moves."""
    message: str
    moves: list[DefragMoveView]
    """In the order of the evictions."""
    devices: list[str]
    """The devices that the pod could get, or the devices that become free."""
    gain_bytes: int
    """The memory that the pod gets, or the headroom of the devices that become free."""
    moved_bytes: int
    """Sum of the reservations of the moved pods."""
    stay: list[DefragStayView]
    """Pods on the examined nodes that are not moved, by the first reason that applies to each."""


class DefragBody(Body):
    answers: list[DefragAnswerView]
    unanswered: int
    """Number of different waiting pods that the search did not reach."""
    examined_nodes: int
    cut_short: bool
    """Whether the search reached its limit of time, nodes or computations. Then there may be an
    answer with fewer moves, or an answer where none was found."""
    not_checked: list[str]
    """Checks of kube-scheduler and the API server that this answer does not include."""


PodKey = Annotated[
    str,
    Query(
        max_length=512,
        description="The waiting pod, as namespace/name; default: every waiting pod.",
        examples=["default/trainer-0"],
    ),
]
FreeNode = Annotated[bool, Query(description="Free the GPUs of a node instead.", examples=["true"])]
OnNode = Annotated[
    str, Query(max_length=253, description="Only moves from this node.", examples=["gpu-a"])
]

routes = APIRouter()


@routes.get("/v1/defrag", response_model=DefragBody, responses=UNKNOWN)
def defrag(
    context: InContext,
    snap: Newest,
    pod: PodKey = "",
    free_node: FreeNode = False,
    node: OnNode = "",
) -> Response:
    """Return the fewest pods to move so that a waiting pod fits, or the GPUs of a node become free.

    Only pods whose controller creates them again are moved, and only if they fit on at least two
    other nodes. Nothing is changed. The search is limited to 2 s and 512 nodes."""
    if node and node not in snap.row_of:
        raise unknown_node(node)
    if pod and free_node:
        raise HTTPException(
            422, "query pod: cannot be combined with query free_node; remove one of them"
        )
    quotas = _Quotas(context)
    movers = Movers(
        context.cluster, snap, context.monotonic_s(), context.schedulers(), quotas.exceeded
    )
    deadline_s = movers.now_s + MOST_S
    effort = Effort(lambda: context.monotonic_s() > deadline_s)
    unanswered, unmodeled = 0, list[str]()
    if free_node:
        answers = [_of_node(for_node(movers, effort, node), node, effort)]
    elif pod:
        namespace, _, name = pod.partition("/")
        waiting = pod_named(context, namespace, name)
        answers, unmodeled = [_of_pod(context, movers, effort, waiting, node)], not_modeled(waiting)
    else:
        groups = _groups(context)
        answers = []
        for alike in groups[:MOST_KINDS]:
            if effort.is_used_up:
                break
            answers.append(_of_pod(context, movers, effort, alike[0], node, alike))
            unmodeled += not_modeled(alike[0])
        unanswered = len(groups) - len(answers)
    body = DefragBody(
        **context.head(snap),
        answers=answers,
        unanswered=unanswered,
        examined_nodes=effort.nodes,
        cut_short=effort.cut_short,
        not_checked=list(dict.fromkeys([AMOUNTS, *quotas.not_checked, *unmodeled])),
    )
    return encoded(body)


class _Quotas:
    """Reads the ResourceQuotas of the namespaces of pods to move, each at most once."""

    def __init__(self, context: Context) -> None:
        self._read = context.quotas
        self._exceeded: dict[str, bool] = {}
        self.not_checked: list[str] = []

    def exceeded(self, namespace: str) -> bool:
        if namespace not in self._exceeded:
            at_limit = len(self._exceeded) >= MOST_NAMESPACES
            found = None if at_limit else self._read(namespace)
            if found is None:
                self.not_checked = ["ResourceQuotas"]
            if at_limit:
                return False
            self._exceeded[namespace] = bool(exceeded(found or ()))
        return self._exceeded[namespace]


def _groups(context: Context) -> list[list[Pod]]:
    """Return the waiting pods with readable requests in groups of equal pods. Groups are sorted by
    importance, and then by age."""
    found: dict[object, list[Pod]] = {}
    waiting = context.cluster.unbound()
    waiting.sort(key=lambda pod: (-pod.priority, pod.metadata.creation_timestamp or "", _key(pod)))
    for pod in waiting:
        request = context.cluster.understand(pod)
        if isinstance(request, VramRequest) and request.asks:
            key = request.kind, eligibility_key(pod), pod.priority
            found.setdefault(key, []).append(pod)
    return list(found.values())


def _key(pod: Pod) -> str:
    return f"{pod.metadata.namespace}/{pod.metadata.name}"


def _of_pod(
    context: Context,
    movers: Movers,
    effort: Effort,
    pod: Pod,
    node: str,
    alike: Sequence[Pod] = (),
) -> DefragAnswerView:
    """Return the view of a waiting pod. ``alike`` is its group if the call is about all pods.
    Raises ``HTTPException`` 422 if its request cannot be read."""
    if pod.node:
        advice = Advice("none", pod.node)
        message = f"bound to node {pod.node}"
        return _view(_key(pod), 1, "bound", message, advice, 0)
    understood(context.cluster, pod, f"pod {_key(pod)}")
    asked = context.journal.of_uid(pod.metadata.uid) is not None
    if why := not_tried(pod, asked, context.schedulers()):
        return _view(_key(pod), max(1, len(alike)), "none", why[1], Advice("none"), 0)
    advice = for_pod(movers, pod, effort, node)
    shown = FEW_PLACES if alike else MOST_PLACES
    message = _message_of_pod(advice, effort)
    return _view(_key(pod), max(1, len(alike)), advice.outcome, message, advice, shown)


def _message_of_pod(advice: Advice, effort: Effort) -> str:
    match advice.outcome:
        case "fits":
            return f"fits on node {advice.node}; no pod has to move"
        case "soon":
            return f"fits on node {advice.node} as soon as terminating pods have ended"
        case "move":
            return f"fits on node {advice.node} after {_moves(advice)}"
    if effort.cut_short:
        return "no moves were found before the search reached its limit"
    return f"does not fit even if up to {MOST_FOR_A_POD} pods of one node are moved"


def _of_node(advice: Advice, node: str, effort: Effort) -> DefragAnswerView:
    match advice.outcome:
        case "free":
            message = f"the GPUs of node {advice.node} hold no pod"
        case "soon":
            message = (
                f"the GPUs of node {advice.node} hold no pod as soon as terminating pods have ended"
            )
        case "move":
            message = f"the GPUs of node {advice.node} hold no pod after {_moves(advice)}"
        case _:
            where = f"node {node}" if node else "a node"
            message = f"moving pods does not free the GPUs of {where}"
            if effort.cut_short:
                message = "no moves were found before the search reached its limit"
    return _view(None, 0, advice.outcome, message, advice, MOST_PLACES)


def _moves(advice: Advice) -> str:
    return "1 pod is moved" if len(advice.moves) == 1 else f"{len(advice.moves)} pods are moved"


def _view(
    pod: str | None, alike: int, outcome: Outcome, message: str, advice: Advice, places: int
) -> DefragAnswerView:
    return DefragAnswerView(
        pod=pod,
        alike=alike,
        node=advice.node or None,
        outcome=outcome,
        message=message,
        moves=[_move_view(move, places) for move in advice.moves],
        devices=list(advice.devices),
        gain_bytes=advice.gain_bytes,
        moved_bytes=sum(move.reserved_bytes for move in advice.moves),
        stay=list(_stay_views(advice.stay)),
    )


def _move_view(move: Move, places: int) -> DefragMoveView:
    pod = move.pod
    kind, owner = owner_of(pod)
    return DefragMoveView(
        namespace=pod.metadata.namespace,
        name=pod.metadata.name,
        uid=pod.metadata.uid,
        owner_kind=kind,
        owner_name=owner,
        priority=pod.priority,
        reserved_bytes=move.reserved_bytes,
        places=len(move.places),
        nodes=list(move.places[:places]),
    )


def _stay_views(stay: Mapping[Stays, int]) -> Iterator[DefragStayView]:
    for reason, pods in sorted(stay.items(), key=lambda each: (-each[1], each[0].name)):
        yield DefragStayView(reason=reason.name.lower(), message=reason.value, pods=pods)
