"""The agent's account, roles and admission policy in a real API server, and its publisher."""

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import yaml
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
from tests.controlplane import ROOT, ApiRefused, ControlPlane
from tests.waiting import PATIENCE_S, until

SYSTEM = "headroom-system"
AGENT = "headroom-agent"
NODES = ("agent-a", "agent-b")
GPUNODES = "/apis/headroom.gpu/v1alpha1/gpunodes"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
ACCOUNTS = f"/api/v1/namespaces/{SYSTEM}/serviceaccounts"
AT_ONCE = {"gracePeriodSeconds": 0}


def unless(status: int, plane: ControlPlane, method: str, path: str, body: Any) -> None:
    try:
        plane.call(method, path, body)
    except ApiRefused as err:
        if f": {status} " not in str(err):
            raise


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "deploy/base" / name).read_text()))


@pytest.fixture(scope="module")
def installed(plane: ControlPlane) -> Iterator[ControlPlane]:
    """The agent's service account with its roles, the admission policy, two nodes with a GPUNode
    each, and a pod of the agent.
    """
    account = {"kind": "ServiceAccount", "name": AGENT, "namespace": SYSTEM}
    undo = contextlib.ExitStack()

    def create(path: str, body: dict[str, Any]) -> None:
        unless(409, plane, "POST", path, body)
        name = body["metadata"]["name"]
        undo.callback(unless, 404, plane, "DELETE", f"{path}/{name}", AT_ONCE)

    with undo:
        unless(409, plane, "POST", "/api/v1/namespaces", {"metadata": {"name": SYSTEM}})
        create(ACCOUNTS, {"metadata": {"name": AGENT}})
        for role in manifests("rbac.yaml"):
            namespace = role["metadata"].get("namespace")
            where = f"{RBAC}/namespaces/{namespace}" if namespace else RBAC
            create(f"{where}/{role['kind'].lower()}s", role)
            if role["metadata"]["name"] == AGENT:
                reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": role["kind"]}
                binding = {
                    "metadata": {"name": "agents-of-the-tests"},
                    "roleRef": {**reference, "name": AGENT},
                    "subjects": [account],
                }
                create(f"{where}/{role['kind'].lower()}bindings", binding)
        for node in NODES:
            create("/api/v1/nodes", {"metadata": {"name": node}})
            kind = {"apiVersion": API_VERSION, "kind": KIND}
            create(GPUNODES, {**kind, "metadata": {"name": node}, "spec": {}})
            spec = {
                "nodeName": node,
                "serviceAccountName": AGENT,
                "containers": [{"name": "agent", "image": "none"}],
            }
            pod = {"metadata": {"name": f"pod-on-{node}"}, "spec": spec}
            create(f"/api/v1/namespaces/{SYSTEM}/pods", pod)
            undo.callback(unless, 404, plane, "DELETE", f"{LEASES}/{node}", AT_ONCE)
        policy, binding = (
            each
            for each in manifests("admission.yaml")
            if each["metadata"]["name"] == "headroom-agent-own-node"
        )
        create(f"{ADMISSION}/validatingadmissionpolicies", policy)
        create(f"{ADMISSION}/validatingadmissionpolicybindings", binding)
        until(lambda: not may_write(plane, "agent-a", "agent-b"), "the policy is in force")
        yield plane


def token(plane: ControlPlane, node: str | None) -> str:
    """Return the token that the node's kubelet would mount into its agent, or a token without a
    pod.
    """
    bound: dict[str, Any] = {}
    if node is not None:
        name = f"pod-on-{node}"
        pod = plane.call("GET", f"/api/v1/namespaces/{SYSTEM}/pods/{name}")
        reference = {"apiVersion": "v1", "kind": "Pod", "name": name}
        bound = {"boundObjectRef": {**reference, "uid": pod["metadata"]["uid"]}}
    request = {"spec": {"expirationSeconds": 3600, **bound}}
    answer = plane.call("POST", f"{ACCOUNTS}/{AGENT}/token", request)
    given: str = answer["status"]["token"]
    return given


@contextlib.contextmanager
def publishing(
    plane: ControlPlane, sits_on: str | None, says: str, timeout_s: float = PATIENCE_S
) -> Iterator[KubernetesPublisher]:
    """Return the publisher of an agent that runs on one node but is configured for another."""
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
