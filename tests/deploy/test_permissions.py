"""Checks that roles grant exactly the permissions that the code uses, and that each rule has a
reason.

The test finds every place in the source that names a method or a path of the API, or that sets a
timeout for a call of the kubernetes package. The permissions that each place needs are listed
below. Together, they must equal the permissions of the roles. Therefore the test finds a missing
permission before a cluster rejects a call, and it finds unused permissions.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headroom.recorder.owners import RESOURCES
from tests.controlplane import ROOT
from tests.deploy.rendered import DEPLOY, NAMESPACE

pytestmark = pytest.mark.slow

#: Files that contain roles.
FILES = (
    DEPLOY / "base/rbac.yaml",
    DEPLOY / "base/certificates.yaml",
    DEPLOY / "components/in-tree-mirror/rbac.yaml",
    DEPLOY / "components/device-taints/device-taints.yaml",
    DEPLOY / "components/monitors/rbac.yaml",
)
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"}
_VERBS = {"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"}

#: A permission: API group, resource with its subresource, verb, and a namespace or "" for all
#: namespaces.
Right = tuple[str, str, str, str]


def rights(group: str, resource: str, *verbs: str, where: str = "") -> set[Right]:
    return {(group, resource, verb, where) for verb in verbs}


GPUNODES = "headroom.gpu", "gpunodes"
WEBHOOKS = "admissionregistration.k8s.io"
LEASES = "coordination.k8s.io", "leases"
PROFILES = "headroom.gpu", "vramprofiles"
WATCHED = (
    rights("", "nodes", "list", "watch")
    | rights("", "namespaces", "list", "watch")
    | rights("", "pods", "list", "watch")
    | rights(*GPUNODES, "list", "watch")
    | rights(*LEASES, "list", "watch", where=NAMESPACE)
    | rights("resource.k8s.io", "resourceslices", "list", "watch")
    | rights("resource.k8s.io", "deviceclasses", "list", "watch")
    | rights("resource.k8s.io", "resourceclaims", "list", "watch")
    | rights("policy", "poddisruptionbudgets", "list", "watch")
)
TOKEN_REVIEWS = rights("authentication.k8s.io", "tokenreviews", "create")
CSRS = rights("certificates.k8s.io", "certificatesigningrequests", "get")
ACCESS_REVIEWS = rights("authorization.k8s.io", "subjectaccessreviews", "create")
#: Permissions of components that authorize the readers of their metrics
#: (headroom/runtime/debug_port.py).
REVIEWS: dict[str, set[Right]] = {
    "headroom.runtime.server.reviews:KubeReviews.authenticate": TOKEN_REVIEWS,
    "headroom.runtime.server.reviews:KubeReviews.authorize": ACCESS_REVIEWS,
}

#: Maps each module and function to the permissions that it needs.
EXTENDER: dict[str, set[Right]] = {
    **REVIEWS,
    "headroom.runtime.kube.client:KubeApi.stream": set(),  # See its callers.
    "headroom.runtime.kube.client:KubeApi._list": set(),
    # Server-side apply needs create and patch, because it creates missing objects.
    "extender.event_recorder:KubeEvents._write": rights("", "events", "create", "patch"),
    # An extender has no sessions of users, so it never calls this function.
    "headroom.runtime.server.reviews:KubeReviews.creator": set(),
    "extender.ledger.kube_store:KubernetesEvictor._evict": rights("", "pods/eviction", "create"),
    "extender.ledger.kube_store:": set(),
    "extender.ledger.kube_store:_pod_path": set(),
    "extender.ledger.kube_store:KubernetesStore.__init__": set(),
    "extender.ledger.kube_store:KubernetesStore.read_gpunode": rights(*GPUNODES, "get"),
    "extender.ledger.kube_store:KubernetesStore.create_gpunode": rights(*GPUNODES, "create"),
    "extender.ledger.kube_store:KubernetesStore.write_spec": rights(*GPUNODES, "patch"),
    "extender.ledger.kube_store:KubernetesStore.remove_finalizer": rights(*GPUNODES, "patch"),
    "extender.ledger.kube_store:KubernetesStore.read_pod": rights("", "pods", "get"),
    "extender.ledger.kube_store:KubernetesStore.read_heartbeat_version": (
        rights(*LEASES, "get", where=NAMESPACE)
    ),
    "extender.ledger.kube_store:KubernetesStore.list_pods": rights("", "pods", "list"),
    "extender.ledger.kube_store:KubernetesStore.list_bound": rights("", "pods", "list"),
    "extender.ledger.kube_store:KubernetesStore.bind": rights("", "pods/binding", "create"),
    "extender.ledger.kube_store:KubernetesStore.touch_pod": rights("", "pods", "patch"),
    "extender.groups.reader:KubeGroups._read": rights("", "pods", "list"),
    "extender.groups.reader:KubeGroups._minimum": (
        rights("scheduling.k8s.io", "podgroups", "get")
        | rights("scheduling.x-k8s.io", "podgroups", "get")
    ),
    "headroom.runtime.kube.resources:_dra": set(),  # See its callers.
    "headroom.runtime.kube.resources:watched_kinds": WATCHED,
}
CONSOLE: dict[str, set[Right]] = {
    **REVIEWS,
    "headroom.runtime.kube.resources:_dra": set(),  # See its callers.
    "headroom.console.quota_reader:KubeQuotas.of": rights("", "resourcequotas", "list"),
    "headroom.console.node_pods:NodePods.on": rights("", "pods", "list"),
    "headroom.runtime.server.reviews:KubeReviews.creator": CSRS,
    "headroom.runtime.kube.resources:watched_kinds": WATCHED,
    "headroom.runtime.kube.resources:profile_kind": rights(*PROFILES, "list", "watch"),
}
#: Permissions of the webhook. ``serve_webhook`` names no path, because it watches three of the
#: kinds in ``watched_kinds``.
WEBHOOK: set[Right] = (
    rights("", "nodes", "list", "watch")
    | rights("", "namespaces", "list", "watch")
    | rights(*GPUNODES, "list", "watch")
)
ELECTION: dict[str, set[Right]] = {
    "headroom.runtime.kube.election:Election.__init__": set(),
    "headroom.runtime.kube.election:Election._read": rights(*LEASES, "get", where=NAMESPACE),
    "headroom.runtime.kube.election:Election.attempt": (
        rights(*LEASES, "create", "update", where=NAMESPACE)
    ),
    "headroom.runtime.kube.election:Election.release": rights(*LEASES, "update", where=NAMESPACE),
}
RECORDER: dict[str, set[Right]] = {
    **REVIEWS,
    **ELECTION,
    # The recorder watches two of the kinds in ``watched_kinds``.
    "headroom.runtime.kube.resources:watched_kinds": (
        rights("", "pods", "list", "watch") | rights(*GPUNODES, "list", "watch")
    ),
    # The path depends on the kind of the pod's controller.
    "headroom.recorder.kube_profiles:OwnerReader._read": {
        right
        for (group, _), resource in RESOURCES.items()
        for right in rights(group, resource, "get")
    },
    "headroom.recorder.kube_profiles:ProfileStore.list": rights(*PROFILES, "list"),
    "headroom.recorder.kube_profiles:ProfileStore.write": rights(*PROFILES, "create", "update"),
    "headroom.recorder.kube_profiles:ProfileStore.read": rights(*PROFILES, "get"),
    "headroom.recorder.kube_profiles:ProfileStore.delete": rights(*PROFILES, "delete"),
    "headroom.recorder.kube_profiles:ProfileStore._folder": set(),  # See its callers.
}
RULES = "resource.k8s.io", "devicetaintrules"
DEVICE_TAINTS: dict[str, set[Right]] = {
    **REVIEWS,
    **ELECTION,
    # This component watches four of the kinds in ``watched_kinds``.
    "headroom.runtime.kube.resources:watched_kinds": (
        rights(*GPUNODES, "list", "watch")
        | rights(*LEASES, "list", "watch", where=NAMESPACE)
        | rights("resource.k8s.io", "resourceslices", "list", "watch")
        | rights("resource.k8s.io", "resourceclaims", "list", "watch")
    ),
    "headroom.runtime.kube.resources:_dra": set(),  # See its callers.
    "headroom.dra_taints.taint_rules:TaintRules.create": rights(*RULES, "create"),
    "headroom.dra_taints.taint_rules:TaintRules.delete": rights(*RULES, "delete"),
    "headroom.dra_taints.taint_rules:TaintRules._path": rights(
        *RULES, "list"
    ),  # See also its callers.
    # Every user may read which resources the API server serves.
    "headroom.dra_taints.taint_rules:TaintRules._served": set(),
    "headroom.dra_taints.taint_rules:TaintRules._owned_by": rights(
        WEBHOOKS, "validatingadmissionpolicies", "get"
    ),
}
AGENT: dict[str, set[Right]] = {
    "agent.probes.gpunode_watch:GPUNodeWatch.__init__": rights(*GPUNODES, "watch"),
    "agent.kube_client:request": set(),  # See its callers.
    "agent.kube_client:watch_lines": set(),
    "agent.metrics_access:KubeReview._create": TOKEN_REVIEWS | ACCESS_REVIEWS,
    "agent.kube_publisher:KubernetesPublisher.__init__": set(),
    "agent.kube_publisher:KubernetesPublisher.report": rights(
        "headroom.gpu", "gpunodes/status", "patch"
    ),
    "agent.kube_publisher:KubernetesPublisher.gpunode": rights(*GPUNODES, "get"),
    "agent.kube_publisher:KubernetesPublisher._read": rights(*GPUNODES, "get"),
    "agent.kube_publisher:KubernetesPublisher.heartbeat": (
        rights(*LEASES, "create", "patch", where=NAMESPACE)
    ),
    "agent.probes.node_probe:NodeApi._labels": rights("", "nodes", "get"),
    # The role does not grant this permission. The agent reports that it is missing
    # (agent/probes/node_probe.py).
    "agent.probes.node_probe:NodeApi._configz": set(),
    "agent.probes.node_probe:NodeApi._mirror": set(),
    "agent.probes.node_probe:NodeApi._get": set(),
}
CERTS: dict[str, set[Right]] = {
    "headroom.certs.cluster_secrets:Certificates._read": rights(
        "", "secrets", "get", where=NAMESPACE
    ),
    "headroom.certs.cluster_secrets:Certificates._write": (
        rights("", "secrets", "create", "patch", where=NAMESPACE)
    ),
    "headroom.certs.cluster_secrets:Certificates._trust_in_webhooks": (
        rights(WEBHOOKS, "validatingwebhookconfigurations", "get", "patch")
        | rights(WEBHOOKS, "mutatingwebhookconfigurations", "get", "patch")
    ),
}
#: Permissions of the renewal job, which writes only existing Secrets.
CERTS_RENEWAL: dict[str, set[Right]] = {
    "headroom.certs.cluster_secrets:Certificates._read": rights(
        "", "secrets", "get", where=NAMESPACE
    ),
    "headroom.certs.cluster_secrets:Certificates._write": (
        rights("", "secrets", "patch", where=NAMESPACE)
    ),
}
MIRROR: dict[str, set[Right]] = {
    "extender.extended_resource:ExtendedResourceController._write_one": rights(
        "", "nodes/status", "patch"
    ),
}
ROLES = {
    "headroom-extender": EXTENDER,
    "headroom-console": CONSOLE,
    "headroom-webhook": {
        **REVIEWS,
        "headroom.runtime.kube.resources:watched_kinds": WEBHOOK,
        "headroom.runtime.kube.resources:profile_kind": rights(*PROFILES, "list", "watch"),
    },
    "headroom-recorder": RECORDER,
    "headroom-device-taints": DEVICE_TAINTS,
    "headroom-agent": AGENT,
    "headroom-certs": CERTS,
    "headroom-certs-renewal": CERTS_RENEWAL,
    "headroom-extender-mirror": MIRROR,
}
#: Functions that do not call the cluster, or that use the permissions of the command's user.
OTHERS = {
    "headroom.contract.console:",  # The path that the console and the plugin use.
    "headroom.planner.prometheus_source:read_prometheus",
    "headroom.webhook.endpoints:webhook_app",
    "extender.scheduler.server:",  # It names methods in the header Allow of a response.
    "extender.scheduler.server:VerbsApp.__call__",
    "headroom.runtime.debug_port:probes_app",
    "headroom.runtime.server.problem_details:_Edge.__call__",  # It answers HEAD by GET.
    "headroom.console.feed.journal_follower:_Stream._read",
    "headroom.doctor.collect:list_environment",  # headroom doctor
    "headroom.doctor.tenants:list_tenancy",  # headroom doctor
    "headroom.doctor.tenants:",  # The paths of its lists.
    "headroom.doctor.tenants:_items",  # headroom doctor
    "headroom.doctor.tenants:_read_settings",  # headroom doctor
    "agent.probes.dcgm:Exporter._scrape",
    "agent.gate_client:ask",
    "agent.http_server:HttpPort.respond",
}


@functools.cache
def places() -> set[str]:
    """Return every module and function that names an HTTP method or an API path, or passes a
    ``_request_timeout``. Skip ``kubectl headroom``, which has the permissions of its user.
    """
    found: set[str] = set()
    for package in ("extender", "agent", "headroom"):
        for file in sorted((ROOT / package).rglob("*.py")):
            if ROOT / "headroom/kubectl" in file.parents:
                continue
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            found |= {f"{module}:{name}" for name in _named(ast.parse(file.read_text()), "")}
    return found


def _named(node: ast.AST, name: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inner = name
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{name}.{child.name}".lstrip(".")
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            text = child.value
            if text in _METHODS or text.startswith(("/api/", "/apis/")):
                yield name
        if isinstance(child, ast.keyword) and child.arg == "_request_timeout":
            yield name
        yield from _named(child, inner)


def roles() -> Iterator[dict[str, Any]]:
    for file in FILES:
        for manifest in yaml.safe_load_all(file.read_text()):
            if manifest["kind"] in ("Role", "ClusterRole"):
                yield manifest


def given(role: str) -> set[Right]:
    """Return the permissions of the roles with this name."""
    found: set[Right] = set()
    for manifest in roles():
        if manifest["metadata"]["name"] != role:
            continue
        where = manifest["metadata"].get("namespace", "")
        for rule in manifest["rules"]:
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    found |= rights(group, resource, *rule["verbs"], where=where)
    return found


def test_every_place_that_calls_the_api_server_is_listed_here() -> None:
    known = OTHERS.union(*ROLES.values())
    unknown = places() - known
    assert not unknown, (
        f"{', '.join(sorted(unknown))}: list its calls of the API server here, as in "
        '"extender.ledger.kube_store:KubernetesStore.bind": rights("", "pods/binding", "create")'
    )
    gone = known - places()
    assert not gone, f"no longer in the code: {', '.join(sorted(gone))}"


@pytest.mark.parametrize("role", ROLES)
def test_a_role_grants_exactly_the_rights_that_the_code_uses(role: str) -> None:
    used = set().union(*ROLES[role].values())
    assert used - given(role) == set(), "used, and not given"
    assert given(role) - used == set(), "given, and not used"


def test_no_role_has_a_wildcard_or_rights_to_secrets_and_roles_of_others() -> None:
    for manifest in roles():
        for rule in manifest["rules"]:
            name = manifest["metadata"]["name"]
            assert "*" not in str(rule.get("verbs", "")), name
            assert "*" not in str(rule.get("resources", "")), name
            assert not {"roles", "clusterroles", "serviceaccounts"} & set(rule.get("resources", ()))
            if "secrets" in rule.get("resources", ()):
                assert name in ("headroom-certs", "headroom-certs-renewal")
                assert manifest["kind"] == "Role"
                assert rule["verbs"] == ["create"] or rule["resourceNames"]


def rules(file: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield each rule of a role with its line number and the comment directly above the rule."""
    lines = file.read_text().splitlines()
    for i, line in enumerate(lines):
        if not re.match(r"  - \{?(apiGroups|nonResourceURLs):", line):
            continue
        above = i
        while lines[above - 1].startswith("  #"):
            above -= 1
        below = i + 1
        while below < len(lines) and lines[below].startswith("    "):
            below += 1
        (rule,) = yaml.safe_load("\n".join(lines[i:below]))
        yield i + 1, "\n".join(each.strip() for each in lines[above:i]), rule


def test_every_verb_has_its_reason() -> None:
    found = [(file, *each) for file in FILES for each in rules(file)]
    assert [rule for *_, rule in found] == [rule for role in roles() for rule in role["rules"]]
    for file, line, comment, rule in found:
        explained = {
            verb
            for verbs in re.findall(r"^# ([a-z]+(?:, [a-z]+)*): \S", comment, re.M)
            for verb in verbs.split(", ")
        }
        missing = set(rule["verbs"]) - explained
        assert not missing, (
            f"{file.name}:{line}: no reason for {', '.join(sorted(missing))}. Example of a comment "
            "directly above the rule: # patch: the report."
        )
        assert explained == set(rule["verbs"]), f"{file.name}:{line}: a reason for no verb"
        if "nonResourceURLs" not in rule:
            assert set(rule["verbs"]) <= _VERBS
