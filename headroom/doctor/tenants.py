"""Rules of ``headroom doctor --multi-tenant``: settings without which tenants can harm each other.

docs/operate/security.md describes the profile that these rules check.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import msgspec

from headroom.contract.gpunode import Device, GPUNode
from headroom.contract.kube import Pod
from headroom.contract.watched import Relisted
from headroom.core.placement.request import asks_for_gpu
from headroom.doctor.findings import Finding, Weight
from headroom.doctor.shipped_policies import rewritten, rewritten_webhook
from headroom.doctor.tenant_quotas import examine_largest, examine_quotas
from headroom.doctor.tenant_rights import Object, Rights, examine_rights
from headroom.errors import BadSettings, NotSynced
from headroom.runtime.kube.api_errors import ApiError, ApiStatus
from headroom.runtime.kube.client import KubeApi, load_configuration
from headroom.runtime.settings.loading import load_settings
from headroom.runtime.settings.settings import Settings
from headroom.runtime.settings.settings_files import merge_texts

#: Policies that must deny, and what is possible without them.
POLICIES = {
    "headroom-priority": "any author of a pod can evict the pods of others by PriorityClass "
    "headroom-critical",
    "headroom-other-schedulers": "GPU pods of other schedulers, or with nodeName, take memory that "
    "is reserved for others",
    "headroom-bindings": "users with all rights in a namespace bind GPU pods themselves, and take "
    "memory that is reserved for others",
    "headroom-pod-annotations": "authors can change the reservations of their pods",
    "headroom-gates": "authors can start pods past their gates",
    "headroom-agent-own-node": "root on one GPU node can report for all nodes",
    "headroom-gate-port": "Services of tenants can answer the gates of others",
    "headroom-static-pods": "root on one GPU node can replace the webhook and the console",
}
#: Maps each part to the value of the label app.kubernetes.io/component on its pods. A NetworkPolicy
#: with the name of the part protects these pods.
NETWORK_POLICIES = {
    "headroom-agent": "agent",
    "headroom-console": "console",
    "headroom-scheduler": "extender",
    "headroom-webhook": "webhook",
}
#: Maps each setting of the profile to its value, and to what is possible with another value.
SETTINGS: Mapping[str, tuple[object, str]] = {
    "mode": ("enforce", "nothing is rejected or evicted"),
    "count_vram": (True, "quotas do not count GPU memory"),
    "on_overuse": ("evict", "pods keep memory that they did not reserve"),
    "overuse_opt_out": (False, "authors exempt their pods from eviction"),
    "metrics_access": ("authorized", "any pod reads the names and the use of all tenants' pods"),
}
#: Prefixes of namespaces that belong to the cluster, not to a tenant.
_OF_CLUSTER = ("kube-", "openshift-")
_WEBHOOK, _PODS = "headroom", "pods.headroom.gpu"
_OPT_OUT = "headroom.gpu/scheduler"
_ENFORCE = "pod-security.kubernetes.io/enforce"
_LEVELS = ("baseline", "restricted")
_PROFILE = "install the profile multi-tenant (docs/operate/security.md)"
#: The profile observes at first, like every new installation.
_ENFORCE_MODE = "set mode: enforce (docs/get-started/rollout.md)"
#: Lists that the rules read, by the path below which the API server serves them.
_ADMISSION = "/apis/admissionregistration.k8s.io/v1"
_RBAC = "/apis/rbac.authorization.k8s.io/v1"


@dataclass(frozen=True, slots=True)
class Tenancy:
    """The objects that the rules read, decoded from JSON."""

    policies: Sequence[Object]
    bindings: Sequence[Object]
    #: MutatingWebhookConfigurations.
    webhooks: Sequence[Object]
    #: The NetworkPolicies in Headroom's namespace.
    network_policies: Sequence[Object]
    quotas: Sequence[Object]
    rights: Rights
    #: The labels of the namespaces with pods that request GPUs, by namespace.
    namespaces: Mapping[str, Mapping[str, str]]
    #: Settings that differ from their defaults, by name.
    settings: Mapping[str, object]
    #: All other namespaces, except Headroom's namespace and the cluster's own namespaces.
    others: Collection[str] = ()
    #: The devices that agents report.
    devices: Sequence[Device] = ()


def examine_tenants(tenancy: Tenancy, namespace: str = "headroom-system") -> list[Finding]:
    """Return a finding for each missing protection of tenants from each other.

    ``namespace`` is Headroom's own namespace.
    """
    return [
        *_policies(tenancy, namespace),
        *_webhook(tenancy, namespace),
        *_settings(tenancy),
        *_network(tenancy),
        *examine_quotas(tenancy.quotas, tenancy.namespaces, tenancy.others, tenancy.devices),
        *examine_largest(tenancy.devices, tenancy.settings.get("largest_devices")),
        *_namespaces(tenancy),
        *examine_rights(tenancy.rights, namespace),
    ]


def _policies(tenancy: Tenancy, namespace: str) -> Iterator[Finding]:
    policies = {each["metadata"]["name"]: each["spec"] for each in tenancy.policies}
    bound: dict[str, list[Object]] = {}
    for each in tenancy.bindings:
        bound.setdefault(each["spec"].get("policyName", ""), []).append(each["spec"])
    for name, harm in POLICIES.items():
        if why := _idle(policies.get(name), bound.get(name, ())):
            yield Finding(
                Weight.WARNING, (), f"ValidatingAdmissionPolicy {name} {why}: {harm}", _PROFILE
            )
    for name, spec in sorted(policies.items()):
        if parts := rewritten(name, spec, namespace):
            yield Finding(
                Weight.WARNING,
                (),
                f"ValidatingAdmissionPolicy {name} differs from the policy in this release of "
                f"Headroom, in {', '.join(parts)}: it may admit what it should reject",
                "install the release again, with the same version as this command",
            )


def _idle(policy: Object | None, bindings: Sequence[Object]) -> str:
    """Return why a policy does not deny everywhere, or "" if it does."""
    if policy is None:
        return "does not exist"
    denying = [each for each in bindings if "Deny" in (each.get("validationActions") or ())]
    if not denying:
        return "does not deny" if bindings else "has no binding"
    if all(_is_narrow(each.get("matchResources")) for each in denying):
        return "denies only what its binding selects"
    return ""


def _is_narrow(resources: Object | None) -> bool:
    """Return whether a binding's matchResources limit the policy to some objects."""
    narrowing = ("namespaceSelector", "objectSelector", "resourceRules", "excludeResourceRules")
    return any((resources or {}).get(each) for each in narrowing)


