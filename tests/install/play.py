"""Installs Headroom with its manifests, uses it, upgrades it under load and removes it again.

    python -m tests.install.play [--nodes 3]

Real are the API server, etcd, controllers, a scheduler for all other pods, kubelets with NVIDIA's
device plugin, and every container of ours, which a runtime of the tests starts as its pod specifies
(tests/install/containers.py). The result is a line of JSON on stdout, which test_install.py judges.
"""

import contextlib
import itertools
import json
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from tests import waiting
from tests.controlplane import CONTROLLERS, ROOT, ApiRefused, ControlPlane, built
from tests.deploy.commands import commands
from tests.driver import GIB, Gpu, library_folder
from tests.install import network
from tests.install.containers import Images, ProcessRuntime
from tests.kubelet.node import Node, start

NAMESPACE = "headroom-system"
WORKLOADS = "team"
PODS = f"/api/v1/namespaces/{WORKLOADS}/pods"
OVERLAY = "device-plugin"
GPU_BYTES = 24 * GIB
PATIENCE_S = 300.0
MERGE = "application/merge-patch+json"


class Plane(ControlPlane):
    address = network.HOST
    without_admission = ()
    controllers = (
        *CONTROLLERS,
        "cronjob-controller",
        "daemonset-controller",
        "disruption-controller",
        "endpointslice-controller",
        "namespace-controller",
        "root-ca-certificate-publisher-controller",
        "serviceaccount-controller",
        "ttl-after-finished-controller",
    )

    def __init__(self) -> None:
        super().__init__()
        self.port = 443

    def spawn_apiserver(self, *flags: str) -> None:
        # For a Service it calls the pods themselves, because there is no load balancer.
        super().spawn_apiserver(
            "--bind-address=0.0.0.0", "--enable-aggregator-routing=true", *flags
        )


class Machine(Node):
    """A node whose containers run, where they are ours."""

    images: Images
    pods: Iterator[int]

    def _new_runtime(self, cdi: Path) -> ProcessRuntime:
        return ProcessRuntime(
            self.folder / "cri.sock",
            self.folder / "proc",
            self.driver,
            cdi,
            self.images,
            self.pods,
            {
                "LD_LIBRARY_PATH": str(library_folder()),
                "FAKE_NVML_TABLE": str(self.driver.table),
                "HEADROOM_PROC": str(self.folder / "proc"),
            },
        )

    def _kubelet_user(self) -> Sequence[str]:
        return ()  # root: it mounts the volumes of pods

    def spawn_kubelet(self, kubeconfig: str = "kubeconfig") -> None:
        super().spawn_kubelet(kubeconfig)
        assert isinstance(self.runtime, ProcessRuntime)
        self.runtime.kubelet_pid = self.pid("kubelet")

    def show_processes(self) -> None:
        """To the agent, of which it sees no others."""
        (self.runtime.proc / "2").mkdir(parents=True, exist_ok=True)
        (self.runtime.proc / "2/comm").write_text("kthreadd\n")
        self._show("kubelet")
        self._show("nvidia-device-plugin")


def until(done: Callable[[], object], what: str, within_s: float = PATIENCE_S) -> float:
    return waiting.until(done, what, within_s, every_s=0.1)


