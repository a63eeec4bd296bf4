"""A small real cluster on the session's API server, with nodes, schedulers, extenders and pods.

``close`` ends every process and deletes every object of the cluster. The API server keeps running,
and its other objects do not change.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import urllib3
import yaml

from headroom.contract.gpunode import GPUNode
from headroom.contract.gpunode_json import decode_gpunode
from headroom.runtime.server.tls import TlsFiles
from tests.controlplane import ROOT, SCHEDULER_NAME, ApiRefused, ControlPlane
from tests.e2e.nodes import RESOURCE, SYSTEM_NAMESPACE, Nodes, Shape
from tests.processes import free_ports
from tests.waiting import PATIENCE_S, until

NAMESPACE = "e2e"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
EVENTS = f"/api/v1/namespaces/{NAMESPACE}/events"
DEPLOYMENTS = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
REPLICA_SETS = f"/apis/apps/v1/namespaces/{NAMESPACE}/replicasets"
JOBS = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
GPUNODES = "/apis/headroom.gpu/v1alpha1/gpunodes"
NODES = "/api/v1/nodes"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
#: Roles for the console.
OF_THE_CONSOLE = ("headroom-console", "headroom-journal")
#: Settings with long timeouts for a busy machine. By default, a node becomes stale 90 s after its
#: last report, and a bind fails after 4 s.
PATIENT = {"stale_after_s": 3600.0, "bind_deadline_s": 50.0}
#: Shipped settings that affect the responses to kube-scheduler.
_FILE = yaml.safe_load(Path(ROOT, "deploy/base/headroom.yaml").read_text(encoding="utf-8"))
SHIPPED = {"gate_image": "headroom-agent", "filter_best_only": _FILE["filter_best_only"]}


class Cluster:
    """A cluster with nodes of these names. A test starts the processes that it needs and waits with
    ``until``.
    """

    def __init__(self, plane: ControlPlane, names: Sequence[str]) -> None:
        self.plane = plane
        self.names = tuple(names)
        self.port, *_ = free_ports(1)
        self._debug_ports: dict[str, int] = {}
        #: Names of the extenders whose debug API requires authentication.
        self._guarded: set[str] = set()
        self._started: list[str] = []
        self._http = urllib3.PoolManager(retries=False, timeout=PATIENCE_S)

    def create(self) -> None:
        """Create namespaces and roles, unless an earlier cluster created them."""
        listed = self.plane.call("GET", NODES)["items"]
        left = [node["metadata"]["name"] for node in listed]
        assert not left, f"another cluster has left its nodes in this API server: {left}"
        namespaces = self.plane.call("GET", "/api/v1/namespaces")["items"]
        if NAMESPACE not in {each["metadata"]["name"] for each in namespaces}:
            self._create_roles()
            self.plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})

    def _create_roles(self) -> None:
        system = {"metadata": {"name": SYSTEM_NAMESPACE}}
        self._unless(409, "POST", "/api/v1/namespaces", system)
        for manifest in yaml.safe_load_all(Path(ROOT, "deploy/base/rbac.yaml").read_text()):
            namespace = manifest["metadata"].get("namespace")
            where = f"{RBAC}/namespaces/{namespace}" if namespace else RBAC
            self._unless(409, "POST", f"{where}/{manifest['kind'].lower()}s", manifest)
            binding = role_binding(manifest)
            self._unless(409, "POST", f"{where}/{manifest['kind'].lower()}bindings", binding)

    def close(self) -> None:
        """Stop every process and delete every object of this cluster."""
        self.kill_all()
        for path in (DEPLOYMENTS, REPLICA_SETS, PODS, EVENTS):
            self._delete_all_of(path)
        for gpunode in self.plane.call("GET", GPUNODES)["items"]:
            path, no_finalizers = f"{GPUNODES}/{gpunode['metadata']['name']}", {"finalizers": None}
            self._unless(404, "PATCH", path, {"metadata": no_finalizers})
        for path in (GPUNODES, NODES):
            self._delete_all_of(path)

    def _delete_all_of(self, path: str) -> None:
        """Delete all objects under a path.

        Retry, because on a busy machine the API server may answer 504 or close the connection
        before it has deleted many Events.
        """

        def deleted() -> bool:
            try:
                self.plane.call("DELETE", path, {"gracePeriodSeconds": 0})
            except urllib3.exceptions.ProtocolError:
                return False
            except ApiRefused as err:
                if ": 504 " not in str(err):
                    raise
                return False
            return True

        until(deleted, f"all of {path} are deleted")

    def start_extender(
        self,
        name: str = "extender",
        port: int | None = None,
        tls: TlsFiles | None = None,
        settings: Mapping[str, Any] | None = None,
        module: str = "headroom",
        api_port: int | None = None,
        guarded: bool = False,
    ) -> str:
        """Start one replica of ``headroom serve`` in cluster mode. Return the URL for
        kube-scheduler.

        ``settings`` are written to the settings file. ``api_port`` is the port of the API server or
        of a proxy. If ``guarded`` is true, the debug API requires authentication.
        """
        port = port or self.port
        (debug_port,) = free_ports(1)
        self.plane.fork(
            name,
            *(module, "serve", "--host", "127.0.0.1"),
            *(() if guarded else ("--debug-open",)),
            *("--verbs-port", str(port), "--debug-port", str(debug_port)),
            *(_options(tls) if tls else ("--insecure-verbs",)),
            *self._config(name, settings),
            env={
                "KUBECONFIG": str(self.plane.kubeconfig("extender-of-the-tests", port=api_port)),
            },
        )
        self._started.append(name)
        self._debug_ports[name] = debug_port
        (self._guarded.add if guarded else self._guarded.discard)(name)
        return f"{'https' if tls else 'http'}://127.0.0.1:{port}"

    def _config(self, name: str, settings: Mapping[str, Any] | None) -> Iterator[str]:
        self.change_settings(name, settings or {})
        yield from ("--config", str(self.plane.folder / f"{name}.yaml"))

    def change_settings(self, name: str, settings: Mapping[str, Any]) -> None:
        """Replace the settings file of a running extender, but keep ``SHIPPED`` and ``PATIENT``."""
        file = self.plane.folder / f"{name}.yaml"
        new = file.with_suffix(".new")
        new.write_text(yaml.safe_dump({**SHIPPED, **PATIENT, **settings}))
        new.rename(file)

    def start_replicas(self, *names: str, settings: Mapping[str, Any] | None = None) -> list[int]:
        """Start extenders with these names. Return their ports for kube-scheduler."""
        ports = free_ports(len(names))
        for name, port in zip(names, ports, strict=True):
            self.start_extender(name, port, settings=settings)
        return ports

    def start_scheduler(
        self, extender_url: str, binary: str = "kube-scheduler", **how: Any
    ) -> None:
        self.plane.start_scheduler(extender_url, binary, **how)
        self._started.append(binary)

    def start_scheduler_as(self, name: str, configuration: Mapping[str, Any], **how: Any) -> None:
        """Start a kube-scheduler with this KubeSchedulerConfiguration as the process ``name``."""
        self.plane.spawn_scheduler(name, configuration, **how)
        self._started.append(name)

    def start_controller_manager(self) -> None:
        self.plane.start_controller_manager()
        self._started.append("kube-controller-manager")

    def kill(self, name: str) -> None:
        """Send SIGKILL to the process. The test may start it again."""
        self.plane.kill(name)
        self._started.remove(name)

    def kill_all(self) -> None:
        for name in list(self._started):
            self.kill(name)

    def bring_up(self) -> None:
        """Start an extender and the newest kube-scheduler, and wait until all nodes accept pods."""
        url = self.start_extender()
        self.start_scheduler(url)
        self.settle()

    def settle(self) -> None:
        """Wait until the GPUNodes of all nodes are initialised and the extenders have received
        them.
        """
        self.until(self.initialised, "all GPUNodes are initialised")
        self.until(self.known, "the extenders have the reports of all nodes")

    def initialised(self) -> bool:
        there = {node.name: node for node in self.gpunodes()}
        return all(name in there and there[name].spec.initialised for name in self.names)

    def known(self) -> bool:
        """Return whether each extender with an open debug API shows the devices of all nodes,
        because an extender's watch may be behind the test's watch.
        """
        return all(
            {each["name"] for each in self._nodes_of(extender) if each["devices"]} >= {*self.names}
            for extender in (self._debug_ports.keys() & set(self._started)) - self._guarded
        )

    def _nodes_of(self, extender: str) -> list[dict[str, Any]]:
        try:
            answer = self._http.request("GET", f"{self.debug_url(extender)}/v1/nodes")
        except urllib3.exceptions.HTTPError:
            return []
        nodes: list[dict[str, Any]] = answer.json()["nodes"] if answer.status == 200 else []
        return nodes

    def create_pod(self, name: str, vram: str | None, *, gpus: int = 1, **spec: Any) -> None:
        """Create a pod. ``spec`` is added to the pod's spec."""
        manifest = pod_manifest(vram, gpus)
        manifest["metadata"]["name"] = name
        manifest["spec"] |= spec
        self.plane.call("POST", PODS, manifest)

    def delete_pod(self, name: str) -> None:
        """Delete the pod as a user does. The kubelet ends its containers and reports the
        pod's end.
        """
        if self.node_of(name):
            ended = {"status": {"phase": "Succeeded"}}
            path = f"{PODS}/{name}/status"
            self.plane.call("PATCH", path, ended)
        self.delete_by_force(name)

    def delete_by_force(self, name: str) -> None:
        """Delete the pod object immediately, even if its containers still run."""
        self.plane.call("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 0})

    def create_deployment(self, name: str, vram: str, replicas: int) -> None:
        labels = {"app": name}
        template = pod_manifest(vram)
        template["metadata"]["labels"] = labels
        spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
        self.plane.call("POST", DEPLOYMENTS, {"metadata": {"name": name}, "spec": spec})

    def pod(self, name: str) -> dict[str, Any]:
        return self.plane.call("GET", f"{PODS}/{name}")

    def pods(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = self.plane.call("GET", PODS)["items"]
        return listed

    def bound(self) -> list[dict[str, Any]]:
        return [pod for pod in self.pods() if pod["spec"].get("nodeName")]

    def node_of(self, name: str) -> str:
        """Return the node of the pod, or an empty string if the pod is not bound."""
        node: str = self.pod(name)["spec"].get("nodeName", "")
        return node

    def cordon(self, node: str, closed: bool) -> None:
        """Cordon or uncordon the node, and wait until kube-scheduler has received the change."""
        body = {"spec": {"unschedulable": closed}}
        self.plane.call("PATCH", f"{NODES}/{node}", body)
        if closed:
            self.until(lambda: self._is_avoided(node), f"kube-scheduler sees that {node} is closed")

    def _is_avoided(self, node: str) -> bool:
        """Return whether kube-scheduler rejects a new pod that can run only on this node."""
        name = f"only-on-{node}"
        self.create_pod(name, None, gpus=0, nodeSelector={"kubernetes.io/hostname": node})
        self.until(lambda: bool(self.node_of(name) or self.rejection(name)), f"{name} is tried")
        avoided = not self.node_of(name)
        self.delete_by_force(name)
        return avoided

    def rejection(self, name: str) -> str:
        return scheduling_message(self.pod(name))

    def gpunode(self, name: str) -> GPUNode:
        return decode_gpunode(msgspec.json.encode(self.plane.call("GET", f"{GPUNODES}/{name}")))

    def gpunodes(self) -> list[GPUNode]:
        listed = self.plane.call("GET", GPUNODES)["items"]
        found = [decode_gpunode(msgspec.json.encode(each)) for each in listed]
        return [gpunode for gpunode in found if gpunode.name in self.names]

    def debug_url(self, extender: str = "extender") -> str:
        return f"http://127.0.0.1:{self._debug_ports[extender]}"

    def is_ready(self, extender: str = "extender") -> bool:
        """Return whether the extender listens and /readyz returns 200."""
        try:
            answer = self._http.request("GET", f"{self.debug_url(extender)}/readyz")
        except urllib3.exceptions.HTTPError:
            return False
        return bool(answer.status == 200)

    def metric(self, sample: str, extender: str = "extender") -> float:
        """Return the value of one sample of the extender's /metrics, or 0 if it does not exist.
        ``sample`` is the name with labels as /metrics prints them.
        """
        url = f"{self.debug_url(extender)}/metrics"
        text = self._http.request("GET", url).data.decode()
        values = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(sample)]
        return float(values[0]) if values else 0.0

    def until(self, true: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
        """Wait for the condition. If it times out, show the last output of each process."""

        def logs() -> str:
            return "\n".join(f"--- {n}\n{self.plane.log(n)[-4000:]}" for n in self._started)

        until(true, what, patience_s, 0.1, logs)

    def _unless(self, status: int, method: str, path: str, body: Mapping[str, Any]) -> None:
        """Make an API call, and ignore an error with this status."""
        content_type = "application/merge-patch+json" if method == "PATCH" else "application/json"
        try:
            self.plane.call(method, path, body, content_type)
        except ApiRefused as err:
            if f": {status} " not in str(err):
                raise


class PlayedCluster(Cluster):
    """A cluster whose nodes are equal Node objects. The test acts as their kubelets and agents."""

    def __init__(self, plane: ControlPlane, nodes: int, shape: Shape, seed: int = 1) -> None:
        width = len(str(nodes))
        super().__init__(plane, [f"gpu-{i + 1:0{width}}" for i in range(nodes)])
        self.nodes = Nodes(plane, self.names, shape, seed)

    def create(self) -> None:
        super().create()
        self.nodes.create()

    def close(self) -> None:
        self.nodes.close()
        super().close()

    def settle(self) -> None:
        """Report every node as soon as its GPUNode exists, and wait until all GPUNodes are
        initialised.
        """
        waiting = set(self.names)

        def reported() -> bool:
            there = {node.name: node for node in self.gpunodes()}
            self.nodes.report(sorted(waiting & there.keys()))
            waiting.difference_update(there)
            return not waiting and all(node.spec.initialised for node in there.values())

        self.until(reported, "all GPUNodes are initialised")
        self.until(self.known, "the extenders have the reports of all nodes")


def _options(tls: TlsFiles) -> Iterator[str]:
    yield from ("--tls-cert", str(tls.cert), "--tls-key", str(tls.key))
    if tls.client_ca:
        yield from ("--tls-client-ca", str(tls.client_ca))


def pod_manifest(vram: str | None, gpus: int = 1) -> dict[str, Any]:
    """Return a pod or the template of a Deployment for the scheduler that calls the extender."""
    limits = {"cpu": "100m", "memory": "64Mi"} | ({RESOURCE: str(gpus)} if gpus else {})
    container = {"name": "main", "image": "none", "resources": {"limits": limits}}
    return {
        "metadata": {"annotations": {} if vram is None else {"headroom.gpu/vram": vram}},
        "spec": {"schedulerName": SCHEDULER_NAME, "containers": [container]},
    }


def scheduling_message(pod: Mapping[str, Any]) -> str:
    """Return the message of the pod's condition PodScheduled, or an empty string if the pod is
    bound or has no such condition.
    """
    for condition in pod["status"].get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            message: str = condition["message"]
            return message
    return ""


def role_binding(role: Mapping[str, Any]) -> dict[str, Any]:
    """Return a binding of the role to the user with the role's name. Roles of the console are also
    bound to the extender, because most tests run both in one process (``headroom serve``).
    """
    name, kind = role["metadata"]["name"], role["kind"]
    users = ["headroom-console", "headroom-extender"] if name in OF_THE_CONSOLE else [name]
    return {
        "apiVersion": role["apiVersion"],
        "kind": f"{kind}Binding",
        "metadata": role["metadata"],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name},
        "subjects": [
            {"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}
            for user in users
        ],
    }


@contextlib.contextmanager
def quota_controller(plane: ControlPlane, *flags: str) -> Iterator[None]:
    """Run the ResourceQuota controller with additional ``flags``."""
    plane.start_controller_manager(*flags, controllers=["resourcequota-controller"])
    try:
        yield
    finally:
        plane.kill("kube-controller-manager")


def placement(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Return the placement annotation of the Binding."""
    decoded: dict[str, Any] = json.loads(pod["metadata"]["annotations"]["headroom.gpu/placement"])
    return decoded
