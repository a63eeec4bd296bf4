"""GitOps tools find no difference after a sync, whatever the cluster adds to the objects.

Argo CD's own engine syncs and compares (tests/gobin/argocd-diff), on a real API server. Flux is
represented by what its kustomize-controller asks for: server-side apply and its dry run.
"""

import json
import os
import subprocess
import sys
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
from tests.processes import starts_processes

pytestmark = pytest.mark.slow

STRATEGIES = ("legacy", "structured-merge", "server-side")


@pytest.fixture(scope="module", params=["chart", "chart, other options", "kustomize"])
@starts_processes
def manifests(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("rendered")
    if request.param == "kustomize":
        components = sorted(COMPONENTS.keys() - {"cert-manager", "privileged"})
        text = named_images(with_components(folder, components))
    else:
        text = template(folder, EVERYTHING if request.param == "chart" else INSTEAD)
    found = objects(text)
    assert len(found) > 60
    return list(found.values())


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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_argo_cd_finds_nothing_out_of_sync_after_a_sync(
    strategy: str, plane: ControlPlane, manifests: list[dict[str, Any]]
) -> None:
    argocd(plane, "sync", strategy, manifests)
    change_as_a_cluster_does(plane, manifests)
    assert out_of_sync(plane, strategy, manifests) == []
    argocd(plane, "sync", strategy, manifests)
    assert trusted(plane) == [True] * 4
    assert out_of_sync(plane, strategy, manifests) == []


@pytest.mark.parametrize("manifests", ["chart"], indirect=True)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_argo_cd_finds_what_was_changed(
    strategy: str, plane: ControlPlane, manifests: list[dict[str, Any]]
) -> None:
    """So the empty differences of the other tests mean something."""
    argocd(plane, "sync", strategy, manifests)
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/headroom-webhook"
    patch = {"spec": {"replicas": 7}}
    plane.call("PATCH", path, patch, "application/merge-patch+json")
    gone = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/headroom-agent"
    plane.call("DELETE", gone)
    found = [yaml.safe_load(each) for each in out_of_sync(plane, strategy, manifests)]
    assert sorted(each["name"] for each in found) == ["headroom-agent", "headroom-webhook"]
    argocd(plane, "sync", strategy, manifests)
    assert out_of_sync(plane, strategy, manifests) == []


def test_flux_finds_no_drift_after_an_apply(
    plane: ControlPlane, manifests: list[dict[str, Any]], tmp_path: Path
) -> None:
    file = tmp_path / "manifests.yaml"
    file.write_text(yaml.safe_dump_all(manifests))
    as_flux = "--server-side", "--field-manager=kustomize-controller", "--force-conflicts"
    plane.kubectl("apply", *as_flux, f"--filename={file}")
    change_as_a_cluster_does(plane, manifests)
    for _ in range(2):
        # kubectl diff exits with 1 if anything differs.
        assert plane.kubectl("diff", *as_flux, f"--filename={file}") == ""
    plane.kubectl("apply", *as_flux, f"--filename={file}")
    assert trusted(plane) == [True] * 4
