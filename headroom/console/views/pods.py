"""Lists all pods that request, reserve or use GPU memory, with filters, sort orders and pages."""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from headroom.console.facts.gpu_pods import GpuPod, GpuPods
from headroom.console.responses import AskedPage, Page, Paged, joined
from headroom.console.times import Time
from headroom.console.view import View
from headroom.console.view_context import Context, InContext, Newest, shared
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.unmanaged_gpus import unmanaged_requests
from headroom.core.placement.request import ContainerAsk, VramRequest
from headroom.core.placement.snapshot import Snapshot

#: Default page size, and maximum page size.
PODS, MOST_PODS = 100, 1000


class State(Enum):
    WAITING = "waiting"
    BOUND = "bound"
    UNCONFIRMED = "unconfirmed"
    STARTING = "starting"
    RUNNING = "running"
    ENDING = "ending"
    GONE = "gone"
    UNRESERVED = "unreserved"
    DRA = "dra"
    OVERUSING = "overusing"
    IDLE = "idle"
    EVICTING = "evicting"


class Order(Enum):
    NAME = "name"
    RESERVED = "reserved"
    USED = "used"
    UNUSED = "unused"
    OVERUSE = "overuse"
    OLDEST = "oldest"


def _text(description: str, example: str) -> object:
    return Query(max_length=253, description=description, examples=[example])


Search = Annotated[
    str,
    _text("Only pods with this text in namespace/name, owner or node. Case is ignored.", "train"),
]
Namespace = Annotated[str, _text("Only pods of this namespace.", "team-a")]
Owner = Annotated[
    str,
    _text("Only pods of this controller, as Kind/name or Pod/name.", "Deployment/llama"),
]
OnNode = Annotated[str, _text("Only pods bound to this node.", "gpu-a")]
Model = Annotated[str, _text("Only pods on devices of this model.", "NVIDIA L4")]
AskedState = Annotated[
    State | None,
    Query(
        alias="state",
        description="Only pods in this state. bound: all pods on a node. unconfirmed: bound, but "
        "no report shows them yet. gone: deleted, but their memory is not seen free yet. "
        "unreserved: bound without a reservation. dra: without a reservation, because DRA "
        "allocated their GPUs. idle: as in /v1/idle.",
        examples=["overusing"],
    ),
]
AskedOrder = Annotated[
    Order,
    Query(
        description="name; oldest: created first; all other orders: most memory first.",
        examples=["unused"],
    ),
]


class PodView(View):
    namespace: str
    name: str
    uid: str
    owner_kind: str
    """Kind and name of the controller. For a pod without a controller, Pod and the pod's name."""
    owner_name: str
    node: str | None
    """Null while the pod is pending."""
    model: str | None
    """Model of its devices, or of its candidate devices; null while neither is known."""
    devices: list[str]
    """Names of the devices on which a report shows it."""
    states: list[str]
    """All states that apply to it. The phase comes first."""
    request: str
    """Its request, such as "1 x nvidia.com/gpu with 8Gi, limit 20Gi"; "none" if it uses GPUs
    without a request; empty if the request cannot be read."""
    memory_class: str | None
    """guaranteed (limit equals request), burstable (limit above request) or unlimited; null if that
    is not known."""
    reserved_bytes: int
    """Sum over its devices. Until it has a reservation, the memory charged for it; 0 while it is
    pending."""
    used_bytes: int | None
    """Null if its use is not measured."""
    peak_bytes: int | None
    """Sum of the peaks of its containers since they started; null if its use is not measured."""
    unused_bytes: int
    """Memory that is reserved and not in use."""
    overuse_bytes: int
    """Memory in use beyond the reservations."""
    created_at: Time | None
    """When the pod was created; null if that is not known."""
    idle_since: Time | None
    """When it last used an SM of its devices; null if it is not idle, or if that is not known."""


class PodSumsView(View):
    """Sums over all matching pods, on all pages."""

    waiting_pods: int = 0
    waiting_bytes: int = 0
    """Memory that the waiting pods request. A share of a device counts as 0."""
    reserved_bytes: int = 0
    used_bytes: int = 0
    unused_bytes: int = 0
    overuse_bytes: int = 0


class PodsBody(Paged):
    sums: PodSumsView
    pods: list[PodView]


#: Shown as the request of a pod that uses GPUs without requesting any.
NO_REQUEST = "none"
#: Maximum number of digits of the reserved bytes.
_DIGITS = 18
#: Sorts after any time written as text.
_LAST = "~"

routes = APIRouter()


def shared_rows(request: Request) -> GpuPods:
    """Return the rows of all pods, which all readers of the application share."""
    return shared(request, GpuPods)


