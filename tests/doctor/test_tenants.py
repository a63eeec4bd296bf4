"""Tests the findings of ``headroom doctor --multi-tenant``."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headroom.contract.kube import Namespace, Pod
from headroom.contract.watched import Relisted
from headroom.core.placement.device_reading import health_issues
from headroom.doctor.findings import Weight
from headroom.doctor.shipped_policies import rewritten, rewritten_webhook
from headroom.doctor.tenant_quotas import BUDGETS, QUOTA
from headroom.doctor.tenant_rights import Rights
from headroom.doctor.tenants import POLICIES, Tenancy, examine_tenants, list_tenancy
from headroom.runtime.settings.settings import Settings
from tests.builders import container, namespace, pod, shared
from tests.controlplane import ApiRefused, ControlPlane
from tests.deploy.rendered import (
    DEPLOY,
    NAMESPACE,
    PLATFORMS,
    objects,
    overlay,
    settings_of,
    template,
)

LEVEL = "pod-security.kubernetes.io/enforce"
MUTATING = "MutatingWebhookConfiguration"
API_SERVER = {"from": [{"ipBlock": {"cidr": "192.0.2.1/32"}}]}


def installed(platform: str) -> Tenancy:
    """Return the objects of an overlay, and a namespace with a quota and Pod Security.

    The address of the API server is added, because kustomize does not render it.
    """
    found = objects(overlay(DEPLOY / "overlays" / platform))

    def of(kind: str) -> list[dict[str, Any]]:
        return [each for key, each in found.items() if key[0] == kind and key[1] in ("", NAMESPACE)]

    policies = deepcopy(of("NetworkPolicy"))
    for each in policies:
        for rule in each["spec"].get("ingress", ()):
            rule.setdefault("from", API_SERVER["from"])
    hard = {QUOTA: "40Gi", BUDGETS: "0"}
    quota = {"metadata": {"name": "q", "namespace": "team"}, "spec": {"hard": hard}}
    return Tenancy(
        of("ValidatingAdmissionPolicy"),
        of("ValidatingAdmissionPolicyBinding"),
        of("MutatingWebhookConfiguration"),
        policies,
        [quota],
        Rights(
            of("Role"), of("RoleBinding"), of("ClusterRole"), [*of("ClusterRoleBinding"), ADMINS]
        ),
        {"team": {LEVEL: "restricted"}},
        settings_of(found) | {"mode": "enforce", "largest_devices": ["nvidia.com/gpu=80Gi"]},
        [],
        [shared(memory_bytes=80 << 30, free=1)],
    )


def binding(role: str, *users: str, kind: str = "ClusterRole") -> dict[str, Any]:
    subjects = [{"kind": "User", "name": user} for user in users]
    return {
        "metadata": {"name": "given"},
        "roleRef": {"kind": kind, "name": role},
        "subjects": subjects,
    }


ADMINS = binding("cluster-admin", "jane")
EDIT = {
    "metadata": {"name": "edit"},
    "rules": [{"apiGroups": [""], "resources": ["pods/exec", "pods"], "verbs": ["create"]}],
}
ROLE = {
    "metadata": {"name": "users"},
    "rules": [{"apiGroups": [""], "resources": ["pods/portforward"], "verbs": ["create"]}],
}
ALL = {
    "metadata": {"name": "headroom-x"},
    "rules": [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}],
}


def test_the_enforced_profile_has_no_findings() -> None:
    assert examine_tenants(installed("multi-tenant")) == []


def test_the_profile_protects_no_tenant_while_it_observes() -> None:
    tenancy = installed("multi-tenant")
    (found,) = examine_tenants(replace(tenancy, settings={**tenancy.settings, "mode": "observe"}))
    assert found.found == "setting mode is observe: nothing is rejected or evicted"
    assert found.do == "set mode: enforce (docs/get-started/rollout.md)"


def test_another_overlay_has_a_finding_for_each_addition_of_the_profile() -> None:
    found = [each.found for each in examine_tenants(installed("device-plugin"))]
    for expected in (
        "headroom-other-schedulers does not deny",
        "headroom-bindings does not deny",
        "setting count_vram is false: quotas do not count GPU memory",
        "setting on_overuse is report",
    ):
        assert any(expected in each for each in found), expected
    assert len(found) == 4


def named(objects: Any, name: str) -> Any:
    return next(each for each in objects if each["metadata"]["name"] == name)


def policy(name: str, **of: Any) -> Callable[[Tenancy], None]:
    return lambda tenancy: named(tenancy.policies, name)["spec"].update(of)


def expression(name: str, part: str, text: str) -> Callable[[Tenancy], None]:
    def change(tenancy: Tenancy) -> None:
        named(tenancy.policies, name)["spec"][part][0]["expression"] = text

    return change


def narrow(tenancy: Tenancy) -> None:
    spec = named(tenancy.bindings, "headroom-other-schedulers")["spec"]
    spec["matchResources"] = {"namespaceSelector": {"matchLabels": {"a": "b"}}}


def without(part: str, name: str) -> Callable[[Tenancy], None]:
    return lambda tenancy: getattr(tenancy, part).remove(named(getattr(tenancy, part), name))


def network(name: str, **spec: Any) -> Callable[[Tenancy], None]:
    def change(tenancy: Tenancy) -> None:
        policies: Any = tenancy.network_policies
        if any(each["metadata"]["name"] == name for each in policies):
            named(policies, name)["spec"].update(spec)
        else:
            policies.append({"metadata": {"name": name}, "spec": spec})

    return change


def hooks(**of: Any) -> Callable[[Tenancy], None]:
    return lambda tenancy: named(tenancy.webhooks, "headroom")["webhooks"][0].update(of)


def quota(**spec: Any) -> Callable[[Tenancy], None]:
    return lambda tenancy: tenancy.quotas[0]["spec"].update(spec)


def labels(**of: str) -> Callable[[Tenancy], None]:
    return lambda tenancy: tenancy.namespaces["team"].update(of)  # type: ignore[attr-defined]


def setting(name: str, value: object) -> Callable[[Tenancy], None]:
    return lambda tenancy: tenancy.settings.update({name: value})  # type: ignore[attr-defined]


def rights(part: str, *added: dict[str, Any]) -> Callable[[Tenancy], None]:
    def change(tenancy: Tenancy) -> None:
        getattr(tenancy.rights, part).extend(added)
        tenancy.rights.cluster_roles.append(EDIT)  # type: ignore[attr-defined]

    return change


PRIORITY = {"scopeName": "PriorityClass", "operator": "In", "values": ["high"]}
CHANGES: dict[str, tuple[Callable[[Tenancy], None], str]] = {
    "a policy is gone": (without("policies", "headroom-priority"), "priority does not exist"),
    "its binding is gone": (without("bindings", "headroom-gates"), "headroom-gates has no binding"),
    "it is ignored": (
        policy("headroom-priority", failurePolicy="Ignore"),
        "in failurePolicy",
    ),
    "it applies to few": (narrow, "denies only what its binding selects"),
    "the webhook is gone": (without("webhooks", "headroom"), "does not exist: GPU pods"),
    "the webhook is ignored": (hooks(failurePolicy="Ignore"), "in failurePolicy: GPU pods"),
    "the webhook is for few": (
        hooks(objectSelector={"matchLabels": {"a": "b"}}),
        "in objectSelector: GPU pods can be created that no quota counts",
    ),
    "another server is the webhook": (
        hooks(clientConfig={"url": "https://192.0.2.7/mutate"}),
        "in clientConfig: GPU pods",
    ),
    "a setting": (setting("mode", "observe"), "setting mode is observe: nothing is rejected"),
    "opt-out": (setting("overuse_opt_out", True), "setting overuse_opt_out is true"),
    "metrics": (setting("metrics_access", "open"), "setting metrics_access is open"),
    "no NetworkPolicy": (
        without("network_policies", "headroom-webhook"),
        "headroom-webhook do not exist, or do not select",
    ),
    "it selects no pod": (
        network("headroom-webhook", podSelector={"matchLabels": {"a": "b"}}),
        "headroom-webhook do not exist, or do not select",
    ),
    "another one admits all": (network("more", podSelector={}, ingress=[{}]), "more in Headroom's"),
    "another one admits all namespaces": (
        network("more", podSelector={}, ingress=[{"from": [{"namespaceSelector": {}}]}]),
        "more in Headroom's",
    ),
    "the API server's address is unknown": (
        network("headroom-console", ingress=[{"ports": [{"port": 8889}]}]),
        "headroom-console in Headroom's namespace admit any pod",
    ),
    "another quota": (
        quota(hard={"pods": "4", BUDGETS: "0"}),
        "no ResourceQuota without a scope",
    ),
    "a huge quota": (
        quota(hard={QUOTA: "80Gi", BUDGETS: "0"}),
        "the quota of GPU memory limits nothing: all GPUs together have 80.0 GiB",
    ),
    "a quota beyond any memory": (
        quota(hard={QUOTA: "100E", BUDGETS: "0"}),
        "the quota of GPU memory limits nothing",
    ),
    "disruption budgets": (quota(hard={QUOTA: "40Gi"}), "may create disruption budgets"),
    "one more disruption budget": (
        quota(hard={QUOTA: "40Gi", BUDGETS: "1"}),
        "may create disruption budgets",
    ),
    "no largest device": (
        setting("largest_devices", []),
        "setting largest_devices lacks resources",
    ),
    "a largest device of another resource": (
        setting("largest_devices", ["nvidia.com/gpu.shared=80Gi"]),
        "setting largest_devices lacks resources",
    ),
    "an expression of a policy": (
        expression("headroom-gates", "validations", "true"),
        "headroom-gates differs from the policy in this release of Headroom, in validations",
    ),
    "a condition of a policy": (
        expression("headroom-gpunode-spec", "matchConditions", "false"),
        "headroom-gpunode-spec differs from the policy in this release of Headroom, in "
        "matchConditions",
    ),
    "the objects of a policy": (
        policy("headroom-priority", matchConstraints={}),
        "headroom-priority differs from the policy in this release of Headroom, in "
        "matchConstraints",
    ),
    "no Pod Security": (labels(**{LEVEL: "privileged"}), "does not enforce Pod Security"),
    "exempt": (labels(**{"headroom.gpu/scheduler": "none"}), "exempts the namespace"),
    "a Role": (rights("roles", ROLE), "Role users in Headroom's namespace gives pods/portforward"),
    "a Role that gives all": (rights("roles", ALL), "Role headroom-x in Headroom's namespace"),
    "a RoleBinding to edit": (
        rights("role_bindings", binding("edit", "tenant")),
        "gives pods, pods/exec by ClusterRole edit to tenant",
    ),
    "edit everywhere": (
        rights("cluster_role_bindings", binding("edit", "tenant")),
        "gives pods, pods/exec of all namespaces by ClusterRole edit to tenant",
    ),
    "all users are admins": (
        rights("cluster_role_bindings", binding("edit", "system:authenticated")),
        "by ClusterRole edit to system:authenticated",
    ),
    "all users see all pods": (
        rights("cluster_role_bindings", binding("headroom-viewer", "system:authenticated")),
        "shows the pods of all tenants to system:authenticated",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_of_the_profile_is_a_warning(name: str) -> None:
    change, expected = CHANGES[name]
    tenancy = deepcopy(installed("multi-tenant"))
    change(tenancy)
    (finding,) = examine_tenants(tenancy)
    assert finding.weight is Weight.WARNING
    assert expected in finding.found


@pytest.mark.parametrize("scope", [{}, {"scopeSelector": {"matchExpressions": [PRIORITY]}}])
def test_a_missing_quota_of_all_pods_is_reported(scope: dict[str, Any]) -> None:
    tenancy = installed("multi-tenant")
    if scope:
        quota(**scope)(tenancy)
    else:
        without("quotas", "q")(tenancy)
    memory, budgets = examine_tenants(tenancy)
    assert "no ResourceQuota without a scope limits their GPU memory" in memory.found
    assert "may create disruption budgets" in budgets.found


def test_namespaces_without_gpus_give_only_advice() -> None:
    tenancy = replace(installed("multi-tenant"), others=["web", "team-b"])
    (finding,) = examine_tenants(tenancy)
    assert (finding.weight, finding.nodes) == (Weight.ADVICE, ("team-b", "web"))


def test_an_existing_budget_is_accepted_if_no_other_can_be_created() -> None:
    tenancy = installed("multi-tenant")
    quota(hard={QUOTA: "40Gi", BUDGETS: "3"})(tenancy)
    tenancy.quotas[0]["status"] = {"used": {BUDGETS: "3"}}  # type: ignore[index]
    assert examine_tenants(tenancy) == []


def test_suggested_device_selectors_permit_all_reported_devices() -> None:
    devices = [
        shared("a", memory_bytes=81_559 << 20, free=8),
        shared("b", memory_bytes=(24 << 30) - 5, free=4),
        shared("c", memory_bytes=10 << 30, free=1, resource="nvidia.com/mig-1g.10gb"),
    ]
    tenancy = replace(installed("multi-tenant"), devices=devices)
    setting("largest_devices", [])(tenancy)
    (finding,) = examine_tenants(tenancy)
    suggested = finding.do.rpartition(": ")[2].split(", ")
    assert suggested == ["nvidia.com/gpu=80Gi/8", "nvidia.com/mig-1g.10gb=10Gi"]
    largest = Settings(largest_devices=tuple(suggested)).rules.largest_devices
    issues = health_issues(devices, [(), (), ()], {}, largest=largest)
    assert issues == [(None, "")] * 3


def changed(policies: Any, own: str = NAMESPACE) -> list[str]:
    names = [each["metadata"]["name"] for each in policies]
    return [each for each in names if rewritten(each, named(policies, each)["spec"], own)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PLATFORMS, "elsewhere"])
def test_all_installations_have_the_shipped_policies(name: str, tmp_path: Path) -> None:
    if name == "elsewhere":
        found, own = objects(template(tmp_path, {}, "multi-tenant", "gpus")), "gpus"
    else:
        found, own = objects(overlay(DEPLOY / "overlays" / name)), NAMESPACE
    policies = [each for key, each in found.items() if key[0] == "ValidatingAdmissionPolicy"]
    assert len(policies) >= len(POLICIES)
    assert changed(policies, own) == []
    (configuration,) = (each for key, each in found.items() if key[0] == MUTATING)
    assert [rewritten_webhook(each, own) for each in configuration["webhooks"]] == [[], []]


@pytest.fixture
def team(plane: ControlPlane) -> Iterator[str]:
    metadata = {"name": "team", "labels": {LEVEL: "baseline"}}
    plane.call("POST", "/api/v1/namespaces", {"metadata": metadata})
    yield "team"
    plane.call("DELETE", "/api/v1/namespaces/team")


@pytest.fixture
def policies(plane: ControlPlane) -> Iterator[None]:
    """Create the policies without bindings, so that they exist but have no effect."""
    path, made = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies", []
    for each in installed("multi-tenant").policies:
        with suppress(ApiRefused):  # Another test has installed it.
            plane.call("POST", path, each)
            made.append(each["metadata"]["name"])
    yield
    for name in made:
        plane.call("DELETE", f"{path}/{name}")


def test_the_objects_are_read_from_the_api_server(
    plane: ControlPlane, team: str, policies: None
) -> None:
    """Only namespaces with pods that request GPUs count."""
    pods = pod(namespace=team), pod(None, container(gpus=0), namespace="web")
    spaces = namespace(team), namespace("web")
    listed = [Relisted(Namespace, spaces, 0.0), Relisted(Pod, pods, 0.0)]
    found = list_tenancy(Settings(count_vram=True), listed, str(plane.kubeconfig()))
    assert {name: found[LEVEL] for name, found in found.namespaces.items()} == {team: "baseline"}
    assert found.settings == {"count_vram": True}
    assert "default" in found.others
    assert {"web", "kube-system", NAMESPACE}.isdisjoint(found.others)
    assert changed(found.policies) == []
    assert named(found.rights.cluster_roles, "edit")
