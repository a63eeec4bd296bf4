"""The store of truth: compare-and-swap, Bindings and touches at the Kubernetes API server.

Every write carries the resourceVersion it was computed from, and is sent once. An answer that does
not come, and every answer of the server that leaves open what it did or may be another one later
(``store_error``), is ``OutcomeUnknown``; the caller reads before it tries again.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from contract.annotations import FINALIZER, TOUCHED
from contract.errors import BadReport
from contract.gpunode import (
    GROUP,
    PLURAL,
    VERSION,
    GPUNode,
    GPUNodeSpec,
    decode_gpunode,
    decode_reservations,
    encode_gpunode,
)
from contract.kube import Lease, ObjectMeta, Pod
from extender.errors import (
    OutcomeUnknown,
    StoreConflict,
    StoreError,
    StoreNotFound,
    StoreRejected,
    StoreTimeout,
)
from extender.kube.async_client import AsyncKubeApi
from extender.kube.client import JSON, METADATA_ONLY, ApiError, ApiStatus, KubeApi, NoAnswer
from extender.ledger.store import Binding

#: From then on the API server keeps no account of who wrote which field, which nobody asks for and
#: which took a third of its time for each promise and each report.
UNTRACKED = [dict[str, Any]()]
_GPUNODES = f"/apis/{GROUP}/{VERSION}/{PLURAL}"
_MERGE_PATCH = "application/merge-patch+json"
_PAGE_SIZE = 500
#: What etcd, and the API server's client of etcd, say of an object beyond their limits (1.5 MiB
#: and 2 MiB by default). It will never be accepted.
_TOO_LARGE = "etcdserver: request is too large", "trying to send message larger than max"
#: Of an admission webhook with failurePolicy Fail that cannot be reached: a 500, and not written.
_NO_WEBHOOK = "failed calling webhook"
#: What their other errors contain. Whether the write was done is not known.
_ETCD_TROUBLE = "etcdserver: ", "rpc error: ", "context deadline exceeded", "context canceled"
#: 401: a token that is just being rotated; 408, 425, 429: too slow, too early, too many; 410: a
#: version that is gone, of which a later one is asked for.
_MAY_BE_ACCEPTED_LATER = frozenset({401, 408, 410, 425, 429})

T = TypeVar("T")


class _Written(msgspec.Struct):
    metadata: ObjectMeta


_encode = msgspec.json.Encoder().encode
_decode_written = msgspec.json.Decoder(_Written).decode
_decode_pod = msgspec.json.Decoder(Pod).decode
_decode_lease = msgspec.json.Decoder(Lease).decode


class KubernetesStore:
    """``extender.ledger.store.Store`` over the API server."""

    def __init__(
        self,
        api: AsyncKubeApi,
        lists: KubeApi,
        *,
        lease_namespace: str = "headroom-system",
        page_size: int = _PAGE_SIZE,
    ) -> None:
        """``lists`` is called on threads, for what is long."""
        self._api = api
        self._lists = lists
        self._leases = (
            f"/apis/coordination.k8s.io/v1/namespaces/{quote(lease_namespace, safe='')}/leases"
        )
        self._page_size = page_size

    async def read_gpunode(self, name: str) -> GPUNode | None:
        what = f"read GPUNode {name}"
        try:
            body = await self._call(what, "GET", _gpunode_path(name))
        except StoreNotFound:
            return None
        return _read(what, _decode_gpunode, body)

    async def create_gpunode(self, gpunode: GPUNode) -> GPUNode:
        what = f"create GPUNode {gpunode.name}"
        # A resourceVersion in a creation is refused. The status is stripped by the server.
        metadata = msgspec.structs.replace(gpunode.metadata, resource_version="", uid="")
        body = encode_gpunode(msgspec.structs.replace(gpunode, metadata=metadata))
        return _read(what, _decode_gpunode, await self._call(what, "POST", _GPUNODES, body))

    async def write_spec(self, before: GPUNode, spec: GPUNodeSpec) -> GPUNode:
        what = f"write spec of GPUNode {before.name}"
        version = _version(what, before.metadata.resource_version)
        changes = spec_patch(before.spec, spec)
        untracked = {"managedFields": UNTRACKED} if changes else {}
        patch = {"metadata": {"resourceVersion": version, **untracked}, "spec": changes}
        path = _gpunode_path(before.name)
        body = await self._call(what, "PATCH", path, _encode(patch), _MERGE_PATCH, METADATA_ONLY)
        # On condition of all of ``before``: nothing else of it can have changed.
        metadata = _read(what, _decode_written, body).metadata
        return msgspec.structs.replace(before, metadata=metadata, spec=spec)

    async def let_go(self, gpunode: GPUNode) -> None:
        what = f"let go of GPUNode {gpunode.name}"
        others = [name for name in gpunode.metadata.finalizers or () if name != FINALIZER]
        version = _version(what, gpunode.metadata.resource_version)
        patch = {"metadata": {"resourceVersion": version, "finalizers": others or None}}
        await self._call(what, "PATCH", _gpunode_path(gpunode.name), _encode(patch), _MERGE_PATCH)

    async def read_pod(self, namespace: str, name: str) -> Pod | None:
        what = f"read pod {namespace}/{name}"
        try:
            body = await self._call(what, "GET", _pod_path(namespace, name))
        except StoreNotFound:
            return None
        return _read(what, _decode_pod, body)

    async def read_heartbeat_version(self, node: str) -> str:
        what = f"read Lease of node {node}"
        try:
            body = await self._call(what, "GET", f"{self._leases}/{quote(node, safe='')}")
        except StoreNotFound:
            return ""
        return _read(what, _decode_lease, body).metadata.resource_version

    async def list_pods(self, node: str | None = None) -> list[Pod]:
        what = "list pods"
        try:
            listing = await asyncio.to_thread(
                self._lists.list,
                "/api/v1/pods",
                partial(_read, what, _decode_pod),
                page_size=self._page_size,
                query={} if node is None else {"fieldSelector": f"spec.nodeName={node}"},
            )
        except ApiError as err:
            raise store_error(what, err) from err
        return listing.items

    async def bind(self, binding: Binding) -> None:
        what = f"bind pod {binding.namespace}/{binding.name} to node {binding.node}"
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {
                "namespace": binding.namespace,
                "name": binding.name,
                "uid": binding.uid,
                "resourceVersion": _version(what, binding.resource_version),
                "annotations": dict(binding.annotations),
            },
            "target": {"apiVersion": "v1", "kind": "Node", "name": binding.node},
        }
        path = f"{_pod_path(binding.namespace, binding.name)}/binding"
        await self._call(what, "POST", path, _encode(body))

    async def touch_pod(self, pod: Pod, value: str, key: str = TOUCHED) -> Pod:
        metadata = pod.metadata
        what = f"touch pod {metadata.namespace}/{metadata.name}"
        patch = {
            "metadata": {
                "uid": metadata.uid,
                "resourceVersion": _version(what, metadata.resource_version),
                "annotations": {key: value},
            }
        }
        path = _pod_path(metadata.namespace, metadata.name)
        body = await self._call(what, "PATCH", path, _encode(patch), _MERGE_PATCH, METADATA_ONLY)
        # On condition of all of ``pod``, so nothing but its metadata has changed.
        return msgspec.structs.replace(pod, metadata=_read(what, _decode_written, body).metadata)

    async def _call(
        self,
        what: str,
        method: str,
        path: str,
        body: bytes | None = None,
        content_type: str = JSON,
        accept: str = JSON,
    ) -> bytes:
        try:
            return await self._api.call(
                method, path, body=body, content_type=content_type, accept=accept
            )
        except ApiError as err:
            raise store_error(what, err) from err


def spec_patch(before: GPUNodeSpec, after: GPUNodeSpec) -> dict[str, Any]:
    """``merge_patch`` of the two. Promises that are the same are not even looked into, of which a
    node has dozens; and none is named that is not known, however few are left."""
    was, is_now = before.reservations, after.reservations
    changed = [uid for uid in was.keys() | is_now.keys() if was.get(uid) is not is_now.get(uid)]
    reservations = merge_patch(
        {uid: msgspec.to_builtins(was[uid]) for uid in changed if uid in was},
        {uid: msgspec.to_builtins(is_now[uid]) for uid in changed if uid in is_now},
    )
    patch = merge_patch(_without_reservations(before), _without_reservations(after))
    return patch | ({"reservations": reservations} if reservations else {})


def _without_reservations(spec: GPUNodeSpec) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(spec, reservations={}))
    return built


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The RFC 7386 patch that turns ``before`` into ``after``: at every level, what is gone is
    null, and what is the same is left out. Neither may hold a null of its own."""
    patch: dict[str, Any] = dict.fromkeys(before.keys() - after.keys())
    for key, new in after.items():
        old = before.get(key)
        if old == new and key in before:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            patch[key] = merge_patch(old, new)
        else:
            patch[key] = new
    return patch


