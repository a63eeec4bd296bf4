"""Tests PodGroups with a real kube-scheduler that has the Coscheduling plugin
(docs/how-to/gangs.md).
"""

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
#: Seconds for which the plugin lets the first pods of a group wait for the other pods.
PERMIT_S = 10
BINDS = "headroom_binds_total"
FILTERED = 'headroom_verb_duration_seconds_count{verb="filter"}'


@contextlib.contextmanager
def coscheduling(cluster: PlayedCluster) -> Iterator[None]:
    """Run Headroom and a kube-scheduler with the plugin, with the configuration that Headroom
    ships.
    """
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
        cluster.start_scheduler_as("coscheduling", configuration, binary="scheduler-plugins")
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
    group(cluster, name, pods)
    for index in range(pods):
        member(cluster, name, index, vram)


def group(cluster: PlayedCluster, name: str, pods: int) -> None:
    spec = {"minMember": pods, "scheduleTimeoutSeconds": PERMIT_S}
    body = {"apiVersion": "scheduling.x-k8s.io/v1alpha1", "kind": "PodGroup"}
    cluster.plane.call("POST", GROUPS, {**body, "metadata": {"name": name}, "spec": spec})


def member(cluster: PlayedCluster, name: str, index: int, vram: str) -> None:
    manifest = pod_manifest(vram)
    manifest["metadata"] |= {"name": f"{name}-{index}", "labels": {GROUP: name}}
    cluster.plane.call("POST", PODS, manifest)


def bound(cluster: PlayedCluster, name: str) -> list[str]:
    return [
        pod["spec"]["nodeName"]
        for pod in cluster.bound()
        if pod["metadata"].get("labels", {}).get(GROUP) == name
    ]


def test_a_group_that_fits_exactly_is_bound_at_once(new_cluster: NewCluster, tell: Tell) -> None:
    """No two pods get the same memory, although nothing is reserved before the last pod of the
    group has a node.
    """
    cluster = new_cluster(6, Shape())
    with coscheduling(cluster), kubelets(cluster):
        began_s = time.monotonic()
        gang(cluster, "exact", "12Gi", 12)
        cluster.until(lambda: len(bound(cluster, "exact")) == 12, "all pods are bound")
        took_s = time.monotonic() - began_s
        assert sorted(bound(cluster, "exact")) == sorted(cluster.names * 2)
        declined = cluster.metric(f'{BINDS}{{outcome="declined"}}')
        assert declined == 0
        tell(f"12 pods of 12 GiB on 6 GPUs: all bound after {took_s:.1f} s, no bind declined")


def test_a_group_that_fits_only_in_part_holds_no_memory(
    new_cluster: NewCluster, tell: Tell
) -> None:
    """The group has six pods, but there is memory for only four. A single pod gets memory although
    the group waits. The group is bound when all of its pods fit.
    """
    cluster = new_cluster(3, Shape())
    with coscheduling(cluster), kubelets(cluster):
        cluster.create_pod("first", "24Gi")
        cluster.until(lambda: cluster.node_of("first") != "", "a node is full")
        gang(cluster, "half", "12Gi", 6)
        cluster.until(lambda: cluster.rejection("half-5") != "", "the group is rejected")
        began_s = time.monotonic()
        for turn in range(2):
            try_again(cluster, "half", turn)
        retried_s = time.monotonic() - began_s
        assert cluster.metric(f'{BINDS}{{outcome="bound"}}') == 1
        assert bound(cluster, "half") == []
        began_s = time.monotonic()
        cluster.create_pod("single", "24Gi")
        cluster.until(lambda: cluster.node_of("single") != "", "a single pod gets the memory")
        tell(
            f"6 pods of 12 GiB on memory for 4: none bound, also not in two more attempts in "
            f"{retried_s:.1f} s; a single pod of 24 GiB waited {time.monotonic() - began_s:.1f} s"
        )
        cluster.delete_pod("first")
        try_again(cluster, "half", 2)
        assert bound(cluster, "half") == []
        cluster.delete_pod("single")
        began_s = time.monotonic()
        cluster.until(lambda: len(bound(cluster, "half")) == 6, "the group is bound whole", 120)
        tell(f"all 6 bound {time.monotonic() - began_s:.1f} s after there was memory for them")


def try_again(cluster: PlayedCluster, name: str, turn: int) -> None:
    """Make the plugin retry the five pods after which it rejects the group.

    The plugin waits for a change that can help, such as an update of the PodGroup.
    """
    before = cluster.metric(FILTERED)
    labels = {"metadata": {"labels": {"turn": str(turn)}}}
    cluster.plane.call("PATCH", f"{GROUPS}/{name}", labels)
    cluster.until(lambda: cluster.metric(FILTERED) > before + 4, "the group is tried again")


def test_one_of_two_groups_that_need_the_same_memory_is_bound(
    new_cluster: NewCluster, tell: Tell
) -> None:
    """The pods of both groups are created alternately. The second group is bound when the first
    group has ended.
    """
    cluster = new_cluster(3, Shape())
    names = "left", "right"
    with coscheduling(cluster), kubelets(cluster):
        began_s = time.monotonic()
        for name in names:
            group(cluster, name, 4)
        for index in range(4):
            for name in names:
                member(cluster, name, index, "12Gi")
        cluster.until(lambda: any(len(bound(cluster, each)) == 4 for each in names), "one is bound")
        tell(
            f"two groups of 4 pods of 12 GiB on 3 GPUs: one is bound after "
            f"{time.monotonic() - began_s:.1f} s"
        )
        whole, other = sorted(names, key=lambda name: -len(bound(cluster, name)))
        assert bound(cluster, other) == []
        for index in range(4):
            cluster.delete_pod(f"{whole}-{index}")
        cluster.until(lambda: len(bound(cluster, other)) == 4, "the other group is bound", 120)
