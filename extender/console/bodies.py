"""What the bodies of the debug API are made of: every figure with its unit in its name, absent is
null."""

from collections import Counter
from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel, Field

from contract.reasons import Reason
from extender.placement.fit import Verdicts
from extender.placement.request import ContainerAsk
from extender.state.selectors import Obstacle


class Body(BaseModel):
    """What every body begins with."""

    apiVersion: str = "headroom.gpu/v1"
    generatedAt: str
    snapshot_generation: int


class Recomputed(BaseModel):
    """What this process computes from its newest snapshot; a decision is the record of its
    extender instead."""

    source: Literal["recomputed"] = "recomputed"


class Paged(Body):
    """A list, or as much of it as was asked for."""

    #: How many there are that match, on this page or not, and how many come after it.
    matching: int
    remaining: int
    #: To be given as ``continue`` for the next page; null where this is the last one.
    continue_: str | None = Field(serialization_alias="continue")


class AskView(BaseModel):
    container: str
    resource: str
    count: int
    #: As written: 8Gi, 25%, or "1 replica" where nobody wrote anything.
    amount: str
    #: "annotation", "namespace" or "replica".
    source: str


class ReasonView(BaseModel):
    #: A reason of Headroom's; or cordoned, taint, selector or affinity for nodes that
    #: kube-scheduler does not offer.
    reason: str
    message: str
    nodes: int
    #: Whether evicting pods could cure it.
    evictable: bool


def ask_view(ask: ContainerAsk) -> AskView:
    return AskView(
        container=ask.name,
        resource=ask.resource,
        count=ask.count,
        amount=ask.amount_text,
        source=ask.source,
    )


def reason_view(reason: Reason, nodes: int) -> ReasonView:
    return ReasonView(
        reason=reason.code, message=reason.sentence, nodes=nodes, evictable=reason.evictable
    )


def obstacle_view(obstacle: Obstacle, nodes: int) -> ReasonView:
    return ReasonView(reason=obstacle.code, message=obstacle.sentence, nodes=nodes, evictable=False)


def counted(count: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def reasons_of(verdicts: Verdicts) -> list[ReasonView]:
    """Why the pod does not fit, by number of nodes."""
    counts = Counter(verdicts.reason(i) for i in range(len(verdicts.rows)))
    return [reason_view(reason, n) for reason, n in counts.most_common() if reason is not None]


def stamp(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="milliseconds")
