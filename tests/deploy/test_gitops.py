"""Checks that a real API server accepts all objects, and that GitOps tools find no difference after
a sync.

They must find no difference even after the cluster has changed the objects. The engines of Argo CD
and Flux apply and compare the objects (tests/gobin/argocd-diff and flux-apply).
"""

import functools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from headroom.certs import cluster_secrets
from headroom.certs.pki import Terms
from headroom.runtime.kube.client import KubeApi
from tests.controlplane import ControlPlane, built
from tests.deploy.rendered import (
    CHART_ONLY,
    COMPONENTS,
    EVERYTHING,
    INSTEAD,
    NAMESPACE,
    PLATFORMS,
    named_images,
    objects,
    template,
    with_components,
)
from tests.processes import DIE_WITH_PARENT

pytestmark = pytest.mark.slow

#: Pairs of rendered objects and Argo CD's strategy. Not all pairs run, because each strategy
#: handles all kinds.
PAIRS = (
    ("chart", "legacy"),
    ("chart", "structured-merge"),
    ("chart", "server-side"),
    ("chart, other options", "server-side"),
    ("kustomize", "legacy"),
    ("kustomize", "server-side"),
)


#: Kinds of the objects that ``change_objects_like_a_cluster`` changes.
CHANGED_KINDS = ("Deployment", "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")


