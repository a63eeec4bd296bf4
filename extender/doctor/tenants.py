"""Rules of ``headroom doctor --multi-tenant``: settings without which tenants can harm each other.

docs/operate/security.md describes the profile that these rules check.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import msgspec

from contract.kube import Namespace, Pod
from extender.config.settings import Settings
from extender.doctor.findings import Finding, Weight
from extender.errors import NotSynced
from extender.kube.api_errors import ApiError
from extender.kube.client import KubeApi, load_configuration
from extender.placement.request import asks_for_gpu
from extender.state.changes import Relisted

#: Bindings of policies that must deny, and what is possible without them.
BINDINGS = {
    "headroom-priority": "any author of a pod can evict the pods of others by PriorityClass "
    "headroom-critical",
    "headroom-other-schedulers": "GPU pods of other schedulers, or with nodeName, take memory that "
    "is reserved for others",
    "headroom-pod-annotations": "authors can change the reservations of their pods",
    "headroom-agent-own-node": "root on one GPU node can report for all nodes",
}
#: Parts that a NetworkPolicy of the same name protects.
NETWORK_POLICIES = ("headroom-agent", "headroom-console", "headroom-scheduler", "headroom-webhook")
#: The name by which quotas count GPU memory.
QUOTA = "requests.headroom.gpu/vram-bytes"
_ENFORCE = "pod-security.kubernetes.io/enforce"
_LEVELS = ("baseline", "restricted")
#: Subresources of pods that reach the ports, or the token, of any pod of a namespace.
_INSIDE = ("pods/portforward", "pods/exec", "pods/attach", "pods/ephemeralcontainers")
_PROFILE = "install the profile multi-tenant (docs/operate/security.md)"


@dataclass(frozen=True, slots=True)
class Tenancy:
    """The objects that the rules read, decoded from JSON."""

    bindings: Sequence[Mapping[str, Any]]
    network_policies: Sequence[Mapping[str, Any]]
    quotas: Sequence[Mapping[str, Any]]
    #: Roles of Headroom's namespace.
    roles: Sequence[Mapping[str, Any]]
    #: Namespaces with pods that request GPUs -> their labels.
    namespaces: Mapping[str, Mapping[str, str]]


def examine_tenants(tenancy: Tenancy) -> list[Finding]:
    """Return what is missing so that tenants need not trust each other."""
    return [*_policies(tenancy), *_network(tenancy), *_namespaces(tenancy), *_roles(tenancy)]


def _policies(tenancy: Tenancy) -> Iterator[Finding]:
    actions = {
        each["metadata"]["name"]: each["spec"].get("validationActions") or ()
        for each in tenancy.bindings
    }
    for name, harm in BINDINGS.items():
        if "Deny" not in actions.get(name, ()):
            state = "does not deny" if name in actions else "does not exist"
            found = f"ValidatingAdmissionPolicyBinding {name} {state}: {harm}"
            yield Finding(Weight.WARNING, (), found, _PROFILE)


def _network(tenancy: Tenancy) -> Iterator[Finding]:
    existing = {each["metadata"]["name"] for each in tenancy.network_policies}
    if missing := [name for name in NETWORK_POLICIES if name not in existing]:
        found = f"NetworkPolicies {', '.join(missing)} do not exist: any pod reaches these parts"
        yield Finding(Weight.WARNING, (), found, _PROFILE)


def _namespaces(tenancy: Tenancy) -> Iterator[Finding]:
    limited = {
        each["metadata"]["namespace"]
        for each in tenancy.quotas
        if QUOTA in (each.get("spec", {}).get("hard") or {})
    }
    if unlimited := sorted(set(tenancy.namespaces) - limited):
        yield Finding(
            Weight.WARNING,
            tuple(unlimited),
            "pods request GPUs, and no ResourceQuota limits their GPU memory",
            f"kubectl create quota gpu-memory -n NAMESPACE --hard={QUOTA}=40Gi",
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


def _roles(tenancy: Tenancy) -> Iterator[Finding]:
    for role in tenancy.roles:
        resources = {
            resource for rule in role.get("rules") or () for resource in rule.get("resources") or ()
        }
        if given := sorted(resources.intersection((*_INSIDE, "*"))):
            yield Finding(
                Weight.WARNING,
                (),
                f"Role {role['metadata']['name']} in Headroom's namespace gives "
                f"{', '.join(given)}: its holders reach all ports of extenders and agents",
                "give it to administrators only, or delete it",
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
    objects = [each for kind in listed for each in kind.objects]
    labels = {
        each.metadata.name: each.metadata.labels or {}
        for each in objects
        if isinstance(each, Namespace)
    }
    using = {
        each.metadata.namespace
        for each in objects
        if isinstance(each, Pod) and asks_for_gpu(each, settings.rules)
    }
    namespaces = {name: labels.get(name, {}) for name in using}
    hint = "the option --multi-tenant examines a cluster"
    namespace = settings.agent_namespace
    try:
        with closing(KubeApi(load_configuration(kubeconfig, context, hint))) as api:
            return Tenancy(
                _items(
                    api,
                    "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings",
                ),
                _items(api, f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"),
                _items(api, "/api/v1/resourcequotas"),
                _items(api, f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles"),
                namespaces,
            )
    except ApiError as err:
        raise NotSynced(
            f"the cluster cannot be examined: {err}; use a kubeconfig that may also list "
            "validatingadmissionpolicybindings, networkpolicies, resourcequotas and roles"
        ) from err


def _items(api: KubeApi, path: str) -> list[Mapping[str, Any]]:
    items: list[Mapping[str, Any]] = msgspec.json.decode(api.call("GET", path))["items"]
    return items
