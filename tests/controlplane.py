"""A real etcd and a real kube-apiserver on loopback, for one test session.

RBAC and TLS are on, and clients trust the API server's self-signed certificate. Tests have a
cluster-admin token. The ServiceAccount admission plugin is off, because no controller creates the
service accounts that it requires. Tests can also start kube-scheduler, kube-controller-manager and
other processes, each with its own user.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import msgspec
import urllib3
import yaml
from kubernetes.client import Configuration

from tests.certificates import Authority, Certificate, make_api_certificate
from tests.kubernetes_version import apiserver_flags, of_version, scheduler_flags
from tests.processes import Processes, free_ports
from tests.waiting import PATIENCE_S, until

ROOT = Path(__file__).resolve().parents[1]
ADMIN_TOKEN = "admin-of-the-tests"
#: Token of an authenticated user who has no permissions.
STRANGER_TOKEN = "stranger-of-the-tests"
#: Maps each token to its user. Kubernetes creates the roles of its own components, but Headroom's
#: components need roles from a test.
TOKENS = {
    STRANGER_TOKEN: "stranger",
    "scheduler-of-the-tests": "system:kube-scheduler",
    "controllers-of-the-tests": "system:kube-controller-manager",
    "extender-of-the-tests": "headroom-extender",
    "console-of-the-tests": "headroom-console",
    "webhook-of-the-tests": "headroom-webhook",
    "agent-of-the-tests": "headroom-agent",
    "recorder-of-the-tests": "headroom-recorder",
    "viewer-of-the-tests": "headroom-viewer",
    "certs-of-the-tests": "headroom-certs",
    "certs-renewal-of-the-tests": "headroom-certs-renewal",
}
#: The name of the only scheduler. Pods that name another scheduler stay pending.
SCHEDULER_NAME = "headroom"
#: Controllers that kube-controller-manager runs. node-lifecycle is missing because it would taint
#: nodes that have no kubelet.
CONTROLLERS = (
    "deployment-controller",
    "replicaset-controller",
    "job-controller",
    "garbage-collector-controller",
)
START_TIMEOUT_S = 180.0
MERGE = "application/merge-patch+json"


@cache
def built(*names: str) -> dict[str, Path]:
    """Return the paths of pinned binaries by name. Build missing binaries and show the progress on
    stderr.
    """
    build = str(ROOT / "tests/gobin/build.py")
    targets = [of_version(name) for name in names]
    command = ["env", "-u", "GOMAXPROCS", sys.executable, build, *targets]  # compile on all cores
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    paths = [Path(line.partition("\t")[2]) for line in answer.stdout.splitlines()]
    return dict(zip(names, paths, strict=True))


def crd_manifest() -> dict[str, Any]:
    """Return the GPUNode CRD from ``deploy/base``."""
    manifest: dict[str, Any] = yaml.load(
        (ROOT / "deploy/base/crd.yaml").read_text(), yaml.CSafeLoader
    )
    return manifest


class ApiRefused(Exception):
    """The API server rejected a test's request."""


