"""Evictions and Events at the Kubernetes API server."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from contract.kube import Pod
from extender.kube.api_errors import ApiError
from extender.kube.async_client import AsyncKubeApi
from extender.ledger.kube_store import store_error
from extender.state.notices import Notice, pod_notice

_encode = msgspec.json.Encoder().encode


class KubernetesEvictor:
    """Implements ``ledger.eviction.Evictor`` and ``preemption_writer.VictimEvictor`` with the API
    server. ``post`` writes an Event and blocks; it runs on a thread."""

    def __init__(self, api: AsyncKubeApi, post: Callable[[Notice], bool]) -> None:
        self._api = api
        self._post = post

    async def evict(self, pod: Pod) -> None:
        await self._evict(pod, {})

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
        namespace, name = quote(metadata.namespace, safe=""), quote(metadata.name, safe="")
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/eviction"
        try:
            await self._api.call("POST", path, body=_encode(body))
        except ApiError as err:
            raise store_error(f"evict pod {metadata.namespace}/{metadata.name}", err) from err

    async def record_event(self, pod: Pod, reason: str, message: str) -> None:
        await asyncio.to_thread(self._post, pod_notice(pod, reason, message, key=""))
