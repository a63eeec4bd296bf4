"""Common parts of the bodies of the debug API.

The name of every quantity ends with its unit. Absent values are null.
"""

from collections import Counter
from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel, Field

from contract.reasons import Reason
from extender.placement.fit import Verdicts
from extender.placement.request import ContainerAsk
from extender.state.eligible_nodes import Obstacle


class Body(BaseModel):
    """The fields of every body."""

    apiVersion: str = "headroom.gpu/v1"
    generatedAt: str
    snapshot_generation: int


class Recomputed(BaseModel):
    """A result that this process computed from its newest snapshot.

    A decision, in contrast, is what an extender recorded.
    """

    source: Literal["recomputed"] = "recomputed"


class Paged(Body):
    """A list, or one page of it."""

    #: Number of all matching items.
    matching: int
    #: Number of matching items after this page.
    remaining: int
    #: Value of the query parameter ``continue`` for the next page; null on the last page.
    continue_: str | None = Field(serialization_alias="continue")


class AskView(BaseModel):
    container: str
    resource: str
    count: int
    #: As written: 8Gi or 25%; "1 replica" if neither the pod nor its namespace has an annotation.
    amount: str
    #: "annotation", "namespace" or "replica".
    source: str


class ReasonView(BaseModel):
    #: A reason of Headroom; or cordoned, taint, selector or affinity for nodes that kube-scheduler
    #: does not offer.
    reason: str
    message: str
    nodes: int
    #: Whether evicting pods could resolve it.
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
    """Return the count with its noun: ``1 node``, ``2 nodes``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def reasons_of(verdicts: Verdicts) -> list[ReasonView]:
    """Return the reasons why the pod does not fit, the most frequent first."""
    counts = Counter(verdicts.reason(i) for i in range(len(verdicts.rows)))
    return [reason_view(reason, n) for reason, n in counts.most_common() if reason is not None]


def stamp(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="milliseconds")
