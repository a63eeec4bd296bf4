"""Checks that filter and bind are called for every kind of GPU with the shipped configuration.

The test uses a real kube-scheduler, kubelets and device plugins, with a node for each kind. It is
needed because kube-scheduler calls an extender only for resources in its configuration.
"""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.controlplane import ControlPlane
from tests.driver import GIB, Gpu, Instance
from tests.e2e.real import RealCluster
from tests.kubelet.node import Node

SMALL, LARGE = "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
NO_MEMORY = "insufficient GPU memory on any device"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of GPU. The ``devices`` of the node offer ``resource``. Each device has ``device_gib``
    GiB and ``replicas`` replicas.
    """

    resource: str
    plugin: dict[str, Any]
    gpu: Gpu
    devices: int
    device_gib: int
    replicas: int = 1


def parted(node: str, *, mixed: bool) -> Gpu:
    """Return a GPU with two small instances and, if ``mixed``, a larger instance."""
    instances = [Instance(f"MIG-{node}-{n}", n, reserved_bytes=0, model=SMALL) for n in (1, 2)]
    large = Instance(f"MIG-{node}-3", 3, 0, 40 * GIB, 0, LARGE)
    return Gpu(f"GPU-{node}", instances=(*instances, *([large] if mixed else ())))


def shared(resource: str, replicas: int, *, rename: bool = False) -> dict[str, Any]:
    sliced = {"resources": [{"name": resource, "replicas": replicas}], "renameByDefault": rename}
    return {"sharing": {"timeSlicing": sliced}}


PROFILE = "nvidia.com/mig-1g.10gb"
MIXED: dict[str, Any] = {"flags": {"migStrategy": "mixed"}}
SINGLE: dict[str, Any] = {"flags": {"migStrategy": "single"}}
WHOLE = "nvidia.com/gpu"
KINDS = {
    "mixed": Kind(PROFILE, MIXED, parted("mixed", mixed=True), 2, 10),
    "mixed-shared": Kind(
        PROFILE, MIXED | shared(PROFILE, 3), parted("mixed-shared", mixed=True), 2, 10, 3
    ),
    "mixed-renamed": Kind(
        f"{PROFILE}.shared",
        MIXED | shared(PROFILE, 3, rename=True),
        parted("mixed-renamed", mixed=True),
        2,
        10,
        3,
    ),
    "single": Kind(WHOLE, SINGLE, parted("single", mixed=False), 2, 10),
    "single-shared": Kind(
        WHOLE, SINGLE | shared(WHOLE, 3), parted("single-shared", mixed=False), 2, 10, 3
    ),
    "whole-renamed": Kind(
        f"{WHOLE}.shared", shared(WHOLE, 3, rename=True), Gpu("GPU-whole", 24 * GIB, 0), 1, 24, 3
    ),
}


class KindsCluster(RealCluster):
    """A cluster with one node for each kind."""

    def __init__(self, plane: ControlPlane) -> None:
        super().__init__(plane, nodes=0, gpus=0, replicas=0)
        run = os.urandom(2).hex()
        self.node_of_kind = {kind: f"{kind}-{run}" for kind in KINDS}
        self.names = tuple(self.node_of_kind.values())
        self.machines = {
            self.node_of_kind[name]: Node(
                plane,
                self.node_of_kind[name],
                [kind.gpu],
                kind.replicas,
                plugin=kind.plugin,
                resource=kind.resource,
                devices=kind.devices,
            )
            for name, kind in KINDS.items()
        }

    def request(self, name: str, kind: str, gib: int) -> None:
        """Create a pod that requests one device of a kind, on the node of that kind."""
        self.asked_bytes[name] = gib * GIB
        limits = {KINDS[kind].resource: "1"}
        containers = [{"name": "main", "image": "none", "resources": {"limits": limits}}]
        selector = {"kubernetes.io/hostname": self.node_of_kind[kind]}
        self.create_pod(name, f"{gib}Gi", containers=containers, nodeSelector=selector)


@pytest.fixture(scope="module")
def cluster(plane: ControlPlane, binaries: None) -> Iterator[KindsCluster]:
    kinds = KindsCluster(plane)
    try:
        kinds.create()
        kinds.bring_up()
        yield kinds
    finally:
        kinds.close()


@pytest.mark.parametrize("kind", KINDS)
def test_pods_of_each_gpu_kind_are_reserved_memory_without_overcommitment(
    cluster: KindsCluster, kind: str
) -> None:
    of = KINDS[kind]
    cluster.request(f"{kind}-too-large", kind, of.device_gib + 1)
    cluster.until(
        lambda: NO_MEMORY in cluster.rejection(f"{kind}-too-large"),
        "Headroom rejects what is large",
    )
    most = of.device_gib - 1
    fitting = [f"{kind}-{number}" for number in range(of.devices)]
    for name in fitting:
        cluster.request(name, kind, most)
    cluster.until(lambda: all(map(cluster.node_of, fitting)), "one pod is bound for each device")
    cluster.until(cluster.decided, "the kubelet has admitted them")
    for name in fitting:
        annotations = cluster.pod(name)["metadata"]["annotations"]
        assert "headroom.gpu/placement" in annotations
    # If only replicas were counted, the pod would be bound, but only to shared devices, because
    # other devices have no free replica.
    cluster.request(f"{kind}-one-more", kind, most)
    cluster.until(lambda: bool(cluster.rejection(f"{kind}-one-more")), "one more is rejected")
    assert (NO_MEMORY in cluster.rejection(f"{kind}-one-more")) == (of.replicas > 1)
    taken = Counter[str]()
    for held in cluster.machines[cluster.node_of_kind[kind]].held():
        taken[held.device] += cluster.asked_bytes[held.pod]
    assert sorted(taken.values()) == [most * GIB] * of.devices
    reservations = cluster.gpunode(cluster.node_of_kind[kind]).spec.reservations
    assert sorted(each.name for each in reservations.values()) == fitting
