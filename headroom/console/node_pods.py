"""Lists all pods of a node, including pods that request no GPU."""

import msgspec

from headroom.contract.kept_fields import kept_pod
from headroom.contract.kube import Pod
from headroom.errors import StoreError
from headroom.runtime.kube.api_errors import ApiError
from headroom.runtime.kube.client import KubeApi

_PAGE_SIZE = 500
_decode = msgspec.json.Decoder(Pod).decode


class NodePods:
    """Reads pods. Its methods block, and may be called from any thread."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api

    def on(self, node: str) -> list[Pod]:
        """Return the pods bound to the node, from the API server's cache. Pods that cannot be
        decoded are left out. Raises ``StoreError``."""
        query = {"fieldSelector": f"spec.nodeName={node}", "resourceVersion": "0"}
        try:
            return self._api.list("/api/v1/pods", _read, page_size=_PAGE_SIZE, query=query).items
        except ApiError as err:
            raise StoreError(f"list pods of node {node}: {err}") from err


def _read(raw: msgspec.Raw) -> Pod | None:
    try:
        return kept_pod(_decode(raw))
    except (ValueError, RecursionError):
        return None
