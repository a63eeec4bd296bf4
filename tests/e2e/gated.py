"""Runs gated pods on real nodes, for the tests of the gate and of short jobs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headroom.contract.gate import gate_container
from tests.controlplane import ControlPlane
from tests.driver import GIB
from tests.e2e.cluster import PODS
from tests.e2e.real import RealCluster
from tests.kubelet.cri_objects import Container
from tests.kubelet.node import Node
from tests.kubelet.node_objects import gpu_container

REPLICAS = 8
LEGACY, CDI = "envvar", "cdi-annotations,cdi-cri"
#: The gate container that the webhook injects into pods.
GATE_CONTAINER = gate_container("headroom-agent")


@contextmanager
def gated_cluster(plane: ControlPlane) -> Iterator[RealCluster]:
    """A cluster of two nodes with two GPUs each. A GPU has 24 GiB and several replicas. One node
    passes devices as environment variables, and the other node passes them as CDI devices.
    """
    real = RealCluster(plane, 2, gpus=2, replicas=REPLICAS, device_lists=(LEGACY, CDI))
    try:
        real.create()
        for name in real.names:
            gated = {"metadata": {"annotations": {"headroom.gpu/device-choice": "gated"}}}
            plane.call("PATCH", f"/api/v1/nodes/{name}", gated)
        real.bring_up()
        real.start_controller_manager()
        yield real
    finally:
        real.close()


def pod_of(name: str, gib: int) -> dict[str, Any]:
    """Return a pod without a gate, for another scheduler."""
    metadata = {"name": name, "annotations": {"headroom.gpu/vram": f"{gib}Gi"}}
    spec = {
        "schedulerName": "another",
        "containers": [gpu_container("main", takes_bytes=gib * GIB)],
        "terminationGracePeriodSeconds": 1,
    }
    return {"metadata": metadata, "spec": spec}


def bind(cluster: RealCluster, name: str, node: str) -> None:
    """Bind the pod as another scheduler does."""
    cluster.plane.bind(PODS, name, node)


def running(machine: Node) -> set[str]:
    """Return the pods whose main container runs."""
    with machine.runtime.lock:
        found = list(machine.runtime.containers.values())
    return {each.pod for each in found if each.name == "main" and each.pid}


def containers(machine: Node, name: str) -> list[Container]:
    """Return the running containers with this name."""
    with machine.runtime.lock:
        found = list(machine.runtime.containers.values())
    return [each for each in found if each.name == name and each.pid]


def ever_ran(machine: Node) -> set[str]:
    return machine.runtime.ever_ran


def evictions(cluster: RealCluster) -> float:
    return cluster.metric('headroom_evictions_total{outcome="evicted"}')


def assert_no_device_was_overcommitted(cluster: RealCluster) -> None:
    for machine in cluster.machines.values():
        assert all(least >= 0 for least in machine.driver.least_free_bytes.values())
