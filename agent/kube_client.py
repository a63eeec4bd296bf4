"""Connects to the API server, sends requests, and streams watches.

In a pod, the kubelet provides the API server's address, certificate and token. The package
``kubernetes`` is imported only for kubeconfigs, because its import would take 17 MiB on every GPU
node.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import urllib3

from headroom.client import kubeconfig
from headroom.client.kube_protocol import LineTooLong, authentication, status_message, whole_lines
from headroom.client.kubeconfig import ACCOUNT

#: Number of connections that are kept open. The watch occupies one of them, and samples, gates and
#: steering share the others.
_CONNECTIONS = 8
_MERGE_PATCH = "application/merge-patch+json"
#: Maximum length of a line of a watch. etcd limits a GPUNode to 1.5 MiB, so its events are shorter.
_MAX_LINE_BYTES = 4 << 20
_MAX_ERROR_BYTES = 4 << 10


class NoCluster(Exception):
    """No configuration of an API server was found."""


class NotReached(Exception):
    """The API server did not answer, or a watch of it failed."""


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Address, connections and credentials of an API server."""

    #: Base URL, such as https://10.96.0.1:443.
    address: str
    pool: urllib3.PoolManager
    #: A function that returns the headers that authenticate a request, such as a token. It raises
    #: ``OSError`` if the credentials cannot be read.
    authentication: Callable[[], dict[str, str]]


def connect() -> ApiServer:
    """Return the API server that kubectl uses, which in a pod is the API server of its cluster.
    Raises ``NoCluster``."""
    try:
        return in_cluster(os.environ) if _uses_account() else _of_kubeconfig()
    except (OSError, kubeconfig.BadKubeconfig) as err:
        raise NoCluster(f"no cluster to report to: {err}; without one, pass --no-publish") from err


def _uses_account() -> bool:
    """Return whether this is a pod without a kubeconfig. Raises ``BadKubeconfig``."""
    try:
        kubeconfig.find()
    except kubeconfig.NoCluster:
        return kubeconfig.in_pod()
    return False


def in_cluster(environment: Mapping[str, str], account: Path = ACCOUNT) -> ApiServer:
    """Return the API server of the pod's cluster. Raises ``OSError`` if the token is missing."""

    def by_token() -> dict[str, str]:
        # Read for every request, because the kubelet replaces the file before the token expires.
        return {"Authorization": f"Bearer {(account / 'token').read_text().strip()}"}

    host, port = environment["KUBERNETES_SERVICE_HOST"], environment["KUBERNETES_SERVICE_PORT"]
    pool = urllib3.PoolManager(
        maxsize=_CONNECTIONS, cert_reqs="CERT_REQUIRED", ca_certs=str(account / "ca.crt")
    )
    by_token()  # Fail now if there is no token.
    address = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return ApiServer(address, pool, by_token)


def _of_kubeconfig() -> ApiServer:
    """Return the API server of the kubeconfig. Raises ``BadKubeconfig``."""
    from kubernetes import client

    configuration = client.Configuration()
    kubeconfig.configure(configuration)
    return of_client(client.ApiClient(configuration))


def of_client(client: Any) -> ApiServer:
    """Return the API server of a ``kubernetes.client.ApiClient``, which renews its own tokens."""
    configuration, pool = client.configuration, client.rest_client.pool_manager
    return ApiServer(configuration.host, pool, partial(authentication, configuration))


def request(
    server: ApiServer,
    method: str,
    path: str,
    timeout_s: float,
    accept: str = "application/json",
    body: object = None,
) -> urllib3.BaseHTTPResponse:
    """Send one request and return the response with any status. Raises ``NotReached``."""
    headers = {"Accept": accept}
    if body is not None:
        headers["Content-Type"] = _MERGE_PATCH if method == "PATCH" else "application/json"
    encoded = None if body is None else msgspec.json.encode(body)
    try:
        return _send(server, method, path, headers, timeout_s, body=encoded)
    except (urllib3.exceptions.HTTPError, OSError) as err:
        raise NotReached(str(err)) from err


def watch_lines(server: ApiServer, path: str, quiet_s: float) -> Iterator[bytes]:
    """Yield the lines of a watch as they arrive, until the API server ends it.

    Raises ``NotReached`` if the watch is rejected or breaks, if a line is too long, or if nothing
    arrives for ``quiet_s`` seconds.
    """
    headers = {"Accept": "application/json"}
    try:
        response = _send(server, "GET", path, headers, quiet_s, preload_content=False)
        try:
            if response.status != 200:
                message = status_message(response.read(_MAX_ERROR_BYTES))
                raise NotReached(f"{response.status}: {message}")
            for lines in whole_lines(response.stream(), _MAX_LINE_BYTES):
                yield from lines
        finally:
            response.close()
    except (urllib3.exceptions.HTTPError, OSError, LineTooLong, EOFError) as err:
        raise NotReached(str(err)) from err


def _send(
    server: ApiServer,
    method: str,
    path: str,
    headers: dict[str, str],
    timeout_s: float,
    **more: Any,
) -> urllib3.BaseHTTPResponse:
    headers["User-Agent"] = "headroom-agent"
    response: urllib3.BaseHTTPResponse = server.pool.request(
        method,
        server.address + path,
        headers=headers | server.authentication(),
        timeout=timeout_s,
        retries=False,  # The caller retries with its newest data.
        **more,
    )
    return response
