"""Installs a packaged chart, uses it, upgrades it, rolls it back, and removes it again.

    python -m tests.install.play [--nodes 3]

Upgrades and rolls back under load. The commands come from docs/get-started/helm.md,
docs/operate/upgrade.md and docs/operate/uninstall.md. The program prints the result as a line of
JSON, which test_install.py checks.
"""

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from tests.controlplane import ApiRefused
from tests.deploy import pages
from tests.deploy.pages import commands, play
from tests.install import network
from tests.install.cluster import Machine, Plane, bring_up, make_machines, until
from tests.install.hanging import freeze
from tests.install.load import GPUNODES, Judge, Load
from tests.install.versions import (
    COLUMN,
    FIELD,
    REGISTRY,
    Version,
    next_version,
    working_tree,
)
from tests.install.workloads import Workloads

NAMESPACE = "headroom-system"
PLATFORM = "device-plugin"
EXTENDER = f"system:serviceaccount:{NAMESPACE}:headroom-extender"
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/gpunodes.headroom.gpu"
#: Sizes of pods in GiB. Three permanent pods fit on a GPU. A pod of ``_NEVER_FITS_GIB`` never fits
#: next to a permanent pod, and a pod of the load always fits next to one permanent pod.
_STAYS_GIB, _NEVER_FITS_GIB, _LOAD_GIB = 7, 20, 2
_LOAD_THREADS = 2


class Play:
    #: The Deployments that the installation creates.
    deployments = ("headroom-scheduler", "headroom-webhook", "headroom-console")

    def __init__(self, plane: Plane, machines: Sequence[Any], container: dict[str, Any]) -> None:
        self.plane = plane
        self.machines = machines
        self.workloads = Workloads(plane, container)
        self.found: dict[str, Any] = {"seconds": {}}

    def act(self, *steps: Any) -> None:
        for step in steps:
            began_s = time.monotonic()
            step()
            self.found["seconds"][step.__name__] = round(time.monotonic() - began_s, 1)

    def install_package(self, version: Version) -> None:
        """Install the package as its README describes, in enforce mode."""
        folder = self.plane.folder / "package"
        folder.mkdir()
        self.found["package"] = version.package.name
        network.run("tar", "-xzf", str(version.package), "-C", str(folder))
        chart = folder / "headroom"
        images = {
            "extender": "headroom-extender",
            "agent": "headroom-agent",
            "kubeScheduler": "kube-scheduler",
        }
        self.shell(
            f"helm install headroom {chart} -n {NAMESPACE} --create-namespace"
            f" --values={chart}/platforms/{PLATFORM}.yaml"
            " --set=onGpuNodes=true,settings.mode=enforce "
            + " ".join(f"--set=images.{key}.repository={REGISTRY}/{n}" for key, n in images.items())
        )
        until(self.ready, "the Deployments and the agents")
        until(self.initialised, "GPUNodes that are initialised")

    def uninstall(self) -> None:
        """Run the commands of docs/operate/uninstall.md while a pod of a user runs."""
        self.workloads.create("stays", _STAYS_GIB)
        until(lambda: self.workloads.runs("stays"), "a pod that runs")
        before = self.workloads.get("stays")
        nodes = self.node_specs()
        for block in self.uninstall_commands():
            self.shell(block)
        after = self.workloads.get("stays")
        containers = [pod["status"]["containerStatuses"] for pod in (before, after)]
        self.found["stays"] = {
            "as it was": after["spec"] == before["spec"] and containers[0] == containers[1],
            "annotations": sorted(after["metadata"]["annotations"]),
        }
        self.found["nodes as they were"] = self.node_specs() == nodes
        until(lambda: not self.processes(), "processes that have ended")
        self.found["left"] = self.left()

    def uninstall_commands(self) -> list[str]:
        """Return the commands of docs/operate/uninstall.md. Replace ``kubectl delete -k`` with
        Helm's commands.
        """
        helm = f"helm uninstall headroom -n {NAMESPACE}\nkubectl delete namespace {NAMESPACE}\n"
        blocks = commands("operate/uninstall.md", "uninstall")
        return [helm if "kubectl delete -k" in block else block for block in blocks]

    def enter(self, script: str) -> tuple[str, int]:
        """Run commands of a page. Return their output and exit status."""
        output, status = pages.shell(self.plane.folder, self.plane.kubeconfig())(script)
        typer.echo(output, err=True)
        return output, status

    def shell(self, script: str) -> None:
        """Run commands of a page. Raise ``RuntimeError`` with their output if they fail."""
        output, status = self.enter(script)
        if status:
            raise RuntimeError(f"{script}: {output}")

    def ours(self, *components: str) -> list[dict[str, Any]]:
        query = f"labelSelector=app.kubernetes.io/component+in+({','.join(components)})"
        path = f"/api/v1/namespaces/{NAMESPACE}/pods?{query}"
        pods: list[dict[str, Any]] = self.plane.call("GET", path)["items"]
        return pods

    def tags(self) -> set[str]:
        """Return the tags of the Headroom images that pods use, including terminating pods."""
        return {
            container["image"].rpartition(":")[2]
            for pod in self.ours("extender", "webhook", "console", "agent")
            for container in pod["spec"]["containers"]
            if container["name"] != "kube-scheduler"
        }

    def ready(self) -> bool:
        return all(map(self._rolled_out, self.deployments)) and self._agents_ready()

    def _rolled_out(self, deployment: str) -> bool:
        path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{deployment}"
        found = self.plane.call("GET", path)
        status, wanted = found.get("status", {}), found["spec"]["replicas"]
        return (
            status.get("observedGeneration") == found["metadata"]["generation"]
            and status.get("updatedReplicas") == status.get("replicas") == wanted
            and status.get("readyReplicas") == wanted
        )

    def _agents_ready(self) -> bool:
        path = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/headroom-agent"
        return bool(self.plane.call("GET", path)["status"]["numberReady"] == len(self.machines))

    def initialised(self) -> bool:
        nodes = self.plane.call("GET", GPUNODES)["items"]
        ready = [node for node in nodes if node.get("spec", {}).get("initialised")]
        return len(ready) == len(self.machines) and all("status" in node for node in ready)

    def node_specs(self) -> dict[str, Any]:
        nodes = self.plane.call("GET", "/api/v1/nodes")["items"]
        return {node["metadata"]["name"]: node["spec"] for node in nodes}

    def processes(self) -> list[str]:
        """Return the pods of Headroom whose containers run according to the container runtimes."""
        return [
            container.pod
            for machine in self.machines
            for container in list(machine.runtime.containers.values())
            if container.process is not None and container.process.poll() is None
        ]

    def left(self) -> list[str]:
        """Return all objects whose names contain headroom."""
        kinds = self.plane.kubectl("api-resources", "--verbs=list", "-o", "name").split()
        listable = ",".join(kind for kind in kinds if not kind.startswith("componentstatuses"))
        listed = self.plane.kubectl("get", listable, "-A", "--ignore-not-found", "-o", "name")
        return sorted({line for line in listed.split() if "headroom" in line})

    def trouble(self) -> str:
        """Return logs to print when a wait times out."""
        out = [self.plane.kubectl("get", "pods,jobs,events", "-A", "-o", "wide")]
        out += [
            f"--- {container.pod} {container.name}\n{output[-3000:]}"
            for machine in self.machines
            for container in list(machine.runtime.containers.values())
            if (output := machine.runtime.output(container))
        ]
        return "\n".join(out)


