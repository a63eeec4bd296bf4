"""What a what-if asks and what it answers."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from extender.console.bodies import AskView, Body, ReasonView
from extender.console.spaces import SpaceView

#: Bounds of one question: each pod and each change of a node takes a few milliseconds.
MOST_PODS, MOST_NODES, MOST_KINDS = 1000, 200, 50


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PodsAsked(_Strict):
    """``count`` equal pods: either made up from a size, or from a manifest."""

    count: int = Field(1, ge=1)
    vram: str = Field("", max_length=256, description="As in headroom.gpu/vram.")
    gpus: int = Field(1, ge=1, le=1024, description="Of each pod.")
    resource: str = Field("", max_length=256, description="Extended resource; else the usual one.")
    policy: Literal["", "pack", "spread", "fragmentation"] = Field(
        "", description="As in headroom.gpu/policy."
    )
    manifest: dict[str, Any] | None = Field(
        None, description="A pod as the API server has it, instead of the size."
    )


class NodesAdded(_Strict):
    like: str = Field(max_length=512, description="A node of the same make.")
    count: int = Field(1, ge=1)


class WhatifAsked(_Strict):
    """Changes come in this order: release, drain, replicas, add. Then the pods of drained nodes are
    placed, then the others as they stand here."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"pods": [{"vram": "20Gi", "count": 6}], "drain": ["gpu-a"]}]
        },
    )

    pods: list[PodsAsked] = Field(default_factory=list, max_length=MOST_KINDS)
    release: list[str] = Field(
        default_factory=list, description="Pods that end, as namespace/name."
    )
    drain: list[str] = Field(default_factory=list, description="Nodes that go.")
    replicas: dict[str, int] = Field(
        default_factory=dict, description="Node: replicas of each of its devices; 1: unshared."
    )
    add: list[NodesAdded] = Field(default_factory=list, description="Idle nodes that come.")


class WhatifPlacementView(BaseModel):
    pod: str
    #: The drained node that it leaves; null for a pod that was asked about.
    leaves: str | None
    node: str
    score_ratio: float
    #: Devices that it could end on; one where that is certain.
    devices: list[str]
    #: The most that it could take of one of them.
    most_bytes: int


class WhatifRejectionView(BaseModel):
    """Equal pods that no node takes."""

    pods: list[str]
    leaves: str | None
    #: Why no scheduler tries the pods, whatever the nodes: scheduling gates, another scheduler, or
    #: a ResourceQuota that rejects them; null if one does.
    not_tried: str | None
    reasons: list[ReasonView]
    #: Nodes that the pods may not run on, by their selectors, affinity, taints and cordon.
    ineligible: list[ReasonView]


class WhatifSpaceView(BaseModel):
    """What is left for pods of one size; see /v1/capacity."""

    request: AskView
    before: SpaceView
    after: SpaceView
    fullness_before: str
    fullness_after: str


class WhatifBody(Body):
    message: str
    placed: int
    rejected: int
    #: In the order in which they were placed.
    placements: list[WhatifPlacementView]
    rejections: list[WhatifRejectionView]
    #: Names of the nodes that were added.
    added: list[str]
    #: Of each size of pods that is asked about; where none is, of a replica's worth.
    spaces: list[WhatifSpaceView]
    #: Checks of kube-scheduler and the API server that this answer does not include.
    not_checked: list[str]
