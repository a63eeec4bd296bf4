"""Writes reports as status patches and heartbeats as a Lease to the API server."""

import math
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
import urllib3

from agent.kube_client import ApiServer, NotReached, request
from agent.status_builder import rfc3339
from headroom.client.kube_protocol import retry_after_s, status_message
from headroom.contract.annotations import OBSERVED_AT
from headroom.contract.gpunode import (
    API_VERSION,
    GROUP,
    KIND,
    PLURAL,
    VERSION,
    GPUNode,
    GPUNodeStatus,
)
from headroom.contract.gpunode_json import decode_gpunode
from headroom.contract.heartbeat import Confirmation, encode_confirmation
from headroom.contract.kube import KubeStruct, ObjectMeta

#: Maximum number of seconds that the agent waits because of a Retry-After header.
_LONGEST_RETRY_AFTER_S = 300.0
_METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"


class _Reported(KubeStruct, frozen=True):
    observed_at: str = ""


class _Partial(KubeStruct, frozen=True):
    """The part of a response that is decoded. A PartialObjectMetadata has no status."""

    metadata: ObjectMeta = ObjectMeta()
    status: _Reported | None = None


_partial = msgspec.json.Decoder(_Partial)


class NotDelivered(Exception):
    """A request failed. ``retry_after_s`` is the delay that the API server asked for, or 0."""

    def __init__(self, why: str, retry_after_s: float = 0.0) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class NotThereYet(NotDelivered):
    """No extender has created this node's GPUNode yet. The agent waits, because it may not create
    it."""


@dataclass(frozen=True, slots=True)
class Held:
    """The uid and the resourceVersion of a GPUNode at the API server. Both are empty if there is no
    GPUNode."""

    uid: str = ""
    version: str = ""


