"""Connections to a debug API: to an address, or through the API server like kubectl port-forward.

The ``kubernetes`` package is imported only if a cluster is needed. The credentials for the API
server also authenticate the user at the debug API: a token always, a client certificate if the
pod's port is named ``debug-tls``.
"""

import http.client
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from contract import kubeconfig as kubeconfigs
from contract.commands import command
from headroom.kubectl.debug_api_client import (
    BAD_INPUT,
    TIMEOUT_S,
    UNREACHABLE,
    CommandError,
    Transport,
)

NAMESPACE = "headroom-system"
SELECTOR = "app.kubernetes.io/name=headroom,app.kubernetes.io/component=console"
PORT = 8889
#: Timeouts of a request to the API server, in seconds: for the connection with its TLS handshake
#: (kubectl's, too), and for the answer.
API_TIMEOUT_S = 10.0, TIMEOUT_S
#: Names of the container port of the debug API. If no port has one of them, ``PORT`` without TLS is
#: used.
PLAIN_NAME, TLS_NAME = "debug", "debug-tls"
#: Permissions that a user needs in the namespace of the console.
_RIGHTS = (
    "{resources: [pods], verbs: [list]} and {resources: [pods/portforward], verbs: [get, create]}"
)
_EXAMPLE = "http://127.0.0.1:8889"


@dataclass(frozen=True, slots=True)
class Files:
    """Paths of the PEM files for TLS; without ``ca``, the system's CAs are trusted."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None


NO_FILES = Files()


def _is_loopback(host: str) -> bool:
    """Return whether a connection to ``host`` stays on this machine; other names may not."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class Address:
    """Opens connections to ``http://host:port`` or https. ``token`` is the bearer token."""

    hint = "check --server or HEADROOM_SERVER"

    def __init__(self, url: str, token: str | None = None, files: Files = NO_FILES) -> None:
        """Raises ``CommandError`` if the URL is not an address, or a file cannot be used."""
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
        self.name = f"{parts.scheme}://{parts.netloc}"
        self.headers: Mapping[str, str] = {"Authorization": f"Bearer {token}"} if token else {}
        self._host, self._port = parts.hostname, port
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._tls = verified_context(files)
        elif files != NO_FILES:
            raise CommandError(
                f"--server: {url} does not use TLS; use https:// with certificates", 2
            )

    def connect(self) -> http.client.HTTPConnection:
        if self._tls:
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=TIMEOUT_S, context=self._tls
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class Target:
    """The port of a pod."""

    pod: str
    port: int
    tls: bool


class PortForward:
    """Opens connections to a ready pod of the console, through the kubeconfig's API server."""

    def __init__(self, kubeconfig: str | None, context: str | None, namespace: str) -> None:
        """Select a ready pod. Raises ``CommandError`` if there is none, or without a cluster."""
        self._api = core_api(kubeconfig, context)
        self._namespace = namespace
        self._target = self._ready_pod()
        self.name = f"pod {namespace}/{self._target.pod}"
        self.hint = "to see why: " + command("kubectl", "-n", namespace, "logs", self._target.pod)
        configuration = self._api.api_client.configuration
        self._files = Files(cert=configuration.cert_file, key=configuration.key_file)

    @property
    def headers(self) -> Mapping[str, str]:
        """The user's token, if there is one. Read each time, because a plugin can renew it."""
        settings: Any = self._api.api_client.configuration.auth_settings()
        values = [each["value"] for each in settings.values() if each["value"]]
        return {"Authorization": values[0]} if values else {}

    def connect(self) -> http.client.HTTPConnection:
        from kubernetes.client.exceptions import ApiException
        from kubernetes.stream import portforward

        try:
            forward: Any = portforward(
                self._api.connect_get_namespaced_pod_portforward,
                self._target.pod,
                self._namespace,
                ports=str(self._target.port),
            )
        except ApiException as err:
            why = f"{self.name} cannot be forwarded to: {self._reason(err)}"
            raise CommandError(why, UNREACHABLE) from err
        connection = http.client.HTTPConnection("headroom", self._target.port, timeout=TIMEOUT_S)
        connection.sock = forward.socket(self._target.port)
        connection.sock.settimeout(TIMEOUT_S)
        if self._target.tls:
            connection.sock = unverified_context(self._files).wrap_socket(connection.sock)
        return connection

    def _ready_pod(self) -> Target:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            pods = self._api.list_namespaced_pod(
                self._namespace, label_selector=SELECTOR, _request_timeout=API_TIMEOUT_S
            ).items
        except ApiException as err:
            where = f"pods in namespace {self._namespace}"
            raise CommandError(
                f"{where} cannot be listed: {self._reason(err)}", UNREACHABLE
            ) from err
        except HTTPError as err:
            raise CommandError(unanswered(err), UNREACHABLE) from err
        ready = [
            pod
            for pod in pods
            if any(c.type == "Ready" and c.status == "True" for c in pod.status.conditions or ())
        ]
        if ready:
            return target(min(ready, key=lambda pod: str(pod.metadata.name)))
        if pods:
            why = f"no console in namespace {self._namespace} is ready"
            listed = command("kubectl", "-n", self._namespace, "get", "pods", "-l", SELECTOR)
            raise CommandError(f"{why}; see: {listed}", UNREACHABLE)
        raise CommandError(
            f"Headroom is not installed in namespace {self._namespace}: it has no pod labelled "
            f"{SELECTOR}; set --headroom-namespace to its namespace, or --server {_EXAMPLE}",
            UNREACHABLE,
        )

    def _reason(self, err: Any) -> str:
        """Describe an ``ApiException``; for 403, with the permissions that the user needs."""
        # If the upgrade of a connection fails, the error has the status only in its text.
        match = re.match(r"Handshake status (\d+) ([^\n]*?)(?: -\+-|$)", str(err.reason))
        status, reason = (int(match[1]), match[2]) if match else (err.status, err.reason)
        match status:
            case 0:
                return f"the API server does not answer: {reason}"
            case 401:
                return f"{status} {reason}: the API server rejects the kubeconfig's credentials"
            case 403:
                return f"{status} {reason}; you need a Role in {self._namespace} with {_RIGHTS}"
        return f"{status} {reason}"


