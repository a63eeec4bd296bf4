"""The part of an API server that one agent needs, scripted by the test."""

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.certificates import Certificate

GPUNODE = "/apis/headroom.gpu/v1alpha1/gpunodes/n1"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/headroom-system/leases"


@dataclass
class ApiServer:
    """Node n1, its GPUNode (both optional), and Leases. Patches are merged."""

    url: str = ""
    gpunode: dict[str, Any] | None = None
    lease: dict[str, Any] | None = None
    node: dict[str, Any] | None = None
    #: Responses that replace the default, by path. Bytes are sent unchanged.
    objects: dict[str, Any] = field(default_factory=dict)
    #: Number of status patches that are applied but answered with an error.
    lost: int = 0
    #: Responses to Lease calls.
    version: int = 100
    #: Status and headers to return instead, by (method, path).
    reject: dict[tuple[str, str], tuple[int, dict[str, str]]] = field(default_factory=dict)
    #: Responses to creations by path.
    created: dict[str, Any] = field(default_factory=dict)
    requests: list[tuple[str, str, dict[str, str], Any]] = field(default_factory=list)

    def create(self, uid: str) -> None:
        self.gpunode = {"metadata": {"name": "n1", "uid": uid}, "spec": {"initialised": True}}

    def answer(self, method: str, path: str, body: Any) -> tuple[int, dict[str, str], Any]:
        if (method, path) in self.reject:
            status, headers = self.reject[method, path]
            return status, headers, {"kind": "Status", "message": "rejected by the test"}
        match method, path:
            case ("PATCH", p) if p == f"{GPUNODE}/status" and self.gpunode is not None:
                self.gpunode["status"] = merged(self.gpunode.get("status"), body["status"])
                if self.lost:
                    self.lost -= 1
                    return 504, {}, {"kind": "Status", "message": "took too long"}
                return 200, {}, self.gpunode
            case ("GET", p) if p.partition("?")[0] == GPUNODE and self.gpunode is not None:
                return 200, {}, self.gpunode
            case ("GET", p) if p in self.objects:
                return 200, {}, self.objects[p]
            case ("GET", "/api/v1/nodes/n1") if self.node is not None:
                return 200, {}, self.node
            case ("PATCH", p) if p == f"{LEASES}/n1" and self.lease is not None:
                return 200, {}, self.take_lease(merged(self.lease, body))
            case ("POST", p) if p == LEASES:
                return 201, {}, self.take_lease(body)
            case ("POST", p) if p in self.created:
                return 201, {}, self.created[p]
        return 404, {}, {"kind": "Status", "reason": "NotFound"}

    def take_lease(self, lease: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.lease = merged(lease, {"metadata": {"resourceVersion": str(self.version)}})
        return self.lease

    def sent(self) -> list[tuple[str, str]]:
        return [(method, path) for method, path, _, _ in self.requests]

    @property
    def kubeconfig(self) -> dict[str, Any]:
        return {
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": "t0ken"}}],
        }

    @classmethod
    @contextmanager
    def serving(cls, certificate: Certificate | None = None) -> Iterator["ApiServer"]:
        """Serve on the loopback, with TLS if there is a certificate."""
        state = cls()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # Otherwise each body waits 40 ms for an ACK.

            def handle_one(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                state.requests.append((self.command, self.path, dict(self.headers), body))
                status, headers, answer = state.answer(self.command, self.path, body)
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_PATCH = do_POST = handle_one

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        if certificate is not None:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(certificate.cert, certificate.key)
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        scheme = "http" if certificate is None else "https"
        state.url = f"{scheme}://127.0.0.1:{server.server_address[1]}"
        try:
            yield state
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def merged(old: Any, patch: Any) -> Any:
    """Apply a patch as defined in RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    result = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result
