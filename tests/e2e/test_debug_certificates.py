"""Client certificates that the debug API accepts: those of the real cluster's CA, over TLS."""

import base64
import contextlib
import io
import json
import os
import ssl
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from headroom.kubectl.commands import main
from headroom.kubectl.transport import PortForward
from headroom.kubectl.ui import Page
from tests.certificates import Authority, Certificate
from tests.controlplane import ADMIN_TOKEN, STRANGER_TOKEN
from tests.e2e.cluster import RBAC, Cluster
from tests.e2e.conftest import NewCluster
from tests.e2e.nodes import SYSTEM_NAMESPACE
from tests.e2e.streams import streaming
from tests.loopback import LOOPBACK
from tests.processes import free_ports
from tests.waiting import PATIENCE_S

GROUP = "gpu-watchers"
CONFIG_MAP = "kube-system/extension-apiserver-authentication"
VIEWER_TOKEN = "viewer-of-the-tests"
OF_SYSTEM = f"{RBAC}/namespaces/{SYSTEM_NAMESPACE}"
SYSTEM_PODS = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods"
BINDINGS = f"{RBAC}/clusterrolebindings"
ROLE = f"{RBAC}/namespaces/kube-system/roles/headroom-console"


@pytest.fixture
def cluster(new_cluster: NewCluster) -> Iterator[Cluster]:
    """In which a group may read the debug API."""
    cluster = new_cluster(1)
    binding = {
        "metadata": {"name": GROUP},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": "headroom-viewer",
        },
        "subjects": [{"kind": "Group", "name": GROUP, "apiGroup": "rbac.authorization.k8s.io"}],
    }
    cluster.plane.call("POST", BINDINGS, binding)
    yield cluster
    cluster.plane.call("DELETE", f"{BINDINGS}/{GROUP}")


def serve_over_tls(cluster: Cluster, tmp_path: Path) -> None:
    served = Authority(tmp_path, "served-by").sign("extender")
    settings = {"debug_tls_cert": str(served.cert), "debug_tls_key": str(served.key)}
    cluster.start_extender(guarded=True, settings=settings)


def answer(
    cluster: Cluster, tmp_path: Path, client: Certificate | None, token: str | None = None
) -> httpx.Response:
    """To /v1/nodes. Raises ``httpx.TransportError`` where the handshake fails."""
    context = ssl.create_default_context(cafile=str(tmp_path / "served-by.crt"))
    if client is not None:
        context.load_cert_chain(client.cert, client.key)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    url = cluster.debug_url().replace("http://", "https://")
    with httpx.Client(verify=context, timeout=PATIENCE_S, trust_env=False) as http:
        return http.get(f"{url}/v1/nodes", headers=headers)


def is_known(cluster: Cluster, tmp_path: Path, client: Certificate) -> bool:
    try:
        return answer(cluster, tmp_path, client).status_code in (200, 403)
    except httpx.TransportError:
        return False


def test_a_certificate_of_the_cluster_s_ca_names_its_user(cluster: Cluster, tmp_path: Path) -> None:
    serve_over_tls(cluster, tmp_path)
    ca = cluster.plane.clients_ca
    watcher, outsider = ca.sign("watcher", ["other", GROUP]), ca.sign("unknown-user")
    cluster.until(lambda: is_known(cluster, tmp_path, outsider), "certificates are taken")
    assert answer(cluster, tmp_path, watcher).status_code == 200
    rejected = answer(cluster, tmp_path, outsider)
    assert rejected.status_code == 403
    assert rejected.json()["detail"].startswith("unknown-user may not get path /v1/nodes; bind")
    # The CA's cluster has its admin in this group: a client without a token.
    assert answer(cluster, tmp_path, ca.sign("kubernetes-admin", ["system:masters"])).is_success

    assert answer(cluster, tmp_path, None).status_code == 401
    assert answer(cluster, tmp_path, None, ADMIN_TOKEN).status_code == 200
    assert answer(cluster, tmp_path, watcher, STRANGER_TOKEN).status_code == 403
    for forged in (
        Authority(tmp_path, "other-ca").sign("other-watcher", [GROUP]),
        ca.sign("for-servers", [GROUP], usage="serverAuth"),
    ):
        with pytest.raises(httpx.TransportError):
            answer(cluster, tmp_path, forged)
    logged = [json.loads(line) for line in cluster.plane.log("extender").splitlines()]
    reasons = [line["message"] for line in logged if line["event"] == "tls_client_rejected"]
    assert reasons[-2:] == [
        "CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate",
        "CERTIFICATE_VERIFY_FAILED: unsuitable certificate purpose",
    ]


