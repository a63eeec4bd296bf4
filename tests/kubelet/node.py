"""A node with a real kubelet and NVIDIA's real device plugin, on a simulated driver and container
runtime.

The kubelet's paths are fixed, so the kubelet and the plugin see a test folder as
``/var/lib/kubelet``. Both run in their own mount namespaces, so the mounts of the machine do not
change. In its namespace, the kubelet also finds the kernel settings that it requires, and the NUMA
nodes of the devices. The kubelet manages no cgroups and listens only on Unix sockets. All of its
code for devices and pods runs as usual, including the device manager, the topology manager, the
checkpoint, PodResources, admission and status.
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
    inside_node,
    is_ready,
    kubelet_configuration,
    numa_files,
    plugin_configuration,
    write_mounts,
)
from tests.kubelet.pod_resources import Held, answer, podresources
from tests.kubelet.runtime import Runtime
from tests.processes import Processes, free_ports
from tests.tunnel import Tunnel
from tests.waiting import PATIENCE_S, until

PODS = "/api/v1/namespaces/default/pods"
#: A part of the line that the kubelet logs when it has received the plugin's replicas.
PLUGIN_HEARD = '"Processed device updates for resource"'
TIMEOUT_S = PATIENCE_S

#: Capabilities that a kubelet needs. Kubelets run with these capabilities as other users, because
#: Linux limits each user to 128 inotify instances and a kubelet uses five. Changing the user resets
#: the parent-death signal, so it is set again.
POWERS = "+chown,+dac_override,+fowner,+kill,+sys_admin,+syslog"
AS_ANOTHER = ("setpriv", f"--inh-caps={POWERS}", f"--ambient-caps={POWERS}", "--pdeathsig", "KILL")


class Node(Processes):
    """A node with a kubelet and a device plugin. ``start`` returns when the kubelet has reported
    every replica to the API server.

    ``device_lists`` is the plugin's device-list-strategy. ``plugin`` is the plugin's configuration
    if it does more than share ``RESOURCE``. In this case, ``resource`` is the offered resource, and
    ``devices`` are the devices that offer it, by default all. ``kubelet`` is the name of the
    kubelet's binary, such as kubelet-1.36. ``settings`` override the kubelet's configuration.
    """

    #: Time limit in seconds of the agent's answers to the kubelet. On a busy machine, the agent
    #: often exceeds the shipped limit (None), and then the kubelet rejects the pod.
    answer_s: float | None = 10.0

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
        """Start the container runtime and the kubelet without waiting until the kubelet is
        ready.
        """
        self.runtime.start()
        self.spawn_kubelet()

    def admit_pods(self) -> None:
        """Wait until the node's status has every replica, and make the node schedulable."""
        self.wait(lambda: self.allocatable() == self.replicas, "every replica in the node's status")
        # Remove the taint that admission adds to every new node, because the controller that
        # usually removes it does not run.
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
        """Start or restart the kubelet. A restarted kubelet finds its checkpoint and its
        containers.
        """
        self.spawn_kubelet()
        self.until_ready()

    def replace_kubelet(self, name: str) -> None:
        """Kill the kubelet and start another version, such as ``kubelet-1.36``."""
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
        """Stop the kubelet during the context, and then start it after the plugin.

        The plugin is registered before the kubelet receives the pods that were bound in the
        meantime. The kubelet admits these pods in order of creation.
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
        """Write the configuration that the plugin reads at its next start."""
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
        """Restart the plugin with this number of replicas per device."""
        self.configure_plugin(plugin_configuration(replicas))
        self.kill("nvidia-device-plugin")
        self.start_plugin()
        self._show("nvidia-device-plugin")

    def _driver_files(self) -> Iterator[str]:
        """Create the library and the device nodes that the plugin needs for a CDI spec. Yield their
        paths.
        """
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
        """Start our agent with short intervals. The agent sees the node as an agent of the
        DaemonSet does.

        The agent sees only the processes of this node, not all processes of the machine.
        """
        proc = self.runtime.proc
        (proc / "2").mkdir(parents=True, exist_ok=True)
        (proc / "2/comm").write_text("kthreadd\n")
        self._show("kubelet")
        self._show("nvidia-device-plugin")
        if (
            not self.runtime.reach
        ):  # Keep the port, because waiting gates ask a restarted agent at the same port.
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
            inside=partial(inside_node, self.folder, self.answer_s),
        )

    def _show(self, process: str) -> None:
        pid = str(self._processes[process].pid)
        if not (shown := self.runtime.proc / pid).is_symlink():
            shown.symlink_to(f"/proc/{pid}")

    def bind(self, pod: Mapping[str, Any]) -> None:
        """Create a pod and bind it to this node, without waiting for the kubelet."""
        self.plane.call("POST", PODS, pod)
        self.plane.bind(PODS, pod["metadata"]["name"], self.name)

    def run(self, pod: Mapping[str, Any]) -> dict[str, Any]:
        """Bind the pod and wait until the kubelet has admitted or rejected it. Return the pod's
        status.
        """
        self.bind(pod)
        name = pod["metadata"]["name"]
        self.wait(lambda: self.status(name)["phase"] != "Pending", f"a pod {name} that started")
        return self.status(name)

    def admit(self, pod: Mapping[str, Any]) -> list[Held]:
        """Bind the pod and wait until it holds all its devices. This is faster than waiting for the
        pod's status.
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
        """Return the reasons of the pod's Events. They show a rejection immediately, but the pod's
        status shows it 10 s later.
        """
        path = f"/api/v1/namespaces/default/events?fieldSelector=involvedObject.name={pod}"
        return {event["reason"] for event in self.plane.call("GET", path)["items"]}

    def delete(self, pod: str, *, by_force: bool = False) -> None:
        """Delete the pod. Without ``by_force``, wait until the kubelet has ended it."""
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
        """Return the replicas that containers hold according to PodResources, for all pods or for
        one pod.
        """
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
        """Call List of PodResources. Return the response of each pod by name."""
        answer = self._answer("List", podresources.ListPodResourcesRequest())
        return {each.name: each for each in answer.pod_resources}

    def got(self, pod: str) -> Any:
        """Call Get of PodResources for one pod. Raise ``grpc.RpcError`` if the call fails."""
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
    """Run a node with these ``settings``. At the end of the context, delete its objects and
    pods.
    """
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
    """Start the nodes in parallel, and wait until all nodes accept pods."""
    for each in nodes:
        each.begin()
    for each in nodes:
        each.until_ready()
        each.start_plugin()
    for each in nodes:
        each.admit_pods()
