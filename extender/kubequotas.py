"""Reads the ResourceQuotas of a namespace when somebody asks for an explanation."""

from urllib.parse import quote

import msgspec

from extender.cluster.quotas import ResourceQuota
from extender.kubeapi import KubeApi

#: Quotas that are read of one namespace.
MAX_QUOTAS = 100


class _Quotas(msgspec.Struct, frozen=True):
    items: list[ResourceQuota] | None = None


_decode = msgspec.json.Decoder(_Quotas).decode


class KubeQuotas:
    """Blocks; may be called from any thread. Raises ``ApiError`` and ``msgspec.MsgspecError``."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api

    def of(self, namespace: str) -> list[ResourceQuota]:
        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/resourcequotas"
        return _decode(self._api.call("GET", path, query={"limit": str(MAX_QUOTAS)})).items or []
