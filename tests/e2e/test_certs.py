"""Runs headroom certs with a real API server, with exactly the permissions in its manifest."""

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml

from headroom.certs.cluster_secrets import AUTHORITIES, Certificates, wanted
from headroom.certs.pki import Pair, Terms, Usage, Wanted, facts, is_signed_by
from headroom.errors import BadSettings
from headroom.runtime.kube.client import KubeApi
from tests import forks
from tests.controlplane import ROOT, ApiRefused, ControlPlane
from tests.e2e.cluster import RBAC, role_binding
from tests.e2e.nodes import SYSTEM_NAMESPACE
from tests.loopback import LOOPBACK
from tests.waiting import until

SECRETS = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/secrets"
ADMISSION = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
NAMES = (AUTHORITIES, *(each.secret for each in wanted(SYSTEM_NAMESPACE)))
NOW = datetime.now(UTC)
RENEWAL = "certs-renewal-of-the-tests"
#: The Secret that all components shared in earlier versions.
SHARED = "headroom-tls"
TLS = {"tls.crt": "", "tls.key": ""}


@pytest.fixture
def rights(plane: ControlPlane) -> Iterator[None]:
    """Create the namespace and the roles in the manifest, but no Secrets."""
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
        elif kind in (
            "Job",
            "CronJob",
        ):  # The test only checks that the API server accepts the Job and the CronJob.
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
        # The webhook must not apply to the objects that the test creates.
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


