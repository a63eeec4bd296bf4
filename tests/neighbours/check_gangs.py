"""PodGroups of a real kube-scheduler with the Coscheduling plugin: docs/gangs.md."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.controlplane import ROOT, ApiRefused, ControlPlane, scheduler_configuration
from tests.deploy.go_modules import folder
from tests.e2e.cluster import NAMESPACE, PODS, PlayedCluster, pod_manifest
from tests.e2e.conftest import NewCluster, Tell
from tests.e2e.nodes import Shape
from tests.neighbours.queues import kubelets
from tests.waiting import until

MODULE = "sigs.k8s.io/scheduler-plugins"
GROUPS = f"/apis/scheduling.x-k8s.io/v1alpha1/namespaces/{NAMESPACE}/podgroups"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
GROUP = "scheduling.x-k8s.io/pod-group"
#: How long the plugin lets the first pods of a group wait for the others.
PERMIT_S = 10


@contextlib.contextmanager
def coscheduling(cluster: PlayedCluster) -> Iterator[None]:
    """Run Headroom, and a kube-scheduler with the plugin, configured as Headroom ships it."""
    plane = cluster.plane
    crd = folder(ROOT / "tests/gobin/scheduler-plugins", MODULE) / "manifests/coscheduling/crd.yaml"
    manifest = yaml.safe_load(crd.read_text())
    plane.call("POST", CRDS, manifest)
    try:
        until(lambda: served(plane), "PodGroups are served")
        configuration = scheduler_configuration(cluster.start_extender(), plane.kubeconfig())
        (profile,) = configuration["profiles"]
        plugins: dict[str, Any] = profile.setdefault("plugins", {})
        enabled = [{"name": "Coscheduling"}]
        plugins.setdefault("multiPoint", {}).setdefault("enabled", []).extend(enabled)
        plugins["queueSort"] = {"enabled": enabled, "disabled": [{"name": "*"}]}
        profile.setdefault("pluginConfig", []).append(
            {"name": "Coscheduling", "args": {"permitWaitingTimeSeconds": PERMIT_S}}
        )
        cluster.start_scheduler_as("coscheduling", configuration, "scheduler-plugins")
        cluster.settle()
        yield
    finally:
        plane.call("DELETE", f"{CRDS}/{manifest['metadata']['name']}")


def served(plane: ControlPlane) -> bool:
    try:
        return "items" in plane.call("GET", GROUPS)
    except ApiRefused:
        return False


def gang(cluster: PlayedCluster, name: str, vram: str, pods: int) -> None:
    spec = {"minMember": pods, "scheduleTimeoutSeconds": PERMIT_S}
    group = {"apiVersion": "scheduling.x-k8s.io/v1alpha1", "kind": "PodGroup"}
    cluster.plane.call("POST", GROUPS, {**group, "metadata": {"name": name}, "spec": spec})
    for index in range(pods):
        manifest = pod_manifest(vram)
        manifest["metadata"] |= {"name": f"{name}-{index}", "labels": {GROUP: name}}
        cluster.plane.call("POST", PODS, manifest)


def bound(cluster: PlayedCluster, name: str) -> list[str]:
    return [
        pod["spec"]["nodeName"]
        for pod in cluster.bound()
        if pod["metadata"].get("labels", {}).get(GROUP) == name
    ]


def test_one_gang_is_placed_at_once(new_cluster: NewCluster, tmp_path: Path, tell: Tell) -> None:
    cluster = new_cluster(4, Shape())
    with coscheduling(cluster), kubelets(cluster):
        began_s = time.monotonic()
        gang(cluster, "one", "20Gi", 4)
        cluster.until(lambda: len(bound(cluster, "one")) > 0, "the first pod is bound")
        first_s = time.monotonic() - began_s
        cluster.until(lambda: len(bound(cluster, "one")) == 4, "all are bound")
        tell(
            f"a gang of 4 pods: first bound after {first_s:.1f} s, last after "
            f"{time.monotonic() - began_s:.1f} s"
        )
