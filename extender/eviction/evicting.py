"""Evicts a pod for a controller. All controllers evict pods only through this module.

A replica's cache may be out of date, because another replica may have withdrawn the decision, or
may have evicted one pod so that the others fit. So before each eviction, the object that contains
the decision is read from the API server and must still require the eviction. The pod is read after
this object. Its uid and resourceVersion are preconditions of the eviction, so a pod that changes in
the meantime is not evicted.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum

from extender.ledger.store import Evictor, Store
from headroom.contract.kube import Pod
from headroom.core.eviction.eligibility import leaves_within
from headroom.errors import StoreConflict, StoreError, StoreNotFound, StoreTimeout

#: Maximum number of attempts to evict a pod that changes between its read and its eviction.
ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class Victim:
    """A pod to evict from a node."""

    namespace: str
    name: str
    uid: str
    node: str


class Result(Enum):
    EVICTED = "evicted"
    #: The pod is no longer on the node, is terminating, or must not be evicted in its current
    #: state.
    LEFT = "left"
    #: The decision no longer requires the eviction.
    WITHDRAWN = "withdrawn"
    #: The pod changed during each attempt.
    CHANGED = "changed"
    #: The API server rejected the eviction, for example because of a disruption budget.
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class Eviction:
    result: Result
    #: The pod that was read from the API server, or None if it was not read.
    pod: Pod | None = None
    #: The API server's reason for a rejection.
    message: str = ""


async def evict(
    store: Store,
    evictor: Evictor,
    victim: Victim,
    is_required: Callable[[], Awaitable[bool]],
    may_leave: Callable[[Pod], bool] = lambda pod: True,
    most_grace_s: int | None = None,
) -> Eviction:
    """Evict the pod if that is still required.

    ``is_required`` reads the object that contains the decision from the API server. ``may_leave``
    returns whether the pod may be evicted in its current state. ``most_grace_s`` is the maximum
    grace period in seconds. It also shortens the grace period of a pod that is already being
    deleted. With None, the pod's own grace period applies. Raises store errors of the reads, and
    ``StoreTimeout`` if it is unknown whether the pod was evicted.
    """
    for _ in range(ATTEMPTS):
        if not await is_required():
            return Eviction(Result.WITHDRAWN)
        pod = await store.read_pod(victim.namespace, victim.name)
        if (
            pod is None
            or (pod.metadata.uid, pod.node) != (victim.uid, victim.node)
            or pod.ended
            or leaves_within(pod, most_grace_s)
            or not may_leave(pod)
        ):
            return Eviction(Result.LEFT, pod)
        try:
            await evictor.evict(pod, most_grace_s)
        except StoreConflict:
            continue
        except StoreNotFound:
            return Eviction(Result.LEFT, pod)
        except StoreTimeout:
            raise
        except StoreError as err:
            return Eviction(Result.REJECTED, pod, str(err))
        return Eviction(Result.EVICTED, pod)
    return Eviction(Result.CHANGED)
