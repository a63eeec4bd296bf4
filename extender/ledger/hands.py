"""Evictions and Events at the Kubernetes API server."""

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from contract.kube import Pod
from extender.cluster.notices import Notice, pod_notice
from extender.kubeapi import ApiError, KubeApi
from extender.ledger.kubernetes import store_error

_encode = msgspec.json.Encoder().encode


class KubernetesHands:
    """``extender.ledger.eviction.Hands`` over the API server; ``post`` writes an Event."""

    def __init__(self, api: KubeApi, post: Callable[[Notice], bool]) -> None:
        self._api = api
        self._post = post

    def evict(self, pod: Pod) -> None:
        self._evict(pod, {})

    def may_evict(self, pod: Pod) -> None:
        self._evict(pod, {"dryRun": ["All"]})

    def _evict(self, pod: Pod, options: Mapping[str, Any]) -> None:
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
        namespace, name = quote(metadata.namespace, safe=""), quote(metadata.name, safe="")
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/eviction"
        try:
            self._api.call("POST", path, body=_encode(body))
        except ApiError as err:
            raise store_error(f"evict pod {metadata.namespace}/{metadata.name}", err) from err

    def tell(self, pod: Pod, reason: str, message: str) -> None:
        self._post(pod_notice(pod, reason, message, key=""))
