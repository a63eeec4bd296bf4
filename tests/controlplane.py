"""A real etcd and kube-apiserver on loopback, for as long as a test session needs them.

RBAC is on, TLS is real (the API server signs for itself and its certificate is trusted by name),
and the tests hold a cluster-admin token. The ServiceAccount admission plugin is off, since no
controller creates the accounts that it asks for.
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import urllib3
import yaml
from kubernetes.client import Configuration

from tests.processes import Processes, free_ports

ROOT = Path(__file__).resolve().parents[1]
ADMIN_TOKEN = "admin-of-the-tests"
#: Authenticated, with no right to anything.
STRANGER_TOKEN = "stranger-of-the-tests"
START_TIMEOUT_S = 60.0


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

    def __init__(self) -> None:
        super().__init__("headroom-plane-")
        self.binaries = built("etcd", "kube-apiserver")
        self.etcd_port, self._peer_port, self.port = free_ports(3)
        self._http = urllib3.PoolManager(retries=False, timeout=urllib3.Timeout(10.0))

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

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
        (self.folder / "tokens.csv").write_text(
            f'{ADMIN_TOKEN},admin,admin,"system:masters"\n{STRANGER_TOKEN},stranger,stranger\n'
        )
        self._start_etcd()
        self.start_apiserver()

    def _start_etcd(self) -> None:
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
            "--watch-progress-notify-interval=1s",  # else bookmarks of a quiet kind stand still
            "--unsafe-no-fsync",
            "--log-level=warn",
        )

    def start_apiserver(self) -> None:
        """Start it, again on the same port after ``kill("kube-apiserver")``."""
        key = self.folder / "service-account.key"
        self.spawn(
            "kube-apiserver",
            str(self.binaries["kube-apiserver"]),
            f"--etcd-servers=http://127.0.0.1:{self.etcd_port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={self.port}",
            f"--cert-dir={self.folder / 'certs'}",
            "--authorization-mode=RBAC",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--disable-admission-plugins=ServiceAccount",
        )
        self._wait_ready()

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        """One request as the cluster's admin; raises ``ApiRefused`` unless it succeeds."""
        answer = self._http.request(
            method,
            self.url + path,
            body=None if body is None else json.dumps(body),
            headers={"Authorization": f"Bearer {ADMIN_TOKEN}", "Content-Type": content_type},
        )
        if answer.status >= 300:
            raise ApiRefused(f"{method} {path}: {answer.status} {answer.data.decode()}")
        decoded: dict[str, Any] = answer.json()
        return decoded

    def install_crd(self) -> None:
        """Create the CRD and wait until its objects are served."""
        self.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd_manifest())
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.call("GET", "/apis/headroom.gpu/v1alpha1/gpunodes")
            except ApiRefused:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)
            else:
                return

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

    def _wait_ready(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            self.raise_if_ended()
            if self.ca_file.exists() and self._ready():
                return
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"not ready:\n{self.log('kube-apiserver')[-4000:]}")
            time.sleep(0.05)

    def _ready(self) -> bool:
        """Whether it is ready and knows what its admin may do."""
        self._http = urllib3.PoolManager(
            ca_certs=str(self.ca_file), retries=False, timeout=urllib3.Timeout(5.0)
        )
        try:
            self.call("GET", "/api/v1/namespaces/default")
            headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
            answer = self._http.request("GET", f"{self.url}/readyz", headers=headers)
        except (ApiRefused, urllib3.exceptions.HTTPError, OSError):
            return False
        return answer.status == 200


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
