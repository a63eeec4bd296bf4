"""Tests writes of kubelets and of users who have all permissions in one namespace, in a real API
server.
"""

from typing import Any

import pytest
import yaml

from tests.admission.policy_site import HERE, documented, rejected, site
from tests.admission.reviews import container, manifest
from tests.admission.site import (
    ADMISSION,
    EXTENDER,
    NODES,
    PODS,
    RBAC,
    SYSTEM,
    TEAM,
    Reply,
    Site,
    manifests,
)
from tests.controlplane import STRANGER_TOKEN
from tests.waiting import until

__all__ = ["site"]

SERVICES = f"/api/v1/namespaces/{TEAM}/services"
RBAC_GROUP = "rbac.authorization.k8s.io"
EVERYTHING = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}


@pytest.fixture(scope="module")
def owner(site: Site) -> str:
    """The token of a user who has all permissions in one namespace."""
    where = f"{RBAC}/namespaces/{TEAM}"
    site.create(f"{where}/roles", {"metadata": {"name": "owner"}, "rules": [EVERYTHING]})
    binding = {
        "metadata": {"name": "owner"},
        "roleRef": {"apiGroup": RBAC_GROUP, "kind": "Role", "name": "owner"},
        "subjects": [{"kind": "User", "name": "stranger", "apiGroup": RBAC_GROUP}],
    }
    site.create(f"{where}/rolebindings", binding)

    def may_write() -> bool:
        return site.send("GET", PODS, token=STRANGER_TOKEN).status == 200

    until(may_write, "the user has the role")
    return STRANGER_TOKEN


def bind(site: Site, token: str, name: str = "by-hand", kubelet_of: str = "") -> Reply:
    body = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": name},
        "target": {"apiVersion": "v1", "kind": "Node", "name": HERE},
    }
    path = f"{PODS}/{name}/binding?dryRun=All"
    return site.send("POST", path, body, token, kubelet_of=kubelet_of)


@pytest.fixture(scope="module")
def denied(site: Site) -> None:
    """Apply the patch of deploy/components/deny-other-schedulers, which denies pods that other
    schedulers bind.
    """
    (component,) = manifests("components/deny-other-schedulers/kustomization.yaml")
    (patch,) = (
        found
        for each in component["patches"]
        if (found := yaml.safe_load(each["patch"]))["metadata"]["name"] == "headroom-bindings"
    )
    path = f"{ADMISSION}/validatingadmissionpolicybindings/headroom-bindings"
    assert site.send("PATCH", path, patch).status == 200


def test_only_schedulers_can_bind_pods(site: Site, owner: str, denied: None) -> None:
    obj = manifest("20Gi", schedulerName="headroom")
    obj["metadata"]["name"] = "by-hand"
    site.create(PODS, obj)
    until(lambda: bind(site, owner).status == 403, "Bindings by users are denied")
    reply = bind(site, owner)
    rejected(reply, "headroom-bindings", "only schedulers bind pods")
    documented(reply)
    other = f"/api/v1/namespaces/{TEAM}/bindings?dryRun=All"
    body = {"metadata": {"name": "by-hand"}, "target": {"kind": "Node", "name": HERE}}
    rejected(
        site.send("POST", other, body, owner), "headroom-bindings", "only schedulers bind pods"
    )
    # A scheduler for all namespaces may bind pods, and so may the cluster's admin.
    assert bind(site, site.token(EXTENDER)).status == 201
    assert bind(site, "scheduler-of-the-tests").status == 201
    assert bind(site, "admin-of-the-tests").status == 201


def static_pod(namespace: str, labels: dict[str, str]) -> dict[str, Any]:
    obj = manifest(None, container(gpus=0), nodeName=HERE)
    mirror = {"kubernetes.io/config.mirror": "x"}
    obj["metadata"] = {
        "name": f"static-{HERE}",
        "namespace": namespace,
        "labels": labels,
        "annotations": mirror,
    }
    return obj


