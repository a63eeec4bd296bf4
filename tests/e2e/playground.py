"""The parts of ``make cluster`` that make it look like an installed cluster to its users.

The API server has Headroom's accounts, roles, admission policies and priority class, as
deploy/base installs them. Extender, webhook and agents have the names of their service accounts,
which the policies check, and the token of each agent is bound to a pod on its node.
"""

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import yaml
from kubernetes.client import ApiClient
from msgspec.structs import replace

from agent.kube_client import of_client
from agent.kube_publisher import KubernetesPublisher
from headroom.contract.errors import BadQuantity
from headroom.contract.gpunode import Condition, GPUNodeStatus
from headroom.contract.quantity import parse_bytes
from tests.controlplane import CONTROLLERS, ROOT, ControlPlane, built
from tests.e2e.cluster import NODES, RBAC, PlayedCluster
from tests.e2e.nodes import RESOURCE, SYSTEM_NAMESPACE, Nodes, Shape

ACCOUNT = f"system:serviceaccount:{SYSTEM_NAMESPACE}:"
#: Kinds of deploy/base that the cluster has. The others are workloads, their Services and settings,
#: which run as processes, and webhook configurations, which have the address of a process.
KINDS = {
    *("Namespace", "CustomResourceDefinition", "ServiceAccount", "PriorityClass"),
    *("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"),
    *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
    *("FlowSchema", "PriorityLevelConfiguration"),
}
DAEMON_SETS = f"/apis/apps/v1/namespaces/{SYSTEM_NAMESPACE}/daemonsets"
AGENT_LABELS = {
    **{"app.kubernetes.io/name": "headroom", "app.kubernetes.io/part-of": "headroom"},
    "app.kubernetes.io/component": "agent",
}
AGENT_SPEC = {
    **{"serviceAccountName": "headroom-agent", "priorityClassName": "headroom-critical"},
    "containers": [{"name": "agent", "image": "simulated"}],
    "tolerations": [{"operator": "Exists"}],
}
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
VRAM = "headroom.gpu/vram"
DRIVER, CUDA = "570.124.06", "12.8"
_MONTH_S = 30 * 24 * 3600


class Playground(ControlPlane):
    """A control plane with the controllers that users expect."""

    controllers = (
        *CONTROLLERS,
        *("cronjob-controller", "statefulset-controller", "namespace-controller"),
        *("resourcequota-controller", "disruption-controller", "ttl-after-finished-controller"),
    )
    renamed = MappingProxyType(
        {
            name: ACCOUNT + name
            for name in ("headroom-extender", "headroom-webhook", "headroom-agent")
        }
    )


def install(plane: ControlPlane) -> None:
    """Apply the objects of deploy/base that need no workload, and let the extender's account do
    what the console's may, because one process has both programs."""
    objects = [*_shipped(), *map(_binding, ("headroom-console", "headroom-journal"))]
    command = [str(built("kubectl")["kubectl"]), f"--kubeconfig={plane.kubeconfig()}"]
    command += ["apply", "--server-side", "--force-conflicts", "-f", "-"]
    text = yaml.dump_all(objects, Dumper=yaml.CSafeDumper)
    subprocess.run(command, input=text, capture_output=True, text=True, check=True)


def _shipped() -> Iterator[dict[str, Any]]:
    """Yield the objects of deploy/base that the cluster has, with the labels of all objects."""
    base = ROOT / "deploy/base"
    listed = yaml.load((base / "kustomization.yaml").read_text(), yaml.CSafeLoader)
    for file in listed["resources"]:
        for each in yaml.load_all((base / file).read_text(), yaml.CSafeLoader):
            if each and each["kind"] in KINDS:
                labels = {**each["metadata"].get("labels", {}), **listed["labels"][0]["pairs"]}
                yield {**each, "metadata": {**each["metadata"], "labels": labels}}


def default_scheduler(plane: ControlPlane) -> dict[str, Any]:
    """Return the configuration of the cluster's own scheduler, which places pods without GPUs."""
    kubeconfig = str(plane.kubeconfig("scheduler-of-the-tests"))
    return {
        **{"apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "KubeSchedulerConfiguration"},
        "clientConnection": {"kubeconfig": kubeconfig},
        "leaderElection": {"leaderElect": False},
    }


def _binding(role: str) -> dict[str, Any]:
    group, version = "rbac.authorization.k8s.io", RBAC.removeprefix("/apis/")
    return {
        **{"apiVersion": version, "kind": "ClusterRoleBinding"},
        "metadata": {"name": f"{role}-of-serve"},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role},
        "subjects": [
            {"kind": "ServiceAccount", "name": "headroom-extender", "namespace": SYSTEM_NAMESPACE}
        ],
    }


