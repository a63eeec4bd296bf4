"""Recommended requests of each owner, with the lives behind them, and the memory that they free."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from headroom.console.facts.request_whatif import Amounts, Outcome, simulate_requests
from headroom.console.responses import InNamespace, encoded
from headroom.console.view_context import Context, InContext, Newest
from headroom.console.views.recommendation_bodies import (
    AcceptedView,
    OwnerSum,
    ReclaimableTeamView,
    RecommendationsBody,
    RecommendationView,
)
from headroom.contract.annotations import Bytes
from headroom.contract.kube import Pod
from headroom.contract.quantity import gib
from headroom.contract.vramprofile import VRAMProfile
from headroom.core.cluster.cluster import Cluster
from headroom.core.placement.capacity import largest_devices
from headroom.core.placement.request import ContainerAsk, VramRequest, asks_for_gpu
from headroom.core.placement.snapshot import Snapshot
from headroom.core.recommend.estimate import fitting
from headroom.core.recommend.families import profile_controller
from headroom.core.recommend.lives import LEAST_LIVES
from headroom.core.recommend.profile import Missing, Recommendation
from headroom.core.recommend.profile_status import restored
from headroom.core.recommend.programs import Family, setting

_HOUR_S, _DAY_S = 3600.0, 86400.0


IfAccepted = Annotated[
    bool,
    Query(description="Also simulate that all recommendations are accepted.", examples=["true"]),
]

routes = APIRouter()


@routes.get("/v1/recommendations", response_model=RecommendationsBody)
def recommendations(
    context: InContext,
    snap: Newest,
    namespace: InNamespace = "",
    accepted: IfAccepted = False,
) -> Response:
    """List the recommended request of each container with recorded lives.

    With ``accepted=true``, also simulate how much memory accepting them frees, and which pending
    pods would then fit.
    """
    profiles = [
        each for each in context.profiles.all() if namespace in ("", each.metadata.namespace)
    ]
    now_s = context.wall_s()
    largest = largest_devices(snap)
    found = [view for profile in profiles for view in _views(profile, now_s, largest)]
    held = _held_by_view(context, found)
    for view in found:
        _add_pods(view, held.get((_container(view), view.model), ()))
    body = RecommendationsBody(
        **context.head(snap), recommendations=found, teams=list(_teams(found))
    )
    if accepted:
        amounts = _amounts(each for pods in held.values() for each in pods)
        body.accepted = _accepted_view(context, snap, amounts)
    return encoded(body)


#: (namespace, profile, container)
Container = tuple[str, str, str]


def _container(view: RecommendationView) -> Container:
    return view.namespace, view.profile, view.container


@dataclass(frozen=True, slots=True)
class _Held:
    """A container of an existing pod."""

    pod: Pod
    ask: ContainerAsk
    #: Bytes that it reserves on each device; None if the pod is pending and requests a share.
    now_bytes: int | None
    #: The recommended bytes; None if there is no recommendation.
    then_bytes: int | None

    @property
    def frees_bytes(self) -> int:
        if self.now_bytes is None or self.then_bytes is None:
            return 0
        return (self.now_bytes - self.then_bytes) * self.ask.count


def _held_by_view(
    context: Context, views: Iterable[RecommendationView]
) -> Mapping[tuple[Container, str], list[_Held]]:
    """Return the containers of existing pods, by container and model of the device.

    If no view has this model, the container counts for the model with the largest recommendation.
    """
    of: dict[Container, dict[str, int | None]] = defaultdict(dict)
    for view in views:
        of[_container(view)][view.model] = view.request_bytes
    found: dict[tuple[Container, str], list[_Held]] = defaultdict(list)
    cluster = context.cluster
    for pod in cluster.pods():
        if pod.ended or not asks_for_gpu(pod, cluster.rules):
            continue
        namespace = pod.metadata.namespace
        profile = context.profiles.of(namespace, profile_controller(pod, ""))
        request = cluster.understand(pod) if profile is not None else None
        if profile is None or not isinstance(request, VramRequest):
            continue
        for ask in request.containers:
            models = of.get(container := (namespace, profile.metadata.name, ask.name))
            if not models:
                continue
            largest = max(models, key=lambda name: models[name] or 0)
            now_bytes, model = _reserved(cluster, pod, ask)
            held = _Held(pod, ask, now_bytes, models[largest])
            found[container, model if model in models else largest].append(held)
    return found


def _reserved(cluster: Cluster, pod: Pod, ask: ContainerAsk) -> tuple[int | None, str]:
    """Return the bytes that a container reserves on a device, and the model of the device."""
    now_bytes = ask.amount.count_bytes if isinstance(ask.amount, Bytes) else None
    gpunode = cluster.gpunode(pod.node) if pod.node else None
    reservation = gpunode.spec.reservations.get(pod.metadata.uid) if gpunode else None
    if gpunode is None or gpunode.status is None or reservation is None:
        return now_bytes, ""
    models = {device.uuid: device.model for device in gpunode.status.devices}
    for charge in reservation.charges:
        if charge.resource == ask.resource and charge.candidates:
            own = [each.device_bytes for each in charge.containers if each.name == ask.name]
            reserved_bytes = max(own or charge.candidates.values())
            model = models.get(next(iter(charge.candidates)), "")
            return now_bytes if now_bytes is not None else reserved_bytes, model
    return now_bytes, ""


def _add_pods(view: RecommendationView, pods: Sequence[_Held]) -> None:
    view.pods = len(pods)
    view.current_bytes = max((e.now_bytes for e in pods if e.now_bytes is not None), default=None)
    view.reclaimable_bytes = sum(each.frees_bytes for each in pods)


def _teams(found: Iterable[RecommendationView]) -> Iterator[ReclaimableTeamView]:
    by_team: dict[str, dict[tuple[str, str], list[RecommendationView]]] = {}
    for each in found:
        owners = by_team.setdefault(each.namespace, {})
        owners.setdefault((each.owner_kind, each.owner_name), []).append(each)
    for namespace in sorted(by_team):
        sums = [
            OwnerSum(
                namespace=namespace,
                kind=kind,
                name=name,
                pods=_pods(rows),
                reclaimable_bytes=sum(max(0, each.reclaimable_bytes) for each in rows),
            )
            for (kind, name), rows in by_team[namespace].items()
        ]
        freeing = sorted(filter(_frees, sums), key=lambda each: -each.reclaimable_bytes)
        total = sum(each.reclaimable_bytes for each in freeing)
        yield ReclaimableTeamView(namespace=namespace, reclaimable_bytes=total, owners=freeing)


def _pods(views: Iterable[RecommendationView]) -> int:
    """Return the number of pods of one owner. Containers of one pod can be in several views."""
    by_container: Counter[str] = Counter()
    for view in views:
        by_container[view.container] += view.pods
    return max(by_container.values(), default=0)


def _frees(owner: OwnerSum) -> bool:
    return owner.reclaimable_bytes > 0


def _amounts(held: Iterable[_Held]) -> Iterator[Amounts]:
    by_pod: dict[str, list[_Held]] = defaultdict(list)
    for each in held:
        if each.then_bytes is not None:
            by_pod[each.pod.metadata.uid].append(each)
    for pods in by_pod.values():
        by_container = {e.ask.name: e.then_bytes for e in pods if e.then_bytes is not None}
        yield Amounts(pods[0].pod, by_container, sum(each.frees_bytes for each in pods))


def _accepted_view(context: Context, snap: Snapshot, amounts: Iterable[Amounts]) -> AcceptedView:
    found = simulate_requests(
        context.cluster, context.seen_by(None, snap), context.monotonic_s(), amounts
    )
    values = {name: getattr(found, name) for name in AcceptedView.model_fields if name != "message"}
    return AcceptedView(message=accepted_message(found), **values)


def accepted_message(found: Outcome) -> str:
    """Describe in a sentence what changes if the recommendations are accepted."""
    if not found.pods:
        return "no bound pod would request another amount"
    pods = "1 pod" if found.pods == 1 else f"{found.pods:,} pods"
    more_bytes = found.headroom_bytes_after - found.headroom_bytes
    change = f"{gib(more_bytes)} more" if more_bytes >= 0 else f"{gib(-more_bytes)} less"
    empty = f"GPUs without a pod: {found.empty_devices_after} instead of {found.empty_devices}"
    if found.empty_devices_again != found.empty_devices:
        empty += (
            f" ({found.empty_devices_again} if the pods were created again with their present"
            " requests)"
        )
    parts = [f"{pods} created again with the recommended requests: {change} free; {empty}"]
    if found.pending:
        parts.append(
            f"of {found.pending:,} pending, {found.pending_fit_after:,} would fit instead of"
            f" {found.pending_fit:,}"
        )
    if found.unschedulable:
        parts.append(f"{found.unschedulable:,} of the pods would be unschedulable")
    if found.left_out:
        parts.append(f"{found.left_out:,} more pods were not simulated")
    return "; ".join(parts)


def _views(
    profile: VRAMProfile, now_s: float, largest: Mapping[str, int]
) -> Iterator[RecommendationView]:
    """Yield a view for each container and device model. Its number of pods is 0 until the caller
    counts them. No request is above ``largest``, the allocatable bytes of the model's largest
    device."""
    metadata, owner = profile.metadata, profile.status.owner
    lives_of = restored(profile.status).containers
    for status in profile.status.containers:
        container = lives_of.get((status.container, status.model))
        if container is None:
            continue
        newest = next(reversed(container.tracks), "")
        found = container.recommendation(newest, now_s)
        request_bytes = None
        if found.request_bytes is not None:
            request_bytes = fitting(found.request_bytes, largest.get(status.model))
            is_whole = found.whole_device or request_bytes < found.highest_bytes
            found = replace(found, whole_device=is_whole)
        family = next((f for f in Family if f.value == status.family), Family.UNKNOWN)
        yield RecommendationView.of(
            found,
            namespace=metadata.namespace,
            profile=metadata.name,
            owner_kind=owner.kind,
            owner_name=owner.name,
            family=owner.family,
            container=status.container,
            model=status.model,
            program=status.family,
            request_bytes=request_bytes,
            missing=found.missing.value if found.missing else None,
            message=message(found),
            quantile_bytes=found.quantile_bytes or None,
            highest_bytes=found.highest_bytes or None,
            setting=setting(family, found.self_sized),
            pods=0,
            current_bytes=None,
            reclaimable_bytes=0,
        )


def message(found: Recommendation) -> str:
    """Describe in a sentence on which lives a recommendation is based."""
    lives = "1 life" if found.lives == 1 else f"{found.lives:,} lives"
    basis = f"{lives}, {_span(found.span_s)}"
    if found.missing is Missing.NO_LIVES:
        return "no recommendation yet: no life is complete"
    if found.missing is Missing.UNSETTLED:
        return (
            f"{basis}: keep the request; the use of {found.unsettled:,} of them grew or jumped "
            "after the first day, as with a leak or models that are changed in the process"
        )
    if found.missing is Missing.OLD_LIVES:
        return f"{basis}: no recommendation yet; these lives ended too long ago"
    if found.missing is not None:
        return f"{basis}: no recommendation yet; at least {LEAST_LIVES} lives are needed"
    text = f"{basis}; {found.missed} of {found.tested} were above the recommendation"
    if found.whole_device:
        text += "; lives differ so much that only the whole device is safe"
    if found.others_lives:
        others = "1 life" if found.others_lives == 1 else f"{found.others_lives:,} lives"
        used = gib(found.others_highest_bytes, up=True)
        text += f"; {others} of other programs used up to {used}"
    return f"{text}; a setting of the program sets its size" if found.self_sized else text


def _span(span_s: float) -> str:
    return f"{span_s / _HOUR_S:.0f} h" if span_s < 2 * _DAY_S else f"{span_s / _DAY_S:.0f} days"
