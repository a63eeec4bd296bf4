"""The ledger's store at the API server: compare-and-swap, Bindings, annotations and evictions.

Each write carries the resourceVersion that it was computed from, and is sent only once.
``store_error`` returns ``OutcomeUnknown`` if there is no response, if the write may have been done
despite the error, and if a rejection may be temporary. The caller then reads the object before it
tries again.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from extender.ledger.store import Binding
from headroom.contract.annotations import FINALIZER, TOUCHED
from headroom.contract.errors import BadReport
from headroom.contract.gpunode import GROUP, PLURAL, VERSION, GPUNode, GPUNodeSpec
from headroom.contract.gpunode_json import decode_gpunode, decode_reservations, encode_gpunode
from headroom.contract.kube import Lease, ObjectMeta, Pod
from headroom.core.rules.bound_pods import BoundPod
from headroom.errors import (
    OutcomeUnknown,
    StoreConflict,
    StoreError,
    StoreNotFound,
    StoreRejected,
    StoreTimeout,
)
from headroom.runtime.kube.api_errors import ApiError, ApiStatus, NoAnswer
from headroom.runtime.kube.async_client import AsyncKubeApi
from headroom.runtime.kube.client import JSON, METADATA_ONLY, KubeApi

#: A value that removes the object's managedFields. Nothing reads these fields, but they took a
#: third of the API server's time for each write of a reservation or report.
UNTRACKED = [dict[str, Any]()]
_GPUNODES = f"/apis/{GROUP}/{VERSION}/{PLURAL}"
_MERGE_PATCH = "application/merge-patch+json"
_PAGE_SIZE = 500
#: Errors of etcd, and of the API server's etcd client, for an object above their limits (by default
#: 1.5 MiB and 2 MiB). etcd never accepts such an object, so retrying is useless.
_TOO_LARGE = "etcdserver: request is too large", "trying to send message larger than max"
#: The API server's error (status 500) if an admission webhook with failurePolicy Fail cannot be
#: reached. Nothing was written.
_NO_WEBHOOK = "failed calling webhook"
#: Fragments of other etcd errors, after which it is unknown whether the write was done.
_ETCD_TROUBLE = "etcdserver: ", "rpc error: ", "context deadline exceeded", "context canceled"
#: HTTP status codes of rejections that may be temporary. With 401, the token is being rotated. With
#: 410, the resourceVersion has expired, and the next attempt reads a newer version. 408, 425 and
#: 429 mean timeout, too early and too many requests.
_MAY_BE_ACCEPTED_LATER = frozenset({401, 408, 410, 425, 429})

T = TypeVar("T")


class _Written(msgspec.Struct):
    metadata: ObjectMeta


class _BoundPods(msgspec.Struct):
    items: list[BoundPod]


_encode = msgspec.json.Encoder().encode
_decode_written = msgspec.json.Decoder(_Written).decode
_decode_pod = msgspec.json.Decoder(Pod).decode
_decode_bound = msgspec.json.Decoder(_BoundPods).decode
_decode_lease = msgspec.json.Decoder(Lease).decode


class KubernetesStore:
    """Implements ``extender.ledger.store.Store`` with the API server."""

    def __init__(
        self,
        api: AsyncKubeApi,
        lists: KubeApi,
        *,
        lease_namespace: str = "headroom-system",
        page_size: int = _PAGE_SIZE,
    ) -> None:
        """Use ``lists`` for long lists. It blocks, so it is called on threads."""
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
        # The server rejects a creation with a resourceVersion, and drops the status.
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
        # The write required the resourceVersion of ``before``, so nothing else can have changed.
        metadata = _read(what, _decode_written, body).metadata
        return msgspec.structs.replace(before, metadata=metadata, spec=spec)

    async def remove_finalizer(self, gpunode: GPUNode) -> None:
        what = f"remove finalizer of GPUNode {gpunode.name}"
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

    async def list_bound(self, node: str) -> list[BoundPod]:
        """Return the pods on the node that have not ended, from the API server's cache. The cache
        may miss Bindings of the last milliseconds, but a consistent list would have to wait for
        etcd."""
        what = f"list pods of node {node}"
        selector = f"spec.nodeName={node},status.phase!=Succeeded,status.phase!=Failed"
        query = f"resourceVersion=0&fieldSelector={quote(selector, safe='')}"
        body = await self._call(what, "GET", f"/api/v1/pods?{query}")
        return _read(what, _decode_bound, body).items

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
        what = f"annotate pod {metadata.namespace}/{metadata.name}"
        patch = {
            "metadata": {
                "uid": metadata.uid,
                "resourceVersion": _version(what, metadata.resource_version),
                "annotations": {key: value},
            }
        }
        path = _pod_path(metadata.namespace, metadata.name)
        body = await self._call(what, "PATCH", path, _encode(patch), _MERGE_PATCH, METADATA_ONLY)
        # The write required the resourceVersion of ``pod``, so only its metadata has changed.
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


#: The grace period in seconds of a pod that does not set one.
_DEFAULT_GRACE_S = 30


class KubernetesEvictor:
    """Implements ``extender.ledger.store.Evictor`` with the API server."""

    def __init__(self, api: AsyncKubeApi) -> None:
        self._api = api

    async def evict(self, pod: Pod, most_grace_s: int | None = None) -> None:
        own_s = pod.spec.termination_grace_period_seconds
        grace_s = (
            None
            if most_grace_s is None
            else min(most_grace_s, _DEFAULT_GRACE_S if own_s is None else own_s)
        )
        await self._evict(pod, {} if grace_s is None else {"gracePeriodSeconds": grace_s})

    async def may_evict(self, pod: Pod) -> None:
        await self._evict(pod, {"dryRun": ["All"]})

    async def _evict(self, pod: Pod, options: Mapping[str, Any]) -> None:
        metadata = pod.metadata
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": metadata.name, "namespace": metadata.namespace},
            "deleteOptions": {
                "preconditions": {
                    "uid": metadata.uid,
                    "resourceVersion": metadata.resource_version,
                },
                **options,
            },
        }
        path = f"{_pod_path(metadata.namespace, metadata.name)}/eviction"
        try:
            await self._api.call("POST", path, body=_encode(body))
        except ApiError as err:
            raise store_error(f"evict pod {metadata.namespace}/{metadata.name}", err) from err


def spec_patch(before: GPUNodeSpec, after: GPUNodeSpec) -> dict[str, Any]:
    """Return the same patch as ``merge_patch`` of the two specs, but faster.

    A node has dozens of reservations, and most of them are the same object in both specs. So only
    the other reservations are converted and compared.
    """
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
    """Return the RFC 7386 patch that turns ``before`` into ``after``: at each level, removed keys
    are null and unchanged keys are omitted. Neither object may contain nulls."""
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
    """Return the resourceVersion. Raise ``StoreRejected`` if it is empty, because an empty
    precondition is not checked."""
    if not resource_version:
        raise StoreRejected(
            f"{what}: the object has no resourceVersion, so the write would be unconditional"
        )
    return resource_version


def _decode_gpunode(body: bytes) -> GPUNode:
    """Decode a GPUNode. If the agent's status cannot be read, decode its reservations only."""
    try:
        return decode_gpunode(body)
    except BadReport:
        return decode_reservations(body)


