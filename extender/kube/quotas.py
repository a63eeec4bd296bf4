"""Reads the ResourceQuotas of a namespace for an explanation."""

from urllib.parse import quote

import msgspec

from extender.kube.api_errors import Unreadable
from extender.kube.client import KubeApi
from extender.state.pod_requests import ResourceQuota

#: Number of quotas in each answer of the API server.
PAGE_SIZE = 100


class KubeQuotas:
    """Reads quotas. Methods block, may be called from any thread, and raise ``ApiError``."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api

    def of(self, namespace: str) -> list[ResourceQuota]:
        """Return all quotas of the namespace."""
        # The name may be a reader's own input. Valid names have no dots, and ".." is another path.
        name = quote(namespace, safe="").replace(".", "%2E")
        path = f"/api/v1/namespaces/{name}/resourcequotas"
        try:
            return self._api.list(path, _decode, page_size=PAGE_SIZE).items
        except msgspec.MsgspecError as err:
            raise Unreadable(f"GET {path}: not a list of ResourceQuotas: {err}") from err


_decode = msgspec.json.Decoder(ResourceQuota).decode
