"""Reads the ResourceQuotas of a namespace, or of all, for explanations and for the console."""

from urllib.parse import quote

import msgspec

from headroom.core.rules.pod_requests import ResourceQuota
from headroom.runtime.kube.api_errors import Unreadable
from headroom.runtime.kube.client import KubeApi

#: Number of quotas in each answer of the API server.
PAGE_SIZE = 100


class KubeQuotas:
    """Reads quotas. Methods block, may be called from any thread, and raise ``ApiError``."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api

    def of(self, namespace: str) -> list[ResourceQuota]:
        """Return all quotas of the namespace; of all namespaces if it is empty."""
        # The name may be a reader's own input. Valid names have no dots, and ".." is another path.
        name = quote(namespace, safe="").replace(".", "%2E")
        within = f"/namespaces/{name}" if name else ""
        path = f"/api/v1{within}/resourcequotas"
        try:
            return self._api.list(path, _decode, page_size=PAGE_SIZE).items
        except msgspec.MsgspecError as err:
            raise Unreadable(f"GET {path}: not a list of ResourceQuotas: {err}") from err


_decode = msgspec.json.Decoder(ResourceQuota).decode