class Play:
    #: Components of ``deploy`` that it adds to the overlay, and the Deployments that result.
    components: tuple[str, ...] = ()
    deployments = ("headroom-scheduler", "headroom-webhook", "headroom-console")

    def __init__(self, plane: Plane, machines: Sequence[Machine]) -> None:
        self.plane = plane
        self.machines = machines
        self.found: dict[str, Any] = {}
        self.retried: list[str] = []
        self._deploy = plane.folder / "deploy"
        shutil.copytree(ROOT / "deploy", self._deploy)

    def run(self) -> None:
        for step in (self.install, self.place, self.upgrade, self.uninstall):
            began_s = time.monotonic()
            step()
            typer.echo(f"{step.__name__}: {time.monotonic() - began_s:.1f} s", err=True)

    # Steps.

    def install(self) -> None:
        self.found["applied"] = self.apply("v1").splitlines()
        until(self.rolled_out, "the Deployments")
        until(self.agents_ready, "the agents")
        until(self.initialised, "GPUNodes that are initialised")
        self.found["scheduler_pods"] = len(self.ours("extender"))
        self.found["webhook_pods"] = len(self.ours("webhook"))
        self.found["console_pods"] = len(self.ours("console"))
        self.found["agents"] = len(self.ours("agent"))

    def place(self) -> None:
        """More than there is; then a look at who got what."""
        self.plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": WORKLOADS}})
        until(self.has_account, "a service account for pods of the namespace")
        room = 2 * len(self.machines) * 3  # pods of 7 GiB on GPUs of 24
        for number in range(room + 3):
            self.create_pod(f"pod-{number}", 7)
        until(lambda: len(self.bound()) == room, f"{room} bound pods")
        until(lambda: sum(self.running(f"pod-{n}") for n in range(room + 3)) == room, "they run")
        # A sample of the agents, a report, and a retry of a pod that does not fit.
        time.sleep(6.0)
        self.found["room"] = room
        self.found["running"] = sum(pod["status"]["phase"] == "Running" for pod in self.pods())
        self.found["overdrawn"] = sum(
            least < 0
            for machine in self.machines
            for least in machine.driver.least_free_bytes.values()
        )
        self.found["messages"] = self.rejections()
        self.found["schedulers"] = sorted({pod["spec"]["schedulerName"] for pod in self.pods()})
        try:
            self.create_pod("slip", 7, vram="8GB")
        except ApiRefused as err:
            self.found["slip"] = str(err)

    def upgrade(self) -> None:
        """Pods come and go all the while."""
        for pod in self.pods():
            self.plane.call("DELETE", f"{PODS}/{pod['metadata']['name']}")
        until(lambda: not self.pods(), "pods that are gone")
        before = self.servers()
        stop = threading.Event()
        load = Load(self, stop)
        load.start()
        # What is done and gone cannot be in the way of the new one.
        until(lambda: not self.jobs(), "the end of the first certificates' Job")
        self.apply("v2")
        until(lambda: self.rolled_out() and not before & self.servers(), "the new replicas")
        until(lambda: not self.old_agents("v1"), "the new agents")
        time.sleep(2.0)
        stop.set()
        load.join()
        self.found["retried"] = self.retried
        self.found["during_upgrade"] = {
            "created": load.created,
            "slowest_s": load.slowest_s,
            "failures": load.failures,
            "versions": sorted({image.rpartition(":")[2] for image in self.images()}),
        }

    def uninstall(self) -> None:
        """With the commands of docs/operations.md, as they stand there; one pod goes on running."""
        until(lambda: not self.pods(), "pods of the load that are gone")
        self.create_pod("stays", 7)
        until(lambda: self.running("stays"), "a pod that runs")
        before = self.plane.call("GET", f"{PODS}/stays")
        nodes = self.node_specs()
        kubectl = [str(built("kubectl")["kubectl"]), f"--kubeconfig={self.plane.kubeconfig()}"]
        for block in self.uninstall_commands():
            script = block.replace("kubectl ", f"{shlex.join(kubectl)} ")
            script = script.replace("deploy/overlays/OVERLAY", str(self._mine()))
            subprocess.run(["sh", "-euc", script], check=True, stdout=sys.stderr, timeout=120)
        after = self.plane.call("GET", f"{PODS}/stays")
        self.found["stays"] = {
            "as it was": after["spec"] == before["spec"] and self.running("stays"),
            "annotations": sorted(after["metadata"]["annotations"]),
        }
        self.found["nodes as they were"] = self.node_specs() == nodes
        until(lambda: not self.processes(), "processes that have ended")
        self.found["left"] = self.left()

    def uninstall_commands(self) -> list[str]:
        return commands("operations.md", "uninstall")

    # What it is made of.

    def apply(self, tag: str) -> str:
        mine = self._mine()
        mine.mkdir(exist_ok=True)
        images = [
            {"name": f"set-me.invalid/{name}", "newName": f"tests.invalid/{name}", "newTag": tag}
            for name in ("headroom-extender", "headroom-agent", "kube-scheduler")
        ]
        content = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [f"../{OVERLAY}"],
            "components": [f"../../{each}" for each in self.components],
            "images": images,
        }
        (mine / "kustomization.yaml").write_text(yaml.safe_dump(content))
        return self.kubectl("apply", "--server-side", "-k", str(mine))

    def kubectl(self, *arguments: str) -> str:
        """Raises ``RuntimeError`` with the output."""
        try:
            return self.plane.kubectl(*arguments)
        except subprocess.CalledProcessError as err:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {err.stdout}{err.stderr}") from err

    def _mine(self) -> Path:
        return self._deploy / "overlays/mine"

    def ours(self, component: str) -> list[dict[str, Any]]:
        query = f"labelSelector=app.kubernetes.io/component={component}"
        path = f"/api/v1/namespaces/{NAMESPACE}/pods?{query}"
        pods: list[dict[str, Any]] = self.plane.call("GET", path)["items"]
        return pods

    def images(self) -> set[str]:
        return {
            container["image"]
            for component in ("extender", "webhook", "console", "agent")
            for pod in self.ours(component)
            for container in pod["spec"]["containers"]
        }

    def servers(self) -> set[str]:
        """The uids of the pods of all Deployments."""
        return self.uids("extender") | self.uids("webhook") | self.uids("console")

    def uids(self, component: str) -> set[str]:
        return {pod["metadata"]["uid"] for pod in self.ours(component)}

    def jobs(self) -> list[Any]:
        found: list[Any] = self.plane.call("GET", f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs")[
            "items"
        ]
        return found

    def rolled_out(self) -> bool:
        return all(map(self._rolled_out, self.deployments))

    def _rolled_out(self, deployment: str) -> bool:
        path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{deployment}"
        found = self.plane.call("GET", path)
        status, wanted = found.get("status", {}), found["spec"]["replicas"]
        return (
            status.get("observedGeneration") == found["metadata"]["generation"]
            and status.get("updatedReplicas") == status.get("replicas") == wanted
            and status.get("readyReplicas") == wanted
        )

    def agents_ready(self) -> bool:
        path = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/headroom-agent"
        return bool(self.plane.call("GET", path)["status"]["numberReady"] == len(self.machines))

    def old_agents(self, tag: str) -> list[str]:
        return [
            pod["metadata"]["name"]
            for pod in self.ours("agent")
            if pod["spec"]["containers"][0]["image"].endswith(tag)
        ]

    def initialised(self) -> bool:
        nodes = self.plane.call("GET", "/apis/headroom.gpu/v1alpha1/gpunodes")["items"]
        ready = [node for node in nodes if node.get("spec", {}).get("initialised")]
        return len(ready) == len(self.machines) and all("status" in node for node in ready)

    def has_account(self) -> bool:
        with contextlib.suppress(ApiRefused):
            path = f"/api/v1/namespaces/{WORKLOADS}/serviceaccounts/default"
            return bool(self.plane.call("GET", path))
        return False

    def create_pod(self, name: str, gib: int, vram: str = "") -> None:
        """It takes so many GiB, and asks for the same or for ``vram``."""
        container = {
            "name": "main",
            **self.workload(),
            "env": [{"name": "TAKES_VRAM", "value": str(gib * GIB)}],
            "resources": {"limits": {"nvidia.com/gpu": "1"}},
        }
        metadata = {"name": name, "annotations": {"headroom.gpu/vram": vram or f"{gib}Gi"}}
        # Nothing of a scheduler: the webhook sends it to ours.
        spec = {"containers": [container], "terminationGracePeriodSeconds": 1}
        # Who makes pods tries again, as all controllers do; why is judged.
        for _ in range(5):
            try:
                self.plane.call("POST", PODS, {"metadata": metadata, "spec": spec})
                return
            except ApiRefused as err:
                if "failed calling webhook" not in str(err):
                    raise
                self.retried.append(str(err))
                time.sleep(1.0)
        raise TimeoutError(f"nobody lets {name} in: {self.retried[-1]}")

    def workload(self) -> dict[str, Any]:
        """Return the image of a user's container, and its command; here it is only pretended."""
        return {"image": "none"}

    def pods(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.plane.call("GET", PODS)["items"]
        return found

    def bound(self) -> list[dict[str, Any]]:
        return [pod for pod in self.pods() if pod["spec"].get("nodeName")]

    def rejections(self) -> list[str]:
        return sorted(
            {
                condition.get("message", "")
                for pod in self.pods()
                for condition in pod["status"].get("conditions", [])
                if condition["type"] == "PodScheduled" and condition["status"] == "False"
            }
        )

    def running(self, name: str) -> bool:
        return bool(self.plane.call("GET", f"{PODS}/{name}")["status"]["phase"] == "Running")

    def node_specs(self) -> dict[str, Any]:
        nodes = self.plane.call("GET", "/api/v1/nodes")["items"]
        return {node["metadata"]["name"]: node["spec"] for node in nodes}

    def processes(self) -> list[str]:
        """Containers of ours that run, as the runtimes know."""
        return [
            container.pod
            for machine in self.machines
            for container in list(machine.runtime.containers.values())
            if container.process is not None and container.process.poll() is None
        ]

    def left(self) -> list[str]:
        """Objects of any kind that name us."""
        kinds = self.kubectl("api-resources", "--verbs=list", "-o", "name").split()
        listable = ",".join(kind for kind in kinds if not kind.startswith("componentstatuses"))
        listed = self.kubectl("get", listable, "-A", "--ignore-not-found", "-o", "name")
        return sorted({line for line in listed.split() if "headroom" in line})

    def trouble(self) -> str:
        """Logs for a wait that timed out."""
        out = [self.plane.kubectl("get", "pods,jobs,events", "-A", "-o", "wide")]
        out += [
            f"--- {container.pod} {container.name}\n{container.output[-3000:]}"
            for machine in self.machines
            for container in list(machine.runtime.containers.values())
            if container.output
        ]
        return "\n".join(out)


class Load(threading.Thread):
    """A pod every so often, which goes when it is bound."""

    def __init__(self, play: Play, stop: threading.Event) -> None:
        super().__init__()
        self._play = play
        self._until = stop
        self.created = 0
        self.slowest_s = 0.0
        self.failures: list[str] = []

    def run(self) -> None:
        try:
            self._load()
        except Exception as err:
            self.failures.append(repr(err))
            raise

    def _load(self) -> None:
        while not self._until.wait(0.3):
            name = f"load-{self.created}"
            self._play.create_pod(name, 7)
            self.created += 1
            path = f"{PODS}/{name}"
            try:
                took_s = until(
                    lambda path=path: self._play.plane.call("GET", path)["spec"].get("nodeName"),
                    f"{name} bound",
                    60.0,
                )
            except AssertionError:
                pod = self._play.plane.call("GET", path)
                self.failures.append(json.dumps(pod["status"]))
                continue
            self.slowest_s = max(self.slowest_s, took_s)
            self._play.plane.call("DELETE", path)


def start_default_scheduler(plane: ControlPlane, config: Path, *flags: str) -> None:
    binary = str(built("kube-scheduler")["kube-scheduler"])
    plane.spawn("default-scheduler", binary, f"--config={config}", "--secure-port=0", *flags)


def make_machines(plane: ControlPlane, count: int) -> list[Machine]:
    """Two GPUs in each, of which everyone can be given out four times; to be started."""
    Machine.images = Images(built("kube-scheduler")["kube-scheduler"], plane.folder)
    Machine.pods = itertools.count()
    return [
        Machine(
            plane,
            f"gpu-{number}",
            [Gpu(f"GPU-{number}-{i}", GPU_BYTES, reserved_bytes=0) for i in range(2)],
            4,
        )
        for number in range(count)
    ]


def bring_up(plane: ControlPlane, machines: Sequence[Machine]) -> None:
    """Nodes with a device plugin, and a scheduler for all other pods."""
    plain: Mapping[str, Any] = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(plane.kubeconfig("scheduler-of-the-tests"))},
    }
    config = plane.folder / "default.json"
    config.write_text(json.dumps(plain))
    start_default_scheduler(plane, config)
    start(machines)
    for machine in machines:
        machine.show_processes()
        labels = {"metadata": {"labels": {"nvidia.com/gpu.present": "true"}}}
        plane.call("PATCH", f"/api/v1/nodes/{machine.name}", labels, MERGE)


def main(nodes: Annotated[int, typer.Option(min=1)] = 3) -> None:
    network.alone()
    network.build()
    with contextlib.ExitStack() as stack:
        plane = Plane()
        stack.callback(plane.stop)
        plane.start()
        plane.start_controller_manager()
        machines = make_machines(plane, nodes)
        for machine in machines:
            stack.callback(machine.stop)
        bring_up(plane, machines)
        play = Play(plane, machines)
        try:
            play.run()
        except BaseException:
            typer.echo(play.trouble(), err=True)
            raise
        typer.echo(json.dumps(play.found))


if __name__ == "__main__":
    typer.run(main)
