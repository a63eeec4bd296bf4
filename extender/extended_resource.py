"""Keeps the extended resource for GPU memory up to date on the Nodes.

An extended resource is advertised in the Node's capacity, and the kubelet copies it to allocatable
with its next status update. This module writes both, so that no pod has to wait for the kubelet.

The controller runs on each replica even if the setting is off, because in this case it removes the
resource from Nodes that still have it. It writes only differences.
"""

import asyncio
from collections.abc import Callable
from itertools import islice
from urllib.parse import quote

import msgspec
import structlog

from headroom.contract.annotations import MIRROR
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.memory_totals import CapacityChange, capacity_changes
from headroom.runtime.kube.api_errors import ApiError, ApiStatus
from headroom.runtime.kube.client import KubeApi
from headroom.runtime.loops import Loops

log = structlog.get_logger()

EVERY_S = 5.0
#: Maximum number of writes per round. In a large cluster, the first writes take several rounds.
AT_MOST = 200
_HINT = "apply ClusterRole headroom-extender-mirror in deploy/components/in-tree-mirror"

_MERGE_PATCH = "application/merge-patch+json"


class ExtendedResourceController:
    """Writes the resource if it is ``wanted``, and otherwise removes it."""

    def __init__(self, cluster: Cluster, wanted: bool, api: KubeApi) -> None:
        self._cluster = cluster
        self._wanted = wanted
        self._api = api
        self._logged = ""

    def start(self, loops: Loops, unready: Callable[[], str]) -> None:
        loops.start("mirror", self.once, EVERY_S, unready=unready)

    async def once(self) -> None:
        due = list(islice(capacity_changes(self._cluster, self._wanted), AT_MOST))
        if due:
            error = await asyncio.to_thread(self._write, due)
            if error and error != self._logged:
                log.warning("extended_resource_not_written", message=error, hint=_HINT)
            self._logged = error

    def _write(self, due: list[CapacityChange]) -> str:
        """Write the changes and return the first error, or an empty string if all writes succeeded.
        If writing is forbidden, stop at the first node."""
        error = ""
        for shown in due:
            try:
                self._write_one(shown)
            except ApiStatus as err:
                error = error or str(err)
                if err.status == 403:
                    break
            except ApiError as err:
                return str(err)
        return error

    def _write_one(self, shown: CapacityChange) -> None:
        """Patch one Node. Several replicas may write the same patch, because a patch that changes
        nothing creates no new resourceVersion."""
        amounts = {MIRROR: None if shown.mib is None else str(shown.mib)}
        body = msgspec.json.encode({"status": {"capacity": amounts, "allocatable": amounts}})
        path = f"/api/v1/nodes/{quote(shown.node, safe='')}/status"
        self._api.call("PATCH", path, body=body, content_type=_MERGE_PATCH)
