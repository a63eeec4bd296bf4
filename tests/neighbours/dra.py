"""A cluster with a real kube-scheduler, kubelet and DRA driver.

The driver is dra-example-driver with the name of NVIDIA's driver, because Headroom reads only the
devices of that name. The GPUs are rows in the table of the fake NVML library, with the UUIDs that
the driver publishes. The agent has its default intervals. The device taint controller has the
permissions of its own ServiceAccount.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from tests.controlplane import ROOT, ControlPlane, built
from tests.e2e.cluster import Cluster
from tests.e2e.nodes import SYSTEM_NAMESPACE
from tests.gobin.build import version_tuple
from tests.kubernetes_version import UNDER_TEST
from tests.neighbours.dra_node import DRIVER, DraNode
from tests.processes import free_ports
from tests.waiting import until

GIB = 1 << 30
#: API versions of DeviceTaintRule. kube-scheduler reads the first version.
RULES_VERSIONS = ("v1",) if version_tuple(UNDER_TEST) >= (1, 37) else ("v1beta2", "v1alpha3")
NODE = "dra-1"
PODS = "/api/v1/namespaces/default/pods"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
COMPONENT = ROOT / "deploy/components/device-taints/device-taints.yaml"
ACCOUNT = "headroom-device-taints"
#: Maps each kind to the API path at which its objects are created.
FOLDERS = {
    "ServiceAccount": "/api/v1/namespaces/{namespace}/serviceaccounts",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings",
    "ValidatingAdmissionPolicy": (
        "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
    ),
    "ValidatingAdmissionPolicyBinding": (
        "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
    ),
    "ResourceClaimTemplate": ("/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates"),
    "Pod": PODS,
}


class DraPlane(ControlPlane):
    """A control plane that serves one version of DeviceTaintRule."""

    controllers = ("resourceclaim-controller", "garbage-collector-controller")

    def __init__(self, version: str = RULES_VERSIONS[0]) -> None:
        super().__init__()
        self.version = version

    @property
    def rules_path(self) -> str:
        return f"/apis/resource.k8s.io/{self.version}/devicetaintrules"

    def spawn_apiserver(self, *flags: str) -> None:
        super().spawn_apiserver(
            "--feature-gates=DRADeviceTaintRules=true",
            f"--runtime-config=resource.k8s.io/{self.version}=true",
            *flags,
        )

    def start_plain_scheduler(self) -> None:
        """Start a kube-scheduler that schedules all pods without our extender."""
        name = "kube-scheduler"
        self.spawn(
            name,
            str(built(name)[name]),
            f"--kubeconfig={self.kubeconfig('scheduler-of-the-tests')}",
            "--leader-elect=false",
            "--secure-port=0",
            "--feature-gates=DRADeviceTaintRules=true",
        )

    def rules(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = self.call("GET", self.rules_path)["items"]
        return items


class Scene:
    """The cluster of a test, with methods that create and check claims."""

    def __init__(self, plane: DraPlane, node: DraNode, cluster: Cluster) -> None:
        self.plane, self.node, self.cluster = plane, node, cluster
        self.uuids = node.devices()
        self.console = ""

    def create(self, manifest: Mapping[str, Any]) -> None:
        create(self.plane, manifest)

    def claim(self, name: str, memory: str) -> None:
        """Create a pod with a claim. ``headroom convert`` makes both from a pod with Headroom's
        annotation.
        """
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "annotations": {"headroom.gpu/vram": memory}},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 1,
                "containers": [
                    {"name": "main", "image": "any", "resources": {"limits": {"nvidia.com/gpu": 1}}}
                ],
            },
        }
        text = headroom("convert", "--to=dra", "-f-", text=json.dumps(pod))
        template, converted = yaml.safe_load_all(text)
        # Request a part of the compute, because this driver would otherwise give the claim all
        # compute of the device.
        (request,) = template["spec"]["spec"]["devices"]["requests"]
        request["exactly"]["capacity"]["requests"]["compute"] = "1"
        self.create(template)
        self.create(converted)

    def device_of(self, pod: str) -> str:
        """Return the device that is allocated to the pod's claim, or an empty string."""
        for claim in self.plane.call("GET", CLAIMS)["items"]:
            status = claim.get("status", {})
            if any(each["name"] == pod for each in status.get("reservedFor", ())):
                (result,) = status["allocation"]["devices"]["results"]
                return str(result["device"])
        return ""

    def run(self, pod: str) -> str:
        """Wait until the pod runs. Return its device."""
        self.node.wait(lambda: self.node.runtime.running(pod), f"{pod} to run")
        return self.device_of(pod)

    def use(self, pod: str, used_bytes: int) -> None:
        container = self.node.runtime.running(pod)["main"]
        self.node.runtime.use(container, used_bytes)

    def unknown_process(self, device: str, used_bytes: int) -> None:
        """Let a process without a pod use ``used_bytes`` of a device. 0 ends the process."""
        pid = 77
        folder = self.node.runtime.proc / str(pid)
        folder.mkdir(exist_ok=True)
        (folder / "comm").write_text("trainer\n")
        (folder / "cgroup").write_text("0::/user.slice/session-1.scope\n")
        (folder / "stat").write_text(f"{pid} (trainer) S " + "0 " * 18 + "1 " + "0 " * 40)
        self.node.driver.use(pid, {self.uuids[device]: used_bytes} if used_bytes else {})

    def drift(self) -> list[dict[str, Any]]:
        answer = self.cluster._http.request("GET", f"{self.console}/v1/drift").json()
        claims: list[dict[str, Any]] = answer["claims"]
        return claims

    def tainted(self) -> set[str]:
        return {each["spec"]["deviceSelector"]["device"] for each in self.plane.rules()}

    def seconds_until(self, done: Callable[[], object], what: str, limit_s: float) -> float:
        """Wait for the condition. Return the seconds that it took, and fail after ``limit_s``."""
        began_s = time.monotonic()
        until(done, what, limit_s, 0.05, self.node.logs)
        return time.monotonic() - began_s


