"""Connects a console to the API server, which delivers watches and quotas, and authorizes
readers."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import structlog
from fastapi import FastAPI

from headroom.console.console import Console
from headroom.console.quota_reader import KubeQuotas
from headroom.core.rules.pod_requests import ResourceQuota
from headroom.runtime.follow.cluster_connection import ApiServer
from headroom.runtime.kube.api_errors import ApiError
from headroom.runtime.kube.resources import profile_kind

log = structlog.get_logger()


@asynccontextmanager
async def followed_through(console: Console, server: ApiServer) -> AsyncIterator[None]:
    """Follow the watches of the API server while the context lasts."""
    kinds = [profile_kind()]
    async with server.followed_by(console.view, console.take, kinds, console.profiles.apply):
        yield


def app_for(console: Console, server: ApiServer) -> FastAPI:
    """Return the app of a console that runs in a cluster."""
    quotas = KubeQuotas(server.reviews)

    def read(namespace: str) -> Sequence[ResourceQuota] | None:
        try:
            return quotas.of(namespace)
        except ApiError as err:
            log.warning("quotas_not_read", namespace=namespace, error=str(err))
            return None

    return console.app(server.guard, read)
