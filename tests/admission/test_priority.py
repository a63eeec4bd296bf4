"""Checks in a real API server that only Headroom's pods may use its PriorityClass."""

from typing import Any

import pytest

from tests.admission.policy_site import documented, rejected, site
from tests.admission.reviews import container, manifest
from tests.admission.site import ADMISSION, PODS, RBAC, SYSTEM, TEAM, Reply, Site, manifests
from tests.controlplane import STRANGER_TOKEN
from tests.waiting import until

__all__ = ["site"]

POLICY, CLASS, MESSAGE = "headroom-priority", "headroom-critical", "is for Headroom's own pods"
RBAC_GROUP = "rbac.authorization.k8s.io"
#: The rules of the role ``edit``. In a cluster, a controller aggregates this ClusterRole into
#: ``edit``.
EDIT = "system:aggregate-to-edit"
#: API version, resource, and kind of each built-in object with a pod template.
TEMPLATES = (
    ("v1", "podtemplates", "PodTemplate"),
    ("v1", "replicationcontrollers", "ReplicationController"),
    ("apps/v1", "daemonsets", "DaemonSet"),
    ("apps/v1", "deployments", "Deployment"),
    ("apps/v1", "replicasets", "ReplicaSet"),
    ("apps/v1", "statefulsets", "StatefulSet"),
    ("batch/v1", "jobs", "Job"),
    ("batch/v1", "cronjobs", "CronJob"),
)


def path(version: str, resource: str, namespace: str = TEAM) -> str:
    root = "api" if version == "v1" else "apis"
    return f"/{root}/{version}/namespaces/{namespace}/{resource}"


def templated(kind: str, version: str, name: str, **spec: Any) -> dict[str, Any]:
    """Return an object of this kind. ``spec`` is added to the spec of its pod template."""
    labels = {"app": name}
    spec = {"restartPolicy": "Always", "containers": [container(gpus=0)], **spec}
    if kind in ("Job", "CronJob"):
        spec["restartPolicy"] = "Never"
    template = {"metadata": {"labels": labels}, "spec": spec}
    body: dict[str, Any] = {"template": template}
    if kind in ("DaemonSet", "Deployment", "ReplicaSet", "StatefulSet"):
        body["selector"] = {"matchLabels": labels}
    if kind == "CronJob":
        body = {"schedule": "0 0 * * *", "jobTemplate": {"spec": body}}
    head = {"apiVersion": version, "kind": kind, "metadata": {"name": name}}
    return {**head, **(body if kind == "PodTemplate" else {"spec": body})}


@pytest.fixture
def tenant(site: Site) -> str:
    """The token of a user who may write the objects of one namespace."""
    binding = {
        "metadata": {"name": "tenant-of-priorities"},
        "roleRef": {"apiGroup": RBAC_GROUP, "kind": "ClusterRole", "name": EDIT},
        "subjects": [{"kind": "User", "name": "stranger", "apiGroup": RBAC_GROUP}],
    }
    site.create(f"{RBAC}/namespaces/{TEAM}/rolebindings", binding)
    plain = manifest(None, container(gpus=0))
    until(
        lambda: site.send("POST", dry(PODS), plain, STRANGER_TOKEN).status == 201,
        "the tenant may create pods",
    )
    return STRANGER_TOKEN


def dry(where: str) -> str:
    return f"{where}?dryRun=All"


@pytest.mark.parametrize("spec", [{}, {"priority": 1_000_000_000}])
def test_a_tenants_pod_cannot_use_the_class(site: Site, tenant: str, spec: dict[str, Any]) -> None:
    """The policy also rejects a pod with the integer priority that the API server would add."""
    obj = manifest(None, container(gpus=0), priorityClassName=CLASS, **spec)
    reply = site.send("POST", PODS, obj, tenant)
    rejected(reply, POLICY, MESSAGE)
    documented(reply)


@pytest.mark.parametrize(("version", "resource", "kind"), TEMPLATES)
def test_a_tenants_template_is_rejected_before_its_pods(
    site: Site, version: str, resource: str, kind: str
) -> None:
    where = path(version, resource)
    named = templated(kind, version, "named", priorityClassName=CLASS)
    rejected(site.send("POST", dry(where), named), POLICY, MESSAGE)
    other = templated(kind, version, "plain", priorityClassName="system-cluster-critical")
    assert site.send("POST", dry(where), other).status == 201
    # The policy also rejects updates, if the API server lets a user change the template.
    site.create(where, templated(kind, version, "changed"))
    reply = replaced(site, where, templated(kind, version, "changed", priorityClassName=CLASS))
    if kind != "Job":
        rejected(reply, POLICY, MESSAGE)
    assert reply.status in (403, 422)


def replaced(site: Site, where: str, obj: dict[str, Any]) -> Reply:
    found = site.send("GET", f"{where}/{obj['metadata']['name']}").body
    obj["metadata"]["resourceVersion"] = found["metadata"]["resourceVersion"]
    return site.send("PUT", f"{where}/{obj['metadata']['name']}", obj)


def test_headrooms_own_pods_can_use_the_class(site: Site) -> None:
    for version, resource, kind in (("v1", "pods", "Pod"), *TEMPLATES):
        obj = (
            manifest(None, container(gpus=0), priorityClassName=CLASS)
            if kind == "Pod"
            else templated(kind, version, "own", priorityClassName=CLASS)
        )
        assert site.send("POST", dry(path(version, resource, SYSTEM)), obj).status == 201, kind


def test_an_object_that_used_the_class_before_the_policy_can_still_change(site: Site) -> None:
    """Otherwise, controllers could not scale the object down or remove its finalizer."""
    where = path("apps/v1", "deployments")
    obj = templated("Deployment", "apps/v1", "earlier", priorityClassName=CLASS)
    bindings = f"{ADMISSION}/validatingadmissionpolicybindings"
    (binding,) = (
        each
        for each in manifests("base/priorityclass.yaml")
        if each["kind"] == "ValidatingAdmissionPolicyBinding"
    )

    def is_denied() -> bool:
        named = templated("Deployment", "apps/v1", "probe", priorityClassName=CLASS)
        return site.send("POST", dry(where), named).status == 403

    site.send("DELETE", f"{bindings}/{POLICY}")
    try:
        until(lambda: not is_denied(), "the policy is not enforced")
        site.create(where, obj)
    finally:
        site.send("POST", bindings, binding)
        until(is_denied, "the policy is enforced again")
    patch = {"metadata": {"labels": {"a": "b"}}, "spec": {"replicas": 0}}
    assert site.send("PATCH", f"{where}/earlier", patch).status == 200
