"""Findings of ``headroom doctor --multi-tenant``."""

from dataclasses import replace
from typing import Any

import pytest

from contract.kube import Namespace, Pod
from extender.config.settings import Settings
from extender.doctor.findings import Weight
from extender.doctor.tenants import QUOTA, Tenancy, examine_tenants, list_tenancy
from extender.state.changes import Relisted
from tests.builders import container, namespace, pod
from tests.controlplane import ControlPlane
from tests.deploy.rendered import DEPLOY, NAMESPACE, objects, overlay

LEVEL = "pod-security.kubernetes.io/enforce"


def installed(platform: str) -> Tenancy:
    """The objects of an overlay, and a namespace with a quota and Pod Security."""
    found = objects(overlay(DEPLOY / "overlays" / platform))

    def of(kind: str) -> list[dict[str, Any]]:
        return [each for key, each in found.items() if key[0] == kind and key[1] in ("", NAMESPACE)]

    quota = {"metadata": {"name": "q", "namespace": "team"}, "spec": {"hard": {QUOTA: "40Gi"}}}
    return Tenancy(
        of("ValidatingAdmissionPolicyBinding"),
        of("NetworkPolicy"),
        [quota],
        of("Role"),
        {"team": {LEVEL: "restricted"}},
    )


def test_the_profile_has_no_findings() -> None:
    assert examine_tenants(installed("multi-tenant")) == []


def test_another_overlay_lacks_what_the_profile_adds() -> None:
    (finding,) = examine_tenants(installed("device-plugin"))
    assert finding.weight is Weight.WARNING
    assert "headroom-other-schedulers does not deny" in finding.found


ROLE = {
    "metadata": {"name": "users"},
    "rules": [{"apiGroups": [""], "resources": ["pods/portforward"], "verbs": ["create"]}],
}


@pytest.mark.parametrize(
    ("changes", "names", "found"),
    [
        ({"network_policies": ()}, (), "headroom-scheduler, headroom-webhook do not exist"),
        ({"quotas": ()}, ("team",), "no ResourceQuota limits their GPU memory"),
        (
            {"quotas": [{"metadata": {"namespace": "team"}, "spec": {"hard": {"pods": "4"}}}]},
            ("team",),
            "no ResourceQuota limits their GPU memory",
        ),
        ({"namespaces": {"team": {}}}, ("team",), "does not enforce Pod Security"),
        ({"namespaces": {"team": {LEVEL: "privileged"}}}, ("team",), "does not enforce"),
        ({"roles": [ROLE]}, (), "Role users in Headroom's namespace gives pods/portforward"),
    ],
)
def test_what_is_missing_is_a_warning(
    changes: dict[str, Any], names: tuple[str, ...], found: str
) -> None:
    (finding,) = examine_tenants(replace(installed("multi-tenant"), **changes))
    assert (finding.weight, finding.nodes) == (Weight.WARNING, names)
    assert found in finding.found


@pytest.mark.parametrize(
    "name", ["headroom-priority", "headroom-pod-annotations", "headroom-agent-own-node"]
)
def test_a_policy_that_was_deleted_is_a_warning(name: str) -> None:
    whole = installed("multi-tenant")
    kept = [each for each in whole.bindings if each["metadata"]["name"] != name]
    (finding,) = examine_tenants(replace(whole, bindings=kept))
    assert f"{name} does not exist" in finding.found


def test_only_namespaces_with_pods_that_request_gpus_count(plane: ControlPlane) -> None:
    """The other objects come from the API server."""
    pods = pod(namespace="team"), pod(None, container(gpus=0), namespace="web")
    spaces = namespace("team"), namespace("web")
    listed = [Relisted(Namespace, spaces, 0.0), Relisted(Pod, pods, 0.0)]
    found = list_tenancy(Settings(), listed, str(plane.kubeconfig()))
    assert set(found.namespaces) == {"team"}
    assert all(each["metadata"]["name"] for each in (*found.bindings, *found.roles))
