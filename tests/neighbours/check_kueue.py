"""Tests queues of a real Kueue that count GPU memory (docs/how-to/kueue.md)."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.admission.site import counting
from tests.controlplane import ControlPlane
from tests.e2e.cluster import PODS, PlayedCluster, pod_manifest
from tests.e2e.conftest import NewCluster, Tell
from tests.e2e.nodes import Shape
from tests.neighbours.queues import (
    COUNTED,
    QUEUE,
    bound_pods_of,
    finish,
    is_admitted,
    job,
    kubelets,
    kueue,
    pods_of,
    queues,
    workload_of,
)


@pytest.fixture
def four(plane: ControlPlane, new_cluster: NewCluster, tmp_path: Path) -> Iterator[PlayedCluster]:
    """A cluster of four nodes with one 24 GiB GPU each, with Kueue and Headroom's webhook."""
    cluster = new_cluster(4, Shape())
    with counting(plane, tmp_path), kueue(plane, tmp_path):
        cluster.bring_up()
        cluster.start_controller_manager()
        yield cluster


def counted(cluster: PlayedCluster, name: str) -> list[str]:
    """Return the GPU memory that Kueue counts for each pod set of a workload."""
    pod_sets = workload_of(cluster, name)["spec"]["podSets"]
    return [
        container["resources"]["requests"].get(COUNTED, "none")
        for each in pod_sets
        for container in each["template"]["spec"]["containers"]
    ]


def test_a_queue_counts_the_memory_of_pods_jobs_and_deployments(four: PlayedCluster) -> None:
    with queues(four.plane, {"team-a": 24}), kubelets(four):
        job(four, "first", "team-a", "8Gi", pods=2)
        four.until(lambda: len(bound_pods_of(four, "first")) == 2, "16 of 24 GiB are admitted")
        assert counted(four, "first") == ["8Gi"]
        job(four, "second", "team-a", "9Gi")
        four.until(lambda: bool(workload_of(four, "second")), "it has a workload")
        manifest = pod_manifest("4Gi")
        manifest["metadata"] |= {"name": "plain", "labels": {QUEUE: "team-a"}}
        four.plane.call("POST", PODS, manifest)
        four.until(lambda: four.node_of("plain") != "", "4 of the remaining 8 GiB are admitted")
        assert counted(four, "plain") == ["4Gi"]
        assert not is_admitted(four, "second")
        assert pods_of(four, "second") == []
        deployment(four, "web", "team-a", "4Gi", replicas=2)
        four.until(lambda: len(bound(four, "web")) == 1, "one of two pods is admitted")
        finish(four, "first")
        four.until(lambda: len(bound(four, "web")) == 2, "the other pod is admitted")
        four.until(lambda: len(bound_pods_of(four, "second")) == 1, "the second Job is admitted")


def test_a_team_borrows_memory_and_returns_it(four: PlayedCluster, tell: Tell) -> None:
    """Kueue evicts pods that use borrowed quota, and their memory is free before the owner's pods
    start.
    """
    with queues(four.plane, {"team-a": 48, "team-b": 48}), kubelets(four):
        job(four, "large", "team-a", "20Gi", pods=4)
        four.until(lambda: len(bound_pods_of(four, "large")) == 4, "team a borrows 32 GiB")
        began_s = time.monotonic()
        job(four, "own", "team-b", "20Gi", pods=2)
        four.until(lambda: len(bound_pods_of(four, "own")) == 2, "team b has its quota")
        took_s = time.monotonic() - began_s
        assert not is_admitted(four, "large")
        tell(f"Kueue: from the owner's Job to its pods on the borrowed GPUs {took_s:.1f} s")
        finish(four, "own")
        four.until(lambda: len(bound_pods_of(four, "large")) == 4, "the quota is borrowed again")


def test_a_pod_that_needs_more_than_its_queue_waits_there(four: PlayedCluster) -> None:
    with queues(four.plane, {"team-a": 24}), kubelets(four):
        job(four, "large", "team-a", "50%", pods=3)
        four.until(lambda: bool(workload_of(four, "large")), "it has a workload")
        assert counted(four, "large") == ["12Gi"]
        four.until(lambda: bool(condition(four, "large", "QuotaReserved")), "Kueue reports why")
        message = condition(four, "large", "QuotaReserved")["message"]
        assert f"insufficient quota for {COUNTED}" in message
        assert pods_of(four, "large") == []


def test_an_incomplete_gang_releases_its_memory(
    plane: ControlPlane, new_cluster: NewCluster, tmp_path: Path, tell: Tell
) -> None:
    """Two Jobs of three pods fit into the quota, but not together on the four GPUs.

    With waitForPodsReady, Kueue evicts a Job if some of its pods are not ready in time.
    """
    cluster = new_cluster(4, Shape())
    waiting = {"timeout": "10s", "requeuingStrategy": {"backoffBaseSeconds": 1}}
    with counting(plane, tmp_path), kueue(plane, tmp_path, waitForPodsReady=waiting):
        cluster.bring_up()
        cluster.start_controller_manager()
        with queues(plane, {"team-a": 200}), kubelets(cluster):
            job(cluster, "whole", "team-a", "20Gi", pods=3)
            cluster.until(lambda: len(bound_pods_of(cluster, "whole")) == 3, "one Job runs")
            job(cluster, "half", "team-a", "20Gi", pods=3)
            cluster.until(lambda: reserved(cluster, "half"), "a third of the other is bound")
            began_s = time.monotonic()
            assert len(bound_pods_of(cluster, "half")) == 1
            cluster.until(lambda: not reserved(cluster, "half"), "its memory is free again")
            took_s = time.monotonic() - began_s
            tell(f"Kueue, waitForPodsReady 10 s: half of a gang held memory for {took_s:.1f} s")
            evicted = condition(cluster, "half", "Evicted")
            assert evicted["reason"] == "PodsReadyTimeout"
            assert len(reserved(cluster, "whole")) == 3
            finish(cluster, "whole")
            cluster.until(
                lambda: len(reserved(cluster, "half")) == 3, "the other Job has all its pods", 120
            )


def condition(cluster: PlayedCluster, name: str, kind: str) -> dict[str, str]:
    conditions = workload_of(cluster, name).get("status", {}).get("conditions", ())
    return next((each for each in conditions if each["type"] == kind), {})


def reserved(cluster: PlayedCluster, job: str) -> list[str]:
    """Return the pods of a Job that have reservations."""
    return [
        reservation.name
        for gpunode in cluster.gpunodes()
        for reservation in gpunode.spec.reservations.values()
        if reservation.name.startswith(f"{job}-")
    ]


def deployment(cluster: PlayedCluster, name: str, team: str, vram: str, replicas: int) -> None:
    template = pod_manifest(vram)
    template["metadata"]["labels"] = {"app": name, QUEUE: team}
    spec = {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": template}
    metadata = {"name": name, "labels": {QUEUE: team}}
    cluster.plane.call(
        "POST", "/apis/apps/v1/namespaces/e2e/deployments", {"metadata": metadata, "spec": spec}
    )


def bound(cluster: PlayedCluster, app: str) -> list[str]:
    return [
        pod["metadata"]["name"]
        for pod in cluster.bound()
        if (pod["metadata"].get("labels") or {}).get("app") == app
    ]
