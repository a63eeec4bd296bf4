"""Adds up a pod's requests by resource in the same way as kube-scheduler, and compares them with
quotas.

Amounts are exact decimals because sums are compared. A quantity that cannot be parsed counts as
zero, because the API server neither accepts pods nor writes quotas with such quantities.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from headroom.contract.annotations import COUNTED_VRAM, Bytes
from headroom.contract.kube import (
    Container,
    KubeStruct,
    ObjectMeta,
    Pod,
    PodSpec,
    Quantity,
    ResourceRequirements,
)
from headroom.contract.quantity import MAX_LENGTH
from headroom.core.placement.request import VramRequest

Demands = Mapping[str, Decimal]
_SUFFIXES: Mapping[str, Decimal] = {
    "": Decimal(1),
    **{f"{prefix}i": Decimal(1024) ** power for power, prefix in enumerate("KMGTPE", 1)},
    **{prefix: Decimal(1000) ** power for power, prefix in enumerate("kMGTPE", 1)},
    **{prefix: Decimal(1000) ** -power for power, prefix in enumerate("mun", 1)},
}
NOTHING = Decimal(0)
#: Maximum amount. Larger amounts count as zero.
MAX_AMOUNT = Decimal("1e30")
#: Resources that a pod can request as a whole, in addition to huge pages.
_OF_WHOLE_POD = "cpu", "memory"
_HUGE_PAGES = "hugepages-"
#: Prefixes of a quota's resource names that concern pods. Other names concern Services, Secrets
#: etc.
_OF_PODS = ("pods", "count/pods", "cpu", "memory", "ephemeral-storage", "requests.", "limits.")
_NOT_OF_PODS = "requests.storage"
#: Maximum number of exceeded resources in a message.
_MAX_NAMED = 3


def demands(pod: Pod) -> dict[str, Decimal]:
    """Return the amount of each resource that kube-scheduler counts for the pod, from its spec.

    This is the sum over the containers that run at the same time, or the need of the largest init
    container with the sidecars before it, whichever is larger. Requests of the pod as a whole
    replace it, and the pod's overhead is added.
    """
    return with_overhead(pod.spec, {**of_containers(pod.spec), **of_whole_pod(pod.spec.resources)})


def of_containers(
    spec: PodSpec, requests: Callable[[Container], Demands] | None = None
) -> dict[str, Decimal]:
    """Return the sum over the containers.

    ``requests`` returns the requests of one container, by default from its spec.
    """
    requests = requests or spec_requests
    sidecars: dict[str, Decimal] = {}
    initial: dict[str, Decimal] = {}
    for container in spec.init_containers or ():
        needs = requests(container)
        if container.restart_policy == "Always":
            sidecars = total([sidecars, needs])
        else:
            initial = larger(initial, total([sidecars, needs]))
    together = total([sidecars, *map(requests, spec.containers or ())])
    return larger(initial, together)


def of_whole_pod(resources: ResourceRequirements | None) -> Demands:
    """Return the requests of a pod as a whole, which replace the requests of its containers."""
    return {
        name: needed
        for name, needed in amounts(resources.requests if resources else None).items()
        if name in _OF_WHOLE_POD or name.startswith(_HUGE_PAGES)
    }


def with_overhead(spec: PodSpec, needs: Demands) -> dict[str, Decimal]:
    return total([needs, amounts(spec.overhead)])


def amounts(quantities: Mapping[str, Quantity] | None) -> dict[str, Decimal]:
    return {name: amount(quantity) for name, quantity in (quantities or {}).items()}


def total(parts: Iterable[Demands]) -> dict[str, Decimal]:
    found: dict[str, Decimal] = {}
    for part in parts:
        for name, quantity in part.items():
            found[name] = found.get(name, NOTHING) + quantity
    return found


def amount(quantity: str | int) -> Decimal:
    """Convert a Kubernetes quantity to a number."""
    text = str(quantity)[:MAX_LENGTH]
    suffix = next(each for each in (text[-2:], text[-1:], "") if each in _SUFFIXES)
    try:
        found = Decimal(text.removesuffix(suffix))
        return found * _SUFFIXES[suffix] if abs(found) < MAX_AMOUNT else NOTHING
    except ArithmeticError:
        return NOTHING


def spec_requests(container: Container) -> dict[str, Decimal]:
    resources = container.resources
    if resources is None:
        return {}
    # A limit without a request is also the request.
    return amounts({**(resources.limits or {}), **(resources.requests or {})})


def larger(one: Demands, other: Demands) -> dict[str, Decimal]:
    names = one.keys() | other.keys()
    return {name: max(one.get(name, NOTHING), other.get(name, NOTHING)) for name in names}


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
    """Return a phrase with the exceeded resources, or an empty string if there are none.

    The phrase contains no amounts, because a reader of the pod may not be allowed to read quotas.

    A pod that is created again uses at most as much as the deleted pod. So it can be rejected only
    by a quota that is already exceeded, because the quota was lowered after the pods were created.
    """
    found = [
        f"ResourceQuota {quota.metadata.name} is exceeded for {resource}"
        for quota in quotas
        for resource, left in _left(quota.status)
        if resource.startswith(_OF_PODS) and resource != _NOT_OF_PODS and left < 0
    ]
    more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    return ", ".join(found[:_MAX_NAMED]) + more


def _left(status: QuotaStatus) -> Iterator[tuple[str, Decimal]]:
    """Yield each resource of the quota with its remaining amount, which is negative if the quota is
    exceeded."""
    used = status.used or {}
    for resource, hard in (status.hard or {}).items():
        yield resource, amount(hard) - amount(used.get(resource, "0"))


class QuotaUse:
    """Counts new pods in the quotas of one namespace for GPUs, their memory and the number of pods.

    Quotas with scopes are ignored, because they count only some pods.
    """

    def __init__(self, quotas: Iterable[ResourceQuota]) -> None:
        self._quotas = [q for q in quotas if not (q.spec.scopes or q.spec.scope_selector)]
        #: Amount that new pods use minus the amount of deleted pods, by resource.
        self._taken: Counter[str] = Counter()

    def take(self, request: VramRequest) -> str:
        """Count a new pod and return "", or return why a quota would reject it."""
        needs = _usage(request)
        for quota in self._quotas:
            for resource, left in _left(quota.status):
                count = needs.get(resource, 0)
                if count and self._taken[resource] + count > left:
                    return f"ResourceQuota {quota.metadata.name} would reject it for {resource}"
        self._taken.update(needs)
        return ""

    def give_back(self, request: VramRequest) -> None:
        """Subtract a deleted pod."""
        self._taken.subtract(_usage(request))


def _usage(request: VramRequest) -> dict[str, int]:
    """Return a pod's usage as the API server counts it, without CPU, memory and storage."""
    gpus = {f"requests.{ask.resource}": ask.count for ask in request.asks}
    # Shares of a device are omitted. The webhook counts them as on the largest device.
    vram_bytes = sum(
        each.amount.count_bytes * each.count
        for each in request.containers
        if isinstance(each.amount, Bytes) and each.index is not None
    )
    vram = {f"requests.{COUNTED_VRAM}": vram_bytes} if vram_bytes else {}
    return {"pods": 1, "count/pods": 1, **gpus, **vram}
