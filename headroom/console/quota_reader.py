"""Reads ResourceQuotas of one namespace or of all namespaces."""

from urllib.parse import quote

import msgspec

from headroom.core.rules.pod_requests import ResourceQuota
from headroom.runtime.kube.api_errors import Unreadable
from headroom.runtime.kube.client import KubeApi

#: Number of quotas that the API server returns at a time.
PAGE_SIZE = 100


class KubeQuotas:
    """Reads quotas. Its methods block, may be called from any thread, and raise ``ApiError``."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api

    def of(self, namespace: str) -> list[ResourceQuota]:
        """Return all quotas of the namespace, or of all namespaces if it is empty."""
        # The name may come from a reader. Valid names have no dots, and ".." would change the path.
        name = quote(namespace, safe="").replace(".", "%2E")
        within = f"/namespaces/{name}" if name else ""
        path = f"/api/v1{within}/resourcequotas"
        try:
            return self._api.list(path, _decode, page_size=PAGE_SIZE).items
        except msgspec.MsgspecError as err:
            raise Unreadable(f"GET {path}: cannot parse the list of ResourceQuotas: {err}") from err


_decode = msgspec.json.Decoder(ResourceQuota).decode
