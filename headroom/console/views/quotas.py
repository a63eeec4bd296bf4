"""The ResourceQuotas that limit GPU memory, compared with the reservations in the ledger."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from fastapi import APIRouter, HTTPException
from starlette.responses import Response

from headroom.console.facts.movable_pods import charged_bytes
from headroom.console.responses import Body, InNamespace, encoded
from headroom.console.view import View
from headroom.console.view_context import InContext, Newest
from headroom.contract.annotations import COUNTED_VRAM, MIRROR
from headroom.core.cluster.cluster import Cluster
from headroom.core.placement.policy import MIB
from headroom.core.rules.pod_requests import ResourceQuota, amount

#: Resource of a quota -> bytes of one unit.
_UNITS: Mapping[str, int] = {
    f"{prefix}{name}": unit_bytes
    for name, unit_bytes in ((COUNTED_VRAM, 1), (MIRROR, MIB))
    for prefix in ("requests.", "limits.")
}


class QuotaView(View):
    namespace: str
    name: str
    resource: str
    """The resource that the quota limits, such as requests.headroom.gpu/vram-bytes."""
    hard_bytes: int
    used_bytes: int
    """As the API server counts it: all pods that have not ended, bound or not."""
    reserved_bytes: int
    """Memory that the ledger has reserved for the bound pods of the namespace, on the devices
    that they have or could get."""


class QuotasBody(Body):
    quotas: list[QuotaView]
    """Sorted by namespace and name."""


routes = APIRouter()


@routes.get("/v1/quotas", response_model=QuotasBody)
def quotas(context: InContext, snap: Newest, namespace: InNamespace = "") -> Response:
    """List the ResourceQuotas that limit GPU memory, with hard and used values as the API server
    counts them."""
    found = context.quotas(namespace)
    if found is None:
        raise HTTPException(503, "the ResourceQuotas cannot be read: see the log of the console")
    views = _views(found, _reserved(context.cluster))
    ordered = sorted(views, key=lambda each: (each.namespace, each.name, each.resource))
    return encoded(QuotasBody(**context.head(snap), quotas=ordered))


def _views(quotas: Sequence[ResourceQuota], reserved: Mapping[str, int]) -> Iterator[QuotaView]:
    for quota in quotas:
        used, namespace = quota.status.used or {}, quota.metadata.namespace
        for resource, hard in (quota.status.hard or {}).items():
            if unit_bytes := _UNITS.get(resource):
                yield QuotaView(
                    namespace=namespace,
                    name=quota.metadata.name,
                    resource=resource,
                    hard_bytes=int(amount(hard)) * unit_bytes,
                    used_bytes=int(amount(used.get(resource, "0"))) * unit_bytes,
                    reserved_bytes=reserved.get(namespace, 0),
                )


def _reserved(cluster: Cluster) -> Mapping[str, int]:
    """Return the bytes reserved for the pods of each namespace."""
    found = Counter[str]()
    for gpunode in cluster.gpunodes():
        for held in gpunode.spec.reservations.values():
            found[held.namespace] += sum(map(charged_bytes, held.charges))
    return found
