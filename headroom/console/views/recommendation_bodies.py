"""The answer of GET /v1/recommendations."""

from headroom.console.responses import Body
from headroom.console.view import View


class RecommendationView(View):
    """A container of an owner on one device model."""

    namespace: str
    profile: str
    """Name of the VRAMProfile."""
    owner_kind: str
    owner_name: str
    family: bool
    """Whether the owner stands for all objects whose names begin with its name."""
    container: str
    model: str
    program: str
    """The program's family, such as vLLM; empty if unknown."""
    request_bytes: int | None
    """Null if there are too few lives."""
    missing: str | None
    """Why there is no request: no-lives, few-lives, old-lives, unsettled or new-program; null if
    there is one."""
    message: str
    """One sentence for people."""
    lives: int
    """Complete lives of the program that ran last. A life is one run of a container on one
    device."""
    span_s: float
    """Seconds from the first of these lives to the last."""
    quantile_bytes: int | None
    """The quantile of their peaks to which a margin is added; null without a request."""
    highest_bytes: int | None
    """The highest of their peaks; null without a request."""
    above_ratio: float
    """Share of the lives, weighted by age, above the request."""
    tested: int
    """Lives that ended while there was a recommendation."""
    missed: int
    """The tested lives whose peak exceeded the recommendation."""
    self_sized: bool
    """Whether the program allocates once and keeps what it has."""
    setting: str
    """The program's setting that decides how much it allocates; empty if none is known."""
    pods: int
    """Pods that exist now, on this model or pending."""
    current_bytes: int | None
    """The most that one of these pods reserves on a device."""
    reclaimable_bytes: int
    """The memory that these pods would free: negative if they would reserve more. A container
    gets the largest recommendation of all its models."""


class OwnerSum(View):
    namespace: str
    kind: str
    name: str
    pods: int
    reclaimable_bytes: int


class ReclaimableTeamView(View):
    namespace: str
    reclaimable_bytes: int
    owners: list[OwnerSum]
    """Owners whose pods would free memory, those that would free the most first."""


class AcceptedView(View):
    """The effect if the pods are created again with the recommended requests, by simulation."""

    message: str
    pods: int
    """Pods that were simulated."""
    left_out: int
    """Pods that were not simulated, because there are too many."""
    unschedulable: int
    """Pods that would fit on no node if they were created again."""
    empty_devices: int
    """Devices without use and without a reservation."""
    empty_devices_again: int
    """Empty devices after all pods were placed again with their present requests."""
    empty_devices_after: int
    """Empty devices after all pods were placed again with the recommended requests."""
    headroom_bytes: int
    headroom_bytes_after: int
    """Headroom with the recommended requests."""
    pending: int
    pending_fit: int
    """Pending pods that fit now."""
    pending_fit_after: int
    """Pending pods that fit with the recommended requests."""
    not_checked: list[str]


class RecommendationsBody(Body):
    recommendations: list[RecommendationView]
    teams: list[ReclaimableTeamView]
    """Sums of what recommendations below the present requests would free, by namespace."""
    accepted: AcceptedView | None = None
    """Null unless ``accepted=true`` is requested."""
