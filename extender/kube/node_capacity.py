"""Writes the GPU memory of a Node as an extended resource.

Extended resources are advertised by the Node's capacity. The kubelet copies it to allocatable with
its next status update; both are written here, so that no pod has to wait for that.
"""

from urllib.parse import quote

import msgspec

from contract.annotations import MIRROR
from extender.kube.client import KubeApi

_encode = msgspec.json.Encoder().encode
_MERGE_PATCH = "application/merge-patch+json"


class KubeNodes:
    """Writes Node statuses. Methods block, may be called from any thread, and raise
    ``ApiError``."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api

    def show(self, node: str, mib: int | None) -> None:
        """Write the amount in MiB; None removes the resource. Several replicas may write it: a
        patch without changes creates no new version."""
        amounts = {MIRROR: None if mib is None else str(mib)}
        body = _encode({"status": {"capacity": amounts, "allocatable": amounts}})
        path = f"/api/v1/nodes/{quote(node, safe='')}/status"
        self._api.call("PATCH", path, body=body, content_type=_MERGE_PATCH)
