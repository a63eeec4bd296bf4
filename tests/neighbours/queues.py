"""Runs a real Kueue in a test cluster, and creates queues and pods for it.

The manifests come from Kueue's Go module, and its webhooks listen on loopback. Kueue has the
permissions of an administrator, because its RBAC is not under test.
"""

import base64
import contextlib
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Event, Thread
from typing import Any

import urllib3
import yaml

from tests.certificates import Authority
from tests.controlplane import ROOT, ApiRefused, ControlPlane, built
from tests.deploy.go_modules import folder
from tests.e2e.cluster import DEPLOYMENTS, JOBS, NAMESPACE, PODS, REPLICA_SETS, PlayedCluster
from tests.e2e.test_evictions import deleted, end
from tests.processes import free_ports
from tests.waiting import until

MODULE = "sigs.k8s.io/kueue"
API = "/apis/kueue.x-k8s.io/v1beta2"
WORKLOADS = f"{API}/namespaces/{NAMESPACE}/workloads"
QUEUE = "kueue.x-k8s.io/queue-name"
COUNTED = "headroom.gpu/vram-bytes"
#: The kinds whose webhooks are installed. The API server does not serve the other kinds.
_KINDS = ("pod", "job", "deployment", "clusterqueue", "cohort", "resourceflavor", "workload")
PATIENCE_S = 120.0
#: Command prefix that mounts an overlay over /etc, because Kueue reads a certificate from there.
IN_OWN_ETC = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t overlay overlay -o "lowerdir=$0:/etc" /etc && exec "$@"',
)


@contextlib.contextmanager
def kueue(plane: ControlPlane, scratch: Path, **configuration: Any) -> Iterator[None]:
    """Run Kueue with these configuration entries, and wait until the API server serves its
    queues.
    """
    webhook_port, health_port = free_ports(2)
    authority = Authority(scratch, "kueue-ca")
    certificate = authority.sign("kueue")
    certificates = scratch / "etc/kueue/metrics/certs"
    certificates.mkdir(parents=True)
    (certificates / "tls.crt").write_bytes(certificate.cert.read_bytes())
    (certificates / "tls.key").write_bytes(certificate.key.read_bytes())
    config = scratch / "kueue.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "config.kueue.x-k8s.io/v1beta2",
                "kind": "Configuration",
                "namespace": "kueue-system",
                "health": {"healthProbeBindAddress": f"127.0.0.1:{health_port}"},
                "metrics": {"bindAddress": "0"},
                "webhook": {"port": webhook_port, "certDir": str(certificates)},
                "leaderElection": {"leaderElect": False},
                "internalCertManagement": {"enable": False},
                "clientConnection": {"qps": 300, "burst": 500},
                "integrations": {"frameworks": ["batch/job", "pod", "deployment"]},
                "featureGates": {"VisibilityOnDemand": False},
                **configuration,
            }
        )
    )
    with contextlib.ExitStack() as undo:
        for each in _manifests(f"https://127.0.0.1:{webhook_port}", authority):
            undo.enter_context(_created(plane, each))
        until(lambda: _served(plane), "the API server serves Kueue's kinds", PATIENCE_S)
        plane.spawn(
            "kueue",
            *IN_OWN_ETC,
            str(scratch / "etc"),
            str(built("kueue")["kueue"]),
            f"--config={config}",
            f"--kubeconfig={plane.kubeconfig()}",
        )
        undo.callback(plane.kill, "kueue")
        http = urllib3.PoolManager(retries=False)
        undo.callback(http.clear)

        def is_ready() -> bool:
            plane.raise_if_ended()
            try:
                answer = http.request("GET", f"http://127.0.0.1:{health_port}/readyz", timeout=5.0)
            except urllib3.exceptions.HTTPError:
                return False
            return answer.status == 200

        until(is_ready, "Kueue is ready", PATIENCE_S, logs=lambda: plane.log("kueue")[-4000:])
        yield