def _webhook(tenancy: Tenancy, namespace: str) -> Iterator[Finding]:
    called = [
        each
        for configuration in tenancy.webhooks
        if configuration["metadata"]["name"] == _WEBHOOK
        for each in configuration.get("webhooks") or ()
        if each["name"] == _PODS
    ]
    if not called:
        why = "does not exist"
    elif parts := rewritten_webhook(called[0], namespace):
        why = f"differs from the webhook in this release of Headroom, in {', '.join(parts)}"
    else:
        return
    found = (
        f"webhook {_PODS} of MutatingWebhookConfiguration {_WEBHOOK} {why}: GPU pods can be "
        "created that no quota counts and Headroom does not place"
    )
    yield Finding(Weight.WARNING, (), found, _PROFILE)


def _settings(tenancy: Tenancy) -> Iterator[Finding]:
    defaults = load_settings(None, {}).model_dump(mode="json")
    for name, (safe, harm) in SETTINGS.items():
        if (value := tenancy.settings.get(name, defaults[name])) != safe:
            shown = str(value).lower() if isinstance(value, bool) else f"{value}"
            found = f"setting {name} is {shown:.100}: {harm}"
            yield Finding(Weight.WARNING, (), found, _ENFORCE_MODE if name == "mode" else _PROFILE)


def _network(tenancy: Tenancy) -> Iterator[Finding]:
    selected = {
        each["metadata"]["name"]: (each["spec"].get("podSelector") or {}).get("matchLabels") or {}
        for each in tenancy.network_policies
    }
    missing = []
    for name, component in NETWORK_POLICIES.items():
        labels = {"app.kubernetes.io/name": "headroom", "app.kubernetes.io/component": component}
        if name not in selected or not selected[name].items() <= labels.items():
            missing.append(name)
    if missing:
        found = f"NetworkPolicies {', '.join(missing)} do not exist, or do not select the part's "
        yield Finding(Weight.WARNING, (), f"{found}pods: any pod reaches these parts", _PROFILE)
    open_to_all = sorted(
        name
        for each in tenancy.network_policies
        # Gates are in all namespaces.
        if (name := each["metadata"]["name"]) != "headroom-agent" and _admits_all(each["spec"])
    )
    if open_to_all:
        yield Finding(
            Weight.WARNING,
            (),
            f"NetworkPolicies {', '.join(open_to_all)} in Headroom's namespace admit any pod: a "
            "pod that reaches the webhook can read the defaults and recommendations of all "
            "namespaces",
            "set networkPolicies.apiServerCidrs of the chart to the addresses of the API server, "
            "and delete other policies",
        )


