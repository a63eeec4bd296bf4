"""Updates a Deployment on a full GPU with the real controllers. The update completes only after the
command that ``why`` suggests.

The test acts as kube-scheduler and the kubelet: it binds the pods and reports that they are ready.
"""

import shlex
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from headroom.console.facts.fixes import end_old_pods_first
from headroom.contract.kube import Pod
from tests.controlplane import ControlPlane
from tests.waiting import until

pytestmark = pytest.mark.slow

PODS = "/api/v1/namespaces/default/pods"
#: The API path of each kind, and a strategy that starts a new pod before the old pod ends.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Deployment": ("deployments", {"replicas": 1}),
    "DaemonSet": (
        "daemonsets",
        {"updateStrategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}},
    ),
}


class _Plane(ControlPlane):
    controllers = ("deployment-controller", "replicaset-controller", "daemonset-controller")


@pytest.fixture(scope="module")
def plane() -> Iterator[_Plane]:
    plane = _Plane()
    try:
        plane.start()
        plane.start_controller_manager()
        plane.call("POST", "/api/v1/nodes", {"metadata": {"name": "n"}})
        yield plane
    finally:
        plane.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_a_rolling_update_on_a_full_gpu_ends_after_the_suggested_command(
    kind: str, plane: _Plane
) -> None:
    resource, strategy = KINDS[kind]
    path, name = f"/apis/apps/v1/namespaces/default/{resource}", f"llm-{kind.lower()}"
    labels = {"app": name}
    spec = {
        "containers": [{"name": "c", "image": "one.invalid/c"}],
        # No kubelet reports that the node is ready or that a pod has ended.
        "tolerations": [{"operator": "Exists"}],
        "terminationGracePeriodSeconds": 0,
    }

    def pods() -> list[dict[str, Any]]:
        found = plane.call("GET", f"{PODS}?labelSelector=app%3D{name}")["items"]
        return [each for each in found if "deletionTimestamp" not in each["metadata"]]

    def start(image: str) -> dict[str, Any]:
        """Bind the pod with this image, and report that it is ready."""
        (pod,) = (each for each in pods() if each["spec"]["containers"][0]["image"] == image)
        url = f"{PODS}/{pod['metadata']['name']}"
        plane.bind(PODS, pod["metadata"]["name"], "n")
        ready = {"type": "Ready", "status": "True"}
        plane.call(
            "PATCH", f"{url}/status", {"status": {"phase": "Running", "conditions": [ready]}}
        )
        return pod

    plane.call(
        "POST",
        path,
        {
            "metadata": {"name": name},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": spec},
                **strategy,
            },
        },
    )
    until(lambda: len(pods()) == 1, "the first pod exists")
    old = start("one.invalid/c")
    changed = {
        "spec": {"template": {"spec": {"containers": [{"name": "c", "image": "two.invalid/c"}]}}}
    }
    plane.call("PATCH", f"{path}/{name}", changed, "application/strategic-merge-patch+json")
    until(lambda: len(pods()) == 2, "the new pod exists beside the old one")
    (new,) = (each for each in pods() if each["metadata"]["uid"] != old["metadata"]["uid"])
    command = end_old_pods_first(msgspec.convert(new, Pod))
    plane.kubectl(*shlex.split(command)[1:])
    until(
        lambda: [each["spec"]["containers"][0]["image"] for each in pods()] == ["two.invalid/c"],
        "the old pod ends although the new one is not ready",
    )