def test_the_first_run_creates_all_certificates_and_the_next_run_changes_nothing(
    plane: ControlPlane, rights: None
) -> None:
    env = {"KUBECONFIG": str(plane.kubeconfig("certs-of-the-tests")), "PATH": "/usr/bin:/bin"}
    done = forks.run("headroom", "certs", "--namespace", SYSTEM_NAMESPACE, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [
        "serving CA",
        "client CA",
        "validatingwebhookconfiguration headroom",
        *(f"Secret {name}" for name in NAMES[1:]),
    ]
    serving, client = (
        secret(plane, "headroom-webhook-tls"),
        secret(plane, "headroom-scheduler-client"),
    )
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


def test_two_concurrent_first_runs_create_one_set_of_certificates(
    plane: ControlPlane, rights: None
) -> None:
    with ThreadPoolExecutor(4) as pool:
        message = [line for done in pool.map(lambda _: run(plane), range(4)) for line in done]
    assert len([line for line in message if line.startswith("serving CA: created")]) == 1
    assert run(plane) == []
    for each in wanted(SYSTEM_NAMESPACE):
        signer = secret(plane, AUTHORITIES)[f"{each.purpose}.crt"]
        assert secret(plane, each.secret)["ca.crt"] == signer
        assert is_signed_by(secret(plane, each.secret)["tls.crt"], signer)


def test_deleting_the_secret_of_an_authority_replaces_the_authority(
    plane: ControlPlane, rights: None
) -> None:
    run(plane)
    first = {name: secret(plane, name) for name in NAMES}
    plane.call("DELETE", f"{SECRETS}/{AUTHORITIES}")
    assert [line.partition(":")[0] for line in run(plane)] == [
        "serving CA",
        "client CA",
        "validatingwebhookconfiguration headroom",
        *(f"Secret {name}" for name in NAMES[1:]),
    ]
    for name in NAMES[1:]:
        data = secret(plane, name)
        assert data["ca.crt"] != first[name]["ca.crt"]
        assert is_signed_by(data["tls.crt"], data["ca.crt"])
    assert bundle(plane) == secret(plane, "headroom-webhook-tls")["ca.crt"]
    assert run(plane) == []


def test_certificates_are_renewed_before_they_expire(plane: ControlPlane, rights: None) -> None:
    run(plane)
    before = secret(plane, "headroom-scheduler-client")
    due = NOW + Terms().leaf_lifetime - Terms().leaf_renewed_before
    assert run(plane, due - timedelta(hours=1)) == []
    (line, *_) = run(plane, due)
    assert "Secret headroom-extender-tls: new certificate until " in line
    after = secret(plane, "headroom-scheduler-client")
    assert after["ca.crt"] == before["ca.crt"]
    ends_at = facts(Pair(after["tls.crt"], after["tls.key"])).ends_at
    assert ends_at == (due + Terms().leaf_lifetime).replace(microsecond=0)


def test_the_daily_job_can_renew_certificates_but_change_nothing_else(
    plane: ControlPlane, rights: None
) -> None:
    """With a stolen token of its account, CAs and webhook configurations cannot be written."""
    with pytest.raises(BadSettings, match="job --from=cronjob/headroom-certs-authority"):
        renewed(plane, NOW)
    run(plane)
    before = {name: secret(plane, name) for name in NAMES}
    assert renewed(plane, NOW) == []
    due = NOW + Terms().leaf_lifetime - Terms().leaf_renewed_before
    assert len(renewed(plane, due)) == len(NAMES[1:])
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
    """Run the daily job. Return its output."""
    message: list[str] = []
    api = KubeApi(plane.configuration(RENEWAL))
    try:
        all_wanted = wanted(SYSTEM_NAMESPACE)
        Certificates(api, SYSTEM_NAMESPACE, all_wanted, Terms(), message.append).renew(now)
    finally:
        api.close()
    return message


def test_authorities_that_expire_soon_are_reported(plane: ControlPlane, rights: None) -> None:
    """The certificates of such an authority expire at the same time, and the daily job cannot renew
    the authority.
    """
    run(plane)
    soon = NOW + Terms().authority_lifetime - Terms().leaf_renewed_before
    assert not any("CA: expires at" in line for line in run(plane, soon - timedelta(hours=1)))
    serving, client = run(plane, soon)
    assert serving.startswith("serving CA: expires at ")
    assert "certificates cannot be renewed beyond that (Secrets: headroom-extender-tls, " in serving
    assert f"kubectl -n {SYSTEM_NAMESPACE} delete secret headroom-ca && " in serving
    assert client.startswith("client CA: expires at ")


def test_secrets_of_cert_manager_are_left_unchanged(plane: ControlPlane, rights: None) -> None:
    annotations = {"cert-manager.io/certificate-name": "headroom-extender-tls"}
    theirs = {"metadata": {"name": "headroom-extender-tls", "annotations": annotations}}
    plane.call("POST", SECRETS, theirs)
    with pytest.raises(
        BadSettings, match="headroom-extender-tls is managed by cert-manager; either do not run"
    ):
        run(plane)
    assert "data" not in plane.call("GET", f"{SECRETS}/headroom-extender-tls")
    with pytest.raises(ApiRefused, match=": 404 "):
        plane.call("GET", f"{SECRETS}/{AUTHORITIES}")


def test_the_account_has_no_right_to_other_secrets(plane: ControlPlane, rights: None) -> None:
    api = KubeApi(plane.configuration("certs-of-the-tests"))
    plane.call("POST", SECRETS, {"metadata": {"name": "theirs"}})
    with pytest.raises(Exception, match=r"403 .*cannot get resource \"secrets\""):
        api.call("GET", f"{SECRETS}/theirs")
    plane.call("DELETE", f"{SECRETS}/theirs")
    api.close()


def test_an_upgrade_from_the_shared_secret_keeps_the_ca_and_the_old_certificate(
    plane: ControlPlane, rights: None
) -> None:
    """Earlier versions had one Secret, headroom-tls, for all components. During the upgrade, old
    and new pods serve, and clients trust the CAs of both.
    """
    names = tuple(name for each in wanted(SYSTEM_NAMESPACE)[:-1] for name in each.names)
    shared = Wanted("serving", SHARED, "headroom", names, Usage.SERVER)
    old = KubeApi(plane.configuration())
    try:
        all_old = (shared, wanted(SYSTEM_NAMESPACE)[-1])
        Certificates(old, SYSTEM_NAMESPACE, all_old, Terms(), lambda _: None).run(NOW)
        before = {name: secret(plane, name) for name in (AUTHORITIES, *(o.secret for o in all_old))}
        trusted = bundle(plane)
        with pytest.raises(BadSettings, match="Secret headroom-system/headroom-extender-tls does"):
            renewed(plane, NOW)  # The daily job may run before the new version's first job.
        changed = run(plane)
        assert [line.partition(":")[0] for line in changed] == [
            f"Secret {name}" for name in NAMES[1:-1]
        ]
        assert {name: secret(plane, name) for name in before} == before
        assert bundle(plane) == trusted
        keys = {secret(plane, name)["tls.key"] for name in (*NAMES[1:], SHARED)}
        assert len(keys) == len(NAMES[1:]) + 1, "two parts have one key"
        for name in (*NAMES[1:-1], SHARED):
            assert is_signed_by(secret(plane, name)["tls.crt"], trusted)
        assert renewed(plane, NOW) == []
    finally:
        plane.call("DELETE", f"{SECRETS}/{SHARED}")
        old.close()


def test_the_job_account_cannot_create_other_secrets(plane: ControlPlane, rights: None) -> None:
    """Otherwise, the account could create a Secret that requests the token of another account, and
    Kubernetes would write the token into it.
    """
    accounts = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/serviceaccounts"
    made: list[str] = []

    def create(path: str, body: dict[str, Any]) -> None:
        plane.call("POST", path, body)
        made.append(f"{path}/{body['metadata']['name']}")

    create(accounts, {"metadata": {"name": "headroom-certs"}})
    for manifest in yaml.safe_load_all((ROOT / "deploy/base/certificates.yaml").read_text()):
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if kind.startswith("ValidatingAdmissionPolicy"):
            plural = f"{kind.lower()}s".replace("policys", "policies")
            create(f"/apis/admissionregistration.k8s.io/v1/{plural}", manifest)
        elif kind == "RoleBinding" and name == "headroom-certs":
            manifest["metadata"]["name"] = "certs-of-the-account"
            create(f"{RBAC}/namespaces/{SYSTEM_NAMESPACE}/rolebindings", manifest)
    request = {"spec": {"expirationSeconds": 3600}}
    answer = plane.call("POST", f"{accounts}/headroom-certs/token", request)
    head = {"Authorization": f"Bearer {answer['status']['token']}"}

    def created(name: str, kind: str, **metadata: Any) -> tuple[int, str]:
        body = {"metadata": {"name": name, **metadata}, "type": kind, "stringData": TLS}
        answer = LOOPBACK.post(f"{plane.url}{SECRETS}?dryRun=All", json=body, headers=head)
        return answer.status_code, answer.json().get("message", "")

    try:
        says = "may create only Secret headroom-ca and Secrets with Headroom's certificates"
        until(lambda: says in created("other", "Opaque")[1], "the policy is in force")
        account = {"annotations": {"kubernetes.io/service-account.name": "headroom-certs"}}
        for name in NAMES:
            asked = created(name, "kubernetes.io/service-account-token", **account)
            assert asked[0] == 403, asked
            assert says in asked[1]
            kind = "Opaque" if name == AUTHORITIES else "kubernetes.io/tls"
            assert created(name, kind) == (201, "")
    finally:
        for path in reversed(made):
            plane.call("DELETE", path)