def test_a_kubelet_cannot_add_a_pod_to_headrooms_services(site: Site) -> None:
    labels = {"app.kubernetes.io/name": "headroom", "app.kubernetes.io/component": "webhook"}
    path = f"/api/v1/namespaces/{SYSTEM}/pods?dryRun=All"
    for node in NODES:
        reply = site.send("POST", path, static_pod(SYSTEM, labels), kubelet_of=node)
        rejected(reply, "headroom-static-pods", "static pods cannot be in Headroom's namespace")
    documented(reply)
    elsewhere = static_pod("kube-system", {})
    path = path.replace(SYSTEM, "kube-system")
    assert site.send("POST", path, elsewhere, kubelet_of=HERE).status == 201
    # Controllers create Headroom's own pods.
    own = static_pod(SYSTEM, labels)
    path = path.replace("kube-system", SYSTEM)
    assert site.send("POST", path, own).status == 201


def test_a_service_cannot_take_the_connections_of_gates(site: Site, owner: str) -> None:
    def create(port: int, **spec: Any) -> Reply:
        body = {"metadata": {"name": "gate"}, "spec": {"ports": [{"port": port}], **spec}}
        return site.send("POST", f"{SERVICES}?dryRun=All", body, owner)

    external = {"externalIPs": ["192.0.2.7"]}
    reply = create(9410, **external)
    rejected(reply, "headroom-gate-port", "port 9410 of a Service with externalIPs could take")
    documented(reply)
    assert create(9411, **external).status == create(9410).status == 201


def test_a_user_of_one_namespace_cannot_write_addresses_of_load_balancers(
    site: Site, owner: str
) -> None:
    """A user who could write them could redirect connections, because kube-proxy handles these
    addresses like externalIPs.
    """
    spec = {"type": "LoadBalancer", "ports": [{"port": 9410}]}
    site.create(SERVICES, {"metadata": {"name": "balanced"}, "spec": spec})
    status = {"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.7"}]}}}

    def write(body: dict[str, Any], token: str) -> Reply:
        return site.send("PATCH", f"{SERVICES}/balanced/status", body, token)

    reply = write(status, owner)
    rejected(reply, "headroom-gate-port", "only controllers of load balancers write addresses")
    documented(reply)
    conditions = {"status": {"conditions": []}, "metadata": {"labels": {"a": "b"}}}
    assert write(conditions, owner).status == 200
    # A controller may write the status of Services in all namespaces. This account may only patch
    # it.
    rules = [{"apiGroups": [""], "resources": ["services/status"], "verbs": ["patch"]}]
    site.create(f"{RBAC}/clusterroles", {"metadata": {"name": "balancer"}, "rules": rules})
    binding = {
        "metadata": {"name": "balancer"},
        "roleRef": {"apiGroup": RBAC_GROUP, "kind": "ClusterRole", "name": "balancer"},
        "subjects": [{"kind": "User", "name": "headroom-viewer", "apiGroup": RBAC_GROUP}],
    }
    site.create(f"{RBAC}/clusterrolebindings", binding)
    until(lambda: write(status, "viewer-of-the-tests").status == 200, "a controller may patch")
    assert write({"metadata": {"labels": {"a": "c"}}}, owner).status == 200
    cleared = {"status": {"loadBalancer": None}}
    rejected(write(cleared, owner), "headroom-gate-port", "only controllers of load balancers")
    assert site.send("DELETE", f"{RBAC}/clusterrolebindings/balancer").status == 200


def test_a_tenant_cannot_add_an_endpoint_to_headrooms_services(site: Site, owner: str) -> None:
    metadata = {"name": "x", "labels": {"kubernetes.io/service-name": "headroom-webhook"}}
    of_discovery = f"/apis/discovery.k8s.io/v1/namespaces/{SYSTEM}/endpointslices"
    for path in (of_discovery, f"/api/v1/namespaces/{SYSTEM}/endpoints"):
        reply = site.send("POST", f"{path}?dryRun=All", {"metadata": metadata}, owner)
        assert (reply.status, "cannot create resource" in reply.message) == (403, True)
