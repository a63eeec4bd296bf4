"""A real etcd and kube-apiserver on loopback, for as long as a test session needs them.

RBAC is on, TLS is real (the API server signs for itself and its certificate is trusted by name),
and the tests hold a cluster-admin token. The ServiceAccount admission plugin is off, since no
controller creates the accounts that it asks for. kube-scheduler, kube-controller-manager and
whatever else a test needs a process for run beside them, each as a user of its own.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import urllib3
import yaml
from kubernetes.client import Configuration

from tests.certificates import Authority
from tests.processes import Processes, free_ports
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[1]
ADMIN_TOKEN = "admin-of-the-tests"
#: Authenticated, with no right to anything.
STRANGER_TOKEN = "stranger-of-the-tests"
#: Token -> user. Kubernetes itself gives its own components their rights; ours need roles.
TOKENS = {
    STRANGER_TOKEN: "stranger",
    "scheduler-of-the-tests": "system:kube-scheduler",
    "controllers-of-the-tests": "system:kube-controller-manager",
    "extender-of-the-tests": "headroom-extender",
    "console-of-the-tests": "headroom-console",
    "webhook-of-the-tests": "headroom-webhook",
    "agent-of-the-tests": "headroom-agent",
    "viewer-of-the-tests": "headroom-viewer",
    "certs-of-the-tests": "headroom-certs",
}
#: Pods that name it are scheduled with the extender, all others wait for a scheduler for ever.
SCHEDULER_NAME = "headroom"
#: What cannot be said in deploy/base/kube-scheduler.yaml, which says why.
SCHEDULER_FLAGS = ("--feature-gates=SchedulerPopFromBackoffQ=false",)
#: The only controllers that run: with a node's life watched, nodes without a kubelet were tainted.
CONTROLLERS = (
    "deployment-controller",
    "replicaset-controller",
    "job-controller",
    "garbage-collector-controller",
)
START_TIMEOUT_S = 180.0


def built(*names: str) -> dict[str, Path]:
    """The pinned binaries by name; builds those that are missing, its progress on stderr."""
    command = [sys.executable, str(ROOT / "tests/gobin/build.py"), *names]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return {
        name: Path(path) for name, path in (line.split("\t") for line in answer.stdout.splitlines())
    }


def crd_manifest() -> dict[str, Any]:
    """The CRD of GPUNode as it is deployed; until that exists, one that keeps every field."""
    deployed = ROOT / "deploy/base/crd.yaml"
    if deployed.exists():
        manifest: dict[str, Any] = yaml.safe_load(deployed.read_text())
        return manifest
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "gpunodes.headroom.gpu"},
        "spec": {
            "group": "headroom.gpu",
            "scope": "Cluster",
            "names": {"kind": "GPUNode", "plural": "gpunodes", "singular": "gpunode"},
            "versions": [
                {
                    "name": "v1alpha1",
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "properties": {"spec": anything, "status": anything},
                        }
                    },
                }
            ],
        },
    }


class ApiRefused(Exception):
    """The API server did not do what a test asked in passing."""


class ControlPlane(Processes):
    """``start`` returns when the API server is ready; ``stop`` leaves nothing behind."""

    #: Where the API server listens, and is found.
    address = "127.0.0.1"
    #: What its admission leaves out: by default nobody makes service accounts for pods.
    without_admission = ("ServiceAccount",)
    controllers = CONTROLLERS

    def __init__(self) -> None:
        super().__init__("headroom-plane-")
        self.binaries = built("etcd", "kube-apiserver")
        self.etcd_port, self._peer_port, self.port = free_ports(3)
        self._http = urllib3.PoolManager(retries=False, timeout=urllib3.Timeout(10.0))

    @property
    def url(self) -> str:
        return f"https://{self.address}:{self.port}"

    @property
    def ca_file(self) -> Path:
        return self.folder / "certs/apiserver.crt"

    def configuration(self, token: str = ADMIN_TOKEN) -> Configuration:
        """For the ``kubernetes`` package and for ours."""
        configuration = Configuration()
        configuration.host = self.url
        configuration.ssl_ca_cert = str(self.ca_file)
        configuration.api_key["authorization"] = f"Bearer {token}"
        return configuration

    def start(self) -> None:
        key = self.folder / "service-account.key"
        subprocess.run(
            ["openssl", "ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", str(key)],
            check=True,
            capture_output=True,
        )
        self.clients_ca = Authority(self.folder, "clients-ca")
        users = "".join(f"{token},{user},{user}\n" for token, user in TOKENS.items())
        admin = f'{ADMIN_TOKEN},admin,admin,"system:masters"\n'
        (self.folder / "tokens.csv").write_text(admin + users)
        self.spawn_etcd()
        self.start_apiserver()

    def spawn_etcd(self) -> None:
        """Start it, again with what it held after ``kill("etcd")``."""
        client = f"http://127.0.0.1:{self.etcd_port}"
        peer = f"http://127.0.0.1:{self._peer_port}"
        self.spawn(
            "etcd",
            str(self.binaries["etcd"]),
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--watch-progress-notify-interval=5s",  # as kubeadm sets it
            "--unsafe-no-fsync",
            "--log-level=warn",
        )

    def start_apiserver(self, patience_s: float = START_TIMEOUT_S, *flags: str) -> None:
        """Start it, again on the same port after ``kill("kube-apiserver")``."""
        self.spawn_apiserver(*flags)
        self._wait_ready(patience_s)

    def spawn_apiserver(self, *flags: str) -> None:
        """The same without waiting until it is ready."""
        key = self.folder / "service-account.key"
        self.spawn(
            "kube-apiserver",
            str(self.binaries["kube-apiserver"]),
            f"--etcd-servers=http://127.0.0.1:{self.etcd_port}",
            f"--bind-address={self.address}",
            f"--advertise-address={self.address}",
            f"--secure-port={self.port}",
            f"--cert-dir={self.folder / 'certs'}",
            "--authorization-mode=RBAC",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            f"--client-ca-file={self.clients_ca.cert}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-cluster-ip-range=10.0.0.0/24",
            f"--disable-admission-plugins={','.join(self.without_admission)}",
            *flags,
        )

    def kubeconfig(
        self, token: str = ADMIN_TOKEN, namespace: str = "default", port: int | None = None
    ) -> Path:
        """A kubeconfig file for the holder of the token; ``port`` is that of who stands before the
        API server."""
        path = self.folder / f"{token}.{namespace}.{port or self.port}.kubeconfig"
        self.write_kubeconfig(path, {"token": token}, namespace, port)
        return path

    def write_kubeconfig(
        self,
        path: Path,
        user: Mapping[str, Any],
        namespace: str = "default",
        port: int | None = None,
    ) -> None:
        """``user`` is that of the kubeconfig: who it is, and how it is shown."""
        server = f"https://{self.address}:{port or self.port}"
        context = {"cluster": "tests", "user": "tests", "namespace": namespace}
        cluster = {"server": server, "certificate-authority": str(self.ca_file)}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "tests", "cluster": cluster}],
            "users": [{"name": "tests", "user": dict(user)}],
            "contexts": [{"name": "tests", "context": context}],
            "current-context": "tests",
        }
        # Another process may be reading it: it finds the old file or the new one, never a part.
        new = path.with_name(f"{path.name}.{uuid4().hex}")
        new.write_text(json.dumps(content))
        new.replace(path)

    def start_scheduler(
        self,
        extender_url: str,
        binary: str = "kube-scheduler",
        tls: Mapping[str, str] | None = None,
        one_entry: bool = False,
    ) -> None:
        """Start one of the built kube-schedulers with our extender, as we tell users to set it up.

        It serves nothing itself; several may run at once under the names of their binaries.
        ``tls`` is the extender's tlsConfig, where it is spoken to over TLS.
        """
        kubeconfig = self.kubeconfig("scheduler-of-the-tests")
        content = scheduler_configuration(extender_url, kubeconfig, tls, one_entry)
        self.spawn_scheduler(binary, content, binary)

    def spawn_scheduler(
        self, name: str, configuration: Mapping[str, Any], binary: str = "kube-scheduler"
    ) -> None:
        """Start one of this very KubeSchedulerConfiguration, as a process of that name."""
        config = self.folder / f"{name}.json"
        config.write_text(json.dumps(configuration))
        flags = f"--config={config}", "--secure-port=0", *SCHEDULER_FLAGS
        self.spawn(name, str(built(binary)[binary]), *flags)

    def start_controller_manager(self) -> None:
        name = "kube-controller-manager"
        self.spawn(
            name,
            str(built(name)[name]),
            f"--kubeconfig={self.kubeconfig('controllers-of-the-tests')}",
            f"--service-account-private-key-file={self.folder / 'service-account.key'}",
            f"--controllers={','.join(self.controllers)}",
            f"--root-ca-file={self.ca_file}",
            "--use-service-account-credentials=true",  # else RBAC grants its controllers nothing
            "--leader-elect=false",
            "--secure-port=0",
        )

    def kubectl(self, *arguments: str) -> str:
        """What kubectl prints for the cluster's admin."""
        command = [str(built("kubectl")["kubectl"]), f"--kubeconfig={self.kubeconfig()}"]
        command += [f"--cache-dir={self.folder / 'kubectl'}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """One request as the cluster's admin; raises ``ApiRefused`` unless it succeeds."""
        answer = self._http.request(
            method,
            self.url + path,
            body=None if body is None else json.dumps(body),
            headers={"Authorization": f"Bearer {ADMIN_TOKEN}", "Content-Type": content_type},
            **({} if timeout_s is None else {"timeout": timeout_s}),
        )
        if answer.status >= 300:
            raise ApiRefused(f"{method} {path}: {answer.status} {answer.data.decode()}")
        decoded: dict[str, Any] = answer.json()
        return decoded

    def install_crd(self) -> None:
        """Create the CRD and wait until its objects are served."""
        self.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd_manifest())

        def served() -> bool:
            try:
                self.call("GET", "/apis/headroom.gpu/v1alpha1/gpunodes")
            except ApiRefused:
                return False
            return True

        until(served, "GPUNodes are served", START_TIMEOUT_S, 0.05)

    def compact(self) -> int:
        """Forget etcd's history up to now; the revision it was compacted at."""
        etcd = f"http://127.0.0.1:{self.etcd_port}/v3"
        answer = self._http.request("POST", f"{etcd}/kv/range", json={"key": "AA=="})
        revision = int(answer.json()["header"]["revision"])
        answer = self._http.request(
            "POST", f"{etcd}/kv/compaction", json={"revision": revision, "physical": True}
        )
        if answer.status != 200:
            raise ApiRefused(f"compaction: {answer.status} {answer.data.decode()}")
        return revision

    def _wait_ready(self, patience_s: float) -> None:
        def is_ready() -> bool:
            self.raise_if_ended()
            return self.ca_file.exists() and self._ready()

        said = lambda: self.log("kube-apiserver")[-4000:]  # noqa: E731
        until(is_ready, "kube-apiserver is ready", patience_s, 0.05, said)

    def _ready(self) -> bool:
        """Whether it is ready and knows what its admin may do."""
        # Whoever is answered 429 asks again: so does the API server while it takes in a new schema.
        retries = urllib3.Retry(
            total=None,
            connect=False,
            read=False,
            redirect=False,
            other=False,
            status=30,
            status_forcelist=(429,),
            allowed_methods=None,
            raise_on_status=False,
        )
        self._http = urllib3.PoolManager(
            ca_certs=str(self.ca_file), retries=retries, timeout=urllib3.Timeout(30.0)
        )
        try:
            self.call("GET", "/api/v1/namespaces/default")
            headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
            answer = self._http.request("GET", f"{self.url}/readyz", headers=headers)
        except (ApiRefused, urllib3.exceptions.HTTPError, OSError):
            return False
        return answer.status == 200


def scheduler_configuration(
    extender_url: str,
    kubeconfig: Path,
    tls: Mapping[str, str] | None = None,
    one_entry: bool = False,
) -> dict[str, Any]:
    """The KubeSchedulerConfiguration as it is shipped, for an extender of the tests; with
    ``one_entry`` it is only called for pods with a GPU, as the file says."""
    content: dict[str, Any] = yaml.safe_load((ROOT / "deploy/base/kube-scheduler.yaml").read_text())
    content["clientConnection"] = {"kubeconfig": str(kubeconfig)}
    content["leaderElection"] = {"leaderElect": False}
    if one_entry:
        first, second = content["extenders"]
        moved = {key: second[key] for key in ("prioritizeVerb", "weight")}
        content["extenders"] = [first | moved]
    for extender in content["extenders"]:
        extender["urlPrefix"] = extender_url
        if tls is not None:
            # Without a caFile it would take any certificate at all.
            extender |= {"enableHTTPS": True, "tlsConfig": tls}
    return content


@contextlib.contextmanager
def control_plane() -> Iterator[ControlPlane]:
    """A running control plane with the CRD installed."""
    plane = ControlPlane()
    try:
        plane.start()
        plane.install_crd()
        yield plane
    finally:
        plane.stop()
