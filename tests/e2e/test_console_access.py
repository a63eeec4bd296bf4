"""Checks that users reach the console through a real API server, and that the console does not get
their credentials.
"""

import base64
import json
import re
import shlex
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import urllib3

from headroom.contract.console import AUDIENCE, CSRS, HEADER, PROXIED, SIGNER, csr_name
from headroom.kubectl import sessions
from headroom.kubectl.sessions import new_secret
from headroom.kubectl.transport import Proxied
from headroom.kubectl.ui import Page
from tests.answering import Answer, Request, answering
from tests.certificates import Authority, Certificate
from tests.controlplane import ADMIN_TOKEN, ApiRefused, ControlPlane, built
from tests.e2e.cluster import PlayedCluster
from tests.e2e.nodes import SYSTEM_NAMESPACE, Shape
from tests.egress import ProxyingPlane, proxying_plane
from tests.kubectl.transcripts import Shown, run
from tests.loopback import LOOPBACK
from tests.processes import free_ports, starts_processes
from tests.waiting import PATIENCE_S, until

#: Members of this group may connect to the console and read everything.
GROUP = "gpu-watchers"
PROXY = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/services/{PROXIED}/proxy"
REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"


@pytest.fixture(autouse=True)
def own_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECACHEDIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
@starts_processes
def plane(request: pytest.FixtureRequest) -> Iterator[ProxyingPlane]:
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        built("etcd", "kube-apiserver", "kubectl")
    with proxying_plane() as running:
        yield running


@pytest.fixture(scope="module")
@starts_processes
def cluster(plane: ProxyingPlane) -> Iterator[PlayedCluster]:
    cluster = watched_by(GROUP, plane)
    yield cluster
    cluster.close()


def watched_by(group: str, plane: ProxyingPlane) -> PlayedCluster:
    """Start a cluster in which the members of a group may connect and read everything."""
    cluster = PlayedCluster(plane, 1, Shape())
    cluster.create()
    let_connect(plane, "watchers", f"--group={group}")
    let_view(plane, "watchers-view", f"--group={group}")
    served = Authority(plane.folder, "served-by").sign("extender")
    settings = {"debug_tls_cert": str(served.cert), "debug_tls_key": str(served.key)}
    cluster.start_extender(guarded=True, settings=settings)
    cluster.settle()
    port = int(cluster.debug_url().rpartition(":")[2])
    plane.publish(SYSTEM_NAMESPACE, "headroom-debug", "debug-tls", port)
    return cluster


def let_connect(plane: ControlPlane, binding: str, subject: str) -> None:
    """Bind the role that permits connecting to a subject, such as ``--user=NAME``."""
    in_cluster = "create", "clusterrolebinding", binding, "--clusterrole=headroom-user"
    of_console = "create", "rolebinding", binding, "--role=headroom-user"
    plane.kubectl(*in_cluster, subject)
    plane.kubectl("-n", SYSTEM_NAMESPACE, *of_console, subject)
    requests = {"group": "certificates.k8s.io", "resource": "certificatesigningrequests"}
    proxy = {"resource": "services", "subresource": "proxy", "name": PROXIED}
    until_permitted(plane, subject, resourceAttributes={"verb": "create", **requests})
    proxy["namespace"] = SYSTEM_NAMESPACE
    until_permitted(plane, subject, resourceAttributes={"verb": "get", **proxy})


def let_view(plane: ControlPlane, binding: str, subject: str) -> None:
    """Bind the role of viewers to a subject."""
    view = "create", "clusterrolebinding", binding, "--clusterrole=headroom-viewer"
    plane.kubectl(*view, subject)
    read = {"verb": "get", "path": "/v1/nodes"}
    until_permitted(plane, subject, nonResourceAttributes=read)


def until_permitted(plane: ControlPlane, subject: str, **asked: Mapping[str, str]) -> None:
    """Wait until the API server applies the new binding, which its watch delivers late.

    ``asked`` is a part of the spec of a SubjectAccessReview.
    """
    kind, _, name = subject.removeprefix("--").partition("=")
    user = f"system:serviceaccount:{name}" if kind == "serviceaccount" else name
    who = {"user": "any", "groups": [name]} if kind == "group" else {"user": user}

    def permitted() -> bool:
        reviewed = plane.call("POST", REVIEWS, {"spec": {**who, **asked}})
        return bool(reviewed["status"]["allowed"])

    until(permitted, f"{subject} may {asked}")


