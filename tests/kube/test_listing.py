"""Tests commands that list the objects of a real API server once."""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from headroom.doctor.collect import list_cluster
from headroom.errors import NotSynced
from headroom.runtime.kube.api_errors import ApiStatus
from headroom.runtime.kube.client import KubeApi
from headroom.runtime.settings.settings import Settings
from tests.controlplane import ROOT, STRANGER_TOKEN, TOKENS, ControlPlane
from tests.forks import run
from tests.scripted import Exchange, ScriptedServer, scripted_server
from tests.waiting import PATIENCE_S, until

NODES = "/api/v1/nodes"


@pytest.fixture
def node(plane: ControlPlane) -> Iterator[str]:
    name = "looked-at-by-the-doctor"
    plane.call("POST", NODES, {"metadata": {"name": name}})
    status = {"status": {"allocatable": {"nvidia.com/gpu": "4"}}}
    plane.call("PATCH", f"{NODES}/{name}/status", status, "application/merge-patch+json")
    yield name
    plane.call("DELETE", f"{NODES}/{name}")


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run(
        "headroom", "doctor", *arguments, env={"PATH": "/usr/bin:/bin"}, timeout_s=PATIENCE_S
    )


@pytest.fixture
def driver(plane: ControlPlane, node: str) -> Iterator[str]:
    """Create a pod of the GPU Operator on the node. The pod never starts."""
    path, name = "/api/v1/namespaces/default/pods", "nvidia-driver-daemonset-0"
    container = {"name": "driver", "image": "images.example/driver:580"}
    metadata = {"name": name, "labels": {"app": "nvidia-driver-daemonset"}}
    pod = {"metadata": metadata, "spec": {"nodeName": node, "containers": [container]}}
    plane.call("POST", path, pod)
    yield name
    plane.call("DELETE", f"{path}/{name}", {"gracePeriodSeconds": 0})


@pytest.fixture
def few_rights(plane: ControlPlane) -> Iterator[str]:
    """The token of a user who may list only the kinds that the extender watches."""
    name, rbac = "looks-at-little", "/apis/rbac.authorization.k8s.io/v1"
    kinds = ["nodes", "namespaces", "pods", "leases", "resourceslices", "deviceclasses", "gpunodes"]
    rules = [{"apiGroups": ["*"], "resources": kinds, "verbs": ["list"]}]
    plane.call("POST", f"{rbac}/clusterroles", {"metadata": {"name": name}, "rules": rules})
    group = "rbac.authorization.k8s.io"
    role = {"apiGroup": group, "kind": "ClusterRole", "name": name}
    subjects = [{"apiGroup": group, "kind": "User", "name": TOKENS[STRANGER_TOKEN]}]
    bound = {"metadata": {"name": name}, "roleRef": role, "subjects": subjects}
    plane.call("POST", f"{rbac}/clusterrolebindings", bound)
    api = KubeApi(plane.configuration(STRANGER_TOKEN))
    with contextlib.closing(api):
        until(lambda: _allowed(api), "the binding counts")
    yield STRANGER_TOKEN
    plane.call("DELETE", f"{rbac}/clusterrolebindings/{name}")
    plane.call("DELETE", f"{rbac}/clusterroles/{name}")


def _allowed(api: KubeApi) -> bool:
    try:
        return bool(api.call("GET", NODES))
    except ApiStatus:
        return False


@pytest.fixture
def scheduler(plane: ControlPlane) -> Iterator[str]:
    path, name = "/api/v1/namespaces/kube-system/configmaps", "second-scheduler"
    config = (ROOT / "deploy/base/kube-scheduler.yaml").read_text().replace("100", "50")
    data = {"config.yaml": config, "other": "kind: KubeSchedulerConfiguration: no YAML"}
    plane.call("POST", path, {"metadata": {"name": name}, "data": data})
    yield name
    plane.call("DELETE", f"{path}/{name}")


def test_the_doctor_lists_a_cluster(
    plane: ControlPlane, node: str, driver: str, scheduler: str
) -> None:
    shown = doctor("--kubeconfig", str(plane.kubeconfig()))
    report, operator = [line for line in shown.stdout.splitlines() if node in line]
    assert report.startswith("warning: ")
    assert "no GPU report from the node" in report
    assert operator.startswith(
        f"warning: {node}: the GPU Operator's nvidia-driver-daemonset is not ready (Pending)"
    )
    where = f"ConfigMap kube-system/{scheduler}, config.yaml"
    (mistake,) = [line for line in shown.stdout.splitlines() if where in line]
    assert mistake.startswith(f"warning: {where}: percentageOfNodesToScore is not 100")
    assert shown.returncode == 1


def test_kinds_without_rights_are_reported(
    plane: ControlPlane, node: str, few_rights: str, scheduler: str
) -> None:
    shown = doctor("--kubeconfig", str(plane.kubeconfig(few_rights)))
    assert shown.returncode == 1
    lines = [line for line in shown.stdout.splitlines() if "not read: " in line]
    assert [line.partition(" (GET ")[0] for line in lines] == [
        *(
            f"advice: not read: kube-scheduler's ConfigMaps in {namespace}"
            for namespace in ("headroom-system", "kube-system")
        ),
        "advice: not read: VRAMProfiles",
    ]
    assert all(" 403" in line for line in lines)
    assert node in shown.stdout


def test_missing_rights_are_reported(plane: ControlPlane) -> None:
    shown = doctor("--kubeconfig", str(plane.kubeconfig("unknown-token")))
    assert shown.returncode == 2
    (line,) = shown.stderr.splitlines()
    assert line.startswith("headroom: the cluster cannot be listed: GET /api/v1/nodes: 401")
    assert "a kubeconfig that may list nodes" in line


def kubeconfig_of(server: ScriptedServer, folder: Path) -> str:
    """Write a kubeconfig for a scripted server."""
    clusters = [{"name": "c", "cluster": {"server": server.configuration().host}}]
    contexts = [{"name": "c", "context": {"cluster": "c", "user": "u"}}]
    file = folder / "kubeconfig"
    users = [{"name": "u", "user": {}}]
    shown = {"clusters": clusters, "contexts": contexts, "users": users, "current-context": "c"}
    file.write_text(json.dumps({"kind": "Config", "apiVersion": "v1", **shown}))
    return str(file)


def test_a_cluster_without_headroom_is_reported(tmp_path: Path) -> None:
    def missing(exchange: Exchange) -> None:
        exchange.reply(404, {"kind": "Status", "message": "not here"})

    with scripted_server(*[missing] * 6) as server:
        file = kubeconfig_of(server, tmp_path)
        with pytest.raises(NotSynced, match="Headroom is not installed in this cluster: GET /"):
            list_cluster(Settings(), file)


def test_an_object_without_a_name_is_skipped(tmp_path: Path) -> None:
    def nameless(exchange: Exchange) -> None:
        items = [{"spec": 5}, {"metadata": 5}, "odd", {"metadata": {"name": "n", "uid": "u"}}]
        exchange.reply(200, {"metadata": {}, "items": items})

    with scripted_server(*[nameless] * 7) as server:
        listed = list_cluster(Settings(), kubeconfig_of(server, tmp_path))
    assert {obj.metadata.name for kind in listed for obj in kind.objects} == {"n"}
