"""Connects to the API server: address, connections, and the token of each request.

In a pod, the kubelet provides all of it. Only kubeconfigs need the package ``kubernetes``, whose
import would take 17 MiB on every GPU node.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import urllib3

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
#: Seconds for which a token is reused. The kubelet replaces the file well before it expires.
_TOKEN_FOR_S = 60.0
#: A watch keeps one connection open; samples, gates and steering share the others.
_CONNECTIONS = 8


class NoCluster(Exception):
    """No configuration of an API server was found."""


@dataclass(frozen=True, slots=True)
class ApiServer:
    #: Base URL, such as https://10.96.0.1:443.
    address: str
    pool: urllib3.PoolManager
    #: Headers that authenticate a request, such as a token. Raises ``OSError``.
    authentication: Callable[[], dict[str, str]]


def connect() -> ApiServer:
    """Return the API server of the pod's cluster, or of $KUBECONFIG. Raises ``NoCluster``."""
    try:
        if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
            return in_cluster(os.environ)
        return _of_kubeconfig()
    except OSError as err:
        raise NoCluster(f"no cluster to report to: {err}; without one, pass --no-publish") from err


def in_cluster(
    environment: Mapping[str, str],
    account: Path = ACCOUNT,
    monotonic: Callable[[], float] = time.monotonic,
) -> ApiServer:
    """Return the API server of the pod's cluster. Raises ``OSError`` if the token is missing."""
    host, port = environment["KUBERNETES_SERVICE_HOST"], environment["KUBERNETES_SERVICE_PORT"]
    pool = urllib3.PoolManager(
        maxsize=_CONNECTIONS, cert_reqs="CERT_REQUIRED", ca_certs=str(account / "ca.crt")
    )
    token = _Token(account / "token", monotonic)
    token.headers()
    address = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return ApiServer(address, pool, token.headers)


class _Token:
    """The token of a service account, read again once a minute."""

    def __init__(self, path: Path, monotonic: Callable[[], float]) -> None:
        self._path = path
        self._monotonic = monotonic
        self._until_s = float("-inf")
        self._headers: dict[str, str] = {}

    def headers(self) -> dict[str, str]:
        now_s = self._monotonic()
        if now_s >= self._until_s:
            self._headers = {"Authorization": f"Bearer {self._path.read_text().strip()}"}
            self._until_s = now_s + _TOKEN_FOR_S
        return dict(self._headers)


def _of_kubeconfig() -> ApiServer:
    """Return the API server of the kubeconfig. Raises ``OSError``."""
    from kubernetes import client, config
    from kubernetes.config import ConfigException

    # Not config.load_config: it prefers a kubeconfig in the home directory, and prints.
    untyped: Any = config
    try:
        untyped.load_kube_config()
    except ConfigException as err:
        raise OSError(str(err)) from err
    return of_client(client.ApiClient())


def of_client(client: Any) -> ApiServer:
    """Return the API server of a ``kubernetes.client.ApiClient``, which renews its own tokens."""
    from kubernetes.config import ConfigException

    def authentication() -> dict[str, str]:
        try:
            settings = client.configuration.auth_settings()
        except ConfigException as err:
            raise OSError(str(err)) from err
        return {each["key"]: each["value"] for each in settings.values()}

    return ApiServer(client.configuration.host, client.rest_client.pool_manager, authentication)
