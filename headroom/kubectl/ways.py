"""The ways to a debug API: an address, or through the API server, as ``kubectl port-forward`` goes.

Everything of a kubeconfig (contexts, tokens, exec plugins, client certificates) is the business of
the ``kubernetes`` package, which is imported only where a cluster is asked.
"""

import http.client
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from headroom.kubectl.client import TIMEOUT_S, UNREACHABLE, Trouble, Way

NAMESPACE = "headroom-system"
SELECTOR = "app.kubernetes.io/name=headroom,app.kubernetes.io/component=extender"
PORT = 8889
_EXAMPLE = "http://127.0.0.1:8889"


class Address:
    """``http://host:port`` or https; ``token`` is sent as it is."""

    def __init__(self, url: str, token: str | None = None) -> None:
        """Raises ``Trouble``."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise Trouble(f"--server: {url!r} is no address; right is, for example, {_EXAMPLE}", 2)
        self.name = f"{parts.scheme}://{parts.netloc}"
        self.headers: Mapping[str, str] = {"Authorization": f"Bearer {token}"} if token else {}
        self._host, self._port, self._tls = parts.hostname, port, parts.scheme == "https"

    def connect(self) -> http.client.HTTPConnection:
        if self._tls:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=TIMEOUT_S, context=context
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)


class Tunnel:
    """To a ready pod of the extender, through the API server that the kubeconfig names."""

    def __init__(self, kubeconfig: str | None, context: str | None, namespace: str) -> None:
        """Raises ``Trouble``."""
        self._api = _core_api(kubeconfig, context)
        self._namespace = namespace
        self._pod = self._ready_pod()
        self.name = f"pod {namespace}/{self._pod}"
        self.headers: Mapping[str, str] = _authorization(self._api)

    def connect(self) -> http.client.HTTPConnection:
        from kubernetes.client.exceptions import ApiException
        from kubernetes.stream import portforward

        try:
            forward: Any = portforward(
                self._api.connect_get_namespaced_pod_portforward,
                self._pod,
                self._namespace,
                ports=str(PORT),
            )
        except ApiException as err:
            raise Trouble(f"{self.name} cannot be forwarded to: {_reason(err)}", UNREACHABLE) from (
                err
            )
        connection = http.client.HTTPConnection("headroom", PORT, timeout=TIMEOUT_S)
        connection.sock = forward.socket(PORT)
        connection.sock.settimeout(TIMEOUT_S)
        return connection

    def _ready_pod(self) -> str:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            pods = self._api.list_namespaced_pod(self._namespace, label_selector=SELECTOR).items
        except ApiException as err:
            where = f"pods in namespace {self._namespace}"
            raise Trouble(f"{where} cannot be listed: {_reason(err)}", UNREACHABLE) from err
        except HTTPError as err:
            raise Trouble(f"the API server does not answer: {err}", UNREACHABLE) from err
        ready = sorted(
            pod.metadata.name
            for pod in pods
            if any(c.type == "Ready" and c.status == "True" for c in pod.status.conditions or ())
        )
        if ready:
            return str(ready[0])
        if pods:
            why = f"no extender in namespace {self._namespace} is ready"
            raise Trouble(
                f"{why}; see: kubectl -n {self._namespace} get pods -l {SELECTOR}", UNREACHABLE
            )
        raise Trouble(
            f"Headroom is not installed in namespace {self._namespace}: it has no pod labelled "
            f"{SELECTOR}; say --headroom-namespace where it is elsewhere, or --server {_EXAMPLE}",
            UNREACHABLE,
        )


def way(
    server: str | None,
    token: str | None,
    kubeconfig: str | None,
    context: str | None,
    namespace: str,
) -> Way:
    """Raises ``Trouble``."""
    return Address(server, token) if server else Tunnel(kubeconfig, context, namespace)


def default_namespace(kubeconfig: str | None, context: str | None) -> str:
    """That of the context, as kubectl takes it; "default" where none says one."""
    try:
        from kubernetes import config

        load: Any = config  # typed in some releases, in part
        contexts, active = load.list_kube_config_contexts(config_file=kubeconfig)
    except Exception:  # noqa: BLE001 - no kubeconfig, no package: then there is no other default
        return "default"
    chosen = next((each for each in contexts if each["name"] == context), active)
    return str((chosen or {}).get("context", {}).get("namespace") or "default")


def _core_api(kubeconfig: str | None, context: str | None) -> Any:
    try:
        from kubernetes import client, config
    except ImportError as err:
        raise Trouble(f"{err}; right is: pip install 'headroom-gpu[extender,cluster]'", 2) from err
    load: Any = config
    try:
        return client.CoreV1Api(load.new_client_from_config(kubeconfig, context))
    except config.ConfigException as err:
        raise Trouble(
            f"no cluster is configured: {err}; without one say --server {_EXAMPLE}", UNREACHABLE
        ) from err


def _authorization(api: Any) -> dict[str, str]:
    """The user's token, as the API server gets it; nothing for a client certificate."""
    value = api.api_client.configuration.get_api_key_with_prefix("authorization")
    return {"Authorization": value} if value else {}


def _reason(err: Any) -> str:
    return f"{err.status} {err.reason}"
