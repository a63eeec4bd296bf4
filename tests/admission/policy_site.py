"""Provides a cluster in which all admission policies are in force, and checks rejections."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.admission.reviews import manifest
from tests.admission.site import (
    EXTENDER,
    GPUNODES,
    NODES,
    PODS,
    Reply,
    Site,
    installed,
)
from tests.controlplane import ROOT, ControlPlane
from tests.waiting import until

HERE, OTHER = NODES
GPUNODE = {"apiVersion": "headroom.gpu/v1alpha1", "kind": "GPUNode"}
BOUND, WAITING = "bound", "waiting"
PLACED = {"headroom.gpu/placement": "{}", "headroom.gpu/devices.0": "GPU-a"}
#: Permissions that the extender's role lacks. They are granted here, so that a policy and not RBAC
#: rejects a request.
AND_MORE = {
    "kind": "ClusterRole",
    "metadata": {"name": f"{EXTENDER}-and-more"},
    "rules": [
        {
            "apiGroups": [""],
            "resources": ["pods", "pods/status", "pods/ephemeralcontainers", "nodes/status"],
            "verbs": ["create", "get", "update", "patch"],
        }
    ],
}


@pytest.fixture(scope="module")
def site(plane: ControlPlane) -> Iterator[Site]:
    """A cluster with a bound pod, a pending pod, a GPUNode for each node, and all policies. The
    extender has more permissions than its own role grants.
    """
    with installed(plane) as site:
        site.grant(AND_MORE)
        extender = site.token(EXTENDER)
        until(lambda: in_force(site, extender), "all policies are in force")
        for node in NODES:
            body = {**GPUNODE, "metadata": {"name": node}, "spec": {"initialised": True}}
            assert site.send("POST", GPUNODES, body, extender).status == 201
        for name in (BOUND, WAITING):
            obj = manifest("8Gi", schedulerName="headroom")
            obj["metadata"]["name"] = name
            assert site.send("POST", PODS, obj).status == 201
        assert bind(site, BOUND, extender, PLACED).status == 201
        yield site


def in_force(site: Site, extender: str) -> bool:
    """Return whether the API server enforces each policy, which takes some time after its
    creation.
    """
    body = {**GPUNODE, "metadata": {"name": "probe"}, "spec": {}}
    status = f"/api/v1/nodes/{HERE}/status?dryRun=All"
    labelled = {"metadata": {"labels": {"a": "b"}}}
    attempts = [
        site.send("POST", f"{GPUNODES}?dryRun=All", body),
        site.send("POST", f"{PODS}?dryRun=All", manifest(annotations=PLACED)),
        bind(site, "no-owner", extender, {"team/note": "x"}),
        site.send("PATCH", status, labelled, extender),
        site.send("POST", f"{PODS}?dryRun=All", manifest(priorityClassName="headroom-critical")),
    ]
    warned = site.send("POST", f"{PODS}?dryRun=All", manifest(schedulerName="other")).warnings
    return bool(warned) and all("ValidatingAdmissionPolicy" in a.message for a in attempts)


def bind(
    site: Site,
    name: str,
    token: str,
    annotations: dict[str, str],
    labels: dict[str, str] | None = None,
) -> Reply:
    body = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": name, "annotations": annotations, "labels": labels or {}},
        "target": {"apiVersion": "v1", "kind": "Node", "name": HERE},
    }
    return site.send("POST", f"{PODS}/{name}/binding", body, token)


def noted(key: str, text: str | None) -> dict[str, Any]:
    return {"metadata": {"annotations": {key: text}}}


PAGE = (ROOT / "docs/design/security.md").read_text()


def rejected(reply: Reply, policy: str, reported: str) -> None:
    """Check that the policy rejected the request, and that docs/design/security.md names the
    policy.
    """
    assert reply.status == 403, reply
    assert f"ValidatingAdmissionPolicy '{policy}'" in reply.message
    assert reported in reply.message
    assert f"`{policy}`" in PAGE


def documented(reply: Reply) -> None:
    """Check that the docs page contains the exact message."""
    _, _, shown = reply.message.partition(" denied request: ")
    assert f"| {shown} |" in PAGE, shown
