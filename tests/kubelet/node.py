"""A node: NVIDIA's device plugin and a kubelet, both real, on a driver and a runtime that are not.

The kubelet's paths are fixed, so both processes see a folder of ours as ``/var/lib/kubelet``: each
runs in a mount namespace of its own and leaves the machine's mounts alone. There the kubelet also
finds the kernel settings that it insists on, and does not change the machine's, and as many NUMA
nodes as the devices have. It manages no cgroups and listens on Unix sockets only. What it does
with devices and pods is all its own: device manager, topology manager, checkpoint, PodResources,
admission, status.
"""

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import yaml

from tests.controlplane import ADMIN_TOKEN, ApiRefused, ControlPlane, built
from tests.driver import Driver, Gpu, library_folder, mig_minors
from tests.kubelet.node_objects import (
    INSIDE,
    KERNEL,
    NUMA,
    PCI,
    RESOURCE,
    forget,
    kubelet_configuration,
    numa_files,
    plugin_configuration,
    see_only,
    write_mounts,
)
from tests.kubelet.pod_resources import Held, answer, podresources
from tests.kubelet.runtime import Runtime
from tests.processes import Processes, free_ports
from tests.tunnel import Tunnel
from tests.waiting import PATIENCE_S, until

PODS = "/api/v1/namespaces/default/pods"
#: The kubelet's log line about the plugin's replicas.
PLUGIN_HEARD = '"Processed device updates for resource"'
TIMEOUT_S = PATIENCE_S

#: Capabilities of root that a kubelet needs, under another uid: Linux lets one user watch files
#: from 128 places, and a kubelet does so from five. The change undoes that it is killed with us.
POWERS = "+chown,+dac_override,+fowner,+kill,+sys_admin,+syslog"
AS_ANOTHER = ("setpriv", f"--inh-caps={POWERS}", f"--ambient-caps={POWERS}", "--pdeathsig", "KILL")