def by_certificate(client: Certificate) -> dict[str, str]:
    """Return the user entry of a kubeconfig as kubeadm or kind writes it."""
    files = {"client-certificate-data": client.cert, "client-key-data": client.key}
    return {key: base64.b64encode(file.read_bytes()).decode() for key, file in files.items()}


def by_plugin(folder: Path, credentials: Mapping[str, str]) -> dict[str, Any]:
    """Return the user entry of a kubeconfig as cloud providers write it. A command prints the
    credential.
    """
    kind = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}
    plugin = folder / "plugin"
    plugin.write_text(
        f"#!/bin/sh\nprintf %s '{json.dumps(kind | {'status': dict(credentials)})}'\n"
    )
    plugin.chmod(0o700)
    version = {"apiVersion": kind["apiVersion"], "interactiveMode": "Never"}
    return {"exec": version | {"command": str(plugin)}}


def token_of_account(plane: ControlPlane, name: str, *options: str) -> str:
    """Return a token of a service account that may connect and read everything."""
    plane.kubectl("create", "serviceaccount", name)
    subject = f"--serviceaccount=default:{name}"
    let_connect(plane, name, subject)
    let_view(plane, f"{name}-view", subject)
    return plane.kubectl("create", "token", name, *options).strip()


def csrs(plane: ControlPlane) -> dict[str, dict[str, Any]]:
    """Return the spec of each session by the name of its CertificateSigningRequest."""
    items = plane.call("GET", CSRS)["items"]
    return {each["metadata"]["name"]: each["spec"] for each in items}


def top(plane: ControlPlane, folder: Path, user: Mapping[str, Any], *options: str) -> Shown:
    file = folder / "kubeconfig"
    plane.write_kubeconfig(file, user)
    return run("", "--kubeconfig", file, *options, "top")


def test_users_with_any_kind_of_credential_read_with_one_session(
    cluster: PlayedCluster, tmp_path: Path
) -> None:
    plane, ca = cluster.plane, cluster.plane.clients_ca
    watcher = ca.sign("kubectl-watcher", [GROUP])
    of_account = token_of_account(plane, "robot")
    in_files = {"clientCertificateData": watcher.cert, "clientKeyData": watcher.key}
    as_json = {key: each.read_text() for key, each in in_files.items()}
    users: list[tuple[str, Mapping[str, Any], bool]] = [
        ("admin", {"token": ADMIN_TOKEN}, True),
        ("kubectl-watcher", by_certificate(watcher), True),
        ("admin", by_plugin(tmp_path, {"token": ADMIN_TOKEN}), False),
        ("kubectl-watcher", by_plugin(tmp_path, as_json), False),
        ("system:serviceaccount:default:robot", {"token": of_account}, True),
    ]
    for name, user, is_new in users:
        before = csrs(plane)
        if "exec" in user:
            credentials = {"token": ADMIN_TOKEN} if name == "admin" else as_json
            by_plugin(tmp_path, credentials)
        for _ in range(2):
            answered = top(plane, tmp_path, user)
            assert (answered.returncode, answered.stderr) == (0, "")
            assert cluster.names[0] in answered.stdout
        created = {key: spec for key, spec in csrs(plane).items() if key not in before}
        assert [spec["username"] for spec in created.values()] == [name] * is_new
        assert {spec["signerName"] for spec in created.values()} <= {SIGNER}


def test_a_user_reads_what_the_api_server_permits(cluster: PlayedCluster, tmp_path: Path) -> None:
    plane = cluster.plane
    let_connect(plane, "tenant", "--user=tenant")
    tenant = by_certificate(plane.clients_ca.sign("tenant"))
    rejected = top(plane, tmp_path, tenant)
    assert rejected.returncode == 3
    assert "tenant may not get path /v1/nodes; bind ClusterRole headroom-viewer" in rejected.stderr


@pytest.mark.parametrize("lacks", ["both", "the proxy"])
def test_a_missing_permission_is_reported_with_the_commands_that_grant_it(
    cluster: PlayedCluster, tmp_path: Path, lacks: str
) -> None:
    plane = cluster.plane
    name = f"newcomer-{lacks[-5:]}"
    user = by_certificate(plane.clients_ca.sign(name, [f"{name}s"]))
    if lacks != "both":
        may = "create", "clusterrolebinding", f"{name}-csr", "--clusterrole=headroom-user"
        plane.kubectl(*may, f"--user={name}")
        requests = {"group": "certificates.k8s.io", "resource": "certificatesigningrequests"}
        asked = {"verb": "create", **requests}
        until_permitted(plane, f"--user={name}", resourceAttributes=asked)
    missing = (
        'cannot create resource "certificatesigningrequests"'
        if lacks == "both"
        else 'cannot get resource "services/proxy"'
    )
    shown = top(plane, tmp_path, user)
    assert shown.returncode == 3
    assert missing in shown.stderr
    commands = re.findall(r"kubectl [^;\n]+--user=NAME", shown.stderr)
    assert len(commands) == 2
    for number, each in enumerate(commands):
        if number == 1 or lacks == "both":
            plane.kubectl(*shlex.split(each.replace("NAME", name))[1:])
    cluster.until(
        lambda: f"{name} may not get path /v1/nodes" in top(plane, tmp_path, user).stderr,
        "the console recognizes the user",
    )