def _manifests(url: str, authority: Authority) -> Iterator[dict[str, Any]]:
    """Yield the namespace, the kinds and the webhooks of Kueue's default installation."""
    overlay = folder(ROOT / "tests/gobin/kueue", MODULE) / "config/default"
    trusted = base64.b64encode(authority.cert.read_bytes()).decode()
    kubectl = built("kubectl")["kubectl"]
    rendered = subprocess.run(
        [str(kubectl), "kustomize", str(overlay)], check=True, capture_output=True, text=True
    ).stdout
    found = [each for each in yaml.safe_load_all(rendered) if each]
    yield {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kueue-system"}}

    def reached(client: Mapping[str, Any]) -> dict[str, Any]:
        return {"url": url + client["service"]["path"], "caBundle": trusted}

    for each in found:
        if each["kind"] == "CustomResourceDefinition":
            conversion = each["spec"].get("conversion", {}).get("webhook")
            if conversion:
                conversion["clientConfig"] = reached(conversion["clientConfig"])
            yield each
    for each in found:
        if each["kind"].endswith("WebhookConfiguration"):
            each["webhooks"] = [
                webhook
                for webhook in each["webhooks"]
                if webhook["name"][1:].partition(".")[0] in _KINDS
            ]
            for webhook in each["webhooks"]:
                webhook["clientConfig"] = reached(webhook["clientConfig"])
            yield each


PATHS = {
    "Namespace": "/api/v1/namespaces",
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "MutatingWebhookConfiguration": (
        "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
    ),
    "ValidatingWebhookConfiguration": (
        "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
    ),
    "ResourceFlavor": f"{API}/resourceflavors",
    "ClusterQueue": f"{API}/clusterqueues",
    "LocalQueue": f"{API}/namespaces/{NAMESPACE}/localqueues",
    "WorkloadPriorityClass": f"{API}/workloadpriorityclasses",
}


@contextlib.contextmanager
def _created(plane: ControlPlane, manifest: Mapping[str, Any]) -> Iterator[None]:
    """Create an object, and delete it at the end of the context. Namespaces are not deleted."""
    path = PATHS[manifest["kind"]]
    try:
        plane.call("POST", path, manifest)
    except ApiRefused as err:
        if manifest["kind"] != "Namespace" or ": 409 " not in str(err):
            raise
    try:
        yield
    finally:
        if manifest["kind"] != "Namespace":
            where = f"{path}/{manifest['metadata']['name']}"
            plane.call("DELETE", where)
            until(lambda: _is_gone(plane, where), f"{where} is deleted", PATIENCE_S, 0.1)


def _is_gone(plane: ControlPlane, path: str) -> bool:
    try:
        plane.call("GET", path)
    except ApiRefused as err:
        return ": 404 " in str(err)
    return False


def _served(plane: ControlPlane) -> bool:
    try:
        return all(plane.call("GET", f"{API}/{kind}") for kind in ("workloads", "clusterqueues"))
    except ApiRefused:
        return False


@contextlib.contextmanager
def queues(plane: ControlPlane, teams_gib: Mapping[str, int], gpus: int = 100) -> Iterator[None]:
    """Create a ClusterQueue and a LocalQueue for each team, with this quota of GPU memory in GiB.
    All teams are in one cohort.

    When a team needs its quota, Kueue evicts workloads that borrowed it. A workload of higher
    priority also evicts other workloads of its own team.
    """
    flavor = {"apiVersion": API[6:], "kind": "ResourceFlavor", "metadata": {"name": "gpu"}}
    with contextlib.ExitStack() as undo:
        undo.enter_context(_created(plane, flavor))
        for team, gib in teams_gib.items():
            quotas = {"nvidia.com/gpu": gpus, COUNTED: f"{gib}Gi", "cpu": 1000, "memory": "1000Gi"}
            spec = {
                "cohortName": "all",
                "namespaceSelector": {},
                "resourceGroups": [
                    {
                        "coveredResources": [*quotas],
                        "flavors": [
                            {
                                "name": "gpu",
                                "resources": [
                                    {"name": name, "nominalQuota": amount}
                                    for name, amount in quotas.items()
                                ],
                            }
                        ],
                    }
                ],
                "preemption": {
                    "reclaimWithinCohort": "Any",
                    "withinClusterQueue": "LowerPriority",
                },
            }
            for kind, named, content in (
                ("ClusterQueue", team, spec),
                ("LocalQueue", team, {"clusterQueue": team}),
            ):
                manifest = {
                    "apiVersion": API[6:],
                    "kind": kind,
                    "metadata": {"name": named},
                    "spec": content,
                }
                undo.enter_context(_created(plane, manifest))
        try:
            yield
        finally:
            _emptied(plane)


def _emptied(plane: ControlPlane) -> None:
    """Delete all workloads and their pods, so that the queues can be deleted."""
    at_once = {"gracePeriodSeconds": 0, "propagationPolicy": "Background"}
    for path in (DEPLOYMENTS, REPLICA_SETS, JOBS, PODS, WORKLOADS):
        plane.call("DELETE", path, at_once)

    def gone() -> bool:
        for path in (JOBS, PODS, WORKLOADS):
            for each in plane.call("GET", path)["items"]:
                metadata = {"metadata": {"finalizers": None}}
                with contextlib.suppress(ApiRefused):
                    plane.call("PATCH", f"{path}/{each['metadata']['name']}", metadata)
                with contextlib.suppress(ApiRefused):
                    plane.call("DELETE", f"{path}/{each['metadata']['name']}", at_once)
        return not any(plane.call("GET", path)["items"] for path in (JOBS, PODS, WORKLOADS))

    until(gone, "the queues are empty", PATIENCE_S, 0.2)


def job(
    cluster: PlayedCluster, name: str, team: str, vram: str, pods: int = 1, priority: str = ""
) -> None:
    """Submit a Job whose pods request one GPU replica each. ``priority`` is the priority of its
    workload.
    """
    labels = {QUEUE: team}
    if priority:
        labels["kueue.x-k8s.io/priority-class"] = priority
    limits = {"cpu": "100m", "memory": "64Mi", "nvidia.com/gpu": 1}
    template = {
        "metadata": {"annotations": {"headroom.gpu/vram": vram}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "containers": [{"name": "main", "image": "none", "resources": {"limits": limits}}],
        },
    }
    spec = {"parallelism": pods, "completions": pods, "template": template}
    metadata = {"name": name, "labels": labels}
    cluster.plane.call("POST", JOBS, {"metadata": metadata, "spec": spec})


def workload_of(cluster: PlayedCluster, name: str) -> dict[str, Any]:
    """Return the Workload of a Job, of a pod, or of a Deployment with one pod. Return an empty
    object if there is none.
    """
    for each in cluster.plane.call("GET", WORKLOADS)["items"]:
        owners = each["metadata"].get("ownerReferences", ())
        if any(owner["name"].startswith(name) for owner in owners):
            found: dict[str, Any] = each
            return found
    return {}


def is_true(workload: Mapping[str, Any], condition: str) -> bool:
    conditions = workload.get("status", {}).get("conditions", ())
    return any(each["type"] == condition and each["status"] == "True" for each in conditions)


def is_admitted(cluster: PlayedCluster, name: str) -> bool:
    return is_true(workload_of(cluster, name), "Admitted")


def pods_of(cluster: PlayedCluster, job: str) -> list[dict[str, Any]]:
    return [
        pod
        for pod in cluster.pods()
        if (pod["metadata"].get("labels") or {}).get("job-name") == job
    ]


def bound_pods_of(cluster: PlayedCluster, job: str) -> list[dict[str, Any]]:
    return [pod for pod in pods_of(cluster, job) if pod["spec"].get("nodeName")]


@contextlib.contextmanager
def kubelets(cluster: PlayedCluster) -> Iterator[None]:
    """Act as the kubelets and agents during the context: start bound pods, end terminating pods,
    and report GPUs.
    """
    stop = Event()

    def work() -> None:
        while not stop.wait(0.2):
            with contextlib.suppress(ApiRefused):  # The pod was deleted meanwhile.
                end(cluster, deleted(cluster))
                for pod in cluster.bound():
                    if pod["status"].get("phase") == "Pending":
                        _start(cluster, pod)
            ended = ("Succeeded", "Failed")
            pods = [pod for pod in cluster.pods() if pod["status"].get("phase") not in ended]
            cluster.nodes.observe(pods)

    thread = Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _start(cluster: PlayedCluster, pod: Mapping[str, Any]) -> None:
    ready = {"type": "Ready", "status": "True"}
    status = {"phase": "Running", "conditions": [*pod["status"].get("conditions", ()), ready]}
    path = f"{PODS}/{pod['metadata']['name']}/status"
    # The version prevents that a pod that has ended meanwhile is started again.
    version = {"resourceVersion": pod["metadata"]["resourceVersion"]}
    cluster.plane.call("PATCH", path, {"metadata": version, "status": status})


def finish(cluster: PlayedCluster, job: str) -> None:
    """Let all pods of a Job succeed."""
    for pod in pods_of(cluster, job):
        path = f"{PODS}/{pod['metadata']['name']}/status"
        cluster.plane.call("PATCH", path, {"status": {"phase": "Succeeded"}})