def _gpunode_path(name: str) -> str:
    return f"{_GPUNODES}/{quote(name, safe='')}"


def _pod_path(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(name, safe='')}"


def _version(what: str, resource_version: str) -> str:
    """A precondition that is empty would be none at all."""
    if not resource_version:
        raise StoreRejected(f"{what}: without a resourceVersion nothing guards it")
    return resource_version


def _decode_gpunode(body: bytes) -> GPUNode:
    """The promises are readable even where an agent's status is not."""
    try:
        return decode_gpunode(body)
    except BadReport:
        return decode_reservations(body)


def _read(what: str, decode: Callable[[Any], T], body: bytes | msgspec.Raw) -> T:
    """An answer that cannot be read is no answer."""
    try:
        return decode(body)
    except (ValueError, RecursionError) as err:
        raise OutcomeUnknown(f"{what}: the answer cannot be read: {err}") from err


def store_error(what: str, err: ApiError) -> StoreError:
    """Returns what an answer, or its absence, means to the protocol."""
    kind: type[StoreError] = OutcomeUnknown
    if isinstance(err, NoAnswer):
        kind = StoreTimeout
    elif isinstance(err, ApiStatus):
        kind = _meaning(err.status, err.message)
    return kind(f"{what}: {err}")


def _meaning(status: int, message: str) -> type[StoreError]:
    # The API server has no status of its own for what etcd answers: as a rule that is a 500, and
    # for a Binding a 409 with reason Conflict, whether the object is too large or etcd timed out.
    if any(said in message for said in (*_TOO_LARGE, _NO_WEBHOOK)):
        return StoreRejected
    if status == 409:
        return OutcomeUnknown if any(said in message for said in _ETCD_TROUBLE) else StoreConflict
    if status == 404:
        return StoreNotFound
    if status in _MAY_BE_ACCEPTED_LATER or not 400 <= status < 500:
        return OutcomeUnknown
    return StoreRejected