class Node(Processes):
    """``start`` returns when the kubelet has reported every replica to the API server.

    ``device_lists`` is the plugin's device-list-strategy, ``plugin`` the rest of its configuration
    where it does more than to share ``RESOURCE``, and ``resource`` what it then offers, of
    ``devices`` if that is not of all. ``kubelet`` is the name of its binary, such as kubelet-1.36.
    ``settings`` replace those of the kubelet's configuration.
    """

    def __init__(
        self,
        plane: ControlPlane,
        name: str,
        gpus: list[Gpu],
        replicas: int,
        device_lists: str = "envvar",
        plugin: Mapping[str, Any] | None = None,
        resource: str = RESOURCE,
        devices: int | None = None,
        kubelet: str = "kubelet",
        **settings: Any,
    ) -> None:
        super().__init__("headroom-node-")
        self.plane = plane
        self.name = name
        self.resource = resource
        self.replicas = (len(gpus) if devices is None else devices) * replicas
        self._uid = 100_000 + int.from_bytes(os.urandom(2))
        self.driver = Driver(self.folder / "devices", gpus)
        self.device_lists = device_lists
        self._tunnels: list[Tunnel] = []
        cdi = self.folder / "cdi"
        cdi.mkdir()
        self.runtime = self._new_runtime(cdi)
        self._kubelet = kubelet
        self._binaries = built(kubelet, "nvidia-device-plugin")
        self.root = self.folder / "kubelet"
        self.root.mkdir()
        files = {f"/proc/sys/{setting}": f"{value}\n" for setting, value in KERNEL.items()}
        covered = [*files]
        if any(gpu.numa is not None for gpu in gpus):
            files |= numa_files(gpus)
            covered += [NUMA, PCI]
        if minors := mig_minors(gpus):
            files["/proc/driver/nvidia-caps/mig-minors"] = minors
            covered.append("/proc/driver")
        for path, text in files.items():
            file = self.folder / f"over{path}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        write_mounts(self.folder, covered)
        self.configure_plugin(plugin or plugin_configuration(replicas))
        self._write_kubeconfig("kubeconfig")
        (self.folder / "kubelet.yaml").write_text(
            yaml.safe_dump(self._kubelet_configuration() | settings)
        )

    def _new_runtime(self, cdi: Path) -> Runtime:
        return Runtime(self.folder / "cri.sock", self.folder / "proc", self.driver, cdi)

    def start(self) -> None:
        start([self])

    def begin(self) -> None:
        """The runtime and a kubelet that need not be ready yet."""
        self.runtime.start()
        self.spawn_kubelet()

    def admit_pods(self) -> None:
        """Let schedulers use it, once the API server has every replica."""
        self.wait(lambda: self.allocatable() == self.replicas, "every replica in the node's status")
        # Admission taints every new node; what would untaint it is a controller.
        patch = {"spec": {"taints": None}}
        path = f"/api/v1/nodes/{self.name}"
        self.plane.call("PATCH", path, patch, "application/merge-patch+json")

    def stop(self) -> None:
        self.runtime.end_commands()
        super().stop()
        self.runtime.stop()
        for tunnel in self._tunnels:
            tunnel.close()

    def start_kubelet(self) -> None:
        """Again after ``kill("kubelet")``: it finds its checkpoint and its containers."""
        self.spawn_kubelet()
        self.until_ready()

    def replace_kubelet(self, name: str) -> None:
        """Kill the kubelet and start another version of it, such as ``kubelet-1.36``."""
        self._kubelet = name
        self._binaries |= built(name)
        self.kill("kubelet")
        self.start_kubelet()

    def spawn_kubelet(self, kubeconfig: str = "kubeconfig") -> None:
        self._spawn_inside(
            "kubelet",
            *self._kubelet_user(),
            str(self._binaries[self._kubelet]),
            f"--config={self.folder}/kubelet.yaml",
            f"--kubeconfig={self.folder}/{kubeconfig}",
            f"--hostname-override={self.name}",
            "--v=2",
        )

    def _kubelet_user(self) -> Sequence[str]:
        return *AS_ANOTHER, f"--reuid={self._uid}"

    @contextlib.contextmanager
    def kubelet_restarts(self) -> Iterator[None]:
        """It is down for as long as this lasts; then it is there, and so is the plugin, before it
        sees the pods that were bound meanwhile: it admits them in the order of creation."""
        self.kill("kubelet")
        yield
        tunnel = Tunnel(self.plane.port)
        self._tunnels.append(tunnel)
        self._write_kubeconfig("tunnel", tunnel.port)
        received = self.log("kubelet").count(PLUGIN_HEARD)
        self.spawn_kubelet("tunnel")
        self._show("kubelet")
        self.wait(
            lambda: self.log("kubelet").count(PLUGIN_HEARD) > received, "a kubelet with a plugin"
        )
        tunnel.open()
        self.until_ready()

    def until_ready(self) -> None:
        self.wait(self._is_ready, "a node that is ready")

    def configure_plugin(self, configuration: Mapping[str, Any]) -> None:
        """For when it starts the next time."""
        file = self.folder / "plugin.yaml"
        file.write_text(yaml.safe_dump({"version": "v1", **configuration}))

    def start_plugin(self) -> None:
        self._spawn_inside(
            "nvidia-device-plugin",
            str(self._binaries["nvidia-device-plugin"]),
            f"--config-file={self.folder}/plugin.yaml",
            "--device-discovery-strategy=nvml",
            f"--device-list-strategy={self.device_lists}",
            *(self._driver_files() if "cdi" in self.device_lists else ()),
        )

    def replace_plugin(self, replicas: int) -> None:
        """Have it end, and another one start that shares each device by so many."""
        self.configure_plugin(plugin_configuration(replicas))
        self.kill("nvidia-device-plugin")
        self.start_plugin()
        self._show("nvidia-device-plugin")

    def _driver_files(self) -> Iterator[str]:
        """The paths that the plugin names in a CDI spec: one library, and device nodes."""
        root = self.folder / "driver"
        if not root.exists():
            libraries = root / "usr/lib/x86_64-linux-gnu"
            libraries.mkdir(parents=True)
            (libraries / "libcuda.so.580.95.05").touch()
            (root / "dev").mkdir()
            for index in range(len(self.driver.gpus)):
                mode = stat.S_IFCHR | 0o666
                os.mknod(root / f"dev/nvidia{index}", mode, os.makedev(195, index))
        yield f"--container-driver-root={root}"

    def start_agent(self, kubeconfig: Path, *flags: str) -> None:
        """Our agent, which sees the node as one that the DaemonSet runs does; it is in a hurry.

        Of the machine's processes it is shown those of this node.
        """
        proc = self.runtime.proc
        (proc / "2").mkdir(parents=True, exist_ok=True)
        (proc / "2/comm").write_text("kthreadd\n")
        self._show("kubelet")
        self._show("nvidia-device-plugin")
        if not self.runtime.reach:  # gates that wait ask the next agent at the same port
            (port,) = free_ports(1)
            self.runtime.reach = {"HOST_IP": "127.0.0.1", "HEADROOM_AGENT_PORT_NUMBER": str(port)}
        self.fork(
            *("agent", "agent", f"--node={self.name}", "--interval=1", "--heartbeat=10"),
            f"--proc={proc}",
            f"--cgroups={self.runtime.cgroups}",
            f"--listen=127.0.0.1:{self.runtime.reach['HEADROOM_AGENT_PORT_NUMBER']}",
            "--local-port=0",
            *flags,
            env=self._driver_environment() | {"KUBECONFIG": str(kubeconfig)},
            inside=partial(see_only, self.folder),
        )

    def _show(self, process: str) -> None:
        pid = str(self._processes[process].pid)
        if not (shown := self.runtime.proc / pid).is_symlink():
            shown.symlink_to(f"/proc/{pid}")

    def bind(self, pod: Mapping[str, Any]) -> None:
        """Create a pod and bind it here, as a scheduler does; the kubelet takes it from there."""
        self.plane.call("POST", PODS, pod)
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": pod["metadata"]["name"]},
            "target": {"apiVersion": "v1", "kind": "Node", "name": self.name},
        }
        self.plane.call("POST", f"{PODS}/{pod['metadata']['name']}/binding", binding)

    def run(self, pod: Mapping[str, Any]) -> dict[str, Any]:
        """Bind it and wait until the kubelet has decided; the pod's status."""
        self.bind(pod)
        name = pod["metadata"]["name"]
        self.wait(lambda: self.status(name)["phase"] != "Pending", f"a pod {name} that started")
        return self.status(name)

    def admit(self, pod: Mapping[str, Any]) -> list[Held]:
        """Bind it and wait until it holds all that it asks for; quicker: no status yet."""
        self.bind(pod)
        name, containers = pod["metadata"]["name"], pod["spec"]["containers"]
        count = sum(each["resources"]["limits"][self.resource] for each in containers)
        self.wait(lambda: len(self.held(name)) == count, f"a pod {name} that was admitted")
        return self.held(name)

    def status(self, pod: str) -> dict[str, Any]:
        status: dict[str, Any] = self.plane.call("GET", f"{PODS}/{pod}")["status"]
        return status

    def uid(self, pod: str) -> str:
        uid: str = self.plane.call("GET", f"{PODS}/{pod}")["metadata"]["uid"]
        return uid

    def events(self, pod: str) -> set[str]:
        """The reasons of its events; they show a rejection at once, its status takes 10 s."""
        path = f"/api/v1/namespaces/default/events?fieldSelector=involvedObject.name={pod}"
        return {event["reason"] for event in self.plane.call("GET", path)["items"]}

    def delete(self, pod: str, *, by_force: bool = False) -> None:
        """By force it is gone at once; else when the kubelet has ended it."""
        self.plane.call("DELETE", f"{PODS}/{pod}", {"gracePeriodSeconds": 0} if by_force else None)

    def is_gone(self, pod: str) -> bool:
        try:
            self.status(pod)
        except ApiRefused:
            return True
        return False

    def object(self) -> dict[str, Any]:
        return self.plane.call("GET", f"/api/v1/nodes/{self.name}")

    def allocatable(self) -> int:
        return int(self.object()["status"]["allocatable"].get(self.resource, "0"))

    def checkpoint(self) -> dict[str, Any]:
        """The device manager's own record, as it is on the disk."""
        text = (self.root / "device-plugins/kubelet_internal_checkpoint").read_text()
        decoded: dict[str, Any] = json.loads(text)
        return decoded["Data"]

    def held(self, pod: str | None = None) -> list[Held]:
        """Replica -> container, by PodResources; of all pods or of one."""
        return sorted(
            (
                Held(each.name, container.name, replica)
                for each in self.listed().values()
                if pod in (None, each.name)
                for container in each.containers
                for device in container.devices
                for replica in device.device_ids
            ),
            key=lambda held: (held.pod, held.container, held.replica),
        )

    def wait(self, done: Callable[[], object], what: str) -> None:
        def runs() -> object:
            self.raise_if_ended()
            return done()

        until(runs, what, TIMEOUT_S, 0.1, self.logs)

    def _is_ready(self) -> bool:
        try:
            conditions = self.object()["status"].get("conditions", [])
            self.held()
        except (ApiRefused, grpc.RpcError):
            return False
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    def listed(self) -> dict[str, Any]:
        """The answer of PodResources' List, by pod."""
        answer = self._answer("List", podresources.ListPodResourcesRequest())
        return {each.name: each for each in answer.pod_resources}

    def got(self, pod: str) -> Any:
        """The answer of PodResources' Get for one pod. Raises ``grpc.RpcError``."""
        request = podresources.GetPodResourcesRequest(pod_name=pod, pod_namespace="default")
        return self._answer("Get", request).pod_resources

    def _answer(self, call: str, request: Any) -> Any:
        return answer(self.root / "pod-resources/kubelet.sock", call, request)

    def _spawn_inside(self, name: str, *command: str, env: Mapping[str, str] | None = None) -> None:
        self.spawn(
            name,
            *("unshare", "--mount", "sh", "-c", INSIDE, "sh", str(self.folder), *command),
            env={**self._driver_environment(), **(env or {})},
        )

    def _driver_environment(self) -> dict[str, str]:
        return {
            "LD_LIBRARY_PATH": str(library_folder()),
            "FAKE_NVML_TABLE": str(self.driver.table),
        }

    def _write_kubeconfig(self, name: str, port: int | None = None) -> None:
        self.plane.write_kubeconfig(self.folder / name, {"token": ADMIN_TOKEN}, port=port)

    def _kubelet_configuration(self) -> dict[str, Any]:
        return kubelet_configuration(self.folder / "cri.sock", self.plane.certificate)


@contextlib.contextmanager
def node(
    plane: ControlPlane, name: str, gpus: list[Gpu], replicas: int, **settings: Any
) -> Iterator[Node]:
    """A running node; ``settings`` are the kubelet's. Its objects and its pods go with it."""
    running = Node(plane, name, gpus, replicas, **settings)
    try:
        running.start()
        yield running
    finally:
        running.stop()
        plane.call(
            "DELETE", f"{PODS}?fieldSelector=spec.nodeName={name}", {"gracePeriodSeconds": 0}
        )
        forget(plane, name)


def start(nodes: Sequence[Node]) -> None:
    """Start them side by side; returns when all of them take pods."""
    for each in nodes:
        each.begin()
    for each in nodes:
        each.until_ready()
        each.start_plugin()
    for each in nodes:
        each.admit_pods()
