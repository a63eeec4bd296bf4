"""The request and the answer of POST /v1/whatif."""

from pydantic import ConfigDict, Field

from headroom.console.responses import AskView, Body, ReasonView
from headroom.console.view import View
from headroom.console.views.capacity import SpaceView
from headroom.console.views.requested_pods import PodsAsked, StrictModel
from headroom.contract.annotations import DeviceChoice

#: Maximum number of entries of ``pods``.
MOST_KINDS = 50


class NodesAdded(StrictModel):
    like: str = Field(max_length=512, description="An existing node to copy.")
    count: int = Field(1, ge=1)


class WhatifAsked(StrictModel):
    """Changes are applied in this order: release, drain, replicas, device_choices, add. Then
    the pods of drained nodes are placed, and then ``pods`` in the given order."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"pods": [{"vram": "20Gi", "count": 6}], "drain": ["gpu-a"]}]
        },
    )

    pods: list[PodsAsked] = Field(default_factory=list, max_length=MOST_KINDS)
    release: list[str] = Field(
        default_factory=list, description="Pods to remove, as namespace/name."
    )
    drain: list[str] = Field(default_factory=list, description="Nodes to drain and remove.")
    replicas: dict[str, int] = Field(
        default_factory=dict,
        description="Node name -> new number of replicas of each of its devices; 1: not shared.",
    )
    device_choices: dict[str, DeviceChoice] = Field(
        default_factory=dict,
        description="Node name -> new value of its annotation headroom.gpu/device-choice.",
    )
    add: list[NodesAdded] = Field(default_factory=list, description="Idle nodes to add.")


class WhatifPlacementView(View):
    pod: str
    leaves: str | None
    """The drained node that the pod leaves; null for a new pod."""
    node: str
    score_ratio: float
    devices: list[str]
    """Devices that the pod could get. If there is one, it is certain."""
    most_bytes: int
    """Maximum memory that the pod takes on one of them."""


class WhatifRejectionView(View):
    """Equal pods that could not be placed, with the reasons."""

    pods: list[str]
    leaves: str | None
    not_tried: str | None
    """Why no scheduler tries the pods on any node: scheduling gates, another scheduler, or a
    ResourceQuota that rejects them; null if a scheduler tries them."""
    reasons: list[ReasonView]
    ineligible: list[ReasonView]
    """Nodes that are not eligible because of a selector, affinity, taint or cordon."""


class WhatifSpaceView(View):
    """Free memory for pods of one size, before and after. See /v1/capacity."""

    request: AskView
    before: SpaceView
    after: SpaceView
    fullness_before: str
    fullness_after: str


class WhatifTotalsView(View):
    """Sums over the cluster."""

    pods: int
    """Number of pods that are bound or hold GPU memory."""
    reserved_bytes: int
    """Memory that these pods reserve. Each GPU that a pod gets counts once."""
    headroom_bytes: int
    """As in /v1/fleet. Until the GPU of a pod is known, memory is kept on each GPU that it could
    get."""
    devices: int
    devices_in_use: int
    """Number of devices with a pod or other use. A pod that could get one of several devices counts
    on an empty one."""
    devices_empty: int


class WhatifBody(Body):
    message: str
    placed: int
    rejected: int
    before: WhatifTotalsView
    """Totals of the cluster, without the changes and with them."""
    after: WhatifTotalsView
    placements: list[WhatifPlacementView]
    """In the order in which the pods were placed."""
    rejections: list[WhatifRejectionView]
    added: list[str]
    """Names of the nodes that were added."""
    spaces: list[WhatifSpaceView]
    """One for each size in ``pods``. Without pods, one for the memory share of a replica."""
    not_checked: list[str]
    """Checks of kube-scheduler and the API server that this answer does not include."""
