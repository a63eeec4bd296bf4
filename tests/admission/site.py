"""Installs the admission policies, roles and webhook in a real API server, with a real extender."""

import base64
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import urllib3
import yaml

from tests.admission.server import WebhookServer, start_webhook
from tests.certificates import Authority, Certificate
from tests.controlplane import ADMIN_TOKEN, ROOT, ApiRefused, ControlPlane
from tests.processes import free_ports
from tests.waiting import PATIENCE_S, until

SYSTEM = "headroom-system"
EXTENDER, WEBHOOK, AGENT = "headroom-extender", "headroom-webhook", "headroom-agent"
#: The user name of the extender.
PROCESS = "admission-extender"
TEAM = "admission-team"
OPTED_OUT = "admission-opted-out"
#: GPU nodes that these tests create.
NODES = ("admission-a", "admission-b")
GPUNODES = "/apis/headroom.gpu/v1alpha1/gpunodes"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
ACCOUNTS = f"/api/v1/namespaces/{SYSTEM}/serviceaccounts"
PODS = f"/api/v1/namespaces/{TEAM}/pods"
AT_ONCE = {"gracePeriodSeconds": 0}
MERGE = "application/merge-patch+json"
GATE_IMAGE = "registry.example/headroom-agent:1"


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: dict[str, Any]
    warnings: tuple[str, ...]

    @property
    def message(self) -> str:
        reported: str = self.body.get("message", "")
        return reported