def transport_for(
    server: str | None,
    token: str | None,
    files: Files,
    kubeconfig: str | None,
    context: str | None,
    namespace: str,
) -> Transport:
    """Return the transport that the options select. Raises ``CommandError``."""
    if not server and files != NO_FILES:
        flags = "--certificate-authority, --client-certificate and --client-key"
        raise CommandError(f"{flags} need --server; without it, the kubeconfig's are used", 2)
    return Address(server, token, files) if server else PortForward(kubeconfig, context, namespace)


def default_namespace(kubeconfig: str | None, context: str | None) -> str:
    """Return the namespace of the context, like kubectl. Raises ``CommandError``."""
    try:
        return kubeconfigs.namespace(kubeconfig, context)
    except kubeconfigs.BadKubeconfig as err:
        raise _not_configured(err) from err


def core_api(kubeconfig: str | None, context: str | None) -> Any:
    """Return a ``CoreV1Api`` of the cluster that kubectl uses. Raises ``CommandError``.

    It repeats a request only if the connection failed. An API server that hangs would delay each
    attempt by the whole timeout.
    """
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
    # Else urllib3 repeats it three times, also after a timeout.
    api.api_client.rest_client.pool_manager.connection_pool_kw["retries"] = Retry(2, read=0)
    return api


def _not_configured(err: kubeconfigs.BadKubeconfig) -> CommandError:
    """Return an error with the reason why no cluster is configured."""
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


def target(pod: Any) -> Target:
    """Return the port of the debug API of a console's pod, by the names of its ports."""
    port_of = {
        port.name: port.container_port
        for container in pod.spec.containers
        for port in container.ports or ()
    }
    name = str(pod.metadata.name)
    if TLS_NAME in port_of:
        return Target(name, port_of[TLS_NAME], True)
    return Target(name, port_of.get(PLAIN_NAME, PORT), False)


def verified_context(files: Files) -> ssl.SSLContext:
    """Return a context that verifies the server's name. Raises ``CommandError``."""
    try:
        context = ssl.create_default_context(cafile=files.ca)
    except (OSError, ValueError) as err:
        raise CommandError(f"--certificate-authority: {files.ca}: {err}", 2) from err
    return _with_client_certificate(context, files)


def unverified_context(files: Files) -> ssl.SSLContext:
    """Return a context without verification, for a connection through the API server.

    The API server already selects the pod, so the pod's certificate adds nothing. Raises
    ``CommandError``.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return _with_client_certificate(context, files)


def _with_client_certificate(context: ssl.SSLContext, files: Files) -> ssl.SSLContext:
    if files.cert is None:
        if files.key is not None:
            raise CommandError("--client-key is set without --client-certificate; set both", 2)
        return context
    try:
        # One file may contain both. The empty password prevents a prompt for an encrypted key.
        context.load_cert_chain(files.cert, files.key, password=lambda: b"")
    except (OSError, ValueError) as err:
        where = files.cert if files.key is None else f"{files.cert}, {files.key}"
        raise CommandError(
            f"the client certificate cannot be used: {where}: {err}; set a certificate and its key "
            "in PEM. Example: --client-certificate tls.crt --client-key tls.key",
            2,
        ) from err
    return context
