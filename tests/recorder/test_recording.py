"""Runs the recorder as a process, with a real API server and the recorder's own permissions."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
import yaml

from headroom.contract.vramprofile import stamp
from headroom.core.recommend.histogram import bucket_of
from tests.controlplane import ROOT, ApiRefused, ControlPlane
from tests.processes import starts_processes
from tests.waiting import until

pytestmark = pytest.mark.slow

GIB = 1 << 30
SYSTEM = "headroom-system"
CRD = ROOT / "deploy/base/crd-vramprofile.yaml"
#: Start time of the runs.
STARTED = stamp(1_790_000_000)


@pytest.fixture(scope="module")
def permitted(plane: ControlPlane) -> str:
    """Install the CRD, the recorder's account and its roles. Return a token of the account."""
    for manifest in [yaml.safe_load(CRD.read_text()), {"kind": "Namespace", "apiVersion": "v1"}]:
        create(plane, manifest | ({} if "metadata" in manifest else {"metadata": {"name": SYSTEM}}))
    for file in ("accounts.yaml", "rbac.yaml"):
        for manifest in yaml.safe_load_all((ROOT / "deploy/base" / file).read_text()):
            if manifest["metadata"]["name"] == "headroom-recorder":
                create(plane, manifest)
    until(
        lambda: asked(plane, "/apis/headroom.gpu/v1alpha1/vramprofiles") is not None,
        "VRAMProfiles are served",
    )
    account = f"/api/v1/namespaces/{SYSTEM}/serviceaccounts/headroom-recorder/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token: str = plane.call("POST", account, request)["status"]["token"]
    return token


def create(plane: ControlPlane, manifest: dict[str, Any]) -> dict[str, Any]:
    """Create an object unless it already exists."""
    group = manifest["apiVersion"]
    root = "/api/v1" if group == "v1" else f"/apis/{group}"
    namespace = manifest["metadata"].get("namespace")
    kind = manifest["kind"].lower() + "s"
    path = f"{root}/namespaces/{namespace}/{kind}" if namespace else f"{root}/{kind}"
    try:
        return plane.call("POST", path, manifest)
    except ApiRefused as err:
        if "409" not in str(err):
            raise
        return {}


def asked(plane: ControlPlane, path: str) -> dict[str, Any] | None:
    try:
        return plane.call("GET", path)
    except ApiRefused:
        return None


@pytest.fixture
@starts_processes
def recorder(plane: ControlPlane, permitted: str) -> Iterator[subprocess.Popen[str]]:
    process = started(plane, permitted)
    yield process
    process.kill()
    process.communicate()


def started(plane: ControlPlane, token: str) -> subprocess.Popen[str]:
    path = plane.folder / "recorder.kubeconfig"
    plane.write_kubeconfig(path, {"token": token})
    command = [sys.executable, "-m", "tests.hasty", "recorder", "--debug-port", "0"]
    environment = os.environ | {"KUBECONFIG": str(path)}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


