"""Connections to a debug API: to an address, or through the API server's proxy of its Service.

The ``kubernetes`` package is imported only if a cluster is needed.
"""

import http.client
import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headroom.client import kubeconfig as kubeconfigs
from headroom.client.kube_protocol import authentication, status_of
from headroom.contract.commands import command
from headroom.contract.console import AUDIENCE, CSRS, HEADER, PROXIED, audiences
from headroom.kubectl.debug_api_client import (
    BAD_INPUT,
    TIMEOUT_S,
    UNREACHABLE,
    CommandError,
    Response,
    Transport,
)
from headroom.kubectl.sessions import Sessions, folder

NAMESPACE = "headroom-system"
SELECTOR = "app.kubernetes.io/name=headroom,app.kubernetes.io/component=console"
PORT = 8889
#: Timeouts of a request to the API server, in seconds: for the connection with its TLS handshake,
#: as in kubectl, and for the answer.
API_TIMEOUT_S = 10.0, TIMEOUT_S
#: Content type of the console's errors. Errors of the API server have another type.
_PROBLEM = "application/problem+json"
_MAX_ERROR_BYTES = 1 << 16
_EXAMPLE = "http://127.0.0.1:8889"


def _is_loopback(host: str) -> bool:
    """Return whether a connection to ``host`` certainly stays on this machine."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class Address:
    """Opens connections to ``http://host:port`` or https.

    ``token`` is a bearer token that only the debug API accepts.
    """

    hint = "check --server or HEADROOM_SERVER"

    def __init__(self, url: str, token: str | None = None, ca: str | None = None) -> None:
        """``ca`` is the path of a PEM file. If it is None, the system's CAs are trusted.

        Raises ``CommandError`` if the URL is not an address, the token is also valid for other
        servers, or a file cannot be used.
        """
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise CommandError(f"--server: {url!r} is not an address. Example: {_EXAMPLE}", 2)
        if parts.scheme == "http" and not _is_loopback(parts.hostname):
            raise CommandError(
                f"--server: {url} is neither encrypted nor on this machine; use https://, or "
                f"forward a port. Example: --server {_EXAMPLE}",
                2,
            )
        if token and audiences(token) != [AUDIENCE]:
            created = command("kubectl", "create", "token", "NAME", "--audience", AUDIENCE)
            raise CommandError(
                "--token: the token is not restricted to the audience of the debug API, so a "
                f"server that receives it could use it elsewhere; create another one: {created}",
                2,
            )
        self.name = f"{parts.scheme}://{parts.netloc}"
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._host, self._port = parts.hostname, port
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._tls = verified_context(ca)
        elif ca is not None:
            raise CommandError(
                f"--server: {url} does not use TLS; use https:// with --certificate-authority", 2
            )

    @contextmanager
    def open(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Iterator[Response]:
        with closing(self._connection()) as connection:
            connection.request(method, target, body, {**headers, **self._headers})
            yield connection.getresponse()

    def _connection(self) -> http.client.HTTPConnection:
        if self._tls:
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=TIMEOUT_S, context=self._tls
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)


class Proxied:
    """Sends requests to any ready console, through the API server's proxy of its Service.

    The API server authenticates the user and does not pass on the credentials. The console
    identifies the user by a session (``headroom.kubectl.sessions``).
    """

    def __init__(self, kubeconfig: str | None, context: str | None, namespace: str) -> None:
        """Raises ``CommandError`` if no cluster is configured."""
        client = core_api(kubeconfig, context).api_client
        self._configuration, self._pool = client.configuration, client.rest_client.pool_manager
        self._namespace = namespace
        self._sessions = Sessions(self._create_csr, folder())
        self.name = f"the console in namespace {namespace}"
        self.hint = "to see why: " + command("kubectl", "-n", namespace, "logs", "-l", SELECTOR)

    @contextmanager
    def open(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Iterator[Response]:
        path = f"/api/v1/namespaces/{self._namespace}/services/{PROXIED}/proxy{target}"
        credential = self._credential()
        for attempt in ("first", "last"):
            session = {HEADER: self._sessions.secret(*credential)}
            with self._sent(method, path, body, {**headers, **session}) as response:
                of_console = response.headers.get("Content-Type") == _PROBLEM
                if response.status >= 400 and not of_console:
                    raise CommandError(self._explained(response), UNREACHABLE)
                if response.status == 401 and attempt == "first":
                    # An administrator may have deleted the session, or this clock has changed.
                    self._sessions.forget(*credential)
                    continue
                yield response
                return

    @contextmanager
    def _sent(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Iterator[Any]:
        """Send a request as the user of the kubeconfig."""
        from urllib3 import Retry, Timeout
        from urllib3.exceptions import HTTPError

        connect_s, read_s = API_TIMEOUT_S
        try:
            response = self._pool.request(
                method,
                self._configuration.host + path,
                body=body,
                headers={**headers, **self._authorization()},
                timeout=Timeout(connect=connect_s, read=read_s),
                retries=Retry(2, read=0, redirect=0, respect_retry_after_header=False),
                redirect=False,
                preload_content=False,
            )
            with closing(response):
                yield response
        except HTTPError as err:
            raise CommandError(unanswered(err), UNREACHABLE) from err

    def _authorization(self) -> dict[str, str]:
        """Return the user's token, if there is one. It is read again each time, because a plugin
        can renew it at any time."""
        return authentication(self._configuration)

    def _credential(self) -> tuple[bytes, ...]:
        """Return the values that identify the cluster and the user."""
        cert = self._configuration.cert_file
        return (
            self._configuration.host.encode(),
            *(value.encode() for value in self._authorization().values()),
            Path(cert).read_bytes() if cert else b"",
        )

    def _create_csr(self, csr: Mapping[str, object]) -> None:
        headers = {"Content-Type": "application/json"}
        with self._sent("POST", CSRS, json.dumps(csr).encode(), headers) as response:
            if response.status != 201:
                raise CommandError(self._explained(response), UNREACHABLE)

    def _explained(self, response: Any) -> str:
        """Describe an error of the API server, and what to do about it."""
        status = response.status
        message = status_of(response.read(_MAX_ERROR_BYTES)).message or str(response.reason)
        match status:
            case 401:
                return f"{status} {message}: the API server rejects the kubeconfig's credentials"
            case 403:
                return f"{message}; {needed_bindings(self._namespace)}"
            # Before Kubernetes 1.37, a missing Service leads to 404 instead of 503.
            case 404 | 503 if "no endpoints" in message or "not found" in message:
                listed = command("kubectl", "-n", self._namespace, "get", "pods", "-l", SELECTOR)
                return (
                    f"no console in namespace {self._namespace} is ready: {message}; see: "
                    f"{listed}; if Headroom has another namespace, set --headroom-namespace"
                )
            case 502 | 503 | 504:
                return (
                    f"the API server cannot connect to {self.name}: {message}; it must reach port "
                    f"{PORT} of the console's pods (docs/get-started/platforms.md)"
                )
        return f"the API server answered {status}: {message}"


def needed_bindings(namespace: str) -> str:
    """Return the commands with which an administrator allows a user to connect."""
    cluster = command(
        *("kubectl", "create", "clusterrolebinding", "headroom-user-NAME"),
        *("--clusterrole=headroom-user", "--user=NAME"),
    )
    proxy = command(
        *("kubectl", "-n", namespace, "create", "rolebinding", "headroom-user-NAME"),
        *("--role=headroom-user", "--user=NAME"),
    )
    return f"an administrator can permit it: {cluster}; {proxy}"


def transport_for(
    server: str | None,
    token: str | None,
    ca: str | None,
    kubeconfig: str | None,
    context: str | None,
    namespace: str,
) -> Transport:
    """Return the transport that the options select. Raises ``CommandError``."""
    if not server and ca is not None:
        raise CommandError(
            "--certificate-authority needs --server; otherwise the kubeconfig's CA is used", 2
        )
    return Address(server, token, ca) if server else Proxied(kubeconfig, context, namespace)


def default_namespace(kubeconfig: str | None, context: str | None) -> str:
    """Return the namespace of the context, like kubectl. Raises ``CommandError``."""
    try:
        return kubeconfigs.namespace(kubeconfig, context)
    except kubeconfigs.BadKubeconfig as err:
        raise _not_configured(err) from err


def core_api(kubeconfig: str | None, context: str | None) -> Any:
    """Return a ``CoreV1Api`` of the cluster that kubectl uses. Raises ``CommandError``.

    The client repeats a request only if the connection failed. If the API server hangs, each
    further attempt would take the whole timeout."""
    try:
        from kubernetes import client
        from urllib3 import Retry
    except ImportError as err:
        raise CommandError(f"{err}; install it: pip install headroom-gpu", 2) from err
    configuration = client.Configuration()
    try:
        kubeconfigs.configure(configuration, kubeconfig, context)
    except kubeconfigs.BadKubeconfig as err:
        raise _not_configured(err) from err
    api = client.CoreV1Api(client.ApiClient(configuration))
    # By default, urllib3 repeats a request three times, even after a timeout.
    api.api_client.rest_client.pool_manager.connection_pool_kw["retries"] = Retry(2, read=0)
    return api


def _not_configured(err: kubeconfigs.BadKubeconfig) -> CommandError:
    """Return an error that states why no cluster is configured."""
    if isinstance(err, kubeconfigs.NoContext):
        return CommandError(str(err), BAD_INPUT)
    return CommandError(
        f"no cluster is configured: {err}; set --kubeconfig or KUBECONFIG, or without a "
        f"cluster --server. Example: --server {_EXAMPLE}",
        UNREACHABLE,
    )


def unanswered(err: Any) -> str:
    """Describe an ``HTTPError`` of urllib3 by its reason, without the long path."""
    return f"the API server does not answer: {getattr(err, 'reason', None) or err}"


def verified_context(ca: str | None) -> ssl.SSLContext:
    """Return a context that verifies the server's name. Raises ``CommandError``."""
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ValueError) as err:
        raise CommandError(f"--certificate-authority: {ca}: {err}", 2) from err