@functools.cache
def manifests(kind: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as home:
        if kind == "kustomize":
            # Name the components by their paths relative to the overlay.
            components = sorted(COMPONENTS.keys() - {"cert-manager", "privileged"})
            text = named_images(with_components(Path(home).resolve(), components))
        else:
            text = template(Path(home), EVERYTHING if kind == "chart" else INSTEAD)
    found = list(objects(text).values())
    assert len(found) > 60
    return found


def test_the_api_server_accepts_every_field_of_every_object_of_the_chart(
    plane: ControlPlane, tmp_path: Path
) -> None:
    """The objects cover each platform and all options. Identical objects are applied only once."""
    texts = [template(tmp_path, {}, platform) for platform in (*PLATFORMS, *CHART_ONLY)]
    texts += [template(tmp_path, values) for values in (EVERYTHING, INSTEAD)]
    different: dict[str, None] = {}
    for text in texts:
        documents = [each for each in re.split(r"^---$", text, flags=re.MULTILINE) if each.strip()]
        assert len(documents) == len(objects(text)) > 60
        different.update(dict.fromkeys(documents))
    file = tmp_path / "rendered.yaml"
    file.write_text("\n---\n".join(different))
    flags = "--server-side", "--dry-run=server", "--validate=strict", "--force-conflicts"
    lines = plane.kubectl("apply", *flags, f"--filename={file}").splitlines()
    assert all(line.endswith("serverside-applied (server dry run)") for line in lines)
    assert len(lines) == len(different)


def environment(plane: ControlPlane) -> dict[str, str]:
    return {
        **os.environ,
        "KUBECONFIG": str(plane.kubeconfig()),
        "HOME": str(plane.folder),
        # Otherwise, the engines would drop a connection if a busy machine does not respond for 45
        # s.
        "HTTP2_READ_IDLE_TIMEOUT_SECONDS": "0",
    }


class ArgoCD:
    """The engine of Argo CD in one process. Like Argo CD, it loads the cluster's schema
    only once.
    """

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def sync(self, strategy: str, wanted: list[dict[str, Any]]) -> None:
        self._ask("sync", strategy, wanted)

    def out_of_sync(self, strategy: str, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the objects that Argo CD shows as OutOfSync, with their desired and live state."""
        found: list[dict[str, Any]] = self._ask("diff", strategy, wanted)
        return found

    def _ask(self, command: str, strategy: str, wanted: list[dict[str, Any]]) -> Any:
        request = {"command": command, "strategy": strategy, "manifests": wanted}
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(request))
        stdin.flush()
        answer = json.loads(stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer["outOfSync"]


@pytest.fixture(scope="module")
def argo_cd(plane: ControlPlane) -> Iterator[ArgoCD]:
    with subprocess.Popen(
        [*DIE_WITH_PARENT, str(os.getpid()), str(built("argocd-diff")["argocd-diff"])],
        env=environment(plane),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield ArgoCD(process)
        process.kill()


def change_objects_like_a_cluster(plane: ControlPlane, manifests: list[dict[str, Any]]) -> None:
    """Change the applied objects as controllers and ``headroom certs`` do."""
    # Make the changes in this process. The command ``headroom`` would import all of Headroom, and
    # this module would depend on all of that code (tests/tiers).
    api = KubeApi(plane.configuration())
    try:
        wanted = cluster_secrets.wanted(NAMESPACE, ())
        certificates = cluster_secrets.Certificates(api, NAMESPACE, wanted, Terms(), print)
        certificates.run(datetime.now(UTC))
    finally:
        api.close()
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
    """Return whether each webhook has a caBundle."""
    return [
        "caBundle" in hook["clientConfig"]
        for kind in ("validating", "mutating")
        for hook in plane.call(
            "GET", f"/apis/admissionregistration.k8s.io/v1/{kind}webhookconfigurations/headroom"
        )["webhooks"]
    ]


@pytest.mark.parametrize(("kind", "strategy"), PAIRS)
def test_argo_cd_finds_no_object_out_of_sync_after_a_sync(
    kind: str, strategy: str, plane: ControlPlane, argo_cd: ArgoCD
) -> None:
    wanted = manifests(kind)
    argo_cd.sync(strategy, wanted)
    change_objects_like_a_cluster(plane, wanted)
    assert argo_cd.out_of_sync(strategy, wanted) == []
    # The next sync must not change the objects.
    changed = [each for each in wanted if each["kind"] in CHANGED_KINDS]
    argo_cd.sync(strategy, changed)
    assert trusted(plane) == [True] * 5
    assert argo_cd.out_of_sync(strategy, changed) == []
    if kind == "chart":
        # This check shows that the engine can find a difference.
        path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/headroom-webhook"
        patch = {"spec": {"replicas": 7}}
        plane.call("PATCH", path, patch, "application/merge-patch+json")
        plane.call("DELETE", f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/headroom-agent")
        workloads = [each for each in wanted if each["kind"] in ("DaemonSet", "Deployment")]
        found = {each["name"] for each in argo_cd.out_of_sync(strategy, workloads)}
        assert found == {"headroom-agent", "headroom-webhook"}


def flux(plane: ControlPlane, wanted: list[dict[str, Any]]) -> list[str]:
    """Reconcile the objects as Flux does. Return the created and changed objects."""
    done = subprocess.run(
        [str(built("flux-apply")["flux-apply"])],
        env=environment(plane),
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("kind", ["chart", "kustomize"])
def test_flux_changes_no_object_after_its_first_reconciliation(
    kind: str, plane: ControlPlane
) -> None:
    wanted = manifests(kind)
    flux(plane, wanted)
    change_objects_like_a_cluster(plane, wanted)
    assert flux(plane, wanted) == []
    assert trusted(plane) == [True] * 5
    deployment = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/headroom-webhook"
    plane.call("DELETE", deployment)
    deployments = [each for each in wanted if each["kind"] == "Deployment"]
    assert flux(plane, deployments) == [f"Deployment/{NAMESPACE}/headroom-webhook created"]


def test_flux_replaces_the_job_of_the_overlay_when_its_image_changes(plane: ControlPlane) -> None:
    wanted = [each for each in manifests("kustomize") if each["kind"] in ("Job", "Namespace")]
    flux(plane, wanted)
    upgraded = json.loads(json.dumps(wanted).replace("headroom-extender:0.1.0", "new:0.2.0"))
    changed = flux(plane, upgraded)
    job = f"Job/{NAMESPACE}/headroom-certs-first"
    assert [line for line in changed if line.startswith("Job/")] == [f"{job} created"]
    assert flux(plane, upgraded) == []
