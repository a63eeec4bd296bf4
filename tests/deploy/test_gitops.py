"""GitOps tools find no difference after a sync, whatever the cluster adds to the objects.

Argo CD's own engine syncs and compares (tests/gobin/argocd-diff), on a real API server. Flux is
represented by what its kustomize-controller asks for: server-side apply and its dry run.
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


def argocd(plane: ControlPlane, verb: str, strategy: str, manifests: list[dict[str, Any]]) -> str:
    done = subprocess.run(
        [str(built("argocd-diff")["argocd-diff"]), verb, strategy],
        env={"KUBECONFIG": str(plane.kubeconfig()), "HOME": str(plane.folder), "PATH": "/bin"},
        input=json.dumps(manifests),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def out_of_sync(plane: ControlPlane, strategy: str, manifests: list[dict[str, Any]]) -> list[str]:
    """Return what Argo CD shows as OutOfSync, with both sides."""
    lines = argocd(plane, "diff", strategy, manifests).splitlines()
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
    argocd(plane, "sync", strategy, wanted)
    change_as_a_cluster_does(plane, wanted)
    assert out_of_sync(plane, strategy, wanted) == []
    argocd(plane, "sync", strategy, wanted)
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


@pytest.mark.parametrize("kind", ["chart", "kustomize"])
def test_flux_finds_no_drift_after_an_apply(kind: str, plane: ControlPlane, tmp_path: Path) -> None:
    wanted = manifests(kind)
    file = tmp_path / "manifests.yaml"
    file.write_text(yaml.safe_dump_all(wanted))
    as_flux = "--server-side", "--field-manager=kustomize-controller", "--force-conflicts"
    plane.kubectl("apply", *as_flux, f"--filename={file}")
    change_as_a_cluster_does(plane, wanted)
    for _ in range(2):
        # kubectl diff exits with 1 if anything differs.
        assert plane.kubectl("diff", *as_flux, f"--filename={file}") == ""
    plane.kubectl("apply", *as_flux, f"--filename={file}")
    assert trusted(plane) == [True] * 4
