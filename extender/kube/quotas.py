"""Reads the ResourceQuotas of a namespace for an explanation."""

from collections.abc import Callable

import msgspec
from kubernetes import client

from extender.kube.client import KubeApi
from extender.state.pod_requests import ResourceQuota

#: Maximum number of quotas that are read per namespace.
MAX_QUOTAS = 100


class KubeQuotas:
    """Reads quotas. Methods block, may be called from any thread, and raise ``ApiError`` and
    ``msgspec.MsgspecError``."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._core = client.CoreV1Api(api.client)

    def of(self, namespace: str) -> list[ResourceQuota]:
        with self._api.asking(f"list ResourceQuotas of {namespace}") as timeout:
            found = self._core.list_namespaced_resource_quota(
                namespace, limit=MAX_QUOTAS, _request_timeout=timeout
            )
        serialized: Callable[[object], object] = self._api.client.sanitize_for_serialization
        return msgspec.convert(serialized(found.items), list[ResourceQuota])