class Workload:
    """A Deployment in the API server, with one ReplicaSet and pods on one node."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        name = self.name = f"llm-{uuid4().hex[:6]}"
        self.node = f"node-{name}"
        template = {
            "metadata": {"labels": {"app": name}},
            "spec": {"containers": [{"name": "main", "image": "vllm/vllm-openai:v0.32.0"}]},
        }
        spec = {"selector": {"matchLabels": {"app": name}}, "template": template}
        metadata = {"name": name, "namespace": "default"}
        deployment = self._create("apps/v1", "Deployment", metadata, spec)
        metadata = {
            "name": f"{name}-5d4f",
            "namespace": "default",
            "ownerReferences": [reference(deployment)],
        }
        self.replica_set = self._create("apps/v1", "ReplicaSet", metadata, spec)
        create(
            plane,
            {
                "apiVersion": "headroom.gpu/v1alpha1",
                "kind": "GPUNode",
                "metadata": {"name": self.node},
                "spec": {},
            },
        )

    def _create(self, api: str, kind: str, metadata: Any, spec: Any) -> dict[str, Any]:
        return create(
            self._plane, {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}
        )

    def pod(self) -> dict[str, Any]:
        metadata = {
            "name": f"{self.name}-5d4f-{uuid4().hex[:5]}",
            "namespace": "default",
            "ownerReferences": [reference(self.replica_set)],
        }
        container = {
            "name": "main",
            "image": "vllm/vllm-openai:v0.32.0",
            "resources": {"limits": {"nvidia.com/gpu": "1"}},
        }
        spec = {"nodeName": self.node, "containers": [container]}
        return self._create("v1", "Pod", metadata, spec)

    def report(self, *uses: tuple[dict[str, Any], int]) -> None:
        """Write a report of the agent with the peak of each pod."""
        pods = [
            {
                "uid": pod["metadata"]["uid"],
                "namespace": "default",
                "name": pod["metadata"]["name"],
                "container": "main",
                "device": "GPU-0",
                "used": peak,
                "peak": peak,
                "startupPeak": peak,
                "peakSource": "nvml",
                "startedAt": STARTED,
                "settledAt": STARTED,
            }
            for pod, peak in uses
        ]
        device = {"uuid": "GPU-0", "model": "NVIDIA L4", "memory": 24 * GIB, "reserved": 0}
        status = {"devices": [device], "pods": pods}
        self._plane.call(
            "PATCH", f"/apis/headroom.gpu/v1alpha1/gpunodes/{self.node}/status", {"status": status}
        )

    def end(self, pod: dict[str, Any]) -> None:
        """Write the status of a pod whose container ended with exit status 0, as a kubelet
        would.
        """
        terminated = {"exitCode": 0, "reason": "Completed", "finishedAt": stamp(1_795_000_000)}
        status = {
            "phase": "Succeeded",
            "containerStatuses": [
                {
                    "name": "main",
                    "image": "i",
                    "imageID": "i",
                    "ready": False,
                    "restartCount": 0,
                    "state": {"terminated": terminated},
                }
            ],
        }
        self._plane.call(
            "PATCH",
            f"/api/v1/namespaces/default/pods/{pod['metadata']['name']}/status",
            {"status": status},
        )

    def profile(self) -> dict[str, Any]:
        path = "/apis/headroom.gpu/v1alpha1/namespaces/default/vramprofiles/"
        return asked(self._plane, f"{path}deployment-{self.name}") or {"status": {}}

    def track(self) -> dict[str, Any]:
        containers = self.profile()["status"].get("containers") or [{"tracks": [{}]}]
        found: dict[str, Any] = containers[0]["tracks"][0]
        return found


def reference(owner: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
    }


def test_runs_of_a_deployment_are_recorded_across_a_change_of_the_leader(
    plane: ControlPlane, permitted: str, recorder: subprocess.Popen[str]
) -> None:
    workload = Workload(plane)
    first, second = workload.pod(), workload.pod()
    workload.report((first, 18 * GIB), (second, 18 * GIB))
    until(lambda: workload.track().get("running"), "the lives that run are recorded")
    profile = workload.profile()
    assert workload.track()["running"] == {str(bucket_of(18 * GIB)): 2000}
    assert profile["status"]["lives"] == 2
    assert profile["status"]["containers"][0]["model"] == "NVIDIA L4"
    assert profile["status"]["containers"][0]["family"] == "vLLM"
    assert profile["status"]["owner"]["kind"] == "Deployment"
    # Kubernetes deletes the profile with its owner.
    (owner,) = profile["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("Deployment", workload.name)

    workload.report((second, 18 * GIB))
    workload.end(first)
    until(lambda: workload.track().get("ended") == 1, "the life that ended is recorded")
    assert workload.track()["flat"] == 1
    assert workload.track()["running"] == {str(bucket_of(18 * GIB)): 1000}

    recorder.terminate()
    recorder.communicate(timeout=300)
    following = started(plane, permitted)
    try:
        third = workload.pod()
        workload.report((second, 18 * GIB), (third, 19 * GIB))
        until(
            lambda: str(bucket_of(19 * GIB)) in workload.track().get("running", {}),
            "the next recorder continues with the profiles of the first",
            90,
        )
        assert workload.track()["ended"] == 1
        workload.report((second, 18 * GIB))
        workload.end(third)
        until(lambda: workload.track().get("ended") == 2, "it records lives that end")
        weights = workload.track()["complete"]
        assert set(weights) == {str(bucket_of(18 * GIB)), str(bucket_of(19 * GIB))}
    finally:
        following.kill()
        following.communicate()
