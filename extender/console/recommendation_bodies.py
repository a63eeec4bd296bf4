"""The answer of GET /v1/recommendations."""

from pydantic import BaseModel

from extender.console.responses import Body


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
    #: Why there is no request: no-lives, few-lives, old-lives, unsettled or new-program;
    #: null if there is one.
    missing: str | None
    #: One sentence for people.
    message: str
    #: Complete lives of the program that ran last. A life is one run of a container on one device.
    lives: int
    #: Seconds from the first of these lives to the last.
    span_s: float
    #: The quantile of their peaks to which a margin is added; null without a request.
    quantile_bytes: int | None
    #: The highest of their peaks; null without a request.
    highest_bytes: int | None
    #: Share of the lives, weighted by age, above the request.
    above_ratio: float
    #: Lives that ended while there was a recommendation.
    tested: int
    #: The tested lives whose peak exceeded the recommendation.
    missed: int
    #: Whether the program allocates once and keeps what it has.
    self_sized: bool
    #: The program's setting that decides how much it allocates; empty if none is known.
    setting: str
    #: Pods that exist now, on this model or pending.
    pods: int
    #: The most that one of these pods reserves on a device.
    current_bytes: int | None
    #: The memory that these pods would free: negative if they would reserve more. A container gets
    #: the largest recommendation of all its models.
    reclaimable_bytes: int


class OwnerSum(BaseModel):
    namespace: str
    kind: str
    name: str
    pods: int
    reclaimable_bytes: int


class ReclaimableTeamView(BaseModel):
    namespace: str
    reclaimable_bytes: int
    #: Owners whose pods would free memory, those that would free the most first.
    owners: list[OwnerSum]


class AcceptedView(BaseModel):
    """The effect if the pods are created again with the recommended requests, by simulation."""

    message: str
    #: Pods that were simulated.
    pods: int
    #: Pods that were not simulated, because there are too many.
    left_out: int
    #: Pods that would fit on no node if they were created again.
    unschedulable: int
    #: Devices without use and without a reservation.
    empty_devices: int
    #: Empty devices after all pods were placed again with their present requests.
    empty_devices_again: int
    #: Empty devices after all pods were placed again with the recommended requests.
    empty_devices_after: int
    headroom_bytes: int
    #: Headroom with the recommended requests.
    headroom_bytes_after: int
    pending: int
    #: Pending pods that fit now.
    pending_fit: int
    #: Pending pods that fit with the recommended requests.
    pending_fit_after: int
    not_checked: list[str]


class RecommendationsBody(Body):
    recommendations: list[RecommendationView]
    #: Sums of what recommendations below the present requests would free, by namespace.
    teams: list[ReclaimableTeamView]
    #: Null unless ``accepted=true`` is requested.
    accepted: AcceptedView | None = None
