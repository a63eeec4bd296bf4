"""Recommended requests of each owner, with the lives that they are based on, and what they free."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel
from starlette.responses import Response

from contract.annotations import Bytes
from contract.vramprofile import VRAMProfile
from extender.console.responses import Body, encoded
from extender.console.view_context import Context, InContext, Newest
from extender.placement.request import VramRequest, asks_for_gpu
from extender.recommend.checkpoint import restored
from extender.recommend.families import profile_controller
from extender.recommend.lives import LEAST_LIVES
from extender.recommend.profile import Missing, Recommendation
from extender.recommend.programs import Family, setting

_HOUR_S, _DAY_S = 3600.0, 86400.0
#: Requests are rounded up to a multiple of this.
STEP_BYTES = 64 << 20


class RecommendationView(BaseModel):
    """A container of an owner on one device model."""

    namespace: str
    #: Name of the VRAMProfile.
    profile: str
    owner_kind: str
    owner_name: str
    #: Whether the owner stands for all objects whose names begin with its name.
    family: bool
    container: str
    model: str
    #: The program's family, such as vLLM; empty if unknown.
    program: str
    #: Null if there are too few lives.
    request_bytes: int | None
    #: Why there is no request: no-lives, few-lives, old-lives or new-program; null if there is one.
    missing: str | None
    #: One sentence for people.
    message: str
    #: Complete lives of the program that ran last, and from the first to the last.
    lives: int
    span_s: float
    #: The quantile to which a margin is added, and the highest peak; null without a request.
    quantile_bytes: int | None
    highest_bytes: int | None
    #: Share of the lives, weighted by age, above the request.
    above_ratio: float
    #: Lives that ended while there was a recommendation, and those that exceeded it.
    tested: int
    missed: int
    #: Whether the program allocates once and keeps what it has, and which setting decides that;
    #: empty if none is known.
    self_sized: bool
    setting: str
    #: Pods that exist now, the largest request of one, and the memory that the recommendation would
    #: free: negative if it asks for more.
    pods: int
    current_bytes: int | None
    reclaimable_bytes: int


class TeamView(BaseModel):
    namespace: str
    reclaimable_bytes: int


class RecommendationsBody(Body):
    recommendations: list[RecommendationView]
    #: Sums of what recommendations below the present requests would free, by namespace.
    teams: list[TeamView]


InNamespace = Annotated[str | None, Query(description="Only this namespace.", examples=["team-a"])]

routes = APIRouter()


@routes.get("/v1/recommendations", response_model=RecommendationsBody)
def recommendations(context: InContext, snap: Newest, namespace: InNamespace = None) -> Response:
    """List the recommended request of each container that lives are recorded of."""
    found = list(recommendation_views(context, namespace))
    freed: dict[str, int] = defaultdict(int)
    for each in found:
        freed[each.namespace] += max(0, each.reclaimable_bytes)
    teams = [TeamView(namespace=name, reclaimable_bytes=freed[name]) for name in sorted(freed)]
    body = RecommendationsBody(**context.head(snap), recommendations=found, teams=teams)
    return encoded(body)


def recommendation_views(context: Context, namespace: str | None) -> Iterator[RecommendationView]:
    """Yield a view for each container and device model, by namespace and profile."""
    requests = _requests(context)
    now_s = context.wall_s()
    for profile in context.profiles.all():
        if namespace in (None, profile.metadata.namespace):
            yield from _of_profile(profile, requests, now_s)


#: (namespace, profile, container) -> bytes on each device and number of devices, of each pod.
Requests = dict[tuple[str, str, str], list[tuple[int, int]]]


def _requests(context: Context) -> Requests:
    """Return the requests in bytes of the pods that exist."""
    found: Requests = defaultdict(list)
    for pod in context.cluster.pods():
        if pod.ended or not asks_for_gpu(pod, context.cluster.rules):
            continue
        namespace = pod.metadata.namespace
        profile = context.profiles.of(namespace, profile_controller(pod, ""))
        request = context.cluster.understand(pod) if profile is not None else None
        if profile is None or not isinstance(request, VramRequest):
            continue
        for ask in request.containers:
            if isinstance(ask.amount, Bytes):
                key = (namespace, profile.metadata.name, ask.name)
                found[key].append((ask.amount.count_bytes, ask.count))
    return found


def _of_profile(
    profile: VRAMProfile, requests: Requests, now_s: float
) -> Iterator[RecommendationView]:
    metadata, owner = profile.metadata, profile.status.owner
    lives_of = restored(profile.status).containers
    for status in profile.status.containers:
        container = lives_of[status.container, status.model]
        newest = next(reversed(container.tracks), "")
        found = container.recommendation(newest, now_s)
        family = next((f for f in Family if f.value == status.family), Family.UNKNOWN)
        request_bytes = rounded(found.request_bytes)
        current = requests.get((metadata.namespace, metadata.name, status.container), [])
        yield RecommendationView(
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
            lives=found.lives,
            span_s=found.span_s,
            quantile_bytes=found.quantile_bytes or None,
            highest_bytes=found.highest_bytes or None,
            above_ratio=found.above_ratio,
            tested=found.tested,
            missed=found.missed,
            self_sized=found.self_sized,
            setting=setting(family, found.self_sized),
            pods=len(current),
            current_bytes=max((each for each, _ in current), default=None),
            reclaimable_bytes=sum(
                (each - request_bytes) * count for each, count in current if request_bytes
            ),
        )


def rounded(request_bytes: int | None) -> int | None:
    """Return a request rounded up to ``STEP_BYTES``; None for None."""
    return None if request_bytes is None else -(-request_bytes // STEP_BYTES) * STEP_BYTES


def message(found: Recommendation) -> str:
    """Return the basis of a recommendation as a sentence."""
    lives = "1 life" if found.lives == 1 else f"{found.lives:,} lives"
    basis = f"{lives}, {_span(found.span_s)}"
    if found.missing is Missing.NO_LIVES:
        return "no complete life: not yet"
    if found.missing is Missing.OLD_LIVES:
        return f"{basis}: not yet; they are too long ago"
    if found.missing is not None:
        return f"{basis}: not yet; at least {LEAST_LIVES} lives are needed"
    text = f"{basis}; {found.missed} of {found.tested} were above the recommendation"
    return f"{text}; its size is a setting" if found.self_sized else text


def _span(span_s: float) -> str:
    return f"{span_s / _HOUR_S:.0f} h" if span_s < 2 * _DAY_S else f"{span_s / _DAY_S:.0f} days"
