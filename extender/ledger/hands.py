"""Evictions and Events at the Kubernetes API server."""

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from urllib.parse import quote

import msgspec

from contract.kube import Pod
from extender.errors import StoreConflict
from extender.kubeapi import ApiError, KubeApi
from extender.ledger.kubernetes import store_error

_encode = msgspec.json.Encoder().encode
#: So that a name with what is put behind it stays below the limit of 253.
_NAME_CHARS = 200


class KubernetesHands:
    """``extender.ledger.eviction.Hands`` over the API server."""

    def __init__(self, api: KubeApi, wall_s: Callable[[], float]) -> None:
        self._api = api
        self._wall_s = wall_s

    def evict(self, pod: Pod) -> None:
        metadata = pod.metadata
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": metadata.name, "namespace": metadata.namespace},
            "deleteOptions": {
                "preconditions": {
                    "uid": metadata.uid,
                    "resourceVersion": metadata.resource_version,
                }
            },
        }
        path = f"{_in(metadata.namespace)}/pods/{quote(metadata.name, safe='')}/eviction"
        self._post(f"evict pod {metadata.namespace}/{metadata.name}", path, body)

    def tell(self, pod: Pod, reason: str, message: str) -> None:
        metadata = pod.metadata
        now = datetime.fromtimestamp(self._wall_s(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            # By its name another replica's is the same one.
            "metadata": {
                "name": f"{metadata.name[:_NAME_CHARS]}.{metadata.uid[:8]}.{reason.lower()}",
                "namespace": metadata.namespace,
            },
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": metadata.name,
                "namespace": metadata.namespace,
                "uid": metadata.uid,
            },
            "type": "Warning",
            "reason": reason,
            "message": message,
            "source": {"component": "headroom"},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        with suppress(StoreConflict):
            what = f"write an Event on pod {metadata.namespace}/{metadata.name}"
            self._post(what, f"{_in(metadata.namespace)}/events", body)

    def _post(self, what: str, path: str, body: object) -> None:
        try:
            self._api.call("POST", path, body=_encode(body))
        except ApiError as err:
            raise store_error(what, err) from err


def _in(namespace: str) -> str:
    return f"/api/v1/namespaces/{quote(namespace, safe='')}"