class KubernetesPublisher:
    """Writes the status of the node's GPUNode and the node's Lease, and reads the GPUNode.

    Every method raises ``NotDelivered`` if its request fails.
    """

    def __init__(
        self,
        server: ApiServer,
        node: str,
        namespace: str,
        heartbeat_s: float,
        timeout_s: float = 5.0,
    ) -> None:
        self._server = server
        self._node = node
        self._namespace = namespace
        self._heartbeat_s = heartbeat_s
        self._timeout_s = timeout_s
        self._gpunode = f"/apis/{GROUP}/{VERSION}/{PLURAL}/{node}"
        self._leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"

    def report(self, status: GPUNodeStatus) -> Held:
        """Write ``status``, and return the uid and version of the GPUNode with this status.

        Raises ``NotThereYet`` if there is no GPUNode.
        """
        answer = self._send("PATCH", f"{self._gpunode}/status", {"status": status_patch(status)})
        if answer.status == 404:
            raise NotThereYet(f"GPUNode {self._node} does not exist yet; an extender creates it")
        return _held(self._accepted(answer, f"status of GPUNode {self._node}"))[0]

    def held(self) -> Held:
        """Return the uid and version of the current GPUNode. Reads only its metadata."""
        return self._read(_METADATA_ONLY)[0]

    def reported(self) -> tuple[Held, str]:
        """Return the uid and version of the current GPUNode, and ``observedAt`` of its status.

        Reads the whole object.
        """
        return self._read("application/json")

    def gpunode(self, within_s: float = math.inf) -> GPUNode | None:
        """Return the GPUNode from a consistent read, or None if it does not exist.

        If the API server does not answer, the call fails after ``within_s`` seconds or the usual
        timeout, whichever is shorter. Raises ``BadReport`` if the GPUNode cannot be decoded.
        """
        timeout_s = min(within_s, self._timeout_s)
        answer = self._send("GET", self._gpunode, accept="application/json", timeout_s=timeout_s)
        if answer.status == 404:
            return None
        return decode_gpunode(self._accepted(answer, f"GPUNode {self._node}"))

    def _read(self, accept: str) -> tuple[Held, str]:
        # resourceVersion=0 reads from the API server's cache, which is fresh enough for heartbeats.
        answer = self._send("GET", f"{self._gpunode}?resourceVersion=0", accept=accept)
        if answer.status == 404:
            return Held(), ""
        return _held(self._accepted(answer, f"GPUNode {self._node}"))

    def heartbeat(self, now: datetime, vouch: Confirmation) -> str:
        """Renew the Lease, or create it if it does not exist, and return its resourceVersion.

        The GPUNode owns the Lease, so Kubernetes deletes both together with the Node.
        """
        owner = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": self._node,
            "uid": vouch.gpunode,
        }
        metadata = {
            "annotations": {OBSERVED_AT: encode_confirmation(vouch)},
            "ownerReferences": [owner],
        }
        spec = {
            "holderIdentity": self._node,
            "leaseDurationSeconds": round(3 * self._heartbeat_s),
            "renewTime": rfc3339(now),
        }
        what = f"Lease {self._namespace}/{self._node}"
        patch = {"metadata": metadata, "spec": spec}
        answer = self._send("PATCH", f"{self._leases}/{self._node}", patch)
        if answer.status == 404:
            lease = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self._node, "namespace": self._namespace, **metadata},
                "spec": spec,
            }
            answer = self._send("POST", self._leases, lease)
        return _held(self._accepted(answer, what))[0].version

    def _send(
        self,
        method: str,
        path: str,
        body: object = None,
        accept: str = _METADATA_ONLY,
        timeout_s: float | None = None,
    ) -> urllib3.BaseHTTPResponse:
        try:
            return request(self._server, method, path, timeout_s or self._timeout_s, accept, body)
        except NotReached as err:
            raise NotDelivered(f"{method} {path}: API server not reached: {err}") from err

    def _accepted(self, answer: urllib3.BaseHTTPResponse, what: str) -> bytes:
        """Return the body of a successful response. ``what`` names the object in the error."""
        if 200 <= answer.status < 300:
            return answer.data
        hint = ""
        if answer.status == 403:
            hint = (
                f"; this agent's node is {self._node}: $NODE_NAME must be set from spec.nodeName"
                " of its pod, and the pod must use the service account of deploy/base/rbac.yaml"
            )
        raise NotDelivered(
            f"{what} was rejected with {answer.status}: {status_message(answer.data)}{hint}",
            min(retry_after_s(answer.headers), _LONGEST_RETRY_AFTER_S),
        )


def status_patch(status: GPUNodeStatus) -> dict[str, Any]:
    """Return ``status`` as a merge patch that replaces the whole previous status.

    A merge patch keeps fields that it does not name, and the encoding omits default values. For
    example, an empty list of pods would be omitted, so the old pods would stay. Therefore the patch
    names every field, and null removes a field.
    """
    built = msgspec.to_builtins(status)
    return {
        key: _with_defaults(getattr(status, name), built.get(key)) for name, key in _fields(status)
    }


def _with_defaults(value: object, built: Any) -> Any:
    """Return the encoded ``value``, including the fields that the encoder omitted."""
    if isinstance(value, msgspec.Struct):
        return {key: (built or {}).get(key) for _, key in _fields(value)}
    if isinstance(value, list):
        return built or []
    return built


def _fields(value: msgspec.Struct) -> list[tuple[str, str]]:
    """Return the name in Python and the name in JSON of each field."""
    return [(field.name, field.encode_name) for field in msgspec.structs.fields(value)]


def _held(body: bytes) -> tuple[Held, str]:
    """Decode the uid and version of an object, and ``observedAt`` of its status (empty if
    absent)."""
    try:
        partial = _partial.decode(body)
    except (ValueError, RecursionError) as err:  # msgspec raises UnicodeDecodeError too
        raise NotDelivered(f"API server's answer cannot be read: {err}") from err
    held = Held(partial.metadata.uid, partial.metadata.resource_version)
    return held, partial.status.observed_at if partial.status else ""
