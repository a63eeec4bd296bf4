"""PodGroups of a real kube-scheduler with the Coscheduling plugin: docs/how-to/gangs.md."""

import contextlib
import time
from collections.abc import Iterator
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


def test_one_gang_is_placed_at_once(new_cluster: NewCluster, tell: Tell) -> None:
    """Each pod is named another node, although no memory is reserved before the last one comes."""
    cluster = new_cluster(6, Shape())
    with coscheduling(cluster), kubelets(cluster):
        began_s = time.monotonic()
        gang(cluster, "one", "20Gi", 6)
        cluster.until(lambda: len(bound(cluster, "one")) > 0, "the first pod is bound")
        first_s = time.monotonic() - began_s
        cluster.until(lambda: len(bound(cluster, "one")) == 6, "all are bound")
        last_s = time.monotonic() - began_s
        assert sorted(bound(cluster, "one")) == sorted(cluster.names)
        declined = cluster.metric('headroom_verb_errors_total{verb="bind"}')
        tell(
            f"a gang of 6 pods of 20 GiB on 6 GPUs: first bound after {first_s:.1f} s, last after "
            f"{last_s:.1f} s, {declined:.0f} binds declined"
        )


def test_half_of_a_gang_holds_no_memory(new_cluster: NewCluster, tell: Tell) -> None:
    """Two gangs of three pods want four GPUs. Another pod gets the fourth."""
    cluster = new_cluster(4, Shape())
    with coscheduling(cluster), kubelets(cluster):
        gang(cluster, "whole", "20Gi", 3)
        cluster.until(lambda: len(bound(cluster, "whole")) == 3, "one gang is bound")
        gang(cluster, "half", "20Gi", 3)
        cluster.until(lambda: cluster.rejection("half-2") != "", "the other gang waits")
        began_s = time.monotonic()
        cluster.create_pod("single", "20Gi")
        cluster.until(lambda: cluster.node_of("single") != "", "a single pod gets the last GPU")
        tell(f"beside half of a gang, a pod of its size waited {time.monotonic() - began_s:.1f} s")
        assert bound(cluster, "half") == []
        for name in ("whole-0", "whole-1", "whole-2", "single"):
            cluster.delete_pod(name)
        cluster.until(lambda: len(bound(cluster, "half")) == 3, "the other gang is bound", 120)
