"""Finds rights by which users other than administrators can get into Headroom's pods.

Such rights come from Roles in Headroom's namespace, from RoleBindings there to a ClusterRole such
as edit, and from ClusterRoleBindings. The check ignores Kubernetes' own subjects and holders of
cluster-admin. It also ignores service accounts with rights in all namespaces, because they usually
belong to components of the cluster."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headroom.doctor.findings import Finding, Weight

#: For each resource, the verbs that give access to the ports or the token of any pod of a
#: namespace.
INSIDE: Mapping[str, frozenset[str]] = {
    "pods/portforward": frozenset({"create", "get"}),
    "pods/exec": frozenset({"create", "get"}),
    "pods/attach": frozenset({"create", "get"}),
    "pods/ephemeralcontainers": frozenset({"update", "patch"}),
    "pods": frozenset({"create"}),
    "secrets": frozenset({"get", "list", "watch"}),
    "serviceaccounts/token": frozenset({"create"}),
}
#: Groups that every user or every pod belongs to.
ALL_USERS = ("system:authenticated", "system:unauthenticated", "system:serviceaccounts")
_ADMIN, _VIEWER = "cluster-admin", "headroom-viewer"
_TO_DO = "give it to administrators only, or delete it"

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rights:
    """RBAC objects, decoded from JSON. Roles and RoleBindings are from one namespace."""

    roles: Sequence[Object] = ()
    role_bindings: Sequence[Object] = ()
    cluster_roles: Sequence[Object] = ()
    cluster_role_bindings: Sequence[Object] = ()


def examine_rights(rights: Rights, namespace: str) -> Iterator[Finding]:
    """Yield one finding for each role or binding. ``namespace`` is Headroom's own namespace."""
    own = {each["metadata"]["name"]: each for each in rights.roles}
    of_cluster = {each["metadata"]["name"]: each for each in rights.cluster_roles}
    for name, role in own.items():
        if given := _given(role):
            found = f"Role {name} in Headroom's namespace gives {_listed(given)}"
            yield _finding(f"{found}: its holders reach all ports of extenders and agents")
    for binding in rights.role_bindings:
        ref = binding["roleRef"]
        users = [] if ref["kind"] == "Role" else _users(binding, namespace)
        if users and (given := _given(of_cluster.get(ref["name"], {}))):
            yield _finding(
                f"RoleBinding {binding['metadata']['name']} in Headroom's namespace gives "
                f"{_listed(given)} by ClusterRole {ref['name']} to {_listed(users)}"
            )
    for binding in rights.cluster_role_bindings:
        name = binding["roleRef"]["name"]
        users = _users(binding, namespace, accounts=False)
        if not users or (name == _ADMIN and not set(users).intersection(ALL_USERS)):
            continue
        where = f"ClusterRoleBinding {binding['metadata']['name']}"
        if name == _VIEWER and (all_users := sorted(set(users).intersection(ALL_USERS))):
            found = f"{where} shows the pods of all tenants to {_listed(all_users)}"
            yield Finding(Weight.WARNING, (), found, "bind headroom-viewer to administrators only")
        elif given := _given(of_cluster.get(name, {})):
            yield _finding(
                f"{where} gives {_listed(given)} of all namespaces by ClusterRole {name} to "
                f"{_listed(users)}"
            )


def _finding(found: str) -> Finding:
    return Finding(Weight.WARNING, (), found, _TO_DO)


def _given(role: Object) -> list[str]:
    """Return the permissions in ``INSIDE`` that a role gives, under any name."""
    given: set[str] = set()
    for rule in role.get("rules") or ():
        groups, verbs = rule.get("apiGroups") or (), set(rule.get("verbs") or ())
        if not set(groups).intersection(("", "*")) or rule.get("resourceNames"):
            continue
        for resource, needed in INSIDE.items():
            names = {resource, "*", f"*/{resource.partition('/')[2] or '-'}"}
            if names.intersection(rule.get("resources") or ()) and (verbs & (needed | {"*"})):
                given.add(resource)
    return sorted(given)


def _users(binding: Object, namespace: str, accounts: bool = True) -> list[str]:
    """Return the subjects that belong neither to Kubernetes nor to Headroom."""
    users = []
    for subject in binding.get("subjects") or ():
        kind, name = subject["kind"], subject["name"]
        if kind == "ServiceAccount":
            if accounts and subject.get("namespace") not in (namespace, "kube-system"):
                users.append(f"{subject.get('namespace')}/{name}")
        elif name in ALL_USERS or not name.startswith("system:"):
            users.append(name)
    return sorted(users)


def _listed(names: Sequence[str]) -> str:
    shown, more = names[:5], len(names) - 5
    return ", ".join(f"{each:.100}" for each in shown) + (f" and {more} more" if more > 0 else "")