def headroom(*arguments: str, text: str = "", **env: str) -> str:
    answer = subprocess.run(
        [sys.executable, "-m", "headroom", *arguments],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )
    if answer.returncode:
        raise AssertionError(f"headroom {' '.join(arguments)}: {answer.stderr}")
    return answer.stdout


@contextlib.contextmanager
def scene() -> Iterator[Scene]:
    plane = DraPlane()
    node = None
    try:
        plane.start()
        plane.install_crd()
        plane.start_controller_manager()
        plane.start_plain_scheduler()
        plane.call(
            "POST",
            "/apis/resource.k8s.io/v1/deviceclasses",
            {
                "metadata": {"name": DRIVER},
                "spec": {"selectors": [{"cel": {"expression": f"device.driver == '{DRIVER}'"}}]},
            },
        )
        node = DraNode(plane, NODE, gpus=2)
        node.start()
        cluster = Cluster(plane, [NODE])
        cluster._create_roles()
        scene = Scene(plane, node, cluster)
        cluster.start_extender()
        node.start_agent(plane.kubeconfig("agent-of-the-tests"), "--interval=5", "--heartbeat=30")
        (port,) = free_ports(1)
        scene.console = f"http://127.0.0.1:{port}"
        plane.fork(
            "console",
            *("headroom", "console", "--debug-open", "--debug-host=127.0.0.1"),
            f"--debug-port={port}",
            env={"KUBECONFIG": str(plane.kubeconfig("console-of-the-tests"))},
        )
        yield scene
    finally:
        for name in ("device-taints", "console", "extender"):
            with contextlib.suppress(KeyError):
                plane.kill(name)
        if node is not None:
            node.stop()
        plane.stop()


def create(plane: ControlPlane, manifest: Mapping[str, Any]) -> None:
    folder = FOLDERS[manifest["kind"]].format(namespace=SYSTEM_NAMESPACE)
    plane.call("POST", folder, manifest)


def install(plane: ControlPlane) -> str:
    """Create the component's objects except its pods. Return a token of its ServiceAccount."""
    for manifest in yaml.safe_load_all(COMPONENT.read_text()):
        if manifest["kind"] in FOLDERS:
            create(plane, manifest)
    path = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/serviceaccounts/{ACCOUNT}/token"
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token: str = plane.call("POST", path, body)["status"]["token"]
    return token


def start_controller(scene: Scene) -> None:
    """Install the component's objects, and run its program with a token of its ServiceAccount."""
    plane = scene.plane
    token = install(plane)
    kubeconfig = plane.folder / "device-taints.kubeconfig"
    plane.write_kubeconfig(kubeconfig, {"token": token})
    (port,) = free_ports(1)
    plane.fork(
        "device-taints",
        *("extender", "device-taints", "--debug-host=127.0.0.1", f"--debug-port={port}"),
        env={"KUBECONFIG": str(kubeconfig)},
    )
    ready = f"http://127.0.0.1:{port}/readyz"
    until(
        lambda: answers(scene, ready) == 200,
        "the controller of device taints is ready",
        60.0,
        0.1,
        lambda: plane.log("device-taints")[-3000:],
    )


def answers(scene: Scene, url: str) -> int:
    try:
        return int(scene.cluster._http.request("GET", url).status)
    except Exception:  # noqa: BLE001 - it does not listen yet
        return 0


class Counter:
    """Counts the rules that were created and deleted."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.created = self.deleted = 0
        self._known = self._uids()

    def watch(self, for_s: float) -> None:
        until_s = time.monotonic() + for_s
        while time.monotonic() < until_s:
            uids = self._uids()
            self.created += len(uids - self._known)
            self.deleted += len(self._known - uids)
            self._known = uids
            time.sleep(0.1)

    def _uids(self) -> set[str]:
        return {rule["metadata"]["uid"] for rule in self._scene.plane.rules()}


def pending(scene: Scene, pod: str) -> str:
    """Return why kube-scheduler cannot place the pod. Return an empty string if it has not tried
    yet.
    """
    conditions = scene.plane.call("GET", f"{PODS}/{pod}")["status"].get("conditions", ())
    return next((each.get("message", "") for each in conditions if each["status"] == "False"), "")


def running(scene: Scene) -> set[str]:
    pods = scene.plane.call("GET", PODS)["items"]
    return {each["metadata"]["name"] for each in pods if each["status"].get("phase") == "Running"}
