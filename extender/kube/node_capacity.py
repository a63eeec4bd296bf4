"""Writes how much GPU memory a Node has, as an extended resource that others count.

Capacity is what extended resources are advertised by; the kubelet makes allocatable follow it,
within its next status. Written at once, nobody has to wait for that.
"""

from urllib.parse import quote

import msgspec

from contract.annotations import MIRROR
from extender.kube.client import KubeApi

_encode = msgspec.json.Encoder().encode
_MERGE_PATCH = "application/merge-patch+json"


class KubeNodes:
    """Blocks; may be called from any thread. Raises ``ApiError``."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api

    def show(self, node: str, mib: int | None) -> None:
        """None: it has none any more. Written by several replicas, it is written once: a patch that
        changes nothing is none."""
        amounts = {MIRROR: None if mib is None else str(mib)}
        body = _encode({"status": {"capacity": amounts, "allocatable": amounts}})
        path = f"/api/v1/nodes/{quote(node, safe='')}/status"
        self._api.call("PATCH", path, body=body, content_type=_MERGE_PATCH)
