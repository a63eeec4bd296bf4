"""DRA with real components: kube-scheduler, kubelet and dra-example-driver, beside Headroom.

    python -m tests.neighbours.dra [--version v1beta2|v1alpha3]

Needs root, for a kubelet in a mount namespace. The driver has the name of NVIDIA's, because that is
the driver whose devices Headroom reads; the GPUs are a table behind a fake NVML library, with the
uuids that the driver publishes. The agent has its default intervals, and the controller of device
taints the rights of its own ServiceAccount. Prints each step with its figures; fails if a figure is
not as stated.
"""

import argparse
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
from tests.neighbours.dra_node import DRIVER, DraNode
from tests.processes import free_ports
from tests.waiting import until

GIB = 1 << 30
#: A device is tainted, and cleared, within so many seconds of the use.
LIMIT_S, CLEARED_LIMIT_S = 10.0, 15.0
NODE = "dra-1"
PODS = "/api/v1/namespaces/default/pods"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
COMPONENT = ROOT / "deploy/components/device-taints/device-taints.yaml"
ACCOUNT = "headroom-device-taints"
#: Where an object of a manifest is created.
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
    """A control plane that serves DeviceTaintRules in one version."""

    controllers = ("resourceclaim-controller", "garbage-collector-controller")

    def __init__(self, version: str) -> None:
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
        """A kube-scheduler without our extender, which schedules all pods."""
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
    """The cluster, and what is asked of it."""

    def __init__(self, plane: DraPlane, node: DraNode, cluster: Cluster) -> None:
        self.plane, self.node, self.cluster = plane, node, cluster
        self.uuids = node.devices()
        self.console = ""

    def create(self, manifest: Mapping[str, Any]) -> None:
        folder = FOLDERS[manifest["kind"]].format(namespace=SYSTEM_NAMESPACE)
        self.plane.call("POST", folder, manifest)

    def claim(self, name: str, memory: str) -> None:
        """Create a pod that Headroom's annotation describes, converted by headroom convert."""
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
        # This driver would give the claim all of the device's compute.
        (request,) = template["spec"]["spec"]["devices"]["requests"]
        request["exactly"]["capacity"]["requests"]["compute"] = "1"
        self.create(template)
        self.create(converted)

    def device_of(self, pod: str) -> str:
        """The device of the pod's claim; empty while it is not allocated."""
        for claim in self.plane.call("GET", CLAIMS)["items"]:
            status = claim.get("status", {})
            if any(each["name"] == pod for each in status.get("reservedFor", ())):
                (result,) = status["allocation"]["devices"]["results"]
                return str(result["device"])
        return ""

    def run(self, pod: str) -> str:
        """Wait until the pod runs; return its device."""
        self.node.wait(lambda: self.node.runtime.running(pod), f"{pod} to run")
        return self.device_of(pod)

    def use(self, pod: str, used_bytes: int) -> None:
        container = self.node.runtime.running(pod)["main"]
        self.node.runtime.use(container, used_bytes)

    def unknown_process(self, device: str, used_bytes: int) -> None:
        """A process of no pod uses so much of a device; 0 ends it."""
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
        """Return how long it takes; fail after the limit."""
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
def scene(version: str) -> Iterator[Scene]:
    plane = DraPlane(version)
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
            *("extender", "console", "--debug-open", "--debug-host=127.0.0.1"),
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


