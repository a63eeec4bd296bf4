"""A node with NVIDIA's real device plugin and a real kubelet, on a simulated driver and runtime.

The kubelet's paths are fixed, so kubelet and plugin see a test folder as ``/var/lib/kubelet``. Each
runs in its own mount namespace, which leaves the machine's mounts unchanged. In the namespace the
kubelet also finds the kernel settings that it requires, and the NUMA nodes of the devices. It
manages no cgroups and listens on Unix sockets only. Its handling of devices and pods is unchanged:
device manager, topology manager, checkpoint, PodResources, admission and status.
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
    is_ready,
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

#: Capabilities of root that a kubelet needs, under another uid, because Linux limits one user to
#: 128 inotify instances and a kubelet uses five. The change of the uid resets the parent-death
#: signal.
POWERS = "+chown,+dac_override,+fowner,+kill,+sys_admin,+syslog"
AS_ANOTHER = ("setpriv", f"--inh-caps={POWERS}", f"--ambient-caps={POWERS}", "--pdeathsig", "KILL")


class Node(Processes):
    """A node. ``start`` returns when the kubelet has reported every replica to the API server.

    ``device_lists`` is the plugin's device-list-strategy. ``plugin`` is the rest of its
    configuration if it does more than share ``RESOURCE``. ``resource`` is then the offered
    resource, with ``devices`` if not all devices offer it. ``kubelet`` is the name of its binary,
    such as kubelet-1.36. ``settings`` override the kubelet's configuration.
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
        """Start the runtime and a kubelet, without waiting until it is ready."""
        self.runtime.start()
        self.spawn_kubelet()

    def admit_pods(self) -> None:
        """Make the node schedulable when the API server has every replica."""
        self.wait(lambda: self.allocatable() == self.replicas, "every replica in the node's status")
        # Admission taints every new node, and the controller that removes the taint does not run
        # here.
        patch = {"spec": {"taints": None}}
        path = f"/api/v1/nodes/{self.name}"
        self.plane.call("PATCH", path, patch)

    def stop(self) -> None:
        self.runtime.end_commands()
        super().stop()
        self.runtime.stop()
        for tunnel in self._tunnels:
            tunnel.close()

    def start_kubelet(self) -> None:
        """Start the kubelet, also after ``kill("kubelet")``. It then finds its checkpoint and its
        containers.
        """
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
        """Stop the kubelet for the duration of the context, then start it after the plugin.

        So the plugin is there before the kubelet sees the pods bound meanwhile. The kubelet admits
        these in order of creation.
        """
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
        """Write the plugin's configuration for its next start."""
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
        """Replace the plugin by one that shares each device by this number of replicas."""
        self.configure_plugin(plugin_configuration(replicas))
        self.kill("nvidia-device-plugin")
        self.start_plugin()
        self._show("nvidia-device-plugin")

    def _driver_files(self) -> Iterator[str]:
        """Return the paths that the plugin names in a CDI spec: one library, and device nodes."""
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
        """Start our agent with short intervals. It sees the node as an agent of the DaemonSet does.

        It sees only those of the machine's processes that belong to this node.
        """
        proc = self.runtime.proc
        (proc / "2").mkdir(parents=True, exist_ok=True)
        (proc / "2/comm").write_text("kthreadd\n")
        self._show("kubelet")
        self._show("nvidia-device-plugin")
        if not self.runtime.reach:  # Waiting gates ask the next agent at the same port.
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
        """Create a pod and bind it to this node, as a scheduler does. Do not wait for the
        kubelet.
        """
        self.plane.call("POST", PODS, pod)
        self.plane.bind(PODS, pod["metadata"]["name"], self.name)

    def run(self, pod: Mapping[str, Any]) -> dict[str, Any]:
        """Bind the pod and wait until the kubelet has decided. Return the pod's status."""
        self.bind(pod)
        name = pod["metadata"]["name"]
        self.wait(lambda: self.status(name)["phase"] != "Pending", f"a pod {name} that started")
        return self.status(name)

    def admit(self, pod: Mapping[str, Any]) -> list[Held]:
        """Bind the pod and wait until it holds all its devices, which is faster than waiting for
        its status.
        """
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
        """Return the reasons of its events, which show a rejection at once, 10 s before its
        status.
        """
        path = f"/api/v1/namespaces/default/events?fieldSelector=involvedObject.name={pod}"
        return {event["reason"] for event in self.plane.call("GET", path)["items"]}

    def delete(self, pod: str, *, by_force: bool = False) -> None:
        """Delete the pod, at once by force, otherwise when the kubelet has ended it."""
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
        """Return the device manager's checkpoint on disk."""
        text = (self.root / "device-plugins/kubelet_internal_checkpoint").read_text()
        decoded: dict[str, Any] = json.loads(text)
        return decoded["Data"]

    def held(self, pod: str | None = None) -> list[Held]:
        """Return the container of each replica from PodResources, for all pods or one."""
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
            self.held()
            return is_ready(self.object())
        except (ApiRefused, grpc.RpcError):
            return False

    def listed(self) -> dict[str, Any]:
        """Return the response of PodResources' List, by pod."""
        answer = self._answer("List", podresources.ListPodResourcesRequest())
        return {each.name: each for each in answer.pod_resources}

    def got(self, pod: str) -> Any:
        """Return the response of PodResources' Get for one pod. Raise ``grpc.RpcError`` on
        failure.
        """
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
    """Run a node with these kubelet ``settings``. At the end, delete its objects and pods."""
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
    """Start the nodes in parallel. Return when all of them accept pods."""
    for each in nodes:
        each.begin()
    for each in nodes:
        each.until_ready()
        each.start_plugin()
    for each in nodes:
        each.admit_pods()
