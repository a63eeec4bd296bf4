"""Runs pods that start alone with a real API server and kube-scheduler, and simulated nodes.

kube-scheduler calls one extender, which is killed during the test. The other extender runs only
controllers.
"""

from typing import Any

from headroom.contract.reasons import Reason
from tests.e2e.cluster import PODS, PlayedCluster, pod_manifest
from tests.e2e.conftest import NewCluster
from tests.e2e.nodes import Shape
from tests.e2e.test_evictions import REPLICAS, told_of, uid_of

WAITS = Reason.OTHER_STARTING.sentence


def create(cluster: PlayedCluster, name: str, timeout: str = "10m") -> None:
    manifest = pod_manifest("4Gi")
    manifest["metadata"]["name"] = name
    manifest["metadata"]["annotations"] |= {
        "headroom.gpu/startup": "alone",
        "headroom.gpu/startup-timeout": timeout,
    }
    probe = {"httpGet": {"path": "/health", "port": 8000}}
    manifest["spec"]["containers"][0]["readinessProbe"] = probe
    cluster.plane.call("POST", PODS, manifest)


def admit(cluster: PlayedCluster, name: str) -> dict[str, Any]:
    """Wait until the pod is bound. Then give it a replica of the GPU, as its kubelet would."""
    cluster.until(lambda: bool(cluster.node_of(name)), f"pod {name} is bound")
    pod = cluster.pod(name)
    cluster.nodes.give(pod, 0)
    cluster.nodes.report(cluster.names)
    return pod


def phases(cluster: PlayedCluster) -> dict[str, str]:
    (name,) = cluster.names
    reservations = cluster.gpunode(name).spec.reservations.values()
    return {reservation.name: reservation.phase for reservation in reservations}


def test_engines_that_start_alone_start_one_after_the_other(new_cluster: NewCluster) -> None:
    cluster = new_cluster(1, Shape(gpus=1))
    ports = cluster.start_replicas(*REPLICAS)
    cluster.start_scheduler(f"http://127.0.0.1:{ports[0]}")
    cluster.settle()
    create(cluster, "first")
    admit(cluster, "first")
    create(cluster, "second", timeout="2s")
    cluster.until(lambda: WAITS in cluster.rejection("second"), "the second engine waits")

    cluster.create_pod("ordinary", "4Gi")
    admit(cluster, "ordinary")
    assert phases(cluster) == {"first": "starting", "ordinary": ""}

    cluster.kill(REPLICAS[0])
    cluster.start_extender(REPLICAS[0], ports[0])
    ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    cluster.plane.call("PATCH", f"{PODS}/first/status", {"status": ready})
    second = admit(cluster, "second")
    assert phases(cluster)["first"] == "running"

    create(cluster, "third")
    admit(cluster, "third")
    assert phases(cluster)["second"] == "running"
    cluster.until(lambda: told_of(cluster, "StartTimedOut") == [uid_of(second)], "an Event")