def start_controller(scene: Scene) -> None:
    """Install the component's objects, and run its program with the token of its account."""
    plane = scene.plane
    for manifest in yaml.safe_load_all(COMPONENT.read_text()):
        if manifest["kind"] in FOLDERS:
            scene.create(manifest)
    path = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/serviceaccounts/{ACCOUNT}/token"
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = plane.call("POST", path, body)["status"]["token"]
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


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def play(scene: Scene) -> None:
    plane = scene.plane
    say("1. Claims and measured use")
    devices: dict[str, str] = {}
    for name, memory in (("a", "30Gi"), ("b", "20Gi"), ("c", "60Gi")):
        scene.claim(name, memory)
        devices[name] = scene.run(name)
    assert devices["a"] == devices["b"] != devices["c"], devices
    for name, used in (("a", 25), ("b", 20), ("c", 60)):
        scene.use(name, used * GIB)
    expected = {("a", 30, 25), ("b", 20, 20), ("c", 60, 60)}

    def shown() -> bool:
        rows = {
            (row["name"], row["claimed_bytes"] // GIB, (row["measured_bytes"] or 0) // GIB)
            for row in scene.drift()
        }
        return rows == expected

    took_s = scene.seconds_until(shown, "claims and use in /v1/drift", 60.0)
    say(f"   allocated by kube-scheduler: {devices}; in /v1/drift after {took_s:.1f} s")
    say(headroom("--server", scene.console, "drift", "-A"))

    say("2. Use of no known pod")
    start_controller(scene)
    assert scene.tainted() == set()
    full, other = devices["a"], devices["c"]
    scene.unknown_process(full, 5 * GIB)
    took_s = scene.seconds_until(lambda: scene.tainted() == {full}, "the device is tainted", 30.0)
    (rule,) = plane.rules()
    assert rule["spec"]["taint"]["effect"] == "NoSchedule", rule
    say(f"   tainted {took_s:.1f} s after the process began: {rule['spec']}")
    assert took_s < LIMIT_S
    scene.claim("d", "25Gi")  # it would fit on this device alone
    until(lambda: "tainted" in pending(scene, "d") or pending(scene, "d"), "d waits", 30.0)
    say(f"   pod d of 25 GiB, for which only {full} has room: {pending(scene, 'd')}")
    scene.claim("e", "15Gi")
    assert scene.run("e") == other
    say(f"   pod e of 15 GiB got {other}; nothing was ended: {sorted(running(scene))}")
    assert running(scene) == {"a", "b", "c", "e"}
    say(headroom("--server", scene.console, "drift", "-A"))
    scene.unknown_process(full, 0)
    took_s = scene.seconds_until(lambda: not scene.tainted(), "the taint is cleared", 30.0)
    say(f"   cleared {took_s:.1f} s after the process ended")
    assert took_s < CLEARED_LIMIT_S
    assert scene.run("d") == full
    say(f"   pod d runs on {full}")

    say("3. Use of a pod beyond its claims")
    scene.use("b", 24 * GIB)
    took_s = scene.seconds_until(lambda: scene.tainted() == {full}, "the device is tainted", 30.0)
    say(f"   tainted {took_s:.1f} s after pod b of 20 GiB used 24 GiB")
    assert took_s < LIMIT_S
    assert {row["excess_bytes"] for row in scene.drift() if row["name"] == "b"} == {4 * GIB}
    scene.use("b", 20 * GIB)
    took_s = scene.seconds_until(lambda: not scene.tainted(), "the taint is cleared", 60.0)
    say(f"   cleared {took_s:.1f} s after it used 20 GiB again")

    say("4. Use that changes every 3 s, for 90 s")
    counted = Counter(scene)
    for _ in range(15):
        scene.use("b", 24 * GIB)
        counted.watch(3.0)
        scene.use("b", 20 * GIB)
        counted.watch(3.0)
    say(f"   {counted.created} taints, {counted.deleted} cleared")
    assert counted.created <= 4
    scene.seconds_until(lambda: not scene.tainted(), "the taint is cleared", 120.0)

    say("5. Pods that end: no taint, although the report still shows their use")
    counted = Counter(scene)
    plane.call("DELETE", f"{PODS}/c")
    plane.call("DELETE", f"{PODS}/e")
    counted.watch(20.0)
    assert (counted.created, running(scene)) == (0, {"a", "b", "d"})
    say("   0 taints in 20 s")

    say("6. Uninstall, with a device tainted")
    scene.use("b", 24 * GIB)
    scene.seconds_until(lambda: scene.tainted() == {full}, "the device is tainted", 300.0)
    plane.kill("device-taints")
    plane.call("DELETE", f"{FOLDERS['ValidatingAdmissionPolicy']}/{ACCOUNT}")
    took_s = scene.seconds_until(lambda: not plane.rules(), "the rules are deleted", 60.0)
    say(f"   Kubernetes deleted the rules in {took_s:.1f} s")


class Counter:
    """Counts rules that appear and disappear."""

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
    """Why the scheduler cannot place a pod; empty while it did not try."""
    conditions = scene.plane.call("GET", f"{PODS}/{pod}")["status"].get("conditions", ())
    return next((each.get("message", "") for each in conditions if each["status"] == "False"), "")


def running(scene: Scene) -> set[str]:
    pods = scene.plane.call("GET", PODS)["items"]
    return {each["metadata"]["name"] for each in pods if each["status"].get("phase") == "Running"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--version", choices=("v1beta2", "v1alpha3"), default="v1beta2")
    with scene(parser.parse_args().version) as ready:
        play(ready)


if __name__ == "__main__":
    main()
