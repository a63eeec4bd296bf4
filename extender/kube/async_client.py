"""The asynchronous client of the Kubernetes API, for the ledger's calls on the event loop.

Like ``extender.kube.client``, it sends each request once, and it raises the same errors. But no
thread waits for an answer: switching threads for each step of each bind would cost almost as much
as the step, and the loop would wait for the interpreter's lock. Use the blocking client for answers
that take long to decode, such as lists.
"""

import ssl
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from kubernetes.client import Configuration
from kubernetes.client.rest import should_bypass_proxies
from yarl import URL

from extender.errors import BadSettings
from extender.kube.api_errors import NoAnswer, describe, rejection
from extender.kube.client import JSON, request_headers
from extender.periodic import progressed

#: Errors of a connection that broke, or was silent for too long.
_BROKEN = (aiohttp.ClientError, OSError)
#: Maximum number of concurrent calls; further calls wait.
CONNECTIONS = 32
#: Seconds after which an unused connection is closed; the API server waits for 90 s.
_KEEPALIVE_S = 60.0
#: A longer body is sent in pieces.
_MAX_ONE_PIECE_BYTES = 1 << 18


class AsyncKubeApi:
    """Calls one API server, from the event loop on which it was created."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        connect_timeout_s: float = 3.0,
        read_timeout_s: float = 10.0,
        total_timeout_s: float = 15.0,
    ) -> None:
        """Prepare a session. Raise ``BadSettings`` if the configuration names a proxy that is no
        HTTP proxy.

        ``read_timeout_s`` limits each silence of the server. ``total_timeout_s`` limits the whole
        call, also if the answer arrives byte by byte or all connections are in use.
        """
        self._configuration = configuration
        self._host = configuration.host.rstrip("/")
        self._routing = _routing(configuration)
        timeout = aiohttp.ClientTimeout(
            total=total_timeout_s, sock_connect=connect_timeout_s, sock_read=read_timeout_s
        )
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=CONNECTIONS, keepalive_timeout=_KEEPALIVE_S, ssl=_tls(configuration)
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept-Encoding", "Content-Type"),
            timeout=timeout,
        )

    async def close(self) -> None:
        await self._session.close()

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        content_type: str = JSON,
        accept: str = JSON,
    ) -> bytes:
        """Send a request once and return the body of a successful answer; raise ``ApiStatus`` or
        ``NoAnswer``."""
        call = f"{method} {path}"
        headers = request_headers(self._configuration, accept)
        data: bytes | BytesIO | None = body
        if body is not None:
            headers["Content-Type"] = content_type
            # In pieces, so that other calls do not wait while the whole body is encrypted.
            data = body if len(body) <= _MAX_ONE_PIECE_BYTES else BytesIO(body)
        try:
            async with self._session.request(
                method,
                URL(self._host + path, encoded=True),
                data=data,
                headers=headers,
                allow_redirects=False,
                **self._routing,
            ) as response:
                content = await response.read()
        except _BROKEN as err:
            raise NoAnswer(f"{call}: {describe(err)}") from err
        except RuntimeError as err:
            if self._session.closed:
                raise NoAnswer(f"{call}: not sent, because this process is stopping") from err
            raise
        finally:
            progressed()
        if 200 <= response.status < 300:
            return content
        raise rejection(call, response.status, content, response.reason, response.headers)


def _routing(configuration: Any) -> dict[str, Any]:
    """Return the options of each request that depend on the configuration: TLS server name and
    proxy. Raise ``BadSettings`` for a proxy that is no HTTP proxy."""
    options: dict[str, Any] = {}
    if configuration.tls_server_name:
        options["server_hostname"] = configuration.tls_server_name
    proxy = configuration.proxy
    if proxy and not should_bypass_proxies(configuration.host, configuration.no_proxy or ""):
        if urlsplit(proxy).scheme not in ("http", "https"):
            raise BadSettings(
                f"the kubeconfig's proxy-url is {proxy}, which is no HTTP proxy. Example: "
                "proxy-url: http://proxy.example.com:3128"
            )
        options |= {"proxy": proxy, "proxy_headers": configuration.proxy_headers}
    return options


def _tls(configuration: Any) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    if configuration.assert_hostname is False:
        context.check_hostname = False
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