class Site:
    """Sends requests to the API server, and returns every response, including errors."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self._undo = contextlib.ExitStack()
        self.webhook: WebhookServer | None = None
        self._http = urllib3.PoolManager(ca_certs=str(plane.ca_file), retries=False)

    def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        token: str = ADMIN_TOKEN,
        content_type: str = "",
        kubelet_of: str = "",
    ) -> Reply:
        """Send a request. If ``kubelet_of`` names a node, impersonate the node's kubelet."""
        kind = content_type or (MERGE if method == "PATCH" else "application/json")
        headers = urllib3.HTTPHeaderDict({"Authorization": f"Bearer {token}", "Content-Type": kind})
        if kubelet_of:
            headers["Impersonate-User"] = f"system:node:{kubelet_of}"
            for group in ("system:nodes", "system:masters"):  # RBAC is not under test.
                headers.add("Impersonate-Group", group)
        answer = self._http.request(
            method,
            self.plane.url + path,
            body=None if body is None else json.dumps(body),
            headers=headers,
            timeout=PATIENCE_S,
        )
        # A warning has the format 299 - "...", and a response can have several Warning headers.
        shown = answer.headers.getlist("Warning") if answer.headers else []
        texts = [each.partition('"')[2].rpartition('"')[0].replace('\\"', '"') for each in shown]
        # The API server answers an unknown path with plain text.
        is_json = "json" in answer.headers.get("Content-Type", "")
        content = json.loads(answer.data) if is_json else {"message": answer.data.decode()}
        return Reply(answer.status, content, tuple(texts))

    def create(self, path: str, body: Mapping[str, Any]) -> None:
        """Create an object, and delete it when the site is closed."""
        with contextlib.suppress(AlreadyThere):
            self._must(self.send("POST", path, body))
        self._undo.callback(self.send, "DELETE", f"{path}/{body['metadata']['name']}", AT_ONCE)

    def _must(self, reply: Reply) -> None:
        if reply.status == 409:
            raise AlreadyThere
        if reply.status >= 300:
            raise ApiRefused(f"{reply.status} {reply.message}")

    def token(self, account: str, node: str | None = None) -> str:
        """Return a token of one of our service accounts. If a node is given, the token is bound to
        a pod on the node, like a token that the kubelet mounts.
        """
        bound: dict[str, Any] = {}
        if node is not None:
            name = f"agent-on-{node}"
            pod = self.plane.call("GET", f"/api/v1/namespaces/{SYSTEM}/pods/{name}")
            reference = {"apiVersion": "v1", "kind": "Pod", "name": name}
            bound = {"boundObjectRef": {**reference, "uid": pod["metadata"]["uid"]}}
        request = {"spec": {"expirationSeconds": 3600, **bound}}
        answer = self.plane.call("POST", f"{ACCOUNTS}/{account}/token", request)
        given: str = answer["status"]["token"]
        return given

    def install(self) -> None:
        """Create namespaces, accounts with their roles, nodes with agent pods, and all policies."""
        for name, labels in (
            (SYSTEM, {}),
            (TEAM, {}),
            (OPTED_OUT, {"headroom.gpu/scheduler": "none"}),
        ):
            reply = self.send(
                "POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}}
            )
            assert reply.status in (201, 409), reply
        self.add_accounts(EXTENDER, WEBHOOK, AGENT)
        self.add_nodes(*NODES)
        self._undo.callback(until, self._is_open_again, "the policies apply no longer")
        files = ("base/admission.yaml", "base/tenants.yaml", "base/priorityclass.yaml")
        for each in (each for file in files for each in manifests(file)):
            if each["kind"] == "PriorityClass":
                self.create("/apis/scheduling.k8s.io/v1/priorityclasses", each)
            else:
                self.enforce(each)

    def add_accounts(self, *accounts: str) -> None:
        """Create service accounts of Headroom with their installed roles."""
        for account in accounts:
            self.create(ACCOUNTS, {"metadata": {"name": account}})
        for role in manifests("base/rbac.yaml"):
            if role["kind"] in ("Role", "ClusterRole"):
                self.grant(role, accounts)

    def add_nodes(self, *names: str) -> None:
        """Create nodes, each with the pod of an agent."""
        for node in names:
            self.create("/api/v1/nodes", {"metadata": {"name": node}})
            self.plane.call("PATCH", f"/api/v1/nodes/{node}", {"spec": {"taints": None}})
            spec = {
                "nodeName": node,
                "serviceAccountName": AGENT,
                "containers": [{"name": "agent", "image": "none"}],
            }
            path = f"/api/v1/namespaces/{SYSTEM}/pods"
            self.create(path, {"metadata": {"name": f"agent-on-{node}"}, "spec": spec})

    def enforce(self, policy: Mapping[str, Any]) -> None:
        """Create an admission policy or the binding of a policy."""
        kind = "ies" if policy["kind"].endswith("Policy") else "ybindings"
        self.create(f"{ADMISSION}/validatingadmissionpolic{kind}", policy)

    def _is_open_again(self) -> bool:
        """Return whether the API server no longer enforces the policies, because other tests share
        it.
        """
        version, metadata = "headroom.gpu/v1alpha1", {"name": "no-owner"}
        gpunode = {"apiVersion": version, "kind": "GPUNode", "metadata": metadata}
        return self.send("POST", f"{GPUNODES}?dryRun=All", gpunode).status == 201

    def grant(
        self, role: Mapping[str, Any], accounts: Sequence[str] = (EXTENDER, WEBHOOK, AGENT)
    ) -> None:
        """Create a role, and bind it to the accounts with which its name starts."""
        metadata = role["metadata"]
        namespace = metadata.get("namespace")
        where = f"{RBAC}/namespaces/{namespace}" if namespace else RBAC
        self.create(f"{where}/{role['kind'].lower()}s", role)
        for account in accounts:
            if metadata["name"].startswith(account):
                self.bind(metadata["name"], account, role["kind"], namespace)

    def bind(
        self, role: str, account: str, kind: str = "ClusterRole", namespace: str | None = None
    ) -> None:
        """Bind an existing role to one of our accounts."""
        binding = {
            "metadata": {"name": f"{role}-of-the-tests"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": SYSTEM}],
        }
        where = f"{RBAC}/namespaces/{namespace}" if namespace else RBAC
        self.create(f"{where}/{kind.lower()}bindings", binding)

    def serve(self, **settings: Any) -> None:
        """Start an extender and a webhook, each with the token of its account."""
        verbs, debug = free_ports(2)
        config = self.plane.folder / "admission.headroom.yaml"
        config.write_text(yaml.safe_dump(settings))
        self.plane.fork(
            PROCESS,
            *("headroom", "serve", "--debug-open", "--insecure-verbs", "--config", str(config)),
            *("--verbs-port", str(verbs), "--debug-port", str(debug)),
            env={"KUBECONFIG": str(self._kubeconfig(EXTENDER))},
        )
        self.verbs_url, self.debug_port = f"http://127.0.0.1:{verbs}", debug
        self.serve_webhook(**settings)
        until(self._is_ready, "the extender has listed everything")

    def serve_webhook(self, **settings: Any) -> None:
        """Start or restart a webhook, and configure the API server to call it."""
        authority = Authority(self.plane.folder, "webhook-ca")
        kubeconfig = self._kubeconfig(WEBHOOK)
        name = "admission-webhook"
        self.webhook = start_webhook(
            self.plane, name, authority, kubeconfig, module="tests.hasty", **settings
        )
        for each in webhooks(self.webhook.url, authority):
            path = f"{ADMISSION}/{each['kind'].lower()}s"
            self.send("DELETE", f"{path}/{each['metadata']['name']}")
            self.create(path, each)

    def kill_webhook(self) -> None:
        assert self.webhook is not None
        self.webhook.stop()

    def _kubeconfig(self, account: str) -> Path:
        path = self.plane.folder / f"admission.{account}.kubeconfig"
        self.plane.write_kubeconfig(path, {"token": self.token(account)})
        return path

    def _is_ready(self) -> bool:
        self.plane.raise_if_ended()
        http = urllib3.PoolManager(retries=False)
        try:
            answer = http.request("GET", f"http://127.0.0.1:{self.debug_port}/readyz", timeout=5.0)
        except urllib3.exceptions.HTTPError:
            return False
        return answer.status == 200

    def close(self) -> None:
        if self.plane.runs(PROCESS):
            self.plane.kill(PROCESS)
        if self.webhook is not None:
            self.webhook.stop()
        self._undo.close()
        for node in NODES:
            path = f"{GPUNODES}/{node}"
            self.send("PATCH", path, {"metadata": {"finalizers": None}})
            self.send("DELETE", path, AT_ONCE)
        for namespace in (TEAM, OPTED_OUT):
            self.send("DELETE", f"/api/v1/namespaces/{namespace}/pods", AT_ONCE)
        self._http.clear()


class AlreadyThere(Exception):
    """The object already exists."""


def manifests(name: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all((ROOT / "deploy" / name).read_text()) if each]


def webhooks(
    url: str, authority: Authority | Certificate, timeout_s: int | None = 30
) -> Iterator[dict[str, Any]]:
    """Yield the shipped webhook configurations with the URL of a test's webhook.

    ``timeout_s`` is the API server's timeout. None keeps the shipped timeout of at most 5 s, which
    can be too short on a busy machine.
    """
    bundle = base64.b64encode(authority.cert.read_bytes()).decode()
    for each in manifests("base/webhook.yaml"):
        for one in each["webhooks"]:
            path = one["clientConfig"]["service"]["path"]
            one["clientConfig"] = {"url": f"{url}{path}", "caBundle": bundle}
            if timeout_s is not None:
                one["timeoutSeconds"] = timeout_s
        yield each


@contextlib.contextmanager
def counting(plane: ControlPlane, folder: Path) -> Iterator[None]:
    """Run a webhook that writes the requested GPU memory of pods and of queued Jobs as a
    resource.
    """
    authority, (port,) = Authority(folder, "ca"), free_ports(1)
    with contextlib.ExitStack() as undo:
        name, kubeconfig = "counting-webhook", plane.kubeconfig()
        webhook = start_webhook(plane, name, authority, kubeconfig, port=port, count_vram=True)
        undo.callback(webhook.stop)
        for each in webhooks(webhook.url, authority):
            path = f"{ADMISSION}/{each['kind'].lower()}s"
            plane.call("POST", path, each)
            undo.callback(plane.call, "DELETE", f"{path}/{each['metadata']['name']}")
        yield


@contextlib.contextmanager
def installed(plane: ControlPlane) -> Iterator[Site]:
    site = Site(plane)
    try:
        site.install()
        yield site
    finally:
        site.close()