@dataclass(frozen=True, slots=True)
class _Filter:
    """The filters of a request. Empty fields match everything."""

    text: str
    namespace: str
    owner: str
    node: str
    model: str
    state: State | None
    wall_s: float
    #: Uids of the pods whose overuse has lasted for a while.
    overusing: frozenset[str]

    def states_of(self, pod: GpuPod) -> Iterator[State]:
        """Yield the states of the pod except ``bound``, starting with its phase."""
        yield State(pod.phase)
        if pod.by_dra:
            yield State.DRA
        elif pod.node and not pod.reserved:
            yield State.UNRESERVED
        if pod.evicting:
            yield State.EVICTING
        if pod.uid in self.overusing:
            yield State.OVERUSING
        if pod.is_idle(self.wall_s):
            yield State.IDLE

    def matches(self, pod: GpuPod) -> bool:
        return (
            (not self.namespace or pod.namespace == self.namespace)
            and (not self.node or pod.node == self.node)
            and (not self.model or pod.model == self.model)
            and (not self.owner or pod.is_owned_by(self.owner))
            and (not self.text or self._has_text(pod))
            and (self.state is None or self._is_in_state(pod))
        )

    def _has_text(self, pod: GpuPod) -> bool:
        names = f"{pod.namespace}/{pod.name}\n{pod.owner_kind}/{pod.owner_name}\n{pod.node}"
        return self.text in names.lower()

    def _is_in_state(self, pod: GpuPod) -> bool:
        if self.state is State.BOUND:
            return bool(pod.node)
        return any(each is self.state for each in self.states_of(pod))


@routes.get("/v1/pods", response_model=PodsBody)
def pods(
    context: InContext,
    request: Request,
    snap: Newest,
    page: AskedPage,
    search: Search = "",
    namespace: Namespace = "",
    owner: Owner = "",
    node: OnNode = "",
    model: Model = "",
    state: AskedState = None,
    order: AskedOrder = Order.NAME,
) -> Response:
    """List all pods that request, reserve or use GPU memory. A page has 100 pods by default, and at
    most 1,000. The next page continues after the last pod of this page, even if pods appeared
    meanwhile."""
    overusing = frozenset(each.uid for each in context.cluster.overuses.lasting)
    wanted = _Filter(
        search.lower(), namespace, owner, node, model, state, context.wall_s(), overusing
    )
    return context.answers.of(
        request,
        context.monotonic_s(),
        lambda: _answer(context, snap, shared_rows(request), wanted, order, page),
    )


def _answer(
    context: Context, snap: Snapshot, rows: GpuPods, wanted: _Filter, order: Order, page: Page
) -> Response:
    position, limit = _ORDERS[order], min(page.limit or PODS, MOST_PODS)
    sums = PodSumsView()
    matching, remaining = 0, 0

    def after() -> Iterator[tuple[str, GpuPod]]:
        nonlocal matching, remaining
        for pod in rows.of(context.cluster, snap):
            if not wanted.matches(pod):
                continue
            matching += 1
            _add(sums, pod)
            if not page.after or position(pod) > page.after:
                remaining += 1
                yield position(pod), pod

    shown = heapq.nsmallest(limit, after())
    remaining -= len(shown)
    body = PodsBody(
        **context.head(snap),
        matching=matching,
        remaining=remaining,
        continue_=shown[-1][0] if remaining else None,
        sums=sums,
        pods=[],
    )
    return joined(body, "pods", (_view(context, wanted, pod) for _, pod in shown))


def _position(key: Callable[[GpuPod], str]) -> Callable[[GpuPod], str]:
    return lambda pod: f"{key(pod)}{pod.namespace}/{pod.name}/{pod.uid}/{pod.node}"


def _most_first(field: str) -> Callable[[GpuPod], str]:
    most = 10**_DIGITS - 1
    return lambda pod: f"{most - (getattr(pod, field) or 0):0{_DIGITS}d}_"


#: Order -> the position of a pod as text, for ``continue``. Positions sort like the pods.
_ORDERS: dict[Order, Callable[[GpuPod], str]] = {
    Order.NAME: _position(lambda _: ""),
    Order.OLDEST: _position(lambda pod: f"{pod.created_at or _LAST}_"),
    **{
        order: _position(_most_first(f"{order.value}_bytes"))
        for order in (Order.RESERVED, Order.USED, Order.UNUSED, Order.OVERUSE)
    },
}


def _add(sums: PodSumsView, pod: GpuPod) -> None:
    sums.waiting_pods += not pod.node
    sums.waiting_bytes += pod.waiting_bytes
    sums.reserved_bytes += pod.reserved_bytes
    sums.used_bytes += pod.used_bytes or 0
    sums.unused_bytes += pod.unused_bytes
    sums.overuse_bytes += pod.overuse_bytes


def _view(context: Context, wanted: _Filter, pod: GpuPod) -> PodView:
    known = context.cluster.pod(pod.uid)
    asked = context.cluster.understand(known) if known else None
    asks = asked.containers if isinstance(asked, VramRequest) else ()
    return PodView.of(
        pod,
        states=[each.value for each in wanted.states_of(pod)],
        request=", ".join(map(_request_text, asks)) or _unmanaged_request(context.cluster, pod.uid),
        memory_class=asked.memory_class.value if asks and isinstance(asked, VramRequest) else None,
        peak_bytes=None if pod.used_bytes is None else pod.peak_bytes,
    )


def _request_text(ask: ContainerAsk) -> str:
    limit = f", limit {ask.limit_text}" if ask.limit_text else ""
    return f"{ask.count} x {ask.resource} with {ask.amount_text}{limit}"


def _unmanaged_request(cluster: Cluster, uid: str) -> str:
    """Return the GPU resources that a pod requests but that are not managed; empty if they are not
    known."""
    pod = cluster.gpu_users.get(uid)
    return (
        ""
        if pod is None
        else ", ".join(unmanaged_requests(pod, cluster.rules.manages)) or NO_REQUEST
    )
