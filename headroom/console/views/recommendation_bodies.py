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
    """Whether the profile stands for all owners whose names begin with the owner's name."""
    container: str
    model: str
    program: str
    """The family of the program, such as vLLM; empty if unknown."""
    request_bytes: int | None
    """Null if there are too few lives."""
    missing: str | None
    """Why there is no request: no-lives, few-lives, old-lives, unsettled or new-program; null if
    there is a request."""
    message: str
    """One sentence for people."""
    lives: int
    """Number of complete lives of the program that ran last. A life is one run of a container on
    one device."""
    span_s: float
    """Seconds from the first of these lives to the last."""
    quantile_bytes: int | None
    """Quantile of the peaks, to which a margin is added; null if there is no request."""
    highest_bytes: int | None
    """The highest peak; null if there is no request."""
    above_ratio: float
    """Share of the lives, weighted by age, whose peak is above the request."""
    tested: int
    """Number of lives that ended while there was a recommendation."""
    missed: int
    """Number of tested lives whose peak exceeded the recommendation."""
    self_sized: bool
    """Whether the program allocates its memory once and keeps it."""
    setting: str
    """The setting of the program that limits how much it allocates; empty if none is known."""
    pods: int
    """Number of pods that exist now, on this model or pending."""
    current_bytes: int | None
    """The largest amount that one of these pods reserves on a device."""
    reclaimable_bytes: int
    """Memory that these pods would free; negative if they would reserve more. A container counts
    with the largest recommendation of all its models."""


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
    """Owners whose pods would free memory, most first."""


class AcceptedView(View):
    """The simulated effect of creating the pods again with the recommended requests."""

    message: str
    pods: int
    """Number of pods that were simulated."""
    left_out: int
    """Number of pods that were not simulated, because there are too many."""
    unschedulable: int
    """Number of pods that would fit on no node if they were created again."""
    empty_devices: int
    """Number of devices that have no reservation and are not used."""
    empty_devices_again: int
    """Number of empty devices after all pods were placed again with their current requests."""
    empty_devices_after: int
    """Number of empty devices after all pods were placed again with the recommended requests."""
    headroom_bytes: int
    headroom_bytes_after: int
    """Headroom with the recommended requests."""
    pending: int
    pending_fit: int
    """Number of pending pods that fit now."""
    pending_fit_after: int
    """Number of pending pods that fit if the others use the recommended requests."""
    not_checked: list[str]


class RecommendationsBody(Body):
    recommendations: list[RecommendationView]
    teams: list[ReclaimableTeamView]
    """Memory that recommendations below the current requests would free, by namespace."""
    accepted: AcceptedView | None = None
    """Null unless ``accepted=true`` is requested."""
