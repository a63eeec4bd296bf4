"""Whether a ResourceQuota would reject a new pod, or one that is deleted and created again."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from contract.errors import BadQuantity
from contract.kube import KubeStruct, ObjectMeta
from contract.quantity import parse_bytes
from extender.placement.request import VramRequest

#: Name prefixes of resources that pods use; a quota counts other objects as well.
_OF_PODS = ("pods", "count/pods", "cpu", "memory", "ephemeral-storage", "requests.", "limits.")
_NOT_OF_PODS = "requests.storage"
#: Maximum number of exceeded resources in a message.
_MAX_NAMED = 3


class QuotaStatus(KubeStruct, frozen=True):
    hard: Mapping[str, str] | None = None
    used: Mapping[str, str] | None = None


class QuotaSpec(KubeStruct, frozen=True):
    scopes: list[str] | None = None
    scope_selector: Mapping[str, Any] | None = None


class ResourceQuota(KubeStruct, frozen=True):
    metadata: ObjectMeta
    spec: QuotaSpec = QuotaSpec()
    status: QuotaStatus = QuotaStatus()


def exceeded(quotas: Iterable[ResourceQuota]) -> str:
    """Return a phrase with the exceeded resources; empty if there are none.

    The phrase contains no amounts because a reader of the pod may not be allowed to read quotas.

    A pod that is created again uses at most as much as the deleted pod. So only a quota that is
    already exceeded can reject it: one that was lowered after the pods were created.
    """
    found = [
        f"ResourceQuota {quota.metadata.name} is exceeded for {resource}"
        for quota in quotas
        for resource in _beyond(quota.status)
    ]
    more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    return ", ".join(found[:_MAX_NAMED]) + more


def _beyond(status: QuotaStatus) -> Iterator[str]:
    for resource, left in _left(status):
        if resource.startswith(_OF_PODS) and resource != _NOT_OF_PODS and left < 0:
            yield resource


def _left(status: QuotaStatus) -> Iterator[tuple[str, int]]:
    """Yield each resource with the thousandths of it that are left."""
    used = status.used or {}
    for resource, hard in (status.hard or {}).items():
        try:
            yield resource, _thousandths(hard) - _thousandths(used.get(resource, "0"))
        except BadQuantity:
            continue  # the API server writes no invalid quantities


def _thousandths(text: str) -> int:
    """Convert a quantity to thousandths, the unit in which CPU is counted."""
    return parse_bytes(text[:-1]) if text.endswith("m") else 1000 * parse_bytes(text)


class QuotaRoom:
    """Counts new pods in the quotas of one namespace, for GPUs and for the number of pods.

    Quotas with scopes count only some pods, and are left out.
    """

    def __init__(self, quotas: Iterable[ResourceQuota]) -> None:
        self._quotas = [q for q in quotas if not (q.spec.scopes or q.spec.scope_selector)]
        #: Resource -> amount that new pods use, minus the amount of deleted pods.
        self._taken: Counter[str] = Counter()

    def take(self, request: VramRequest) -> str:
        """Counts a new pod, or returns why a quota rejects it."""
        needs = _usage(request)
        for quota in self._quotas:
            for resource, left in _left(quota.status):
                count = needs.get(resource, 0)
                if count and 1000 * (self._taken[resource] + count) > left:
                    return f"ResourceQuota {quota.metadata.name} would reject it for {resource}"
        self._taken.update(needs)
        return ""

    def give_back(self, request: VramRequest) -> None:
        """Subtract a deleted pod."""
        self._taken.subtract(_usage(request))


def _usage(request: VramRequest) -> dict[str, int]:
    """Return a pod's usage as the API server counts it, without CPU, memory and storage."""
    gpus = {f"requests.{ask.resource}": ask.count for ask in request.asks}
    return {"pods": 1, "count/pods": 1, **gpus}
