"""The kubelets of all nodes: models that follow the API server by one watch, through any outage.

Stubborn pods use their whole grace period, so their processes outlive a forced deletion.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import urllib3

from tests.controlplane import ApiRefused, ControlPlane
from tests.standin.fleet import Fleet
from tests.standin.node import StandIn

Object = dict[str, Any]
#: Exceptions while the API server is down.
AWAY = (ApiRefused, urllib3.exceptions.HTTPError, OSError)


class Kubelets(Fleet):
    """``changed`` is called with the node's name, holding the node's lock."""

    tolerated = AWAY

    def __init__(
        self,
        plane: ControlPlane,
        nodes: Mapping[str, StandIn],
        changed: Callable[[str], None],
        seed: int,
        admission_s: float,
    ) -> None:
        super().__init__(plane, nodes, admission_s=admission_s, seed=seed)
        self._changed = changed
        self._watched_lock = threading.Lock()
        self._watched: dict[str, Object] = {}

    def stop(self) -> None:
        """Stop the thread. The nodes' objects end with their API server."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def pods_changed(self, what: str, pods: Sequence[Object]) -> None:
        by_uid = {pod["metadata"]["uid"]: pod for pod in pods}
        with self._watched_lock:
            if what == "LISTED":
                self._watched = by_uid
            elif what == "DELETED":
                self._watched.pop(next(iter(by_uid)), None)
            else:
                self._watched |= by_uid

    def _listed(self) -> list[Object]:
        with self._watched_lock:
            return [pod for pod in self._watched.values() if pod["spec"].get("nodeName")]

    def _follow(
        self, node: StandIn, uid: str, pod: Any, seen: Mapping[str, Any] | None, now_s: float
    ) -> None:
        before = uid in node.pods, len(node.processes)
        try:
            super()._follow(node, uid, pod, seen, now_s)
        finally:
            if before != (uid in node.pods, len(node.processes)):
                self._changed(pod.node)
