"""Whether a ResourceQuota would reject a pod that is deleted and created again."""

from collections.abc import Iterable, Iterator, Mapping

from contract.errors import BadQuantity
from contract.kube import KubeStruct, ObjectMeta
from contract.quantity import parse_bytes

#: Beginnings of the names of what pods use; a quota counts other objects as well.
_OF_PODS = ("pods", "count/pods", "cpu", "memory", "ephemeral-storage", "requests.", "limits.")
_NOT_OF_PODS = "requests.storage"
#: Exceeded resources that are named.
_MOST_NAMED = 3


class QuotaStatus(KubeStruct, frozen=True):
    hard: Mapping[str, str] | None = None
    used: Mapping[str, str] | None = None


class ResourceQuota(KubeStruct, frozen=True):
    metadata: ObjectMeta
    status: QuotaStatus = QuotaStatus()


def exceeded(quotas: Iterable[ResourceQuota]) -> str:
    """Names the exceeded resources in a phrase; empty when there is none. Amounts are left out: a
    reader of the pod may not be allowed to read quotas.

    The pod that is created again uses at most as much as the pod that was deleted, so only such a
    quota can reject it: one that was lowered after the pods came.
    """
    found = [
        f"ResourceQuota {quota.metadata.name} is exceeded for {resource}"
        for quota in quotas
        for resource in _beyond(quota.status)
    ]
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return ", ".join(found[:_MOST_NAMED]) + more


def _beyond(status: QuotaStatus) -> Iterator[str]:
    used = status.used or {}
    for resource, hard in (status.hard or {}).items():
        if not resource.startswith(_OF_PODS) or resource == _NOT_OF_PODS:
            continue
        try:
            if _thousandths(used.get(resource, "0")) > _thousandths(hard):
                yield resource
        except BadQuantity:
            continue  # the API server writes none


def _thousandths(text: str) -> int:
    """CPU is counted in thousandths."""
    return parse_bytes(text[:-1]) if text.endswith("m") else 1000 * parse_bytes(text)