def test_tokens_are_accepted_if_the_ca_may_not_be_read(cluster: Cluster, tmp_path: Path) -> None:
    plane = cluster.plane
    role = plane.call("GET", ROLE)
    plane.call("PUT", ROLE, role | {"rules": []})
    try:
        serve_over_tls(cluster, tmp_path)
        cluster.until(
            lambda: "client_ca_unknown" in cluster.plane.log("extender"), "it logs that it may not"
        )
        shown = next(
            json.loads(line)
            for line in cluster.plane.log("extender").splitlines()
            if "client_ca_unknown" in line
        )
        assert shown["message"].startswith(f"the console may not get ConfigMap {CONFIG_MAP}; bind")
        assert answer(cluster, tmp_path, None, ADMIN_TOKEN).status_code == 200
        watcher = plane.clients_ca.sign("early-watcher", [GROUP])
        unknown = answer(cluster, tmp_path, watcher)
        assert unknown.status_code == 401
        assert "client_ca_unknown" in unknown.json()["detail"]
    finally:
        plane.call("PUT", ROLE, {**role, "metadata": {"name": "headroom-console"}})
    cluster.until(
        lambda: answer(cluster, tmp_path, watcher).status_code == 200, "it is read in the end"
    )


# kubectl headroom, with each kind of kubeconfig, through the real API server to a stand-in kubelet.


@dataclass(frozen=True, slots=True)
class Shown:
    status: int
    stdout: str
    stderr: str


def headroom(*arguments: str | Path) -> Shown:
    """In this process: another one takes longer to start than to ask."""
    stdout, stderr, status = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.dict(os.environ, {"HEADROOM_SERVER": "", "HEADROOM_TOKEN": ""}),
        mock.patch.object(sys, "argv", ["kubectl-headroom", *map(str, arguments)]),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            main()
        except SystemExit as err:
            status = int(err.code or 0)
    return Shown(status, stdout.getvalue(), stderr.getvalue())


def by_certificate(client: Certificate) -> dict[str, str]:
    """As kubeadm and kind write it."""
    files = {"client-certificate-data": client.cert, "client-key-data": client.key}
    return {key: base64.b64encode(file.read_bytes()).decode() for key, file in files.items()}


def by_plugin(folder: Path, credentials: Mapping[str, str]) -> dict[str, Any]:
    """As the clouds do it: a command prints what to show."""
    kind = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}
    plugin = folder / "plugin"
    plugin.write_text(
        f"#!/bin/sh\nprintf %s '{json.dumps(kind | {'status': dict(credentials)})}'\n"
    )
    plugin.chmod(0o700)
    version = {"apiVersion": kind["apiVersion"], "interactiveMode": "Never"}
    return {"exec": version | {"command": str(plugin)}}


@pytest.fixture
def installed(cluster: Cluster, tmp_path: Path) -> Iterator[Cluster]:
    """The extender is a pod that is not ready yet, on a node whose kubelet streams. Who may read
    may find it, and be led to it."""
    serve_over_tls(cluster, tmp_path)
    plane, rights = cluster.plane, []
    for name, rule in (
        ("finds", {"resources": ["pods"], "verbs": ["list"]}),
        ("is-led", {"resources": ["pods/portforward"], "verbs": ["get", "create"]}),
    ):
        role = {"metadata": {"name": name}, "rules": [rule | {"apiGroups": [""]}]}
        who = [{"kind": "User", "name": "headroom-viewer"}, {"kind": "Group", "name": GROUP}]
        who += [{"kind": "User", "name": "finder"}] if name == "finds" else []
        group = "rbac.authorization.k8s.io"
        binding = {
            "metadata": {"name": name},
            "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
            "subjects": [each | {"apiGroup": group} for each in who],
        }
        for kind, body in (("roles", role), ("rolebindings", binding)):
            plane.call("POST", f"{OF_SYSTEM}/{kind}", body)
            rights.append(f"{OF_SYSTEM}/{kind}/{name}")
    port = int(cluster.debug_url().rpartition(":")[2])
    container = {"name": "extender", "image": "none"}
    container["ports"] = [{"name": "debug-tls", "containerPort": port}]  # type: ignore[assignment]
    labels = {"app.kubernetes.io/name": "headroom", "app.kubernetes.io/component": "console"}
    pod = {
        "metadata": {"name": "extender", "labels": labels},
        "spec": {"nodeName": "streams", "containers": [container]},
    }
    with streaming(Authority(tmp_path, "kubelets").sign("kubelet")) as kubelet_port:
        status = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": kubelet_port}},
        }
        plane.call("POST", "/api/v1/nodes", {"metadata": {"name": "streams"}, "status": status})
        plane.call("POST", SYSTEM_PODS, pod)
        yield cluster
        for path in (f"{SYSTEM_PODS}/extender", "/api/v1/nodes/streams", *rights):
            plane.call("DELETE", path, {"gracePeriodSeconds": 0})


