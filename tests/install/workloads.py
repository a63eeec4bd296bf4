"""Creates GPU pods of users as a controller would, and reads their state from the API server."""

import contextlib
import time
from typing import Any

from tests.controlplane import ApiRefused
from tests.driver import GIB
from tests.install.cluster import Plane, until

WORKLOADS = "team"
PODS = f"/api/v1/namespaces/{WORKLOADS}/pods"


class Workloads:
    """The pods of one namespace. ``container`` has the image and the command of each pod."""

    def __init__(self, plane: Plane, container: dict[str, Any]) -> None:
        self.plane = plane
        self._container = container
        #: Errors of webhooks that did not respond. Each of these creations was retried.
        self.retried: list[str] = []

    def start(self) -> None:
        self.plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": WORKLOADS}})
        until(self._has_account, "a service account for pods of the namespace")

    def _has_account(self) -> bool:
        with contextlib.suppress(ApiRefused):
            path = f"/api/v1/namespaces/{WORKLOADS}/serviceaccounts/default"
            return bool(self.plane.call("GET", path))
        return False

    def create(self, name: str, gib: int, vram: str = "") -> None:
        """Create a pod that uses ``gib`` GiB and requests ``vram``, by default the memory that it
        uses.

        The manifest names no scheduler, because the webhook sets the scheduler. Raise
        ``ApiRefused`` if the API server rejects the pod.
        """
        container = {
            "name": "main",
            **self._container,
            "env": [{"name": "TAKES_VRAM", "value": str(gib * GIB)}],
            "resources": {"limits": {"nvidia.com/gpu": "1"}},
        }
        metadata = {"name": name, "annotations": {"headroom.gpu/vram": vram or f"{gib}Gi"}}
        spec = {"containers": [container], "terminationGracePeriodSeconds": 1}
        # Retry as controllers do. Tests check the reasons in ``retried``.
        for _ in range(5):
            try:
                self.plane.call("POST", PODS, {"metadata": metadata, "spec": spec})
                return
            except ApiRefused as err:
                if "failed calling webhook" not in str(err):
                    raise
                self.retried.append(str(err))
                time.sleep(1.0)
        raise TimeoutError(f"{name} was not admitted in 5 attempts: {self.retried[-1]}")

    def get(self, name: str) -> dict[str, Any]:
        return self.plane.call("GET", f"{PODS}/{name}")

    def delete(self, name: str) -> None:
        self.plane.call("DELETE", f"{PODS}/{name}")

    def delete_all(self) -> None:
        for pod in self.all():
            self.delete(pod["metadata"]["name"])
        until(lambda: not self.all(), "pods that are gone")

    def all(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.plane.call("GET", PODS)["items"]
        return found

    def bound(self) -> list[dict[str, Any]]:
        return [pod for pod in self.all() if pod["spec"].get("nodeName")]

    def running(self) -> list[dict[str, Any]]:
        return [pod for pod in self.all() if pod["status"].get("phase") == "Running"]

    def runs(self, name: str) -> bool:
        return bool(self.get(name)["status"].get("phase") == "Running")

    def is_gone(self, name: str) -> bool:
        try:
            self.get(name)
        except ApiRefused:
            return True
        return False

    def rejections(self) -> list[str]:
        """Return the scheduling messages of unschedulable pods, without duplicates."""
        return sorted(
            {
                condition.get("message", "")
                for pod in self.all()
                for condition in pod["status"].get("conditions", [])
                if condition["type"] == "PodScheduled" and condition["status"] == "False"
            }
        )