class ControlPlane(Processes):
    """Runs etcd, kube-apiserver and other processes of a cluster.

    ``start`` returns when the API server is ready. ``stop`` ends all processes and deletes their
    files.
    """

    #: The address that the API server listens on and advertises.
    address = "127.0.0.1"
    #: Disabled admission plugins. ServiceAccount is disabled because no controller creates service
    #: accounts by default.
    without_admission = ("ServiceAccount",)
    controllers = CONTROLLERS
    #: Maps the users of ``TOKENS`` to other names. By default, Headroom's components have no
    #: service accounts.
    renamed: Mapping[str, str] = MappingProxyType({})

    def __init__(self) -> None:
        super().__init__("headroom-plane-")
        self.etcd_port, self._peer_port, self.port = free_ports(3)
        self._http = urllib3.PoolManager(retries=False, timeout=urllib3.Timeout(PATIENCE_S))

    @cached_property
    def binaries(self) -> dict[str, Path]:
        """Return the binaries that ``start`` needs. The first call builds missing binaries."""
        return built("etcd", "kube-apiserver")

    @property
    def url(self) -> str:
        return f"https://{self.address}:{self.port}"

    @property
    def ca_file(self) -> Path:
        return self.certificate.cert

    @property
    def certificate(self) -> Certificate:
        """Make the API server's self-signed certificate for its address, valid from an hour ago."""
        return Certificate(self.folder / "certs/apiserver.crt", self.folder / "certs/apiserver.key")

    def configuration(self, token: str = ADMIN_TOKEN) -> Configuration:
        """Return a configuration for the ``kubernetes`` package and for ``runtime.kube``."""
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
        make_api_certificate(self.ca_file, self.address)
        names = {token: self.renamed.get(user, user) for token, user in TOKENS.items()}
        users = "".join(f"{token},{name},{name}\n" for token, name in names.items())
        admin = f'{ADMIN_TOKEN},admin,admin,"system:masters"\n'
        (self.folder / "tokens.csv").write_text(admin + users)
        self.spawn_etcd()
        self.start_apiserver()

    def spawn_etcd(self) -> None:
        """Start etcd. If it was killed before, it starts with the same data."""
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
            # kubeadm's interval of 5 s costs an idle API server 1 % of a CPU.
            "--watch-progress-notify-interval=30s",
            "--unsafe-no-fsync",
            "--log-level=warn",
        )

    def start_apiserver(self, patience_s: float = START_TIMEOUT_S, *flags: str) -> None:
        """Start the API server and wait until it is ready. A restarted API server has the same
        port.
        """
        self.spawn_apiserver(*flags)
        self._wait_ready(patience_s)

    def spawn_apiserver(self, *flags: str) -> None:
        """Start the API server without waiting until it is ready."""
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
            "--endpoint-reconciler-type=none",  # No pod uses the Service kubernetes.
            f"--disable-admission-plugins={','.join(self.without_admission)}",
            *apiserver_flags(),
            *flags,
        )

    def kubeconfig(
        self, token: str = ADMIN_TOKEN, namespace: str = "default", port: int | None = None
    ) -> Path:
        """Write a kubeconfig for a token. If ``port`` is given, the kubeconfig uses the proxy at
        that port.
        """
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
        """Write a kubeconfig. ``user`` is its user entry with credentials and impersonation."""
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
        # Replace the file atomically, because another process may be reading it.
        new = path.with_name(f"{path.name}.{uuid4().hex}")
        new.write_text(json.dumps(content))
        new.replace(path)

    def start_scheduler(
        self,
        extender_url: str,
        binary: str = "kube-scheduler",
        tls: Mapping[str, str] | None = None,
        one_entry: bool = False,
        gates: Sequence[str] = (),
        timeout_s: float = 60.0,
    ) -> None:
        """Start one of the built kube-schedulers with our extender, configured as shipped.

        The scheduler opens no port, so several versions can run at the same time. ``tls`` is the
        extender's tlsConfig. Without ``tls``, the scheduler uses plain HTTP. ``timeout_s`` is the
        timeout of each call. It is longer than the shipped 0.5 s for prioritize, because on a busy
        machine pods would be placed without our scores.
        """
        kubeconfig = self.kubeconfig("scheduler-of-the-tests")
        content = scheduler_configuration(extender_url, kubeconfig, tls, one_entry)
        for extender in content["extenders"]:
            extender["httpTimeout"] = f"{timeout_s:g}s"
        self.spawn_scheduler(binary, content, binary, gates)

    def spawn_scheduler(
        self,
        name: str,
        configuration: Mapping[str, Any],
        binary: str = "kube-scheduler",
        gates: Sequence[str] = (),
    ) -> None:
        """Start a kube-scheduler with this KubeSchedulerConfiguration, as process ``name``.

        ``gates`` are feature gates such as ``"Gate=true"``, which override the shipped feature
        gates.
        """
        config = self.folder / f"{name}.json"
        config.write_text(json.dumps(configuration))
        flags = f"--config={config}", "--secure-port=0", *scheduler_flags(binary, *gates)
        self.spawn(name, str(built(binary)[binary]), *flags)

    def start_controller_manager(self, *flags: str, controllers: Sequence[str] = ()) -> None:
        """Start kube-controller-manager with ``controllers``, by default with the controllers of
        the class.
        """
        name = "kube-controller-manager"
        self.spawn(
            name,
            str(built(name)[name]),
            f"--kubeconfig={self.kubeconfig('controllers-of-the-tests')}",
            f"--service-account-private-key-file={self.folder / 'service-account.key'}",
            f"--controllers={','.join(controllers or self.controllers)}",
            f"--root-ca-file={self.ca_file}",
            "--use-service-account-credentials=true",  # RBAC grants rights only to these accounts
            "--leader-elect=false",
            "--secure-port=0",
            *flags,
        )

    def kubectl(self, *arguments: str) -> str:
        """Run kubectl as the cluster's admin and return its output."""
        command = [str(built("kubectl")["kubectl"]), f"--kubeconfig={self.kubeconfig()}"]
        command += [f"--cache-dir={self.folder / 'kubectl'}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        content_type: str = "",
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Send a request as the cluster's admin. Raise ``ApiRefused`` if the API server rejects it.

        By default, a PATCH is a JSON merge patch.
        """
        kind = content_type or (MERGE if method == "PATCH" else "application/json")
        answer = self._http.request(
            method,
            self.url + path,
            body=None if body is None else json.dumps(body),
            headers={"Authorization": f"Bearer {ADMIN_TOKEN}", "Content-Type": kind},
            **({} if timeout_s is None else {"timeout": timeout_s}),
        )
        if answer.status >= 300:
            raise ApiRefused(f"{method} {path}: {answer.status} {answer.data.decode()}")
        decoded: dict[str, Any] = msgspec.json.decode(answer.data)
        return decoded

    def bind(self, pods: str, name: str, node: str) -> None:
        """Bind a pod as a scheduler does. ``pods`` is the URL path of the pods in the namespace."""
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        self.call("POST", f"{pods}/{name}/binding", {"metadata": {"name": name}, "target": target})

    def install_crd(self) -> None:
        """Create the CRD and wait until the API server serves its objects."""
        self.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd_manifest())

        def served() -> bool:
            try:
                self.call("GET", "/apis/headroom.gpu/v1alpha1/gpunodes")
            except ApiRefused:
                return False
            return True

        until(served, "GPUNodes are served", START_TIMEOUT_S, 0.05)

    def compact(self) -> int:
        """Compact etcd's history up to now. Return the revision."""
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

        log_end = lambda: self.log("kube-apiserver")[-4000:]  # noqa: E731
        until(is_ready, "kube-apiserver is ready", patience_s, 0.05, log_end)

    def _ready(self) -> bool:
        """Return whether the API server is ready and has loaded the admin's permissions."""
        # Retry after 429, which the API server also sends while it loads a new schema.
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
            ca_certs=str(self.ca_file), retries=retries, timeout=urllib3.Timeout(PATIENCE_S)
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
    """Return the shipped KubeSchedulerConfiguration with the URL of a test's extender.

    ``one_entry`` merges the two extender entries, so that the extender is called only for pods that
    request one of the ``managedResources`` of deploy/default-scheduler.
    """
    content: dict[str, Any] = yaml.load(
        (ROOT / "deploy/base/kube-scheduler.yaml").read_text(), yaml.CSafeLoader
    )
    content["clientConnection"] = {"kubeconfig": str(kubeconfig)}
    content["leaderElection"] = {"leaderElect": False}
    if one_entry:
        first, second = content["extenders"]
        moved = {key: second[key] for key in ("prioritizeVerb", "weight")}
        content["extenders"] = [first | moved | {"managedResources": managed_resources()}]
    for extender in content["extenders"]:
        extender["urlPrefix"] = extender_url
        del extender["enableHTTPS"], extender["tlsConfig"]  # They name the shipped certificates.
        if tls is not None:
            # ``tls`` must contain a caFile, because kube-scheduler accepts any certificate without
            # it.
            extender |= {"enableHTTPS": True, "tlsConfig": tls}
    return content


def managed_resources() -> list[dict[str, Any]]:
    """Return the names of GPU resources for which deploy/default-scheduler calls the extender."""
    file = ROOT / "deploy/default-scheduler/kube-scheduler.yaml"
    first, _ = yaml.load(file.read_text(), yaml.CSafeLoader)["extenders"]
    managed: list[dict[str, Any]] = first["managedResources"]
    return managed


@contextlib.contextmanager
def control_plane(kind: type[ControlPlane] = ControlPlane) -> Iterator[ControlPlane]:
    """A running control plane with the CRD installed."""
    plane = kind()
    try:
        plane.start()
        plane.install_crd()
        yield plane
    finally:
        plane.stop()
