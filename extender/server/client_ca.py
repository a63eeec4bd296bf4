"""Keeps the CA of the cluster's client certificates as the API server publishes it.

Every cluster that takes client certificates says whose, in a ConfigMap for servers such as ours.
Where the API server does not answer, the last that it said stays; where it says that there is none,
or that we may not know, no certificate is asked for any more, and tokens are as good as ever.
"""

import asyncio
from collections.abc import Callable

import structlog
from kubernetes import client

from extender.errors import BadSettings
from extender.kube.client import ApiError, ApiStatus, KubeApi, Unreadable
from extender.periodic import Loops

log = structlog.get_logger()

NAMESPACE = "kube-system"
CONFIG_MAP = "extension-apiserver-authentication"
NAME = f"{NAMESPACE}/{CONFIG_MAP}"
KEY = "client-ca-file"
#: Between two looks: while it is known, and while it is not.
REFRESH_S = 60.0
RETRY_S = 5.0


class ClientCaUnknown(Exception):
    """There is none that we may know; why, in a sentence."""


def client_ca(api: KubeApi) -> str:
    """In PEM, one or more. Blocks; raises ``ClientCaUnknown``, and ``ApiError`` where the API
    server did not say."""
    try:
        core = client.CoreV1Api(api.client)
        with api.asking(f"read ConfigMap {NAME}") as timeout:
            published = (
                core.read_namespaced_config_map(
                    CONFIG_MAP, NAMESPACE, _request_timeout=timeout
                ).data
                or {}
            )
    except ApiStatus as err:
        if err.status == 403:
            raise ClientCaUnknown(
                f"the console may not get ConfigMap {NAME}; right is Role headroom-console of "
                "namespace kube-system, in deploy/base/rbac.yaml"
            ) from err
        if err.status == 404:
            raise ClientCaUnknown(f"there is no ConfigMap {NAME}") from err
        raise
    except Unreadable as err:
        raise ClientCaUnknown(f"ConfigMap {NAME} cannot be read") from err
    if not published.get(KEY):
        raise ClientCaUnknown(
            f"ConfigMap {NAME} has no {KEY}: the API server takes no client certificates "
            "(--client-ca-file)"
        )
    return published[KEY]


class ClientCa:
    """``know`` gets the CA of each round, or None; what cannot be had is logged once."""

    def __init__(self, api: KubeApi, know: Callable[[str | None], None]) -> None:
        self._api = api
        self._know = know
        self._said = ""
        self._ca: str | None = None
        self._again = asyncio.Event()

    def start(self, loops: Loops) -> None:
        loops.start("client-ca", self.once, REFRESH_S, self._again, RETRY_S)

    async def once(self) -> None:
        trouble = ""
        try:
            self._ca = await asyncio.to_thread(client_ca, self._api)
        except ClientCaUnknown as err:
            trouble, self._ca = str(err), None
        except ApiError as err:
            trouble = str(err)
        try:
            self._know(self._ca)
        except BadSettings as err:
            trouble = trouble or str(err)
        if trouble:
            self._again.set()
        if trouble and trouble != self._said and self._ca is None:
            log.warning("client_ca_unknown", message=trouble, hint="tokens are taken as ever")
        elif trouble and trouble != self._said:
            log.warning("client_ca_not_renewed", message=trouble, hint="the last one stays")
        if self._said and not trouble:
            log.info("client_ca_known")
        self._said = trouble
