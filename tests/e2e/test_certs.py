"""headroom certs against a real API server, with the rights of its manifest and no others."""

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml

from extender.certs.cluster_secrets import AUTHORITIES, Certificates, wanted
from extender.certs.pki import Pair, Terms, facts, is_signed_by
from extender.errors import BadSettings
from extender.kube.client import KubeApi
from tests import forks
from tests.controlplane import ROOT, ApiRefused, ControlPlane
from tests.e2e.cluster import RBAC, role_binding
from tests.e2e.nodes import SYSTEM_NAMESPACE
from tests.loopback import LOOPBACK

SECRETS = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/secrets"
ADMISSION = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
NAMES = (AUTHORITIES, "headroom-tls", "headroom-scheduler-client")
NOW = datetime.now(UTC)
RENEWAL = "certs-renewal-of-the-tests"


@pytest.fixture
def rights(plane: ControlPlane) -> Iterator[None]:
    """The namespace, and what the manifest lets the command do; no Secret is left."""
    made: list[str] = []

    def create(path: str, body: dict[str, Any]) -> None:
        try:
            plane.call("POST", path, body)
        except ApiRefused as err:
            if ": 409 " not in str(err):
                raise
        made.append(f"{path}/{body['metadata']['name']}")

    create("/api/v1/namespaces", {"metadata": {"name": SYSTEM_NAMESPACE}})
    for manifest in yaml.safe_load_all((ROOT / "deploy/base/certificates.yaml").read_text()):
        kind = manifest["kind"]
        if kind in ("Role", "ClusterRole"):
            namespace = manifest["metadata"].get("namespace")
            where = f"{RBAC}/namespaces/{namespace}" if namespace else RBAC
            create(f"{where}/{kind.lower()}s", manifest)
            create(f"{where}/{kind.lower()}bindings", role_binding(manifest))
        elif kind in ("Job", "CronJob"):  # the API server takes them as they are
            create(f"/apis/batch/v1/namespaces/{SYSTEM_NAMESPACE}/{kind.lower()}s", manifest)
    for name, labels in (("headroom", {"app.kubernetes.io/part-of": "headroom"}), ("other", {})):
        create(ADMISSION, webhook(name, labels))
    yield
    made += [f"{SECRETS}/{name}" for name in NAMES]
    for path in made[1:]:
        try:
            plane.call("DELETE", path, {"propagationPolicy": "Background"})
        except ApiRefused as err:
            if ": 404 " not in str(err):
                raise


def webhook(name: str, labels: dict[str, str]) -> dict[str, Any]:
    service = {"name": "headroom-webhook", "namespace": SYSTEM_NAMESPACE, "path": "/pods"}
    hook = {
        "name": f"{name}.headroom.gpu",
        "clientConfig": {"service": service},
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Ignore",
        # It is for none of the objects that are created here.
        "rules": [
            {"apiGroups": ["x"], "apiVersions": ["v1"], "resources": ["x"], "operations": ["*"]}
        ],
    }
    return {"metadata": {"name": name, "labels": labels}, "webhooks": [hook]}


def run(plane: ControlPlane, now: datetime = NOW) -> list[str]:
    message: list[str] = []
    api = KubeApi(plane.configuration("certs-of-the-tests"))
    try:
        all_wanted = wanted(SYSTEM_NAMESPACE)
        Certificates(api, SYSTEM_NAMESPACE, all_wanted, Terms(), message.append).run(now)
    finally:
        api.close()
    return message


def secret(plane: ControlPlane, name: str) -> dict[str, bytes]:
    data = plane.call("GET", f"{SECRETS}/{name}")["data"]
    return {key: base64.b64decode(text) for key, text in data.items()}


def bundle(plane: ControlPlane, name: str = "headroom") -> bytes:
    (hook,) = plane.call("GET", f"{ADMISSION}/{name}")["webhooks"]
    return base64.b64decode(hook["clientConfig"].get("caBundle", ""))


