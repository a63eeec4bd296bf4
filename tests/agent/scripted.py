"""A fake API server with the resources that one agent needs. The test scripts its responses."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.answering import Answer, Request, answering
from tests.certificates import Certificate

GPUNODE = "/apis/headroom.gpu/v1alpha1/gpunodes/n1"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/headroom-system/leases"


@dataclass
class ApiServer:
    """Serves Node n1, its GPUNode and Leases, and applies merge patches. The Node and the GPUNode
    are optional.
    """

    url: str = ""
    gpunode: dict[str, Any] | None = None
    lease: dict[str, Any] | None = None
    node: dict[str, Any] | None = None
    #: Maps paths to responses that replace the default responses. Bytes are sent unchanged.
    objects: dict[str, Any] = field(default_factory=dict)
    #: Number of next status patches that the server applies but answers with an error.
    lost: int = 0
    #: Resource version of the Lease after its last write.
    version: int = 100
    #: Maps methods and paths to the status and headers of an error response.
    reject: dict[tuple[str, str], tuple[int, dict[str, str]]] = field(default_factory=dict)
    #: Maps paths to the responses to POST requests.
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
        """Serve on loopback, with TLS if a certificate is given."""
        state = cls()

        def answer(request: Request) -> Answer:
            body = json.loads(request.body) if request.body else None
            headers = dict(request.headers)
            state.requests.append((request.method, request.path, headers, body))
            status, more, content = state.answer(request.method, request.path, body)
            return status, content, more

        with answering(answer, certificate) as state.url:
            yield state


def merged(old: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7396)."""
    if not isinstance(patch, dict):
        return patch
    result = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result