def _read(what: str, decode: Callable[[Any], T], body: bytes | msgspec.Raw) -> T:
    """Decode a response. Raise ``OutcomeUnknown`` if it cannot be read."""
    try:
        return decode(body)
    except (ValueError, RecursionError) as err:
        raise OutcomeUnknown(f"{what}: the answer cannot be read: {err}") from err


def store_error(what: str, err: ApiError) -> StoreError:
    """Convert the error of an API call to the store error that the bind protocol handles.

    ``what`` names the operation in the message.
    """
    kind: type[StoreError] = OutcomeUnknown
    if isinstance(err, NoAnswer):
        kind = StoreTimeout
    elif isinstance(err, ApiStatus):
        kind = _store_error_type(err.status, err.message)
    return kind(f"{what}: {err}")


def _store_error_type(status: int, message: str) -> type[StoreError]:
    # The API server has no status code for errors of etcd. It reports both an object that is too
    # large and a timeout of etcd as 500, or for a Binding as 409 with reason Conflict.
    if any(text in message for text in (*_TOO_LARGE, _NO_WEBHOOK)):
        return StoreRejected
    if status == 409:
        return OutcomeUnknown if any(text in message for text in _ETCD_TROUBLE) else StoreConflict
    if status == 404:
        return StoreNotFound
    if status in _MAY_BE_ACCEPTED_LATER or not 400 <= status < 500:
        return OutcomeUnknown
    return StoreRejected