def test_other_errors_report_their_cause(
    cluster: PlayedCluster, plane: ProxyingPlane, tmp_path: Path
) -> None:
    unknown = top(plane, tmp_path, {"token": "unknown-user"})
    assert "401 Unauthorized: the API server rejects the kubeconfig" in unknown.stderr
    elsewhere = top(plane, tmp_path, {"token": ADMIN_TOKEN}, "--headroom-namespace", "default")
    assert "no console in namespace default is ready: " in elsewhere.stderr
    assert "set --headroom-namespace" in elsewhere.stderr
    (nobody,) = free_ports(1)
    plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": "stopped"}})
    plane.publish("stopped", "headroom-debug", "debug-tls", nobody)
    away = top(plane, tmp_path, {"token": ADMIN_TOKEN}, "--headroom-namespace", "stopped")
    assert "cannot connect to the console in namespace stopped: error trying" in away.stderr
    assert "port 8889" in away.stderr
    file = tmp_path / "kubeconfig"
    plane.write_kubeconfig(file, {"token": ADMIN_TOKEN}, port=nobody)
    gone = run("", "--kubeconfig", file, "top")
    assert gone.returncode == 3
    assert "the API server does not answer: " in gone.stderr


def test_the_page_and_its_event_stream_pass_through_the_api_server(cluster: PlayedCluster) -> None:
    plane = cluster.plane
    with Page(Proxied(str(plane.kubeconfig()), None, SYSTEM_NAMESPACE)) as page:
        thread = threading.Thread(target=page.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            html = LOOPBACK.get(page.url)
            assert "script-src 'self'" in html.headers["content-security-policy"]
            files = re.findall(r'(?:src|href)="(page/[^"]+)"', html.text)
            assert files
            assert all(LOOPBACK.get(page.url + file).status_code == 200 for file in files)
            names = [node["name"] for node in LOOPBACK.get(f"{page.url}v1/nodes").json()["nodes"]]
            assert names == list(cluster.names)
            question = {"pods": [{"vram": "1Gi"}]}
            assert LOOPBACK.post(f"{page.url}v1/whatif", json=question).status_code == 200
            with LOOPBACK.stream("GET", f"{page.url}v1/events") as stream:
                assert stream.headers["content-type"].startswith("text/event-stream")
                lines = stream.iter_lines()
                assert next(lines) == "retry: 2000"
                # Each line must arrive when it is sent, and idle time between lines must not end
                # the stream.
                assert ": nothing new" in lines
        finally:
            page.shutdown()
            thread.join()


class Attacker:
    """A user who may connect to the console and who sends arbitrary requests to the API server."""

    def __init__(self, plane: ControlPlane, name: str, group: str = GROUP) -> None:
        certificate = plane.clients_ca.sign(name, [group])
        self.plane = plane
        self._http = urllib3.PoolManager(
            ca_certs=str(plane.ca_file),
            cert_file=str(certificate.cert),
            key_file=str(certificate.key),
            retries=False,
            timeout=PATIENCE_S,
        )

    def send(self, method: str, path: str, body: object = None, **headers: str) -> Any:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        sent = json.dumps(body) if body is not None else None
        content = {"Content-Type": "application/json"}
        return self._http.request(method, self.plane.url + path, body=sent, headers=content | named)

    def read(self, secret: str, **headers: str) -> int:
        """Read a view with this session. Return the status of the response."""
        status: int = self.send("GET", f"{PROXY}/v1/nodes", **{HEADER: secret}, **headers).status
        return status

    def open_session(self, **spec: object) -> tuple[str, Any]:
        secret = new_secret()
        return secret, self.create(sessions.csr(secret), **spec)

    def create(self, csr: Mapping[str, Any], **spec: object) -> Any:
        return self.send("POST", CSRS, {**csr, "spec": {**csr["spec"], **spec}})


def test_no_user_can_act_as_another_user(cluster: PlayedCluster) -> None:
    plane = cluster.plane
    let_connect(plane, "outsider", "--user=outsider")
    outsider, watcher = Attacker(plane, "outsider", "no-group"), Attacker(plane, "watcher")
    secret, created = outsider.open_session()
    cluster.until(lambda: outsider.read(secret) == 403, "the outsider can connect")

    # The API server sets the fields about the creator.
    claimed = {"username": "admin", "uid": "0", "groups": [GROUP, "system:masters"]}
    secret, created = outsider.open_session(**claimed, extra={"scopes": ["all"]})
    spec = created.json()["spec"]
    assert (spec["username"], spec["groups"]) == ("outsider", ["no-group", "system:authenticated"])
    assert outsider.read(secret) == 403
    # The fields stay unchanged even if an administrator writes them.
    path = f"{CSRS}/{csr_name(secret)}"
    for part in ("", "/status", "/approval"):
        csr = plane.call("GET", path)
        csr["spec"] |= claimed
        assert plane.call("PUT", path + part, csr)["spec"]["username"] == "outsider"
    # The age of an old session cannot be changed.
    csr = plane.call("GET", path)
    before = csr["metadata"]["creationTimestamp"]
    csr["metadata"]["creationTimestamp"] = "2099-01-01T00:00:00Z"
    try:
        after = plane.call("PUT", path, csr)["metadata"]["creationTimestamp"]
    except ApiRefused:
        after = before
    assert after == before

    # Some users can read the name of a session, but the secret cannot be derived from the name.
    theirs, created = watcher.open_session()
    assert watcher.read(theirs) == 200
    name = created.json()["metadata"]["name"]
    assert outsider.read(name) == 401
    assert outsider.read(name.rpartition("-")[2]) == 401
    # The name is in use. The same content with another name is a session of the user who creates
    # it.
    csr = sessions.csr(theirs)
    assert outsider.create(csr).status == 409
    assert outsider.create({**csr, "metadata": {"name": f"{name}0"}}).status == 201
    # The API server lets neither user read or change a request.
    for verb, target in (("GET", ""), ("DELETE", ""), ("PATCH", ""), ("PUT", "/approval")):
        assert outsider.send(verb, f"{CSRS}/{name}{target}", csr).status == 403, verb
    assert outsider.send("GET", CSRS).status == 403

    # A request with another signer is not a session, and no other header can name a user.
    other, created = outsider.open_session(signerName="example.com/other")
    assert created.status == 201
    assert outsider.read(other) == 401
    smuggled = {"X_Remote_User": "admin", "X_Remote_Group": GROUP, "X_Forwarded_User": "admin"}
    assert outsider.read(secret, **smuggled) == 403
    assert outsider.read("", **smuggled) == 401
    # Impersonation requires permission.
    assert outsider.read(secret, Impersonate_User="admin") == 403


def test_an_impersonated_user_gets_a_session_of_its_own(cluster: PlayedCluster) -> None:
    plane = cluster.plane
    admin = Attacker(plane, "second-admin", "system:masters")
    jane = {"Impersonate_User": "jane", "Impersonate_Group": GROUP, "Impersonate_Extra_Scopes": "a"}
    secret = new_secret()
    created = admin.send("POST", CSRS, sessions.csr(secret), **jane)
    spec = created.json()["spec"]
    assert (spec["username"], spec["extra"]) == ("jane", {"scopes": ["a"]})
    assert admin.read(secret) == 200
    unknown = new_secret()
    bob = {"Impersonate_User": "bob", "Impersonate_Group": "system:masters"}
    assert admin.send("POST", CSRS, sessions.csr(unknown), **bob).status == 201
    assert admin.read(unknown) == 200
    nobody = new_secret()
    created = admin.send("POST", CSRS, sessions.csr(nobody), Impersonate_User="nobody")
    assert created.status == 403


@pytest.mark.parametrize("ends", ["deleted", "denied"])
def test_an_administrator_can_end_a_session(
    cluster: PlayedCluster, tmp_path: Path, ends: str
) -> None:
    plane = cluster.plane
    name = f"watcher-{ends}"
    user = by_certificate(plane.clients_ca.sign(name, [GROUP]))
    assert top(plane, tmp_path, user).returncode == 0
    (file,) = (tmp_path / "cache/headroom").iterdir()
    (secret, _) = json.loads(file.read_text())
    if ends == "deleted":
        plane.kubectl("delete", "csr", csr_name(secret))
    else:
        plane.kubectl("certificate", "deny", csr_name(secret))
    attacker = Attacker(plane, name)
    cluster.until(lambda: attacker.read(secret) == 401, "the console rejects the session")
    # The user still has permission, so the client gets a new session automatically.
    again = top(plane, tmp_path, user)
    assert (again.returncode, again.stderr) == (0, "")
    assert json.loads(next((tmp_path / "cache/headroom").iterdir()).read_text())[0] != secret


def test_the_user_role_grants_access_only_to_the_debug_api(cluster: PlayedCluster) -> None:
    def may(verb: str, resource: str, name: str = "", namespace: str = "", group: str = "") -> bool:
        resource, _, subresource = resource.partition("/")
        spec = {
            "user": "headroom-user",
            "groups": ["system:authenticated"],
            "resourceAttributes": {
                "verb": verb,
                "resource": resource,
                "subresource": subresource,
                "name": name,
                "namespace": namespace,
                "group": group,
            },
        }
        return bool(cluster.plane.call("POST", REVIEWS, {"spec": spec})["status"]["allowed"])

    system = SYSTEM_NAMESPACE
    assert may("get", "services/proxy", PROXIED, system)
    assert may("create", "services/proxy", PROXIED, system)
    certificates = "certificates.k8s.io"
    assert may("create", "certificatesigningrequests", group=certificates)
    for verb in ("get", "list", "watch", "update", "patch", "delete"):
        assert not may(verb, "certificatesigningrequests", group=certificates)
    for part in ("approval", "status"):
        assert not may("update", f"certificatesigningrequests/{part}", group=certificates)
    for verb in ("approve", "sign"):
        assert not may(verb, "signers", SIGNER, group=certificates)
    for name in ("headroom-debug", "https:headroom-debug:", "headroom-webhook", "headroom-journal"):
        assert not may("get", "services/proxy", name, system)
    assert not may("get", "services/proxy", PROXIED, "default")
    for part in ("portforward", "proxy", "exec", "attach"):
        for verb in ("get", "create"):
            assert not may(verb, f"pods/{part}", "headroom-scheduler-x", system)
    assert not may("list", "pods", namespace=system)


def test_the_console_gets_no_credential_of_the_user(plane: ProxyingPlane, tmp_path: Path) -> None:
    """A malicious console gets the secret of the session, which other servers do not accept."""
    seen: list[dict[str, str]] = []

    def answer(request: Request) -> Answer:
        seen.append({name.lower(): value for name, value in request.headers.items()})
        return 200, {"nodes": [], "continue": None}

    with answering(answer, Authority(tmp_path, "of-it").sign("console")) as url:
        plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": "compromised"}})
        plane.publish("compromised", "headroom-debug", "debug-tls", int(url.rpartition(":")[2]))
        user = {"token": ADMIN_TOKEN}
        top(plane, tmp_path, user, "--headroom-namespace", "compromised")
    (headers,) = seen
    assert ADMIN_TOKEN not in str(headers)
    assert not {"authorization", "cookie", "x-remote-user", "impersonate-user"} & headers.keys()
    secret = headers[HEADER.lower()]
    # The API server does not accept the headers that the console got.
    http = urllib3.PoolManager(ca_certs=str(plane.ca_file), retries=False)
    stolen = {"Authorization": f"Bearer {secret}"}
    assert http.request("GET", f"{plane.url}/api/v1/pods", headers=stolen).status == 401
    review = {"spec": {"token": secret}}
    answer = plane.call("POST", "/apis/authentication.k8s.io/v1/tokenreviews", review)
    assert not answer["status"].get("authenticated")


def test_the_api_server_rejects_a_token_of_the_debug_api(
    cluster: PlayedCluster, tmp_path: Path
) -> None:
    plane = cluster.plane
    token = token_of_account(plane, "reader", f"--audience={AUDIENCE}")
    url = cluster.debug_url().replace("http://", "https://")
    trusts = "--server", url, "--certificate-authority", plane.folder / "served-by.crt"
    assert run("", *trusts, "--token", token, "top").returncode == 0
    rejected = run("", *trusts, "--token", ADMIN_TOKEN, "top")
    assert rejected.returncode == 2
    assert ADMIN_TOKEN not in rejected.stderr
    http = urllib3.PoolManager(ca_certs=str(plane.ca_file), retries=False)
    for path in ("/api/v1/pods", f"{PROXY}/v1/nodes"):
        headers = {"Authorization": f"Bearer {token}"}
        assert http.request("GET", plane.url + path, headers=headers).status == 401
