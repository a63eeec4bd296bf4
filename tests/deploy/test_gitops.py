"""GitOps tools find no difference after a sync, whatever the cluster adds to the objects.

The engines of Argo CD and Flux themselves apply and compare (tests/gobin/argocd-diff and
flux-apply), on a real API server.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.controlplane import ROOT, ControlPlane, built
from tests.deploy.rendered import (
    COMPONENTS,
    EVERYTHING,
    INSTEAD,
    NAMESPACE,
    named_images,
    objects,
    template,
    with_components,
)

pytestmark = pytest.mark.slow

#: Rendered objects, and Argo CD's strategy. Each strategy handles all kinds, so not all pairs run.
PAIRS = (
    ("chart", "legacy"),
    ("chart", "structured-merge"),
    ("chart", "server-side"),
    ("chart, other options", "server-side"),
    ("kustomize", "legacy"),
    ("kustomize", "server-side"),
)


@functools.cache
def manifests(kind: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as home:
        if kind == "kustomize":
            # A component is found by its path from the overlay.
            components = sorted(COMPONENTS.keys() - {"cert-manager", "privileged"})
            text = named_images(with_components(Path(home).resolve(), components))
        else:
            text = template(Path(home), EVERYTHING if kind == "chart" else INSTEAD)
    found = list(objects(text).values())
    assert len(found) > 60
    return found


def engine(plane: ControlPlane, name: str, *arguments: str, wanted: list[dict[str, Any]]) -> str:
    """Return the output of an engine of tests/gobin for these manifests."""
    done = subprocess.run(
        [str(built(name)[name]), *arguments],
        env={"KUBECONFIG": str(plane.kubeconfig()), "HOME": str(plane.folder), "PATH": "/bin"},
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def out_of_sync(plane: ControlPlane, strategy: str, manifests: list[dict[str, Any]]) -> list[str]:
    """Return what Argo CD shows as OutOfSync, with both sides."""
    lines = engine(plane, "argocd-diff", "diff", strategy, wanted=manifests).splitlines()
    return [yaml.safe_dump(json.loads(line)) for line in lines]


def change_as_a_cluster_does(plane: ControlPlane, manifests: list[dict[str, Any]]) -> None:
    """Write what controllers and ``headroom certs`` write into the applied objects."""
    command = [sys.executable, "-m", "headroom", "certs", "--namespace", NAMESPACE]
    env = {"KUBECONFIG": str(plane.kubeconfig()), "PATH": os.environ["PATH"]}
    subprocess.run(command, env=env, cwd=ROOT, capture_output=True, check=True)
    for each in manifests:
        if each["kind"] == "Deployment":
            path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{each['metadata']['name']}"
            annotation = {"deployment.kubernetes.io/revision": "1"}
            merge = "application/merge-patch+json"
            plane.call("PATCH", path, {"metadata": {"annotations": annotation}}, merge)
            replicas = each["spec"]["replicas"]
            status = {"replicas": replicas, "observedGeneration": 1}
            plane.call("PATCH", f"{path}/status", {"status": status}, merge)


def trusted(plane: ControlPlane) -> list[bool]:
    """Return for each webhook whether it has a caBundle."""
    return [
        "caBundle" in hook["clientConfig"]
        for kind in ("validating", "mutating")
        for hook in plane.call(
            "GET", f"/apis/admissionregistration.k8s.io/v1/{kind}webhookconfigurations/headroom"
        )["webhooks"]
    ]


@pytest.mark.parametrize(("kind", "strategy"), PAIRS)
def test_argo_cd_finds_nothing_out_of_sync_after_a_sync(
    kind: str, strategy: str, plane: ControlPlane
) -> None:
    wanted = manifests(kind)
    engine(plane, "argocd-diff", "sync", strategy, wanted=wanted)
    change_as_a_cluster_does(plane, wanted)
    assert out_of_sync(plane, strategy, wanted) == []
    engine(plane, "argocd-diff", "sync", strategy, wanted=wanted)
    assert trusted(plane) == [True] * 4
    assert out_of_sync(plane, strategy, wanted) == []
    if kind == "chart":
        finds_what_was_changed(plane, strategy, wanted)


def finds_what_was_changed(
    plane: ControlPlane, strategy: str, wanted: list[dict[str, Any]]
) -> None:
    """So the empty differences above mean something."""
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/headroom-webhook"
    patch = {"spec": {"replicas": 7}}
    plane.call("PATCH", path, patch, "application/merge-patch+json")
    plane.call("DELETE", f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/headroom-agent")
    found = [yaml.safe_load(each) for each in out_of_sync(plane, strategy, wanted)]
    assert sorted(each["name"] for each in found) == ["headroom-agent", "headroom-webhook"]


def flux(plane: ControlPlane, wanted: list[dict[str, Any]]) -> list[str]:
    """Reconcile as Flux does; return what was created or changed."""
    return engine(plane, "flux-apply", wanted=wanted).splitlines()


@pytest.mark.parametrize("kind", ["chart", "kustomize"])
def test_flux_changes_nothing_after_its_first_reconciliation(
    kind: str, plane: ControlPlane
) -> None:
    wanted = manifests(kind)
    flux(plane, wanted)
    change_as_a_cluster_does(plane, wanted)
    assert flux(plane, wanted) == []
    assert flux(plane, wanted) == []
    assert trusted(plane) == [True] * 4
    deployment = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/headroom-webhook"
    plane.call("DELETE", deployment)
    assert flux(plane, wanted) == [f"Deployment/{NAMESPACE}/headroom-webhook created"]


def test_flux_replaces_the_job_of_the_overlay_when_its_image_changes(plane: ControlPlane) -> None:
    wanted = manifests("kustomize")
    flux(plane, wanted)
    upgraded = json.loads(json.dumps(wanted).replace("headroom-extender:0.1.0", "new:0.2.0"))
    changed = flux(plane, upgraded)
    job = f"Job/{NAMESPACE}/headroom-certs-first"
    assert [line for line in changed if line.startswith("Job/")] == [f"{job} created"]
    assert flux(plane, upgraded) == []
