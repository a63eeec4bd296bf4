"""Installs the agent's account, roles and admission policy in a real API server, and runs its
publisher.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from kubernetes.client import ApiClient

from agent.kube_client import of_client
from agent.kube_publisher import KubernetesPublisher, NotDelivered
from headroom.contract.gpunode import (
    API_VERSION,
    KIND,
    Device,
    GPUNodeStatus,
    SmActivity,
)
from headroom.contract.gpunode_json import decode_gpunode
from headroom.contract.kube import Lease
from tests.admission.site import AGENT, AT_ONCE, GPUNODES, SYSTEM, Site, manifests
from tests.controlplane import ApiRefused, ControlPlane
from tests.waiting import PATIENCE_S, until

NODES = ("agent-a", "agent-b")
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases"


def unless(status: int, plane: ControlPlane, method: str, path: str, body: Any) -> None:
    try:
        plane.call(method, path, body)
    except ApiRefused as err:
        if f": {status} " not in str(err):
            raise


@pytest.fixture(scope="module")
def installed(plane: ControlPlane) -> Iterator[ControlPlane]:
    """An API server with the agent's service account and roles, the admission policy, two nodes
    with GPUNodes, and a pod of the agent.
    """
    site = Site(plane)
    try:
        unless(409, plane, "POST", "/api/v1/namespaces", {"metadata": {"name": SYSTEM}})
        site.add_accounts(AGENT)
        site.add_nodes(*NODES)
        for node in NODES:
            gpunode = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": node}}
            site.create(GPUNODES, {**gpunode, "spec": {}})
        for each in manifests("base/admission.yaml"):
            if each["metadata"]["name"] == "headroom-agent-own-node":
                site.enforce(each)
        until(lambda: not may_write(plane, "agent-a", "agent-b"), "the policy is in force")
        yield plane
    finally:
        for node in NODES:
            unless(404, plane, "DELETE", f"{LEASES}/{node}", AT_ONCE)
        site.close()


def token(plane: ControlPlane, node: str | None) -> str:
    """Return the token that the node's kubelet would mount into its agent. If ``node`` is None,
    return a token that is bound to no pod.
    """
    return Site(plane).token(AGENT, node)


@contextlib.contextmanager
def publishing(
    plane: ControlPlane, sits_on: str | None, says: str, timeout_s: float = PATIENCE_S
) -> Iterator[KubernetesPublisher]:
    """Yield the publisher of an agent that runs on node ``sits_on`` but is configured for another
    node.
    """
    configuration = plane.configuration(token(plane, sits_on))
    configuration.no_proxy = "*"
    with ApiClient(configuration) as kube:
        yield KubernetesPublisher(
            of_client(kube), says, SYSTEM, heartbeat_s=30, timeout_s=timeout_s
        )
        kube.rest_client.pool_manager.clear()


def may_write(plane: ControlPlane, sits_on: str, says: str) -> bool:
    with publishing(plane, sits_on, says) as publisher:
        try:
            publisher.report(status())
        except NotDelivered:
            return False
    return True


def status(
    used_bytes: int = 5, observed_at: str = "2026-11-21T00:00:00.000000Z", sm_ratio: float = 0.0
) -> GPUNodeStatus:
    device = Device(
        uuid="GPU-a",
        memory_bytes=1 << 36,
        reserved_bytes=0,
        used_bytes=used_bytes,
        sm_activity=SmActivity(ratio=sm_ratio, source="test"),
    )
    return GPUNodeStatus(devices=[device], observed_at=observed_at)


def reported(plane: ControlPlane, node: str) -> GPUNodeStatus:
    held = decode_gpunode(msgspec.json.encode(plane.call("GET", f"{GPUNODES}/{node}"))).status
    assert held is not None
    return held


def lease(plane: ControlPlane, node: str) -> Lease:
    return msgspec.convert(plane.call("GET", f"{LEASES}/{node}"), Lease)
