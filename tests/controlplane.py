"""A real etcd and kube-apiserver on loopback, for as long as a test session needs them.

RBAC is on, TLS is real (the API server signs for itself and its certificate is trusted by name),
and the tests hold a cluster-admin token. The ServiceAccount admission plugin is off, since no
controller creates the accounts that it asks for. Both processes are killed by the kernel when the
one that started them dies, however it dies; their files go with ``stop``, or, where that was never
reached, with the next start.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import urllib3
import yaml
from kubernetes.client import Configuration

ROOT = Path(__file__).resolve().parents[1]
ADMIN_TOKEN = "admin-of-the-tests"
#: Authenticated, with no right to anything.
STRANGER_TOKEN = "stranger-of-the-tests"
START_TIMEOUT_S = 60.0

_SCRATCH = "headroom-controlplane-"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


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


class ControlPlane:
    """``start`` returns when the API server is ready; ``stop`` leaves nothing behind."""

    def __init__(self) -> None:
        _sweep()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_SCRATCH}{os.getpid()}-"))
        self.binaries = built("etcd", "kube-apiserver")
        self.etcd_port, self._peer_port, self.port = free_ports(3)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
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

    def stop(self) -> None:
        for name in list(self._processes):
            self.kill(name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start_etcd(self) -> None:
        client = f"http://127.0.0.1:{self.etcd_port}"
        peer = f"http://127.0.0.1:{self._peer_port}"
        self._spawn(
            "etcd",
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
        self._spawn(
            "kube-apiserver",
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

    def kill(self, name: str) -> None:
        """SIGKILL, as a machine that fails would; returns when the process is gone."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def pause(self, name: str) -> None:
        """Freeze it: its connections stay open and nothing answers."""
        self._processes[name].send_signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self._processes[name].send_signal(signal.SIGCONT)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

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

    def _spawn(self, name: str, *arguments: str) -> None:
        parent = os.getpid()

        def die_with_parent() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [str(self.binaries[name]), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                preexec_fn=die_with_parent,
                start_new_session=True,  # Ctrl-C is for the tests to handle, not for them
            )

    def _wait_ready(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise RuntimeError(f"{name} ended by itself:\n{self.log(name)[-4000:]}")
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


def free_ports(count: int) -> list[int]:
    """Ports that were free just now, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [each.getsockname()[1] for each in sockets]


def _sweep() -> None:
    """Remove what a session that was killed could not."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        pid = folder.name.removeprefix(_SCRATCH).partition("-")[0]
        if not Path("/proc", pid).exists():
            shutil.rmtree(folder, ignore_errors=True)