def _admits_all(spec: Object) -> bool:
    """Return whether the policy admits the pods of every namespace, or every address."""
    for rule in spec.get("ingress") or ():
        peers = rule.get("from")
        if not peers or {"namespaceSelector": {}} in peers:
            return True
        if any((each.get("ipBlock") or {}).get("cidr") in ("0.0.0.0/0", "::/0") for each in peers):
            return True
    return False


def _namespaces(tenancy: Tenancy) -> Iterator[Finding]:
    exempt = sorted(
        name for name, labels in tenancy.namespaces.items() if labels.get(_OPT_OUT) == "none"
    )
    if exempt:
        yield Finding(
            Weight.WARNING,
            tuple(exempt),
            f"pods request GPUs, and label {_OPT_OUT}: none exempts the namespace from Headroom",
            f"kubectl label namespace NAMESPACE {_OPT_OUT}-",
        )
    privileged = sorted(
        name for name, labels in tenancy.namespaces.items() if labels.get(_ENFORCE) not in _LEVELS
    )
    if privileged:
        yield Finding(
            Weight.WARNING,
            tuple(privileged),
            "pods request GPUs, and the namespace does not enforce Pod Security: a privileged pod "
            "is root on its node, with the tokens of all pods there",
            f"kubectl label namespace NAMESPACE {_ENFORCE}=baseline",
        )


def list_tenancy(
    settings: Settings,
    listed: Sequence[Relisted],
    kubeconfig: str | None = None,
    context: str | None = None,
) -> Tenancy:
    """List the objects of ``Tenancy``; ``listed`` is a result of ``list_cluster``.

    Raises ``BadSettings`` if no cluster is configured, and ``NotSynced`` if the API server does not
    answer or rejects a call.
    """
    using = {
        each.metadata.namespace
        for kind in listed
        for each in kind.objects
        if isinstance(each, Pod) and asks_for_gpu(each, settings.rules)
    }
    hint = "the option --multi-tenant examines a cluster"
    own = settings.agent_namespace
    try:
        with closing(KubeApi(load_configuration(kubeconfig, context, hint))) as api:
            rights = Rights(
                _items(api, f"{_RBAC}/namespaces/{own}/roles"),
                _items(api, f"{_RBAC}/namespaces/{own}/rolebindings"),
                _items(api, f"{_RBAC}/clusterroles"),
                _items(api, f"{_RBAC}/clusterrolebindings"),
            )
            namespaces = {
                each["metadata"]["name"]: each["metadata"].get("labels") or {}
                for each in _items(api, "/api/v1/namespaces")
            }
            return Tenancy(
                _items(api, f"{_ADMISSION}/validatingadmissionpolicies"),
                _items(api, f"{_ADMISSION}/validatingadmissionpolicybindings"),
                _items(api, f"{_ADMISSION}/mutatingwebhookconfigurations"),
                _items(api, f"/apis/networking.k8s.io/v1/namespaces/{own}/networkpolicies"),
                _items(api, "/api/v1/resourcequotas"),
                rights,
                {name: namespaces.get(name, {}) for name in using},
                _read_settings(api, own, settings),
                [
                    name
                    for name in namespaces.keys() - using - {own}
                    if not name.startswith(_OF_CLUSTER)
                ],
                [
                    device
                    for kind in listed
                    for each in kind.objects
                    if isinstance(each, GPUNode) and each.status
                    for device in each.status.devices
                ],
            )
    except ApiError as err:
        raise NotSynced(
            f"the cluster cannot be examined: {err}; use a kubeconfig that may also list "
            "validatingadmissionpolicies and their bindings, mutatingwebhookconfigurations, "
            "networkpolicies, resourcequotas, and roles and bindings of RBAC"
        ) from err


def _read_settings(api: KubeApi, namespace: str, given: Settings) -> Mapping[str, object]:
    """Return the settings in ConfigMap headroom-config, or the settings of ``--config`` if it does
    not exist."""
    try:
        answer = api.call("GET", f"/api/v1/namespaces/{namespace}/configmaps/headroom-config")
    except ApiStatus as err:
        if err.status != 404:
            raise
        return given.model_dump(mode="json", exclude_unset=True)
    try:
        return merge_texts(msgspec.json.decode(answer).get("data") or {})
    except BadSettings:
        return {}


def _items(api: KubeApi, path: str) -> list[Mapping[str, Any]]:
    items: list[Mapping[str, Any]] = msgspec.json.decode(api.call("GET", path))["items"]
    return items
