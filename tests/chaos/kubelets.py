"""The kubelets of all nodes: stand-ins that follow the API server by one watch, through any outage.

Jobs run for as long as their command names (``run 12``); stubborn pods take their whole grace
period, also if they were deleted by force, so that their processes outlive them.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import urllib3

from tests.controlplane import ApiRefused, ControlPlane
from tests.standin.fleet import EVERY_S, Fleet
from tests.standin.node import StandIn

Object = dict[str, Any]
#: Errors of a client while the API server is away.
AWAY = (ApiRefused, urllib3.exceptions.HTTPError, OSError)


class Kubelets(Fleet):
    """``changed`` is called, with the node's lock held, after each change on a node."""

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
        self._lock = threading.Lock()
        self._there: dict[str, Object] = {}
        #: Pods that are jobs, and when they end.
        self._job_ends_s: dict[str, float] = {}

    def stop(self) -> None:
        """The nodes' objects go with their API server, which may be away."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        if self.failure is not None:
            raise self.failure

    def told(self, what: str, pods: Sequence[Object]) -> None:
        """By the watch."""
        with self._lock:
            if what == "LISTED":
                self._there = {pod["metadata"]["uid"]: pod for pod in pods}
            elif what == "DELETED":
                self._there.pop(pods[0]["metadata"]["uid"], None)
            else:
                self._there[pods[0]["metadata"]["uid"]] = pods[0]

    def _listed(self) -> list[Object]:
        with self._lock:
            return [pod for pod in self._there.values() if pod["spec"].get("nodeName")]

    def _run(self) -> None:
        while not self._stopped.wait(EVERY_S):
            try:
                self._step(time.monotonic())
                self._end_jobs(time.monotonic())
            except AWAY:
                continue  # whatever was not done is found again the next time
            except Exception as err:  # noqa: BLE001 - raised by ``stop``, on the test's thread
                self.failure = err
                return

    def _follow(
        self, node: StandIn, uid: str, pod: Any, seen: Mapping[str, Any] | None, now_s: float
    ) -> None:
        before = uid in node.pods, len(node.processes)
        try:
            super()._follow(node, uid, pod, seen, now_s)
        finally:
            if before != (uid in node.pods, len(node.processes)):
                self._changed(pod.node)

    def _end_jobs(self, now_s: float) -> None:
        for uid, pod in self._pods.items():
            (command, *_) = (each.get("command") for each in pod.manifest["spec"]["containers"])
            node = self.nodes[pod.node]
            with node.lock:
                held = node.pods.get(uid)
                if held is None or held.phase != "Running" or not command or command[0] != "run":
                    continue
                ends_s = self._job_ends_s.setdefault(uid, now_s + float(command[1]))
                if ends_s <= now_s:
                    node.end(uid)
                    self._changed(pod.node)


@contextlib.contextmanager
def away() -> Any:
    """The body may fail because the API server is away; it is not tried again."""
    with contextlib.suppress(*AWAY):
        yield
