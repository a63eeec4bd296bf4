"""Follows pages of docs/get-started on a real API server, as a reader does.

Each function is a step of test_installed.py.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headroom.contract.console import AUDIENCE
from headroom.runtime.settings.settings_files import merge_texts
from tests.controlplane import ROOT
from tests.deploy import foreign
from tests.deploy.installation import AuditedPlane, Installation
from tests.deploy.pages import Run, play, shell
from tests.deploy.rendered import NAMESPACE
from tests.e2e.nodes import node_manifest
from tests.waiting import until

#: Placeholders on the pages, and the values with which a reader replaces them.
WORDS = {"REGISTRY": "registry.example", "VERSION": "0.1.0", "RELEASE": "prom"}
CONFIG = f"/api/v1/namespaces/{NAMESPACE}/configmaps/headroom-config"
DAEMONSETS = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets"


def clone(plane: AuditedPlane, name: str) -> Path:
    """Return a folder in which the reader's commands find the repository and write files."""
    folder = plane.folder / name
    folder.mkdir()
    (folder / "deploy").symlink_to(ROOT / "deploy")
    (folder / "headroom").symlink_to(ROOT)
    return folder


def settings(plane: AuditedPlane) -> dict[str, Any]:
    return merge_texts(plane.call("GET", CONFIG)["data"])


def the_plugin_shows_nodes_and_decisions(installation: Installation) -> None:
    """Run the plugin with a direct connection to the console, because this API server cannot reach
    pods.
    """
    plane, name = installation.plane, "reader"
    plane.kubectl("create", "serviceaccount", name)
    of_reader = "create", "clusterrolebinding", name, f"--serviceaccount=default:{name}"
    plane.kubectl(*of_reader, "--clusterrole=headroom-viewer")
    token = plane.kubectl("create", "token", name, f"--audience={AUDIENCE}").strip()
    run = shell(
        installation.plane.folder,
        installation.plane.kubeconfig(),
        HEADROOM_SERVER=f"https://127.0.0.1:{installation.debug_port}",
        HEADROOM_TOKEN=token,
        SSL_CERT_FILE=str(installation.plane.folder / "etc/tls/ca.crt"),
    )
    play("get-started/helm.md", "top", run)
    play("get-started/rollout.md", "observed", run)


def the_documented_helm_commands_work(installation: Installation) -> None:
    plane = installation.plane
    foreign.install(plane, "prometheuses.monitoring.coreos.com")
    run = shell(plane.folder, plane.kubeconfig(), clone(plane, "helm"))
    play("get-started/gitops.md", "package", run, WORDS)
    play("get-started/helm.md", "install", run, WORDS)
    the_commands_in_the_chart_notes_work(run)
    assert settings(plane)["mode"] == "observe"
    prometheus_operator_can_scrape_metrics(plane, run)
    the_rollout_goes_forward_and_back(installation, run)
    play("operate/upgrade.md", "rollback", run)
    assert not steered_by_default(plane)
    run(f"helm uninstall headroom -n {NAMESPACE}")
    kept = plane.kubectl("get", "crd", "gpunodes.headroom.gpu", "-o", "name").split()
    assert len(kept) == 1  # together with every GPUNode
    label = "--selector=app.kubernetes.io/part-of=headroom"
    kinds = "deployments,daemonsets,services,clusterroles,validatingwebhookconfigurations"
    assert plane.kubectl("get", kinds, "-A", label, "-o", "name") == ""
    plane.kubectl("delete", "namespace", NAMESPACE)
    plane.kubectl("delete", "crd", "gpunodes.headroom.gpu")


def the_commands_in_the_chart_notes_work(run: Run) -> None:
    """Run the commands of the chart's notes, except the command of the plugin and the command for a
    pod that does not exist yet.
    """
    shown, _ = run(f"helm get notes headroom -n {NAMESPACE}")
    typed = [line.strip() for line in shown.splitlines() if line.startswith("  kubectl ")]
    assert [line.split()[1] for line in typed if "headroom doctor" not in line] == [
        "label",
        "-n",
        "-n",
        "get",
        "describe",
    ]
    for line in typed:
        if line.split()[1] in ("label", "get"):
            assert run(line)[1] == 0
        if "rollout status" in line:  # No pods run here.
            output, status = run(line.replace("--timeout=5m", "--timeout=1s"))
            assert (status, "timed out waiting for the condition" in output) == (1, True)