def becomes_ready(cluster: Cluster) -> None:
    status = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    path = f"{SYSTEM_PODS}/extender/status"
    cluster.plane.call("PATCH", path, status, "application/merge-patch+json")


def test_every_kind_of_kubeconfig_leads_to_the_debug_api_or_to_a_reason(
    installed: Cluster, tmp_path: Path
) -> None:
    cluster, plane, ca = installed, installed.plane, installed.plane.clients_ca
    watcher = ca.sign("kubectl-watcher", [GROUP])
    cluster.until(lambda: is_known(cluster, tmp_path, watcher), "certificates are taken")
    viewer = plane.kubeconfig(VIEWER_TOKEN)
    nothing_ready = headroom("--kubeconfig", viewer, "top")
    assert nothing_ready.status == 3
    assert "no console in namespace headroom-system is ready" in nothing_ready.stderr
    becomes_ready(cluster)

    file = tmp_path / "kubeconfig"
    in_files = {"clientCertificateData": watcher.cert, "clientKeyData": watcher.key}
    as_json = {key: each.read_text() for key, each in in_files.items()}
    for user in (
        {"token": VIEWER_TOKEN},
        by_certificate(watcher),
        by_plugin(tmp_path, {"token": VIEWER_TOKEN}),
        by_plugin(tmp_path, as_json),
    ):
        plane.write_kubeconfig(file, user)
        answered = headroom("--kubeconfig", file, "top")
        assert (answered.status, answered.stderr) == (0, ""), answered
        assert "gpu-1" in answered.stdout

    plane.write_kubeconfig(file, by_certificate(watcher))
    with Page(lambda: PortForward(str(file), None, SYSTEM_NAMESPACE)) as page:
        thread = threading.Thread(target=page.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        nodes = LOOPBACK.get(f"{page.url}v1/nodes")
        page.shutdown()
        thread.join()
    assert "gpu-1" in [node["name"] for node in nodes.json()["nodes"]]

    for user, says in (
        (by_certificate(ca.sign("lists-nothing")), "cannot be listed: 403 Forbidden"),
        (by_certificate(ca.sign("finder")), "cannot be forwarded to: 403 Forbidden"),
        ({"token": "unknown-user"}, "cannot be listed: 401 Unauthorized: the API server"),
    ):
        plane.write_kubeconfig(file, user)
        answered = headroom("--kubeconfig", file, "top")
        assert answered.status == 3
        assert says in answered.stderr
        assert "401" in says or "{resources: [pods/portforward], verbs: [get, create]}" in (
            answered.stderr
        )
    elsewhere = headroom("--kubeconfig", viewer, "--headroom-namespace", "default", "top")
    assert "403 Forbidden; you need a Role in default with" in elsewhere.stderr
    admin = plane.kubeconfig()
    elsewhere = headroom("--kubeconfig", admin, "--headroom-namespace", "default", "top")
    assert "Headroom is not installed in namespace default" in elsewhere.stderr
    (nobody,) = free_ports(1)
    plane.write_kubeconfig(file, by_certificate(watcher), port=nobody)
    gone = headroom("--kubeconfig", file, "top")
    assert gone.status == 3
    assert "the API server does not answer: " in gone.stderr

    url = cluster.debug_url().replace("http://", "https://")
    trusts = "--server", url, "--certificate-authority", tmp_path / "served-by.crt"
    shows = "--client-certificate", watcher.cert, "--client-key", watcher.key
    assert headroom(*trusts, *shows, "top").status == 0
    assert "neither a token nor a client certificate" in headroom(*trusts, "top").stderr
    untrusted = headroom("--server", url, *shows, "top")
    assert untrusted.status == 3
    assert "certificate verify failed" in untrusted.stderr
