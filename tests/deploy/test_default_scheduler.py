"""Checks that the rendered objects for the cluster's own kube-scheduler fit its configuration."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from headroom.certs.cluster_secrets import wanted
from headroom.runtime.settings.loading import check_settings
from tests.deploy.rendered import DEPLOY, NAMESPACE, Objects, objects, overlay
from tests.processes import starts_processes

pytestmark = pytest.mark.slow

VARIANT = DEPLOY / "default-scheduler"


@pytest.fixture(scope="module")
@starts_processes
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    """Return the objects of an overlay to which a user has added the component."""
    folder = tmp_path_factory.mktemp("overlay")
    paths = [os.path.relpath(path, folder) for path in (DEPLOY / "overlays/device-plugin", VARIANT)]
    kustomization = {"resources": paths[:1], "components": paths[1:]}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return objects(overlay(folder))


def scheduler() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((VARIANT / "kube-scheduler.yaml").read_text())
    return content


def test_the_deployment_mounts_the_files_for_serving_the_verbs(
    rendered: Objects, tmp_path: Path
) -> None:
    assert ("Deployment", NAMESPACE, "headroom-scheduler") not in rendered
    spec = rendered["Deployment", NAMESPACE, "headroom-extender"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    for name, text in rendered["ConfigMap", NAMESPACE, "headroom-config"]["data"].items():
        (tmp_path / name).write_text(text)
    settings, problems = check_settings(tmp_path, {}, {})
    assert not problems
    assert settings is not None
    assert settings.tls is not None
    volumes = {each["name"]: each for each in spec["volumes"]}
    mounted = {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}
    secrets = {path: each["secret"] for path, each in mounted.items() if "secret" in each}
    assert secrets[str(settings.tls.cert.parent)]["secretName"] == "headroom-extender-tls"
    assert settings.tls.client_ca is not None
    client = secrets[str(settings.tls.client_ca.parent)]
    assert client["secretName"] == "headroom-scheduler-client"
    # The Secret does not contain the CA of other certificates.
    assert [each["key"] for each in client["items"]] == ["ca.crt"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports["verbs"] == settings.verbs_port
    assert settings.scheduler_name == "default-scheduler"


def test_kube_scheduler_finds_the_service_and_expects_its_certificate(rendered: Objects) -> None:
    service = rendered["Service", NAMESPACE, "headroom-extender"]["spec"]
    (port,) = service["ports"]
    serving = wanted(NAMESPACE)[0]
    for extender in scheduler()["extenders"]:
        assert extender["urlPrefix"] == f"https://{service['clusterIP']}:{port['port']}"
        assert extender["enableHTTPS"]
        assert extender["tlsConfig"]["serverName"] in serving.names
    labels = rendered["Deployment", NAMESPACE, "headroom-extender"]["spec"]["template"]["metadata"]
    assert service["selector"].items() <= labels["labels"].items()


def test_the_files_that_kube_scheduler_reads_are_delivered(rendered: Objects) -> None:
    spec = rendered["DaemonSet", NAMESPACE, "headroom-scheduler-files"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    secret, host = spec["volumes"]
    assert container["args"][1:] == [each["mountPath"] for each in container["volumeMounts"]]
    brought = {
        f"{host['hostPath']['path']}/{item['path']}": (each["secret"]["name"], item["key"])
        for each in secret["projected"]["sources"]
        for item in each["secret"]["items"]
    }
    tls = scheduler()["extenders"][0]["tlsConfig"]
    assert {brought[tls[key]] for key in ("certFile", "keyFile")} == {
        ("headroom-scheduler-client", "tls.crt"),
        ("headroom-scheduler-client", "tls.key"),
    }
    assert brought[tls["caFile"]] == ("headroom-extender-tls", "ca.crt")


def test_no_object_of_headrooms_own_kube_scheduler_remains(rendered: Objects) -> None:
    left = [key for key in rendered if "kube-scheduler" in key[2] or "volume-scheduler" in key[2]]
    assert left == []
    assert ("ConfigMap", NAMESPACE, "headroom-scheduler-config") not in rendered
    policy = rendered["ValidatingAdmissionPolicy", "", "headroom-other-schedulers"]["spec"]
    assert policy["variables"][0]["expression"] == '["default-scheduler"]'