def prometheus_operator_can_scrape_metrics(plane: AuditedPlane, run: Run) -> None:
    account = "prom-kube-prometheus-stack-prometheus"
    prometheus = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "Prometheus",
        "metadata": {"name": "prom", "namespace": "monitoring"},
        "spec": {"serviceAccountName": account},
    }
    plane.kubectl("create", "namespace", "monitoring")
    path = "/apis/monitoring.coreos.com/v1/namespaces/monitoring/prometheuses"
    plane.call("POST", path, prometheus)
    play("get-started/monitoring.md", "account", run)
    play("get-started/monitoring.md", "helm", run, WORDS)
    play("get-started/monitoring.md", "monitors", run)
    bindings = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
    (subject,) = plane.call("GET", f"{bindings}/headroom-metrics")["subjects"]
    assert (subject["namespace"], subject["name"]) == ("monitoring", account)


def the_rollout_goes_forward_and_back(installation: Installation, run: Run) -> None:
    plane, (node, *_) = installation.plane, installation.nodes.names
    words = {"NODE": node}

    def choice() -> str | None:
        annotations = plane.call("GET", f"/api/v1/nodes/{node}")["metadata"]["annotations"]
        found: str | None = annotations.get("headroom.gpu/device-choice")
        return found

    play("get-started/rollout.md", "enforce", run)
    assert settings(plane)["mode"] == "enforce"
    play("get-started/rollout.md", "back to observe", run)
    assert settings(plane)["mode"] == "observe"
    play("get-started/rollout.md", "canary", run, words)
    assert choice() == "steered"
    assert {each["metadata"]["name"] for each in plane.call("GET", DAEMONSETS)["items"]} == {
        "headroom-agent",
        "headroom-agent-canary",
    }
    play("get-started/rollout.md", "back to predicted", run, words)
    assert choice() == "predicted"
    assert not steered_by_default(plane)
    play("get-started/rollout.md", "everywhere", run)
    assert steered_by_default(plane)
    play("get-started/rollout.md", "back from everywhere", run)
    assert choice() == "predicted"


def steered_by_default(plane: AuditedPlane) -> bool:
    return "steered" in json.dumps(plane.call("GET", f"{DAEMONSETS}/headroom-agent")["spec"])


def the_documented_kustomize_commands_work(installation: Installation) -> None:
    plane = installation.plane
    folder = clone(plane, "overlay")
    run = shell(plane.folder, plane.kubeconfig(), folder)
    play("get-started/kustomize.md", "overlay", run, WORDS)
    assert settings(plane)["mode"] == "observe"
    assert settings(plane)["filter_best_only"] is True
    images = {
        container["image"]
        for each in plane.call("GET", DAEMONSETS)["items"]
        for container in each["spec"]["template"]["spec"]["containers"]
    }
    assert images == {"registry.example/headroom-agent:0.1.0"}
    output, status = run("kubectl delete -k . --ignore-not-found")
    assert status == 0, output


def the_page_for_clusters_without_gpus_works(installation: Installation) -> None:
    plane = installation.plane
    installation.delete_users_pods()
    for node in installation.nodes.names:
        plane.kubectl("delete", "node", node)
    trial = Installation.again(plane, "trial")
    trial.apply()
    trial.make_certificates()
    plane.call("POST", "/api/v1/nodes", node_manifest("kind"))
    plane.kubectl("taint", "node", "kind", "node.kubernetes.io/not-ready-")
    amounts = {"cpu": "8", "memory": "16Gi", "pods": "100"}
    status = json.dumps({"status": {"capacity": amounts, "allocatable": amounts}})
    plane.kubectl("patch", "node", "kind", "--subresource=status", "--type=merge", "-p", status)
    trial.start()
    run = shell(plane.folder, plane.kubeconfig())
    play("get-started/platforms.md", "trial", run, {"NODE": "kind"})
    for name in ("one", "two"):
        trial.create_pod(name, "10Gi")
        until(lambda name=name: trial.pod(name)["spec"].get("nodeName") == "kind", name)
    trial.create_pod("three", "10Gi")
    until(lambda: "insufficient GPU memory on any device" in trial.rejection("three"), "it waits")
    play("get-started/platforms.md", "label", run, {"NODE": "kind"})
    the_control_plane_has_an_image_of_kube_scheduler(plane, run)


def the_control_plane_has_an_image_of_kube_scheduler(plane: AuditedPlane, run: Run) -> None:
    """Create a pod of kube-scheduler with the labels that kubeadm sets."""
    container = {"name": "kube-scheduler", "image": "registry.k8s.io/kube-scheduler:v1.37.2"}
    pod: Mapping[str, Any] = {
        "metadata": {"name": "kube-scheduler-a", "labels": {"component": "kube-scheduler"}},
        "spec": {"containers": [container]},
    }
    plane.call("POST", "/api/v1/namespaces/kube-system/pods", pod)
    play("get-started/images.md", "kube-scheduler", run)