class Upgraded(Play):
    """Upgrades from one packaged version to another and rolls back, while pods run on every GPU."""

    def __init__(self, plane: Plane, machines: Sequence[Machine], *versions: Version) -> None:
        super().__init__(plane, machines, {"image": "none"})
        self.old, self.new = versions

    def run(self) -> None:
        self.act(self.install, self.freeze_an_extender, self.place)
        self.act(self.upgrade, self.roll_back, self.uninstall)

    def install(self) -> None:
        self.install_package(self.old)
        play("get-started/helm.md", "check", self.enter)
        for part in ("extender", "webhook", "console", "agent"):
            self.found[f"{part}_pods"] = len(self.ours(part))

    def freeze_an_extender(self) -> None:
        """Freeze an extender and wait until its kubelet restarts it."""
        first, *_ = (pod["metadata"]["name"] for pod in self.ours("extender"))
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{first}"
        self.found["frozen"] = freeze(self.plane, self.machines, path, "extender")

    def place(self) -> None:
        """Create more pods than fit, and record which pods run."""
        self.workloads.start()
        room = 2 * len(self.machines) * 3
        for number in range(room + 3):
            self.workloads.create(f"pod-{number}", _STAYS_GIB)
        until(lambda: len(self.workloads.running()) == room, f"{room} pods that run")
        # Wait, because kube-scheduler retries each unschedulable pod after the agents have reported
        # the other pods.
        said = f"{len(self.machines)} insufficient GPU memory on any device"
        until(
            lambda: [said in each for each in self.workloads.rejections()] == [True],
            "the same reason of all pods that do not fit",
        )
        self.found["room"] = room
        self.found["running"] = len(self.workloads.running())
        self.found["messages"] = self.workloads.rejections()
        self.found["schedulers"] = sorted(
            {pod["spec"]["schedulerName"] for pod in self.workloads.all()}
        )
        try:
            self.workloads.create("slip", _STAYS_GIB, vram="8GB")
        except ApiRefused as err:
            self.found["slip"] = str(err)
        self._leave_one_on_each_gpu()
        for number in range(2 * len(self.machines)):
            self.workloads.create(f"never-{number}", _NEVER_FITS_GIB)

    def _leave_one_on_each_gpu(self) -> None:
        """Delete all pods except one on each GPU. The remaining pods run during the upgrade and the
        rollback.
        """
        kept: set[Any] = set()
        for pod in self.workloads.all():
            devices = [
                (machine.name, *container.devices)
                for machine in self.machines
                for container in machine.runtime.running(pod["metadata"]["name"]).values()
            ]
            if not devices or devices[0] in kept:
                self.workloads.delete(pod["metadata"]["name"])
            kept.update(devices)
        left = 2 * len(self.machines)
        until(lambda: len(self.workloads.all()) == left, f"{left} pods that are left")

    def upgrade(self) -> None:
        (block,) = commands("operate/upgrade.md", "upgrade")
        script = block.replace("headroom-VERSION.tgz", str(self.new.package))
        self._change("upgrade", script, self._write_field)

    def roll_back(self) -> None:
        (block,) = commands("operate/upgrade.md", "rollback")
        self._change("rollback", block)

    def uninstall(self) -> None:
        for pod in self.workloads.all():
            if not pod["spec"].get("nodeName"):
                self.workloads.delete(pod["metadata"]["name"])
        super().uninstall()

    def _change(self, name: str, script: str, then: Callable[[], None] = lambda: None) -> None:
        """Run the commands while pods are created and deleted. Wait until only pods of the other
        version run.

        Calls ``then`` after the commands, while pods of both versions run.
        """
        (before,) = self.tags()
        load, judge = (
            Load(self.workloads, _LOAD_THREADS, _LOAD_GIB),
            Judge(self.plane, self.workloads),
        )
        with contextlib.ExitStack() as stack:
            judge.start()
            load.start()
            stack.callback(load.stop)
            stack.callback(judge.stop)
            until(lambda: len(load.waits_s) >= 6 or load.failures, "binds before the change")
            usual_s, count = max(load.waits_s), len(load.waits_s)
            began_s = time.monotonic()
            self.shell(script)
            then()
            until(lambda: before not in self.tags() and self.ready(), f"{name}: the new replicas")
            took_s = time.monotonic() - began_s
            seen = len(load.waits_s)
            until(lambda: len(load.waits_s) >= seen + 3 or load.failures, "binds afterwards")
        self.found[name] = {
            "took_s": round(took_s, 1),
            "tags": sorted(self.tags()),
            "bound": len(load.waits_s) - count,
            "longest_wait_s": round(max(load.waits_s[count:]), 1),
            "longest_wait_before_s": round(usual_s, 1),
            "failures": load.failures,
            "faults": judge.faults,
            "rounds": judge.rounds,
            "running": len(self.workloads.running()),
            "waiting": len(self.workloads.all()) - len(self.workloads.bound()),
            "overcommitted": self._overcommitted(),
            "retried": self.workloads.retried,
            **self._crd(),
        }

    def _overcommitted(self) -> list[str]:
        """Return the GPUs whose use has ever exceeded their memory, according to the fake
        driver.
        """
        return [
            uuid
            for machine in self.machines
            for uuid, least_bytes in machine.driver.least_free_bytes.items()
            if least_bytes < 0
        ]

    def _crd(self) -> dict[str, Any]:
        """Return whether the CRD has the next version's field and column, and the values of the
        field in the GPUNodes.
        """
        (version,) = self.plane.call("GET", CRD)["spec"]["versions"]
        schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
        return {
            "field": FIELD in schema,
            "column": COLUMN in self.plane.kubectl("get", "gpunodes").splitlines()[0],
            "values": self._values(),
        }

    def _values(self) -> list[str]:
        nodes = self.plane.call("GET", GPUNODES)["items"]
        return sorted({node["spec"].get(FIELD, "") for node in nodes})

    def _write_field(self) -> None:
        """Write the next version's field, as its extender would, as soon as the API server accepts
        the field.
        """
        patch = "--type=merge", "-p", json.dumps({"spec": {FIELD: "written"}})

        def written() -> bool:
            self.plane.kubectl("patch", "gpunodes", *self.names(), f"--as={EXTENDER}", *patch)
            return self._values() == ["written"]

        until(written, "a GPUNode with the new field")

    def names(self) -> list[str]:
        return [machine.name for machine in self.machines]


def main(nodes: Annotated[int, typer.Option(min=1)] = 3) -> None:
    network.alone()
    network.build()
    with contextlib.ExitStack() as stack:
        plane = Plane()
        stack.callback(plane.stop)
        versions = working_tree(plane.folder), next_version(plane.folder)
        plane.start()
        plane.start_controller_manager()
        machines = make_machines(plane, nodes)
        for machine in machines:
            stack.callback(machine.stop)
        bring_up(plane, machines)
        upgraded = Upgraded(plane, machines, *versions)
        try:
            upgraded.run()
        except BaseException:
            typer.echo(upgraded.trouble(), err=True)
            raise
        typer.echo(json.dumps(upgraded.found))


if __name__ == "__main__":
    typer.run(main)