class PlaygroundNodes(Nodes):
    """Nodes with labels, conditions, Leases and agents, as kubelets and GPU feature discovery
    write them."""

    def create(self) -> None:
        super().create()
        version = self._plane.call("GET", "/version")["gitVersion"]
        self._clients: dict[str, ApiClient] = {}
        self._created_at = _now()
        owner = self._plane.call("POST", DAEMON_SETS, self._daemon_set())["metadata"]
        self._owner = {
            **{"apiVersion": "apps/v1", "kind": "DaemonSet", "controller": True},
            **{"name": owner["name"], "uid": owner["uid"]},
        }
        count = len(self.names)
        counts = ("desiredNumberScheduled", "currentNumberScheduled", "updatedNumberScheduled")
        counts = (*counts, "numberReady", "numberAvailable")
        status = {"observedGeneration": 1, "numberMisscheduled": 0, **dict.fromkeys(counts, count)}
        self._plane.call("PATCH", f"{DAEMON_SETS}/headroom-agent/status", {"status": status})
        for name in self.names:
            path = f"{NODES}/{name}"
            self._plane.call("PATCH", path, {"metadata": {"labels": self._labels()}})
            self._plane.call("PATCH", f"{path}/status", {"status": node_info(version)})
            self._plane.call("POST", LEASES, {"metadata": {"name": name}, "spec": _lease(name)})
            self._clients[name] = ApiClient(self._plane.configuration(self._agent(name)))

    def restore_agents(self, pods: Sequence[Mapping[str, Any]]) -> None:
        """Create the agents' pods that were deleted again, as the controller of DaemonSets does."""
        there = {pod["metadata"]["name"] for pod in pods}
        for name in self.names:
            if _agent_pod(name) not in there:
                self._clients[name].close()
                self._clients[name] = ApiClient(self._plane.configuration(self._agent(name)))

    def _daemon_set(self) -> dict[str, Any]:
        template = {"metadata": {"labels": AGENT_LABELS}, "spec": AGENT_SPEC}
        spec = {"selector": {"matchLabels": AGENT_LABELS}, "template": template}
        return {"metadata": {"name": "headroom-agent", "labels": AGENT_LABELS}, "spec": spec}

    def _labels(self) -> dict[str, str]:
        return {
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64",
            "nvidia.com/gpu.present": "true",
            "nvidia.com/gpu.product": "NVIDIA-L4-SHARED",
            "nvidia.com/gpu.memory": str(self.shape.memory_bytes >> 20),
            "nvidia.com/gpu.count": str(self.shape.gpus),
            "nvidia.com/gpu.replicas": str(self.shape.replicas),
            "nvidia.com/gpu.sharing-strategy": "time-slicing",
        }

    def _agent(self, node: str) -> str:
        """Create the pod of the node's agent. Return a token that is bound to it."""
        pods = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods"
        metadata = {
            "name": _agent_pod(node),
            "labels": AGENT_LABELS,
            "ownerReferences": [self._owner],
        }
        spec = {"nodeName": node, **AGENT_SPEC}
        made = self._plane.call("POST", pods, {"metadata": metadata, "spec": spec})["metadata"]
        bound = {"kind": "Pod", "apiVersion": "v1", "name": made["name"], "uid": made["uid"]}
        accounts = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/serviceaccounts"
        asked = {"spec": {"expirationSeconds": _MONTH_S, "boundObjectRef": bound}}
        answer = self._plane.call("POST", f"{accounts}/headroom-agent/token", asked)
        token: str = answer["status"]["token"]
        return token

    def publisher(self, name: str) -> KubernetesPublisher:
        client = of_client(self._clients[name])
        return KubernetesPublisher(client, name, SYSTEM_NAMESPACE, heartbeat_s=30)

    def _status(self, name: str, now: datetime) -> GPUNodeStatus:
        status = super()._status(name, now)
        ready = Condition("DriverReady", "True", "Loaded", last_transition_time=self._created_at)
        return replace(status, driver_version=DRIVER, cuda_version=CUDA, conditions=[ready])

    def renew(self) -> None:
        """Renew the kubelets' Leases."""
        for name in self.names:
            self._plane.call("PATCH", f"{LEASES}/{name}", {"spec": _lease(name)})

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        super().close()


class PlaygroundCluster(PlayedCluster):
    """The cluster of ``make cluster``."""

    nodes: PlaygroundNodes

    def __init__(self, plane: ControlPlane, nodes: int, shape: Shape) -> None:
        super().__init__(plane, nodes, shape)
        self.nodes.close()
        self.nodes = PlaygroundNodes(plane, self.names, shape, seed=1)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _agent_pod(node: str) -> str:
    return f"headroom-agent-{node}"


def _lease(name: str) -> dict[str, Any]:
    now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": now}


def node_info(version: str) -> dict[str, Any]:
    """Return the status that a kubelet writes in addition to the resources.

    The node has no address, so kubectl logs and exec fail at once instead of after a timeout.
    """
    now = _now()
    times = {"lastHeartbeatTime": now, "lastTransitionTime": now}
    healthy = {
        **{"Ready": ("True", "KubeletReady", "the kubelet is simulated")},
        "MemoryPressure": ("False", "KubeletHasSufficientMemory", "enough memory"),
        "DiskPressure": ("False", "KubeletHasNoDiskPressure", "enough disk space"),
        "PIDPressure": ("False", "KubeletHasSufficientPID", "enough process IDs"),
    }
    return {
        "conditions": [
            {"type": kind, "status": status, "reason": reason, "message": message, **times}
            for kind, (status, reason, message) in healthy.items()
        ],
        "nodeInfo": {
            "architecture": "amd64",
            "bootID": "",
            "containerRuntimeVersion": "simulated://0",
            "kernelVersion": "simulated",
            "kubeProxyVersion": "",
            "kubeletVersion": version,
            "machineID": "",
            "operatingSystem": "linux",
            "osImage": "simulated node",
            "systemUUID": "",
        },
    }


def used_bytes(pod: Mapping[str, Any], shape: Shape) -> int | None:
    """Return the bytes that a pod without a placement uses, or None if it requests no GPU.

    Such a pod was bound without Headroom. If its annotation is no amount, it uses one replica.
    """
    limits = [each.get("resources", {}).get("limits", {}) for each in pod["spec"]["containers"]]
    if not any(RESOURCE in each for each in limits):
        return None
    replica_bytes = shape.memory_bytes // shape.replicas
    try:
        return parse_bytes(pod["metadata"].get("annotations", {})[VRAM])
    except (BadQuantity, KeyError):
        return replica_bytes
