"""Checks the permissions that the installation grants, with SubjectAccessReviews of a real API
server, and compares them with the table in docs/design/security.md.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.controlplane import ROOT, ControlPlane
from tests.deploy.rendered import (
    DEPLOY,
    EVERYTHING,
    INSTEAD,
    NAMESPACE,
    PLATFORMS,
    WORKLOADS,
    Objects,
    objects,
    overlay,
    template,
)
from tests.waiting import until

pytestmark = pytest.mark.slow

TEAM = "team"
#: Maps users who must get no permissions from the installation to their groups.
OTHERS = {
    "tenant": ("system:authenticated",),
    f"system:serviceaccount:{TEAM}:default": (
        "system:serviceaccounts",
        f"system:serviceaccounts:{TEAM}",
        "system:authenticated",
    ),
    "stranger": ("system:authenticated",),
    "system:anonymous": ("system:unauthenticated",),
    # This account belongs to no Headroom component.
    f"system:serviceaccount:{NAMESPACE}:default": (
        "system:serviceaccounts",
        f"system:serviceaccounts:{NAMESPACE}",
        "system:authenticated",
    ),
}
VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
OWN_KINDS = ("gpunodes", "gpunodes/status", "vramprofiles")

#: A possible permission. It consists of an API group, a resource with a subresource, a verb, a name
#: and a namespace, or of a path and a verb.
Question = tuple[str, str, str, str, str] | tuple[str, str]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    """Return every object that any supported set of options installs."""
    home = tmp_path_factory.mktemp("home")
    found: Objects = {}
    for text in (
        *(template(home, values) for values in (EVERYTHING, INSTEAD)),
        *(overlay(DEPLOY / "overlays" / platform) for platform in PLATFORMS),
    ):
        found |= objects(text)
    return found


def questions(installed: Objects) -> set[Question]:
    """Return every permission that an installed role grants, and every verb for Headroom's
    kinds.
    """
    asked: set[Question] = set()
    for (kind, _, _), obj in installed.items():
        if kind not in ("Role", "ClusterRole"):
            continue
        for rule in obj["rules"]:
            for path in rule.get("nonResourceURLs", ()):
                asked |= {(path.replace("*", "nodes"), verb) for verb in rule["verbs"]}
            asked |= {
                (group, resource, verb, name, namespace)
                for group in rule.get("apiGroups", ())
                for resource in rule["resources"]
                for verb in rule["verbs"]
                for name in rule.get("resourceNames", ("",))
                for namespace in ("", TEAM, NAMESPACE, "kube-system")
            }
    return asked | {
        ("headroom.gpu", resource, verb, "", namespace)
        for resource in OWN_KINDS
        for verb in VERBS
        for namespace in ("", TEAM, NAMESPACE)
    }


def allowed(plane: ControlPlane, user: str, asked: set[Question]) -> set[Question]:
    return {each for each in asked if is_allowed(plane, user, OTHERS.get(user, ()), each)}


def is_allowed(plane: ControlPlane, user: str, groups: tuple[str, ...], question: Question) -> bool:
    spec: dict[str, Any] = {"user": user, "groups": list(groups)}
    if len(question) == 2:
        path, verb = question
        spec["nonResourceAttributes"] = {"path": path, "verb": verb}
    else:
        group, resource, verb, name, namespace = question
        resource, _, subresource = resource.partition("/")
        attributes = {
            "group": group,
            "resource": resource,
            "subresource": subresource,
            "verb": verb,
            "name": name,
            "namespace": namespace,
        }
        spec["resourceAttributes"] = attributes
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    answer = plane.call("POST", path, {"spec": spec})
    return bool(answer["status"]["allowed"])


def create(plane: ControlPlane, installed: Objects) -> None:
    """Create all objects except pods and their controllers."""
    file = plane.folder / "rights.json"
    kinds = ("Certificate", "Issuer", *WORKLOADS)
    items = [each for (kind, *_), each in installed.items() if kind not in kinds]
    file.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    plane.kubectl("apply", "--server-side", "--force-conflicts", f"--filename={file}")


def test_the_installation_grants_no_right_to_other_subjects(
    plane: ControlPlane, installed: Objects
) -> None:
    asked = questions(installed)
    # This controller fills the roles view, edit and admin.
    plane.controllers = ("clusterrole-aggregation-controller",)
    plane.start_controller_manager()
    plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": TEAM}})
    plane.kubectl(
        "-n", TEAM, "create", "rolebinding", "tenant", "--clusterrole=admin", "--user=tenant"
    )
    pods = ("", "pods", "list", "", TEAM)
    groups = OTHERS["tenant"]
    until(
        lambda: is_allowed(plane, "tenant", groups, pods), "the tenant is the namespace's admin", 60
    )
    before = {user: allowed(plane, user, asked) for user in OTHERS}
    assert ("", "pods", "get", "", TEAM) in before["tenant"]

    create(plane, installed)

    accounts = {"headroom-agent": ("headroom.gpu", "gpunodes/status", "patch", "", "")}
    accounts["headroom-extender"] = ("", "pods/binding", "create", "", TEAM)
    for account, question in accounts.items():
        user = f"system:serviceaccount:{NAMESPACE}:{account}"
        until(lambda u=user, q=question: is_allowed(plane, u, (), q), f"{account} has its role")
    after = {user: allowed(plane, user, asked) for user in OTHERS}
    for user in OTHERS:
        assert after[user] == before[user], user
    # This check shows that a permission for all users would be found.
    wide = "create", "clusterrolebinding", "wide", "--clusterrole=headroom-viewer"
    plane.kubectl(*wide, "--group=system:authenticated")
    question = ("/v1/nodes", "get")
    until(lambda: is_allowed(plane, "tenant", groups, question), "the new permission is found", 60)
    assert question in asked


def named(kinds: str, text: str) -> Iterator[tuple[str, str]]:
    for kind in re.findall(r"\b[A-Z]\w+\b", kinds):
        for name in re.findall(r"`([a-z][\w.-]*)`", text):
            yield kind, name


def table() -> set[tuple[str, str]]:
    """Return the kind and name of each object in the table."""
    page = (ROOT / "docs/design/security.md").read_text()
    (rows,) = re.findall(r"\| objects \|.*\n\|---\|---\|\n((?:\|.*\n)+)", page)
    kinds = r"(?:[A-Z][a-z]+(?:[A-Z][a-z]+)*)"
    group = re.compile(rf"({kinds}(?: and {kinds})?) (`[^`]+`(?:(?:, | and )`[^`]+`)*)")
    return {
        pair
        for row in rows.splitlines()
        for part in group.findall(row.split("|")[1])
        for pair in named(*part)
    }


def test_the_table_lists_every_object_outside_headrooms_namespace(installed: Objects) -> None:
    outside = {(kind, name) for kind, namespace, name in installed if namespace != NAMESPACE}
    assert table() == outside


def test_no_role_is_aggregated_to_the_roles_of_kubernetes(installed: Objects) -> None:
    """With an aggregation label, every user with the role view, edit or admin would get the
    rules.
    """
    for (kind, _, name), obj in installed.items():
        if kind in ("Role", "ClusterRole"):
            labels = obj["metadata"].get("labels", {})
            assert not [key for key in labels if "aggregate-to" in key], name
            assert "aggregationRule" not in obj, name