def test_the_first_run_makes_all_and_the_next_one_nothing(
    plane: ControlPlane, rights: None
) -> None:
    env = {"KUBECONFIG": str(plane.kubeconfig("certs-of-the-tests")), "PATH": "/usr/bin:/bin"}
    done = forks.run("extender", "certs", "--namespace", SYSTEM_NAMESPACE, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [
        "serving CA",
        "client CA",
        "validatingwebhookconfiguration headroom",
        "Secret headroom-tls",
        "Secret headroom-scheduler-client",
    ]
    serving, client = secret(plane, "headroom-tls"), secret(plane, "headroom-scheduler-client")
    for data in (serving, client):
        assert set(data) == {"tls.crt", "tls.key", "ca.crt"}
        assert is_signed_by(data["tls.crt"], data["ca.crt"])
    assert not is_signed_by(serving["tls.crt"], client["ca.crt"])
    assert bundle(plane) == serving["ca.crt"]
    assert bundle(plane, "other") == b""
    hook = plane.call("GET", f"{ADMISSION}/headroom")["webhooks"][0]
    assert hook["clientConfig"]["service"]["name"] == "headroom-webhook"
    versions = [plane.call("GET", f"{SECRETS}/{name}")["metadata"] for name in NAMES]
    assert run(plane) == []
    assert [plane.call("GET", f"{SECRETS}/{name}")["metadata"] for name in NAMES] == versions


def test_two_first_runs_at_once_make_one_set(plane: ControlPlane, rights: None) -> None:
    with ThreadPoolExecutor(4) as pool:
        message = [line for done in pool.map(lambda _: run(plane), range(4)) for line in done]
    assert len([line for line in message if line.startswith("serving CA: created")]) == 1
    assert run(plane) == []
    for name, purpose in (("headroom-tls", "serving"), ("headroom-scheduler-client", "client")):
        signer = secret(plane, AUTHORITIES)[f"{purpose}.crt"]
        assert secret(plane, name)["ca.crt"] == signer
        assert is_signed_by(secret(plane, name)["tls.crt"], signer)


def test_authorities_are_replaced_by_deleting_their_secret(
    plane: ControlPlane, rights: None
) -> None:
    run(plane)
    first = {name: secret(plane, name) for name in NAMES}
    plane.call("DELETE", f"{SECRETS}/{AUTHORITIES}")
    assert [line.partition(":")[0] for line in run(plane)] == [
        "serving CA",
        "client CA",
        "validatingwebhookconfiguration headroom",
        "Secret headroom-tls",
        "Secret headroom-scheduler-client",
    ]
    for name in NAMES[1:]:
        data = secret(plane, name)
        assert data["ca.crt"] != first[name]["ca.crt"]
        assert is_signed_by(data["tls.crt"], data["ca.crt"])
    assert bundle(plane) == secret(plane, "headroom-tls")["ca.crt"]
    assert run(plane) == []


def test_certificates_are_renewed_while_they_are_still_good(
    plane: ControlPlane, rights: None
) -> None:
    run(plane)
    before = secret(plane, "headroom-scheduler-client")
    due = NOW + Terms().leaf_lifetime - Terms().leaf_renewed_before
    assert run(plane, due - timedelta(hours=1)) == []
    (line, *_) = run(plane, due)
    assert "Secret headroom-tls: new certificate until " in line
    after = secret(plane, "headroom-scheduler-client")
    assert after["ca.crt"] == before["ca.crt"]
    ends_at = facts(Pair(after["tls.crt"], after["tls.key"])).ends_at
    assert ends_at == (due + Terms().leaf_lifetime).replace(microsecond=0)


def test_the_daily_run_renews_and_can_do_nothing_else(plane: ControlPlane, rights: None) -> None:
    """A stolen token of its account writes neither CAs nor webhook configurations."""
    with pytest.raises(BadSettings, match="job --from=cronjob/headroom-certs-authority"):
        renewed(plane, NOW)
    run(plane)
    before = {name: secret(plane, name) for name in NAMES}
    assert renewed(plane, NOW) == []
    due = NOW + Terms().leaf_lifetime - Terms().leaf_renewed_before
    assert len(renewed(plane, due)) == 2
    assert secret(plane, AUTHORITIES) == before[AUTHORITIES]
    for name in NAMES[1:]:
        after = secret(plane, name)
        assert after["tls.crt"] != before[name]["tls.crt"]
        assert is_signed_by(after["tls.crt"], after["ca.crt"])
    head = {"Authorization": f"Bearer {RENEWAL}", "Content-Type": "application/merge-patch+json"}
    for path in (f"{ADMISSION}/headroom", f"{SECRETS}/{AUTHORITIES}"):
        answer = LOOPBACK.patch(f"{plane.url}{path}?dryRun=All", content="{}", headers=head)
        assert answer.status_code == 403, path
    plane.call("DELETE", f"{SECRETS}/{AUTHORITIES}")
    with pytest.raises(BadSettings, match="Secret headroom-system/headroom-ca does not exist"):
        renewed(plane, due)


def renewed(plane: ControlPlane, now: datetime) -> list[str]:
    """Run the daily job; return what it prints."""
    message: list[str] = []
    api = KubeApi(plane.configuration(RENEWAL))
    try:
        all_wanted = wanted(SYSTEM_NAMESPACE)
        Certificates(api, SYSTEM_NAMESPACE, all_wanted, Terms(), message.append).renew(now)
    finally:
        api.close()
    return message


def test_authorities_that_expire_soon_are_reported(plane: ControlPlane, rights: None) -> None:
    """Their certificates expire with them, and no run can renew these."""
    run(plane)
    soon = NOW + Terms().authority_lifetime - Terms().leaf_renewed_before
    assert not any("CA: expires at" in line for line in run(plane, soon - timedelta(hours=1)))
    serving, client = run(plane, soon)
    assert serving.startswith("serving CA: expires at ")
    assert "the certificate in Secret headroom-tls cannot be renewed beyond that" in serving
    assert f"kubectl -n {SYSTEM_NAMESPACE} delete secret headroom-ca && " in serving
    assert client.startswith("client CA: expires at ")


def test_what_cert_manager_keeps_is_left_alone(plane: ControlPlane, rights: None) -> None:
    annotations = {"cert-manager.io/certificate-name": "headroom-tls"}
    theirs = {"metadata": {"name": "headroom-tls", "annotations": annotations}}
    plane.call("POST", SECRETS, theirs)
    with pytest.raises(
        BadSettings, match="headroom-tls is managed by cert-manager; either do not run"
    ):
        run(plane)
    assert "data" not in plane.call("GET", f"{SECRETS}/headroom-tls")
    with pytest.raises(ApiRefused, match=": 404 "):
        plane.call("GET", f"{SECRETS}/{AUTHORITIES}")


def test_it_has_no_right_to_other_secrets(plane: ControlPlane, rights: None) -> None:
    api = KubeApi(plane.configuration("certs-of-the-tests"))
    plane.call("POST", SECRETS, {"metadata": {"name": "theirs"}})
    with pytest.raises(Exception, match=r"403 .*cannot get resource \"secrets\""):
        api.call("GET", f"{SECRETS}/theirs")
    plane.call("DELETE", f"{SECRETS}/theirs")
    api.close()
