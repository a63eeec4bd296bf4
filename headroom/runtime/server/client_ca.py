"""Reads the CA of the cluster's client certificates from the API server, and keeps it up to date.

A cluster that accepts client certificates publishes their CA in a ConfigMap for extension servers.
If the API server does not answer, the last CA stays in use. If the ConfigMap does not exist, has no
CA or cannot be read, the server requests no client certificates and accepts only tokens.
"""

import asyncio
from collections.abc import Callable

import msgspec
import structlog

from headroom.errors import BadSettings
from headroom.runtime.kube.api_errors import ApiError, ApiStatus
from headroom.runtime.kube.client import KubeApi
from headroom.runtime.loops import Loops

log = structlog.get_logger()

NAMESPACE = "kube-system"
CONFIG_MAP = "extension-apiserver-authentication"
NAME = f"{NAMESPACE}/{CONFIG_MAP}"
KEY = "client-ca-file"
#: Seconds before the CA is read again, after a success and after a failure.
REFRESH_S = 60.0
RETRY_S = 5.0


class ClientCaUnknown(Exception):
    """The CA is not published or cannot be read. The message is the reason."""


class _ConfigMap(msgspec.Struct):
    data: dict[str, str] | None = None


_decode = msgspec.json.Decoder(_ConfigMap).decode


def client_ca(api: KubeApi) -> str:
    """Return one or more CA certificates in PEM.

    Blocks. Raises ``ClientCaUnknown``, or ``ApiError`` if the call fails for another reason.
    """
    try:
        # The typed API would import 236 modules, which takes 0.6 s of CPU and 20 MiB.
        path = f"/api/v1/namespaces/{NAMESPACE}/configmaps/{CONFIG_MAP}"
        published = _decode(api.call("GET", path)).data or {}
    except ApiStatus as err:
        if err.status == 403:
            raise ClientCaUnknown(
                f"the console may not get ConfigMap {NAME}; bind it Role headroom-console of "
                "namespace kube-system (deploy/base/rbac.yaml)"
            ) from err
        if err.status == 404:
            raise ClientCaUnknown(f"there is no ConfigMap {NAME}") from err
        raise
    except (ValueError, RecursionError) as err:
        raise ClientCaUnknown(f"ConfigMap {NAME} cannot be read") from err
    if not published.get(KEY):
        raise ClientCaUnknown(
            f"ConfigMap {NAME} has no {KEY}: the API server accepts no client certificates "
            "(--client-ca-file)"
        )
    return published[KEY]


class ClientCa:
    """Reads the CA periodically and passes it to ``use_ca``, or None if there is no CA.

    A problem is logged when its message changes, not every time it occurs.
    """

    def __init__(self, api: KubeApi, use_ca: Callable[[str | None], None]) -> None:
        self._api = api
        self._use_ca = use_ca
        self._logged_problem = ""
        self._ca: str | None = None
        self._retry = asyncio.Event()

    def start(self, loops: Loops) -> None:
        loops.start("client-ca", self.once, REFRESH_S, self._retry, RETRY_S)

    async def once(self) -> None:
        """Read the CA once and pass it on. After a problem, request a retry after ``RETRY_S``."""
        problem = ""
        try:
            self._ca = await asyncio.to_thread(client_ca, self._api)
        except ClientCaUnknown as err:
            problem, self._ca = str(err), None
        except ApiError as err:
            problem = str(err)
        try:
            self._use_ca(self._ca)
        except BadSettings as err:
            problem = problem or str(err)
        if problem:
            self._retry.set()
        if problem and problem != self._logged_problem and self._ca is None:
            log.warning("client_ca_unknown", message=problem, hint="only tokens are accepted")
        elif problem and problem != self._logged_problem:
            log.warning("client_ca_not_renewed", message=problem, hint="the last CA stays in use")
        if self._logged_problem and not problem:
            log.info("client_ca_known")
        self._logged_problem = problem
